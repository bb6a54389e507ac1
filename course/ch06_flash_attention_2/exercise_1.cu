// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 6.1: causal attention with a window: a query sees itself and the WINDOW keys before it.
// The kernel of the chapter knows the right end of what a row sees, but not the left one, and walks
// over all tiles. Make it right, and let it load no tile that none of the block's rows sees.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* q;  // (row, dim)
  const float* k;  // (row, dim)
  const float* v;  // (row, dim)
  float* o;        // (row, dim)
  float* lse;      // (row)
  i32 rows;        // a multiple of KEYS and of THREADS
  float scale;     // 1 / sqrt(dim) * log2(e)
};

// A tile of KEYS rows into shared memory, by all threads.
void load_tile(float* tile, const float* from) {
  for (u32 at = ptx::thread_index(); at < KEYS * DIM; at += THREADS) tile[at] = from[at];
}

// What a thread knows of its row. O is not divided by l before the end.
struct Row {
  float q[DIM];
  float O[DIM] = {};
  float m = -kInfinity<float>, l = 0;
};

// The online softmax of one query and one tile of keys, of which it sees the first `visible`.
void step(Row& row, const float* k, const float* v, i32 visible, float scale) {
  float s[KEYS];
  float m_new = row.m;
#pragma unroll
  for (i32 j = 0; j < KEYS; ++j) {
    s[j] = 0;
#pragma unroll
    for (i32 d = 0; d < DIM; ++d) s[j] = ptx::fma(row.q[d], k[j * DIM + d], s[j]);
    s[j] = j < visible ? s[j] * scale : -kInfinity<float>;
    m_new = ptx::max(m_new, s[j]);
  }
  const float shrink = ptx::exp2(row.m - m_new);
  row.l *= shrink;
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) row.O[d] *= shrink;
#pragma unroll
  for (i32 j = 0; j < KEYS; ++j) {
    const float weight = ptx::exp2(s[j] - m_new);
    row.l += weight;
#pragma unroll
    for (i32 d = 0; d < DIM; ++d) row.O[d] = ptx::fma(weight, v[j * DIM + d], row.O[d]);
  }
  row.m = m_new;
}

extern "C" __global__ void fulmen_kernel(const Params p) {
  float* const k = reinterpret_cast<float*>(ptx::shared_bytes());  // (KEYS, DIM)
  float* const v = k + KEYS * DIM;                                 // (KEYS, DIM)
  const i32 first_row = static_cast<i32>(ptx::block_index()) * THREADS;
  const i32 i = first_row + static_cast<i32>(ptx::thread_index());
  Row row;
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) row.q[d] = p.q[i * DIM + d];
  const i32 end = p.rows;
  for (i32 first = 0; first < end; first += KEYS) {
    load_tile(k, p.k + first * DIM);
    load_tile(v, p.v + first * DIM);
    ptx::block_sync();  // the tiles are whole
    step(row, k, v, CAUSAL ? i + 1 - first : KEYS, p.scale);
    ptx::block_sync();  // all rows have met them
  }
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) p.o[i * DIM + d] = row.O[d] / row.l;
  p.lse[i] = row.m * kLn2<float> + ptx::accurate_log(row.l);
}
