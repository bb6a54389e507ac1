// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 5.2: the kernel of the chapter with two faults. The checker finds one of them, float64
// the other. Repair both.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* q;  // (row, dim)
  const float* k;  // (row, dim)
  const float* v;  // (row, dim)
  float* o;        // (row, dim)    0 to begin with
  float* m;        // (row)         -inf
  float* l;        // (row)         0
  i32 rows;        // a multiple of KEYS and of THREADS
  float scale;     // 1 / sqrt(dim) * log2(e)
};

// A tile of KEYS rows into shared memory, by all threads.
void load_tile(float* tile, const float* from) {
  for (u32 at = ptx::thread_index(); at < KEYS * DIM; at += THREADS) tile[at] = from[at];
}

// The online softmax of one query and one tile of keys, on O as it will be returned: divided by l.
void step(const Params& p, i32 i, const float* k, const float* v) {
  float q[DIM], s[KEYS];
  for (i32 d = 0; d < DIM; ++d) q[d] = p.q[i * DIM + d];
  const float m = p.m[i], l = p.l[i];
  // S = Q K^T, and of this tile alone the maximum, P and its sum.
  float tile_m = -kInfinity<float>, tile_l = 0;
#pragma unroll
  for (i32 j = 0; j < KEYS; ++j) {
    s[j] = 0;
    for (i32 d = 0; d < DIM; ++d) s[j] = ptx::fma(q[d], k[j * DIM + d], s[j]);
    s[j] *= p.scale;
    tile_m = ptx::max(tile_m, s[j]);
  }
#pragma unroll
  for (i32 j = 0; j < KEYS; ++j) tile_l += s[j] = ptx::exp2(s[j] - tile_m);
  // The states of the keys so far and of the tile become one.
  const float m_new = ptx::max(m, tile_m);
  const float before = ptx::exp2(m - m_new), now = ptx::exp2(tile_m - m_new);
  const float l_new = before * l + now * tile_l;
  for (i32 d = 0; d < DIM; ++d) {
    float sum = 0;
#pragma unroll
    for (i32 j = 0; j < KEYS; ++j) sum = ptx::fma(s[j], v[j * DIM + d], sum);
    p.o[i * DIM + d] = (l * p.o[i * DIM + d] + now * sum) / l_new;
  }
  p.m[i] = m_new;
  p.l[i] = l_new;
}

extern "C" __global__ void fulmen_kernel(const Params p) {
  float* const k = reinterpret_cast<float*>(ptx::shared_bytes());  // (KEYS, DIM)
  float* const v = k + KEYS * DIM;                                 // (KEYS, DIM)
  for (i32 first = 0; first < p.rows; first += KEYS) {
    load_tile(k, p.k + first * DIM);
    load_tile(v, p.v + first * DIM);
    ptx::block_sync();  // the tiles are whole
    for (i32 row = 0; row < p.rows; row += THREADS) {
      step(p, row + static_cast<i32>(ptx::thread_index()), k, v);
    }
  }
}
