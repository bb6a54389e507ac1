// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One line for each array, in the order of Array.

#include "cuda/params.h"

#include <algorithm>

namespace fulmen::cuda {
ArrayView view_of(const Tensor& tensor) {
  if (!tensor.present()) return {};
  ArrayView view{static_cast<u8*>(tensor.data), {}, tensor.dtype};
  std::copy(std::begin(tensor.strides), std::end(tensor.strides), view.strides);
  return view;
}

AttentionParams attention_params(const Problem& problem, u32* faults) {
  const auto view = [&](Array array) { return view_of(problem.arrays[array]); };
  AttentionParams p{};
  p.q = view(Array::kQ);
  p.k = view(Array::kK);
  p.v = view(Array::kV);
  p.bias = view(Array::kBias);
  p.mask = view(Array::kMask);
  p.alibi_slopes = view(Array::kAlibiSlopes);
  p.sinks = view(Array::kSinks);
  p.q_lengths = view(Array::kQLengths);
  p.kv_lengths = view(Array::kKvLengths);
  p.cu_q = view(Array::kCuQ);
  p.cu_kv = view(Array::kCuKv);
  p.q_ids = view(Array::kQIds);
  p.kv_ids = view(Array::kKvIds);
  p.o = view(Array::kO);
  p.lse = view(Array::kLse);
  p.stats = view(Array::kStats);
  p.dout = view(Array::kDOut);
  p.dlse = view(Array::kDLse);
  p.dq = view(Array::kDQ);
  p.dk = view(Array::kDK);
  p.dv = view(Array::kDV);
  p.dbias = view(Array::kDBias);
  p.dsinks = view(Array::kDSinks);
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

AttentionParams side_gradient_params(const Problem& problem, u32* faults) {
  AttentionParams params = attention_params(problem, faults);
  params.dq = params.dk = params.dv = ArrayView{};
  return params;
}

}  // namespace fulmen::cuda
