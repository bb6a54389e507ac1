// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a problem to the options of its config, what the kernel and the copy engine cannot do, and
// the order of blocks. Groups of heads were measured on an H100 SXM on 2026-11-28 (bench/hopper).

#include "gpu/forward_sm90/plan.h"

#include "core/error.h"
#include "gpu/forward_sm90/tiles.h"
#include "gpu/sm90_problem.h"

namespace fulmen {
namespace {

constexpr i64 kMaxDim = 512;
constexpr i64 kUnit = 8;  // elements of 16 bytes, in which the copy engine moves
constexpr i64 kMaxStrideBytes = i64{1} << 40;
constexpr i64 kMaxCount = 0x7fffffff;

i32 product_width(i64 dim) {
  i32 width = 64;
  while (width < dim || !ForwardSm90Config::is_product_width(width)) width += 16;
  return width;
}

// Heads of one key head whose queries fit a tile of 64 rows together: their keys and values are
// read once for all of them.
i32 heads_per_tile(const Problem& problem, const ForwardSm90Config& config) {
  if (problem.batch_invariant || config.split_dims || config.alibi || config.has_pair_terms() ||
      config.dropout) {
    return 1;
  }
  i32 heads = 1;
  while (heads < 8 && problem.group_size() % (2 * heads) == 0 && 2 * heads * problem.max_q <= 64) {
    heads *= 2;
  }
  return heads;
}

// What the problem asks of any tile.
ForwardSm90Config options_of(const Problem& problem) {
  ForwardSm90Config config;
  config.dtype = problem.dtype;
  config.d_qk = static_cast<i32>(16 * ceil_div(problem.dim_qk, 16));
  config.split_dims = max(problem.dim_qk, problem.dim_v) > 256;
  config.d_v = config.split_dims ? static_cast<i32>(128 * ceil_div(problem.dim_v, 128))
                                 : product_width(problem.dim_v);
  config.mask = mask_kind(problem.mask);
  config.sequences = reads_sequences(problem);
  config.softcap = problem.score_map.softcap != 0;
  config.signed_scale = !config.softcap && !(problem.score_map.scale > 0);
  config.alibi = problem.has(Array::kAlibiSlopes);
  config.sinks = problem.has(Array::kSinks);
  config.stats = problem.has(Array::kStats);
  config.wide_output = problem.arrays[Array::kO].dtype == DType::kFloat32;
  config.bias = problem.arrays[Array::kBias].dtype;
  config.pair_mask = problem.has(Array::kMask);
  config.documents = config.skips_documents = problem.has(Array::kQIds);
  config.dropout = problem.dropout.enabled();
  config.stage_output = !config.sequences && !config.wide_output;
  // ALiBi and bias take keys out of the range that the first block sets, a mask sets none, and the
  // assembler serialises the products of documents at d 64 with any other rule (C7514).
  const bool is_narrow = max(config.d_qk, config.d_v) <= 64;
  if (config.alibi || config.bias != DType::kNone || config.pair_mask ||
      (config.documents && is_narrow)) {
    config.shift_rule = ShiftRule::kWhenGrown;
  } else if (problem.dtype == DType::kFloat16) {
    config.shift_rule = ShiftRule::kWhenSumGrew;
  }
  config.heads_per_tile = heads_per_tile(problem, config);
  return config;
}

void leave_out(ForwardSm90Config& config, const Problem& problem) {
  const auto keeps = [&problem](Optimisation each) { return !leaves_out(problem, each); };
  if (!keeps(Optimisation::kPipeline)) config.stages = 1;
  if (!keeps(Optimisation::kLazyRescale)) config.shift_rule = ShiftRule::kEveryBlock;
  config.specialised &= keeps(Optimisation::kWarpSpecialisation);
  config.swizzle &= keeps(Optimisation::kSwizzle);
  config.overlap &= keeps(Optimisation::kOverlap);
  config.ping_pong &= keeps(Optimisation::kPingPong);
  config.folded_scale &= keeps(Optimisation::kFoldedScale);
  config.longest_first &= keeps(Optimisation::kBlockOrder);
  config.skip_full_masks &= keeps(Optimisation::kFullBlocks);
}

}  // namespace

std::string sm90_layout_refusal(const Problem& problem, Array array) {
  const Tensor& tensor = problem.arrays[array];
  if (tensor.strides[3] != 1 && tensor.shape[3] > 1) {
    return sentence(name(array), " has stride ", tensor.strides[3],
                    " along the head dimension; the copy engine needs 1");
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (tensor.shape[axis] <= 1) continue;
    const i64 stride = tensor.strides[axis];
    if (stride % kUnit != 0 || stride <= 0 || stride * 2 >= kMaxStrideBytes) {
      return sentence(name(array), " has stride ", stride, " along axis ", axis,
                      "; the copy engine needs positive multiples of ", kUnit);
    }
  }
  return "";
}

std::string sm90_forward_refusal(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability != 90) return "needs compute capability 9.0 (Hopper)";
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) {
    return sentence("has no arithmetic for ", name(problem.dtype), ", only float16 and bfloat16");
  }
  if (problem.dim_qk < 1 || problem.dim_v < 1 || problem.dim_qk > kMaxDim ||
      problem.dim_v > kMaxDim || problem.dim_v % kUnit != 0) {
    return sentence("head dimensions must be 1 to ", kMaxDim, ", that of v a multiple of ", kUnit,
                    "; they are ", problem.dim_qk, " and ", problem.dim_v);
  }
  if (problem.kv_rows == 0) return "needs at least one key";
  if (problem.q_rows > kMaxCount - 256 || problem.kv_rows > kMaxCount - 256 ||
      problem.num_sequences > kMaxCount) {
    return "counts rows in 31 bits";
  }
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const std::string refusal = sm90_layout_refusal(problem, array);
    if (!refusal.empty()) return refusal;
  }
  const DType o = problem.arrays[Array::kO].dtype;
  if (o != problem.dtype && o != DType::kFloat32) return sentence("does not write ", name(o));
  const ForwardSm90Config config = sm90_forward_config(problem);
  if (problem.tile.given() && !config.valid()) {
    return sentence("a tile of ", config.q_rows(), " x ", config.kv_rows, " with ", config.stages,
                    " stages and ", config.num_q_slots(), " slots of Q, ", config.shared_bytes(),
                    " bytes of shared memory, is none that its kernel can have");
  }
  if (sm90_max_q_blocks(problem, config) > kMaxCount) {
    return "counts blocks of queries in 31 bits";
  }
  return "";
}

