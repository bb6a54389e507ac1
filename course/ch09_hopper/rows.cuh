// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Of a thread of a consumer: its part of O, the products, and the online softmax of its two rows.
// The fragment of wgmma is that of mma.sync, block of 8 columns after block. For flash_hopper.cu
// alone.
#pragma once

#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

constexpr DType kType = DType::kFloat16;

struct Rows {
  float O[32] = {};          // 64 columns: 4 i to 4 i + 3 of block i, first row, then 8 rows on
  u32 P[KEYS / 16][4] = {};  // weights of the last tile, as a left operand
  float m[2] = {-kInfinity<float>, -kInfinity<float>}, l[2] = {};
};

// --8<-- [start:products]
// S = Q K^T, 16 columns of Q and K at a time.
void issue_scores(float (&S)[KEYS / 2], u32 q, u32 k) {
  const u32 Q = ptx::wgmma_descriptor(q, 0), K = ptx::wgmma_descriptor(k, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (u32 d = 0; d < 4; ++d) ptx::wgmma_ss<kType, false>(S, Q + 2 * d, K + 2 * d, d > 0);
}

// O += P V, 16 keys at a time; V lies as K x N.
void issue_output(Rows& rows, u32 v) {
  const u32 V = ptx::wgmma_descriptor(v, 0);
#pragma unroll
  for (u32 i = 0; i < KEYS / 16; ++i) {
    u32(&P)[4] = rows.P[i];
    ptx::wgmma_rs<kType, true>(rows.O, P[0], P[1], P[2], P[3], V + i * (16 * 128 >> 4), true);
  }
}

void wait_for_products() {
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
}
// --8<-- [end:products]

float quad_max(float x) {
  x = ptx::max(x, ptx::shuffle_xor(x, 1));
  return ptx::max(x, ptx::shuffle_xor(x, 2));
}
float quad_sum(float x) {
  x += ptx::shuffle_xor(x, 1);
  return x + ptx::shuffle_xor(x, 2);
}

// P = exp(S - m_new); l and O are made relative to m_new.
void softmax(Rows& rows, float (&S)[KEYS / 2], float scale) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    float m = rows.m[r];
#pragma unroll
    for (i32 i = 2 * r; i < KEYS / 2; i += 4) m = ptx::max(m, ptx::max(S[i], S[i + 1]) * scale);
    m = quad_max(m);
    const float shrink = ptx::exp2(rows.m[r] - m);
    float sum = 0;
#pragma unroll
    for (i32 i = 2 * r; i < KEYS / 2; i += 4) {
      sum += S[i] = ptx::exp2(S[i] * scale - m);
      sum += S[i + 1] = ptx::exp2(S[i + 1] * scale - m);
    }
    rows.l[r] = rows.l[r] * shrink + quad_sum(sum);
#pragma unroll
    for (i32 i = 2 * r; i < 32; i += 4) rows.O[i] *= shrink, rows.O[i + 1] *= shrink;
    rows.m[r] = m;
  }
#pragma unroll
  for (i32 i = 0; i < KEYS / 4; ++i) {
    rows.P[i / 4][i % 4] = ptx::pack<kType>(S[2 * i], S[2 * i + 1]);
  }
}
