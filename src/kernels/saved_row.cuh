// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the forward pass kept of a row's softmax, as the backward kernels read it: stats, or the lse
// alone (then row_max = lse and row_sum = 1, which is exact for ordinary lse).
#pragma once

#include "kernels/head.cuh"

namespace fulmen {

template <DType kDType>
typename Head<kDType>::State saved_state(const Head<kDType>& head, i64 i) {
  using Real = typename Head<kDType>::Real;
  const AttentionParams& p = head.p;
  if (p.stats.present()) {
    const i64 stats = head.q_row(p.stats, i);
    return {load_real_called<Real>(p.stats, stats),
            load_real_called<Real>(p.stats, stats + p.stats.strides[3])};
  }
  const Real lse = load_real_called<Real>(p.lse, head.q_row(p.lse, i));
  return {lse, lse == -Head<kDType>::Math::kInfinity ? Real(0) : Real(1)};
}

// The gradient that arrives through lse; 0 where there is none.
template <DType kDType>
typename Head<kDType>::Real lse_gradient(const Head<kDType>& head, i64 i) {
  using Real = typename Head<kDType>::Real;
  const ArrayView& dlse = head.p.dlse;
  return dlse.present() ? load_real_called<Real>(dlse, head.q_row(dlse, i)) : Real(0);
}

}  // namespace fulmen
