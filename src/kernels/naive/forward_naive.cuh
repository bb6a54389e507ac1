// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The first rung on the GPU: one thread computes 32 output dimensions of one row, key by key,
// straight from the equations, every option of the library. Other threads recompute the same scores
// for the other dimensions. Slow, and therefore the oracle of the faster kernels on the same
// device. Launched with one thread for each (batch, head, q_row, chunk of dim_v).
#pragma once

#include "kernels/common/faults.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/tile_tasks.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/simt/config.h"

namespace fulmen {

// o, and from the first chunk's thread lse and stats, of one row.
template <DType kDType>
void forward_naive_row(const AttentionParams& p, const RowTask& task) {
  using Real = typename Head<kDType>::Real;
  const i64 index = p.packed ? find_sequence(p, p.cu_q, task.row) : task.batch;
  const Head<kDType> head(p, index, task.head);
  const i64 i = task.row - head.sequence.q_begin;
  const bool counts = 0 <= i && i < head.sequence.shape.q_len;
  const i64 first = task.chunk * kNaiveChunk;
  const i64 num_dims = min<i64>(kNaiveChunk, p.dim_v - first);

  typename Head<kDType>::State state;
  Real O[kNaiveChunk] = {};
  const Interval columns = counts ? head.columns(i) : Interval{0, 0};
  for (i64 j = columns.begin; j < columns.end; ++j) {
    if (!head.sees(i, j)) continue;
    const Real s = head.capped_score(i, j) + head.added(i, j);
    const Real rescale = state.update(s);
    const Real weight = state.weight(s);
    state.row_sum += weight;
    const Real kept = weight * head.keep(i, j);
    const i64 v = head.kv_row(p.v, j) + first * p.v.strides[3];
    for (i32 d = 0; d < kNaiveChunk; ++d) {  // O = rescale O + P V
      if (d < num_dims) O[d] = O[d] * rescale + kept * head.element(p.v, v + d * p.v.strides[3]);
    }
  }

  const Real normalizer = state.normalizer(head.sink);
  const i64 o = p.o.offset(task.batch, task.head, task.row, first);
  for (i32 d = 0; d < kNaiveChunk; ++d) {
    if (d < num_dims) store_real(p.o, o + d * p.o.strides[3], O[d] * normalizer);
  }
  if (task.chunk != 0) return;
  if (p.lse.present()) {
    store_real(p.lse, p.lse.offset(task.batch, task.head, task.row, 0), state.lse());
  }
  if (p.stats.present()) {
    const i64 stats = p.stats.offset(task.batch, task.head, task.row, 0);
    store_real(p.stats, stats, state.row_max);
    store_real(p.stats, stats + p.stats.strides[3], state.row_sum);
  }
}

// The number of this thread in the whole launch.
template <FmaConfig kConfig>
i64 naive_task() {
  return static_cast<i64>(ptx::block_index()) * kConfig.num_threads + ptx::thread_index();
}

template <FmaConfig kConfig>
void forward_naive(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  const i64 task = naive_task<kConfig>();
  if (task >= forward_naive_tasks(p)) return;
  forward_naive_row<kConfig.dtype>(p, row_task(task, num_chunks(p.dim_v), p.q_rows, p.heads_q));
}

}  // namespace fulmen
