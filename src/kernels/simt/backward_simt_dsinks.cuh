// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dsinks: a block for each head, whose threads share its rows, eight threads a row, and add up
// their parts in a fixed order. Launched with num_threads a multiple of 32.
#pragma once

#include "kernels/common/faults.cuh"
#include "kernels/common/saved_row.cuh"
#include "kernels/ptx/shared_bytes.cuh"

namespace fulmen {

// This thread's part, one of eight, of D = dot(dO, O) of a row.
template <DType kDType>
typename Head<kDType>::Real row_dot_eighth(const Head<kDType>& head, i64 i, i64 part) {
  using Real = typename Head<kDType>::Real;
  const AttentionParams& p = head.p;
  const i64 dout = head.q_row(p.dout, i);
  const i64 o = head.q_row(p.o, i);
  Real sum = 0;
  for (i64 d = part; d < p.dim_v; d += 8) {
    sum += load_real<Real>(p.dout, dout + d * p.dout.strides[3]) *
           load_real<Real>(p.o, o + d * p.o.strides[3]);
  }
  return sum;
}

// dsinks[h] = - sum over all rows of the sink's share of D
template <FmaConfig kConfig>
void backward_simt_dsinks(const AttentionParams& p) {
  using HeadType = Head<kConfig.dtype>;
  using Real = typename HeadType::Real;
  record_faults(p, kConfig.num_threads);
  const i64 thread = ptx::thread_index();
  const i64 h = ptx::block_index();
  Real sum = 0;  // of this thread's eighths
  for (i64 index = 0; index < p.num_sequences; ++index) {
    const HeadType head(p, index, h);
    for (i64 i = thread / 8; i < head.sequence.shape.q_len; i += kConfig.num_threads / 8) {
      const auto state = saved_state(head, i);
      if (state.row_sum == Real(0)) continue;
      sum -= state.sink_share(head.sink) * row_dot_eighth(head, i, thread % 8);
    }
  }
  Real* const sums = reinterpret_cast<Real*>(ptx::shared_bytes());
  sums[thread] = sum;
  for (i64 half = kConfig.num_threads / 2; half > 0; half /= 2) {
    ptx::block_sync();  // the sums so far are there
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) store_real(p.dsinks, p.dsinks.offset(0, h, 0, 0), sums[0]);
}

}  // namespace fulmen
