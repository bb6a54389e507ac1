// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays and options of a Problem as kernels have them: one line for each option.

#include "gpu/params.h"

#include <algorithm>

#include "core/error.h"

namespace fulmen::gpu {
namespace {

// Calls action(view, array) for each array that kernels have a view of.
template <class Params, class Action>
void for_each_view(Params& p, const Action& action) {
#define FULMEN_ARRAY(array, member, ...) \
  if constexpr (requires { p.member = ArrayView{}; }) action(p.member, Array::array);
#include "fulmen/arrays.def"
}

}  // namespace

AttentionParams attention_params(const Problem& problem, FaultBytes* faults) {
  AttentionParams p{};
  for_each_view(p, [&problem](ArrayView& view, Array array) {
    const Tensor& tensor = problem.arrays[array];
    if (tensor.present()) view = view_of(tensor);
  });
  if (!problem.adds_alibi()) p.alibi_slopes = ArrayView{};
  p.num_sequences = problem.num_sequences;
  p.heads_q = problem.heads_q;
  p.heads_kv = problem.heads_kv;
  p.q_rows = problem.q_rows;
  p.kv_rows = problem.kv_rows;
  p.dim_qk = problem.dim_qk;
  p.dim_v = problem.dim_v;
  const Tensor& dbias = problem.arrays[Array::kDBias];
  std::copy(std::begin(dbias.shape), std::end(dbias.shape), p.dbias_extents);
  p.mask_options = problem.mask;
  p.score_map = problem.score_map;
  p.dropout = problem.dropout;
  p.rng = static_cast<const i64*>(problem.arrays[Array::kRng].data);
  p.packed = problem.packed;
  p.cache_layout = problem.cache_layout();
  p.num_pages = problem.num_pages;
  if (problem.has(Array::kBlocks)) {
    p.lists_by_pair = true;
    p.block_q = problem.block_q;
    p.block_kv = problem.block_kv;
    p.num_key_blocks = ceil_div(problem.max_kv, problem.block_kv);
    p.list_heads = problem.arrays[Array::kBlocks].shape[1];
    p.list_entries = problem.arrays[Array::kBlocks].shape[3];
  }
  p.bottom_right = problem.alignment == Alignment::kBottomRight;
  p.accumulates = problem.accumulate;
  p.faults = faults;
  return p;
}

void bind_params(AttentionParams& params, const Problem& problem, FaultBytes* faults) {
  for_each_view(params, [&problem](ArrayView& view, Array array) {
    if (view.present()) view.data = static_cast<u8*>(problem.arrays[array].data);
  });
  params.dropout = problem.dropout;
  params.rng = static_cast<const i64*>(problem.arrays[Array::kRng].data);
  params.faults = faults;
}

AttentionParams side_gradient_params(const Problem& problem, FaultBytes* faults) {
  AttentionParams params = attention_params(problem, faults);
  params.dq = params.dk = params.dv = ArrayView{};
  return params;
}

namespace {

MaskKind mask_kind_of(const IntervalMask& mask) {
  if (mask.window_left != kNoLimit || mask.chunk > 0) return MaskKind::kBoth;
  if (mask.causal || mask.window_right != kNoLimit) return MaskKind::kRight;
  return MaskKind::kNone;
}

std::string suffix(const char* option, bool is_on) {
  return is_on ? sentence("_", option) : std::string();
}

std::string suffix(const char*, MaskKind kind) {
  constexpr const char* kSuffixes[] = {"", "_right", "_left", "_both"};
  return kSuffixes[static_cast<int>(kind)];
}

std::string suffix(const char*, UserTerms user) { return name_suffix(user); }

std::string suffix(const char* option, DType dtype) {
  return dtype == DType::kNone ? std::string() : sentence("_", option, "_", name(dtype));
}

}  // namespace

ScoreOptions score_options_of(const Problem& problem) {
  return {
      .mask_kind = mask_kind_of(problem.mask),
      .mask = problem.has(Array::kMask),
      .bias = problem.arrays[Array::kBias].dtype,
      .documents = problem.has(Array::kQIds),
      .alibi = problem.adds_alibi(),
      .score_mod = problem.score_map.is_modified(),
      .dropout = problem.dropout.enabled(),
      .sinks = problem.has(Array::kSinks),
      .negative_scale = !(problem.score_map.scale > 0),
      .varlen = problem.packed.q || problem.has(Array::kQLengths) || problem.has(Array::kKvLengths),
      .stats = problem.has(Array::kStats),
      .fp32_out = problem.arrays[Array::kO].dtype == DType::kFloat32,
      .accumulate = problem.accumulate,
      .blocks = problem.has(Array::kBlocks),
      .user = user_terms_of(problem),
  };
}

UserTerms user_terms_of(const Problem& problem) {
  return {.score = problem.has_score_expression(), .mask = problem.has_mask_expression()};
}

bool sums_captures(const Problem& problem) {
  return problem.wants_captures() && problem.has_score_expression();
}

bool has_aligned_pairs(const Problem& problem) {
  for (const Array array : {Array::kMask, Array::kBias}) {
    if (!problem.has(array)) continue;
    const Tensor& tensor = problem.arrays[array];
    const i64 unit = 16 / size_bytes(tensor.dtype);
    bool fits = tensor.strides[3] == 1 && tensor.shape[3] % unit == 0;
    for (int axis = 0; axis < 3; ++axis) {
      fits = fits && (tensor.shape[axis] <= 1 || tensor.strides[axis] % unit == 0);
    }
    if (!fits || problem.pointer_alignment < 16) return false;
  }
  return true;
}

bool has_aligned_rows(const Problem& problem, Array last) {
  const auto elements = [](DType dtype) { return 16 / size_bytes(dtype); };
  const i64 unit = elements(problem.is_quantised() ? problem.kv_dtype() : problem.dtype);
  const auto is_aligned = [&](Array array) {
    const Tensor& tensor = problem.arrays[array];
    const bool is_kv = array == Array::kK || array == Array::kV;
    const DType needed = is_kv                ? problem.kv_dtype()
                         : array == Array::kQ ? problem.q_dtype()
                                              : problem.dtype;
    bool fits = tensor.dtype == needed;
    fits = fits && tensor.strides[3] == 1;
    for (int axis = 0; axis < 3; ++axis) {
      fits =
          fits && (tensor.shape[axis] <= 1 || tensor.strides[axis] % elements(tensor.dtype) == 0);
    }
    return fits;
  };
  return problem.pointer_alignment >= 16 && problem.dim_qk % unit == 0 &&
         problem.dim_v % unit == 0 && is_aligned(Array::kQ) && is_aligned(Array::kK) &&
         is_aligned(Array::kV) && is_aligned(last);
}

std::string name_suffix(UserTerms user) {
  return sentence(user.score ? "_own_score" : "", user.mask ? "_own_mask" : "",
                  user.captures ? "_captures" : "");
}

std::string name_suffix(const ScoreOptions& score) {
  std::string text;
  for_each_field(score, [&text](const char* option, auto value) { text += suffix(option, value); });
  return text;
}

}  // namespace fulmen::gpu
