// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What each query row brings to every pair of its own, once for the backward simt passes that
// follow: the saved softmax, and D = dot(dO, O). One thread a row. D is added up in the order in
// which the passes add up dP = dO V^T, so that both are equal, bit for bit, where O is V: a row
// that sees one key has dQ = dK = 0 exactly. And dsinks.
#pragma once

#include "kernels/common/faults.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/tile_tasks.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/simt/gradient.cuh"

namespace fulmen {

template <DType kDType>
typename Head<kDType>::Real row_dot(const Head<kDType>& head, i64 i) {
  using Real = typename Head<kDType>::Real;
  using Vector = SimtVector<Real>;
  const HeadRows dO = q_rows_of(head, head.p.dout, head.p.dim_v);
  const HeadRows O = q_rows_of(head, head.p.o, head.p.dim_v);
  Real sum = 0;
  for (i32 d = 0; d < dO.dim; d += Vector::kLanes) {
    const Vector a = vector_of<Real>(dO, i, d);
    const Vector b = vector_of<Real>(O, i, d);
#pragma unroll
    for (i32 m = 0; m < Vector::kLanes; ++m) sum += a.lane[m] * b.lane[m];
  }
  return sum;
}

// Row `row` of dQ, counted from the first of the array.
template <class Real>
void clear_dq(const AttentionParams& p, const RowTask& task) {
  constexpr i32 kLanes = SimtVector<Real>::kLanes;
  const HeadRows dQ{p.dq, p.dq.offset(task.batch, task.head, 0, 0), static_cast<i32>(p.dim_qk)};
  const bool in_vectors = dQ.in_vectors(kLanes);
  for (i32 d = 0; d < dQ.dim; d += kLanes) {
    if (in_vectors) {
      reinterpret_cast<SimtVector<Real>*>(dQ.address(task.row))[d / kLanes] = {};
    } else {
      for (i32 m = 0; m < min(kLanes, dQ.dim - d); ++m) {
        store_real(p.dq, dQ.offset(task.row) + (d + m) * p.dq.strides[3], Real(0));
      }
    }
  }
}

template <FmaConfig kConfig>
void backward_simt_rows(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  const i64 number =
      static_cast<i64>(ptx::block_index()) * kConfig.num_threads + ptx::thread_index();
  if (number >= p.batch_extent() * p.heads_q * p.q_rows) return;
  const RowTask task = row_task(number, 1, p.q_rows, p.heads_q);
  using Real = typename ElementOf<kConfig.dtype>::Real;
  if constexpr (kConfig.adds_dq) clear_dq<Real>(p, task);
  const i64 index = p.packed ? find_sequence(p, p.cu_q, task.row) : task.batch;
  const Head<kConfig.dtype> head(p, index, task.head);
  const i64 i = task.row - head.sequence.q_begin;
  if (i < 0 || i >= head.sequence.shape.q_len) return;
  const auto state = saved_state(head, i);
  const Real dL = state.row_sum == Real(0) ? Real(0) : lse_gradient(head, i) / state.row_sum;
  saved_rows(head)[i] = {state.shift(), state.normalizer(head.sink), dL, row_dot(head, i)};
}

// dsinks: a block for each head, whose threads share its rows, eight threads a row, and add up
// their parts in a fixed order. Launched with num_threads a multiple of 32.
//
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
