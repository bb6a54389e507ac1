// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a forward pass writes for the rows of one head: o, lse and stats, from the unnormalised
// output and the softmax state of each row.
#pragma once

#include "cpu/libm_math.h"
#include "cpu/rows.h"
#include "kernels/attention/softmax_state.cuh"

namespace fulmen::cpu {

// A finished row's few numbers cost nothing, so they are computed in float64.
using RowState = SoftmaxState<LibmMath<double>>;

template <class Real>
class RowResults {
 public:
  RowResults(const Problem& problem, const Sequence& sequence, i64 head)
      : problem_(problem), kernels_(kernels<Real>()), sequence_(sequence), head_(head) {}

  // o = O / l_total;  lse = m + log l;  stats = (m, l).  O may be changed; factor: scratch of as
  // many as there are rows.
  void store(Interval rows, bool saw_keys, View<Real> O, const Real* row_max, const Real* row_sum,
             Real* factor) const {
    for (i64 i = 0; i < rows.size(); ++i) {
      const RowState state{static_cast<double>(row_max[i]), static_cast<double>(row_sum[i])};
      save(rows.begin + i, state);
      double normalizer = state.normalizer(sink());
      // Under a sink far above all scores, the factor itself would lose bits below the normal
      // numbers.
      constexpr double kTiny = 0x1p-100;
      if (saw_keys && normalizer != 0 && normalizer < kTiny) {
        scale_row(const_cast<Real*>(O.data) + i * O.stride, static_cast<Real>(normalizer / kTiny));
        normalizer = kTiny;
      }
      factor[i] = static_cast<Real>(normalizer);
    }
    const Destination to = o_from(rows.begin);
    if (!saw_keys) return clear_rows(kernels_, to, rows.size(), problem_.dim_v);
    kernels_.store_rows(O, rows.size(), problem_.dim_v, factor, 1, to);
  }

  // Of rows past the length: those that saw nothing.
  void clear(Interval rows) const {
    if (rows.size() <= 0) return;
    for (i64 i = rows.begin; i < rows.end; ++i) save(i, RowState{});
    clear_rows(kernels_, o_from(rows.begin), rows.size(), problem_.dim_v);
  }

 private:
  Destination o_from(i64 row) const {
    return destination_of(problem_.arrays[Array::kO], sequence_.batch, head_,
                          sequence_.q_begin + row);
  }

  void scale_row(Real* row, Real factor) const {
    for (i64 d = 0; d < problem_.dim_v; ++d) row[d] *= factor;
  }

  double sink() const {
    if (!problem_.has(Array::kSinks)) return -LibmMath<double>::kInfinity;
    return problem_.arrays[Array::kSinks].real(0, head_, 0, 0);
  }

  void save(i64 row_of_sequence, const RowState& state) const {
    const i64 row = sequence_.q_begin + row_of_sequence;
    const Tensor& lse = problem_.arrays[Array::kLse];
    const Tensor& stats = problem_.arrays[Array::kStats];
    if (lse.present()) lse.set_real(sequence_.batch, head_, row, 0, state.lse());
    if (stats.present()) {
      stats.set_real(sequence_.batch, head_, row, 0, state.row_max);
      stats.set_real(sequence_.batch, head_, row, 1, state.row_sum);
    }
  }

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  Sequence sequence_;
  i64 head_;
};

}  // namespace fulmen::cpu
