// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays and options of a Problem as kernels have them.

#include "gpu/params.h"

#include <algorithm>

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

AttentionParams attention_params(const Problem& problem, u32* faults) {
  AttentionParams p{};
  for_each_view(p, [&problem](ArrayView& view, Array array) {
    const Tensor& tensor = problem.arrays[array];
    if (tensor.present()) view = view_of(tensor);
  });
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
  p.bottom_right = problem.alignment == Alignment::kBottomRight;
  p.faults = faults;
  return p;
}

void bind_params(AttentionParams& params, const Problem& problem, u32* faults) {
  for_each_view(params, [&problem](ArrayView& view, Array array) {
    if (view.present()) view.data = static_cast<u8*>(problem.arrays[array].data);
  });
  params.dropout = problem.dropout;
  params.rng = static_cast<const i64*>(problem.arrays[Array::kRng].data);
  params.faults = faults;
}

AttentionParams side_gradient_params(const Problem& problem, u32* faults) {
  AttentionParams params = attention_params(problem, faults);
  params.dq = params.dk = params.dv = ArrayView{};
  return params;
}

}  // namespace fulmen::gpu
