// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How the naive kernels divide a problem among threads: shared by the kernels, which find their
// task, and by the host, which counts the threads. All counts are 64-bit.
#pragma once

#include "kernels/params.h"

namespace fulmen {

inline constexpr i64 kNaiveChunk = 32;  // dimensions of a row that one thread holds in registers

constexpr i64 num_chunks(i64 dim) { return ceil_div(dim, kNaiveChunk); }

// One chunk of row `row` (of the array's row axis) of one batch entry and head.
struct RowTask {
  i64 batch;
  i64 head;
  i64 row;
  i64 chunk;
};

constexpr RowTask row_task(i64 task, i64 chunks, i64 rows, i64 heads) {
  const i64 row = task / chunks;
  return {row / rows / heads, row / rows % heads, row % rows, task % chunks};
}

constexpr i64 forward_naive_tasks(const AttentionParams& p) {
  return p.batch_extent() * p.heads_q * p.q_rows * num_chunks(p.dim_v);
}

constexpr i64 backward_naive_dq_tasks(const AttentionParams& p) {
  return p.batch_extent() * p.heads_q * p.q_rows * num_chunks(p.dim_qk);
}

// Chunks of dK come first, then those of dV; only of those that are asked for.
constexpr i64 dk_chunks(const AttentionParams& p) {
  return p.dk.present() ? num_chunks(p.dim_qk) : 0;
}
constexpr i64 dkdv_chunks(const AttentionParams& p) {
  return dk_chunks(p) + (p.dv.present() ? num_chunks(p.dim_v) : 0);
}
constexpr i64 backward_naive_dkdv_tasks(const AttentionParams& p) {
  return p.batch_extent() * p.heads_kv * p.kv_rows * dkdv_chunks(p);
}

constexpr i64 backward_naive_dbias_tasks(const AttentionParams& p) {
  return p.dbias_extents[0] * p.dbias_extents[1] * p.dbias_extents[2] * p.dbias_extents[3];
}

}  // namespace fulmen