ForwardSm90Config sm90_forward_config(const Problem& problem) {
  ForwardSm90Config config = options_of(problem);
  set_sm90_forward_tile(config, problem);
  leave_out(config, problem);
  return config;
}

// Those that change the config: d 64 full, say, has no overlap to leave out.
u32 sm90_forward_switches(const Problem& problem) {
  Problem each = problem;
  each.without = 0;
  const ForwardSm90Config whole = sm90_forward_config(each);
  u32 switches = 0;
  for (u32 bit = 1; bit <= kAllOptimisations; bit *= 2) {
    each.without = bit;
    if (sm90_forward_config(each) != whole) switches |= bit;
  }
  return switches;
}

GpuNeeds sm90_forward_needs(const Problem& problem, const Gpu& gpu) {
  const ForwardSm90Config config = sm90_forward_config(problem);
  GpuNeeds needs;
  needs.tile = {config.q_rows(), config.kv_rows};
  if (sm90_counts_blocks(problem, gpu, config)) {
    needs.workspace_bytes = needs.zeroed_bytes = sizeof(u32);
  }
  if (config.skips_documents) {
    needs.workspace_bytes =
        kKeyRangesOffset + sm90_num_key_ranges(problem, config) * sizeof(IdRange);
  }
  needs.alignment_bytes = 16;
  return needs;
}

bool sm90_counts_blocks(const Problem& problem, const Gpu& gpu, const ForwardSm90Config& config) {
  return sm90_max_q_blocks(problem, config) > gpu.num_multiprocessors;
}

size_t sm90_num_key_ranges(const Problem& problem, const ForwardSm90Config& config) {
  return static_cast<size_t>(
      num_key_ranges(problem.kv_rows, problem.num_sequences, problem.packed, config.kv_rows));
}

i32 sm90_heads_per_group(const Problem& problem, const Gpu& gpu) {
  const i32 chosen = problem.tile.heads_per_group;
  if (chosen != TileChoice::kOfTable) return chosen;
  const bool masked = mask_kind(problem.mask) != MaskKind::kNone;
  if (!masked && !reads_sequences(problem) && problem.max_kv > kShortRows) return 1;
  const i64 rows = problem.packed || !reads_sequences(problem)
                       ? problem.kv_rows
                       : problem.kv_rows * problem.num_sequences;
  const i64 bytes = max<i64>(rows * (problem.dim_qk + problem.dim_v) * 2 / problem.group_size(), 1);
  const i64 fitting = static_cast<i64>(gpu.l2_bytes) * 2 / 3 / bytes;
  const i64 most = clamp<i64>(fitting, 1, masked ? 16 : 2);
  // Groups of one size: a last one of few heads would leave multiprocessors idle (d 256 causal, 8k,
  // 16 heads as 5 + 5 + 5 + 1: 716 TFLOP/s on an H200; as 4 x 4: 808 on an H100, 2026-11-28).
  const i64 heads = max<i64>(problem.heads_q, 1) *
                    (reads_sequences(problem) ? 1 : max<i64>(problem.num_sequences, 1));
  for (i64 size = most; 2 * size >= most; --size) {
    if (heads % size == 0) return static_cast<i32>(size);
  }
  return static_cast<i32>(ceil_div(heads, ceil_div(heads, most)));
}

i64 sm90_max_q_blocks(const Problem& problem, const ForwardSm90Config& config) {
  if (problem.q_rows == 0) return 0;  // also when packed: nothing is launched
  const i64 rows = config.q_rows();
  const i64 of_a_head = problem.packed ? problem.q_rows / rows + problem.num_sequences
                                       : ceil_div(problem.q_rows, rows) * problem.num_sequences;
  return of_a_head * problem.heads_q / config.heads_per_tile;
}

}  // namespace fulmen
