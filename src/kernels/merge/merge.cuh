// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The attention over the union of disjoint keys, from the attention over each part: a part of a row
// is a softmax state of row_max = lse and row_sum = 1 beside its output, and states merge by the
// one law (softmax_state.cuh). One warp a row, its lanes side by side along the head dimension. A
// lane reads its elements from all parts before it writes them, so that a part may be merged in
// place.
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/common/accurate_math.cuh"
#include "kernels/common/array_access.cuh"
#include "kernels/merge/params.h"
#include "kernels/ptx/thread.cuh"
#include "kernels/simt/config.h"

namespace fulmen {

constexpr i32 kMergeElements = 4;  // of a lane at once

template <class Math>
SoftmaxState<Math> state_of_lse(typename Math::Real lse) {
  if (lse != lse) return {-Math::kInfinity, lse};  // a NaN goes into row_sum, as everywhere
  return {lse, lse == -Math::kInfinity ? typename Math::Real(0) : typename Math::Real(1)};
}

// Elements first, first + 32, ... of one row, kMergeElements of them. Returns the row's state.
template <class Math>
SoftmaxState<Math> merge_elements(const MergeParams& p, i64 batch, i64 head, i64 row, i64 first) {
  using Real = typename Math::Real;
  SoftmaxState<Math> state;
  Real O[kMergeElements] = {};
  for (i32 i = 0; i < p.num_parts; ++i) {
    const MergePartView& part = p.parts[i];
    const auto other =
        state_of_lse<Math>(load_real<Real>(part.lse, part.lse.offset(batch, head, row, 0)));
    if (other.row_sum == Real(0)) continue;  // saw nothing: its o says nothing, whatever it holds
    const auto factors = state.merge(other);
    for (i32 e = 0; e < kMergeElements; ++e) {
      const i64 d = first + 32 * e;
      if (d >= p.dim) break;
      const Real element = load_real<Real>(part.o, part.o.offset(batch, head, row, d));
      O[e] = O[e] * factors.mine + element * factors.other;
    }
  }
  const Real sink = p.sinks.present() ? load_real<Real>(p.sinks, p.sinks.offset(0, head, 0, 0))
                                      : -Math::kInfinity;
  const Real normalizer = state.normalizer(sink);
  for (i32 e = 0; e < kMergeElements; ++e) {
    const i64 d = first + 32 * e;
    if (d < p.dim) store_real(p.o, p.o.offset(batch, head, row, d), O[e] * normalizer);
  }
  return state;
}

template <FmaConfig kConfig>
void merge(const MergeParams& p) {
  using Real = typename ElementOf<kConfig.dtype>::Real;
  using Math = AccurateMath<Real>;
  const i64 lane = ptx::thread_index() % 32;
  const i64 number =
      static_cast<i64>(ptx::block_index()) * (kConfig.num_threads / 32) + ptx::thread_index() / 32;
  if (number >= p.num_rows) return;
  const i64 row = number % p.rows;
  const i64 head = number / p.rows % p.heads;
  const i64 batch = number / p.rows / p.heads;
  SoftmaxState<Math> state;
  i64 first = 0;
  do {
    state = merge_elements<Math>(p, batch, head, row, first + lane);
    first += 32 * kMergeElements;
  } while (first < p.dim);
  ptx::warp_sync();  // all lanes have read lse, which may be that of a part
  if (lane == 0 && p.lse.present()) {
    store_real(p.lse, p.lse.offset(batch, head, row, 0), state.lse());
  }
}

}  // namespace fulmen
