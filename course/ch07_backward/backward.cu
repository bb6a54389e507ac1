// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass. A block has KEYS keys, one a thread, and keeps their dK and dV in registers
// while all tiles of ROWS queries pass by; scores are computed again from q, k and lse. What a
// block finds for dQ it adds to global memory, where blocks of all keys add. KEYS and DIM are 32.
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;
static_assert(KEYS == 32 && DIM == 32, "a thread has a key, and in dQ a column");

struct Params {
  const float* q;     // (row, dim)
  const float* k;     // (row, dim)
  const float* v;     // (row, dim)
  const float* o;     // (row, dim)
  const float* lse;   // (row)
  const float* dout;  // (row, dim)
  float* delta;       // (row)         sums of dO * O
  float* dq;          // (row, dim)    0 to begin with
  float* dk;          // (row, dim)
  float* dv;          // (row, dim)
  i32 rows;           // a multiple of KEYS and of ROWS
  i32 step;           // 0: delta, 1: the gradients
  float scale;        // 1 / sqrt(dim)
};

// delta = rowsum(dO * O), a row a thread.
void sum_rows(const Params& p) {
  const i32 i = static_cast<i32>(ptx::block_index() * KEYS + ptx::thread_index());
  float sum = 0;
  for (i32 d = 0; d < DIM; ++d) sum = ptx::fma(p.dout[i * DIM + d], p.o[i * DIM + d], sum);
  p.delta[i] = sum;
}

void load(float* tile, const float* from, i32 count) {
  for (i32 at = static_cast<i32>(ptx::thread_index()); at < count; at += KEYS) tile[at] = from[at];
}

struct Key {  // of a thread
  float k[DIM], v[DIM], dK[DIM] = {}, dV[DIM] = {};
};

// --8<-- [start:pair]
// One query and the thread's key: four of the five products. Returns dS.
float meet(Key& key, const float* q, const float* dO, float lse, float delta, float scale) {
  float s = 0, dP = 0;
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) {
    s = ptx::fma(q[d], key.k[d], s);     // S = Q K^T
    dP = ptx::fma(dO[d], key.v[d], dP);  // dP = dO V^T
  }
  const float P = ptx::exp2((s * scale - lse) * kLog2E<float>);
  const float dS = P * (dP - delta) * scale;
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) {
    key.dV[d] = ptx::fma(P, dO[d], key.dV[d]);  // dV = P^T dO
    key.dK[d] = ptx::fma(dS, q[d], key.dK[d]);  // dK = dS^T Q
  }
  return dS;
}
// --8<-- [end:pair]

// --8<-- [start:kernel]
void gradients(const Params& p) {
  float* const K = reinterpret_cast<float*>(ptx::shared_bytes());  // (KEYS, DIM)
  float* const Q = K + KEYS * DIM;                                 // (ROWS, DIM)
  float* const dO = Q + ROWS * DIM;                                // (ROWS, DIM)
  float* const dS = dO + ROWS * DIM;                               // (ROWS, KEYS)
  const i32 thread = static_cast<i32>(ptx::thread_index());
  const i32 first_key = static_cast<i32>(ptx::block_index()) * KEYS, j = first_key + thread;
  Key key;
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) {
    key.k[d] = p.k[j * DIM + d];
    key.v[d] = p.v[j * DIM + d];
  }
  load(K, p.k + first_key * DIM, KEYS * DIM);
  for (i32 first = 0; first < p.rows; first += ROWS) {
    load(Q, p.q + first * DIM, ROWS * DIM);
    load(dO, p.dout + first * DIM, ROWS * DIM);
    ptx::block_sync();  // the tiles are whole
#pragma unroll 1
    for (i32 r = 0; r < ROWS; ++r) {
      dS[r * KEYS + thread] =
          meet(key, Q + r * DIM, dO + r * DIM, p.lse[first + r], p.delta[first + r], p.scale);
    }
    ptx::block_sync();  // dS is whole
    for (i32 r = 0; r < ROWS; ++r) {
      float sum = 0;  // dQ = dS K, of these keys: a thread has a column
      for (i32 i = 0; i < KEYS; ++i) sum = ptx::fma(dS[r * KEYS + i], K[i * DIM + thread], sum);
      ptx::reduce_add(p.dq + (first + r) * DIM + thread, sum);
    }
    ptx::block_sync();  // all have used the tiles
  }
#pragma unroll
  for (i32 d = 0; d < DIM; ++d) {
    p.dk[j * DIM + d] = key.dK[d];
    p.dv[j * DIM + d] = key.dV[d];
  }
}
// --8<-- [end:kernel]

extern "C" __global__ void fulmen_kernel(const Params p) {
  p.step == 0 ? sum_rows(p) : gradients(p);
}
