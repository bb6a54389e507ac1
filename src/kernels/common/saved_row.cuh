// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the forward pass kept of a row's softmax, as the backward kernels read it: stats, or the lse
// alone (then row_max = lse and row_sum = 1, which is exact for ordinary lse).
#pragma once

#include "kernels/common/head.cuh"

namespace fulmen {

// What is kept of a row i, read by load(array, offset).
template <DType kDType, class Load>
typename Head<kDType>::State saved_state(const Head<kDType>& head, i64 i, const Load& load) {
  using Real = typename Head<kDType>::Real;
  const AttentionParams& p = head.p;
  if (p.stats.present()) {
    const i64 stats = head.q_row(p.stats, i);
    return {load(p.stats, stats), load(p.stats, stats + p.stats.strides[3])};
  }
  const Real lse = load(p.lse, head.q_row(p.lse, i));
  return {lse, lse == -Head<kDType>::Math::kInfinity ? Real(0) : Real(1)};
}

// The gradient that arrives through lse; 0 where there is none.
template <DType kDType, class Load>
typename Head<kDType>::Real lse_gradient(const Head<kDType>& head, i64 i, const Load& load) {
  const ArrayView& dlse = head.p.dlse;
  return dlse.present() ? load(dlse, head.q_row(dlse, i)) : typename Head<kDType>::Real(0);
}

// The same, of any dtype.
template <DType kDType>
auto saved_state(const Head<kDType>& head, i64 i) {
  return saved_state(head, i, [](const ArrayView& array, i64 offset) {
    return load_real_called<typename Head<kDType>::Real>(array, offset);
  });
}
template <DType kDType>
auto lse_gradient(const Head<kDType>& head, i64 i) {
  return lse_gradient(head, i, [](const ArrayView& array, i64 offset) {
    return load_real_called<typename Head<kDType>::Real>(array, offset);
  });
}

}  // namespace fulmen
