// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 7.2: dQ without additions to global memory, with the same bits in every run. A thread
// has a row of queries and its dQ, and all keys pass by, as in the forward pass. Write what happens
// to a tile of 32 keys.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* q;      // (row, dim)
  const float* k;      // (row, dim)
  const float* v;      // (row, dim)
  const float* lse;    // (row)
  const float* dout;   // (row, dim)
  const float* delta;  // (row)
  float* dq;           // (row, dim)
  i32 rows;            // a multiple of 32
  float scale;         // 1 / sqrt(dim)
};

void load(float* tile, const float* from, i32 count) {
  for (i32 at = static_cast<i32>(ptx::thread_index()); at < count; at += 32) tile[at] = from[at];
}

extern "C" __global__ void fulmen_kernel(const Params p) {
  float* const K = reinterpret_cast<float*>(ptx::shared_bytes());  // (32, DIM)
  float* const V = K + 32 * DIM;                                   // (32, DIM)
  const i32 i = static_cast<i32>(ptx::block_index() * 32 + ptx::thread_index());
  float q[DIM], dO[DIM], dQ[DIM] = {};
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) {
    q[d] = p.q[i * DIM + d];
    dO[d] = p.dout[i * DIM + d];
  }
  for (i32 first = 0; first < p.rows; first += 32) {
    load(K, p.k + first * DIM, 32 * DIM);
    load(V, p.v + first * DIM, 32 * DIM);
    ptx::block_sync();
    // yours
    ptx::block_sync();
  }
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) p.dq[i * DIM + d] = dQ[d];
}
