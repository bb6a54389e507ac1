// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention without a score matrix: a warp has a row of queries, meets the keys 32 at a time and
// keeps m, l and O of the keys so far. One head, float32; DIM is a multiple of 32.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* q;  // (row, dim)
  const float* k;  // (row, dim)
  const float* v;  // (row, dim)
  float* o;        // (row, dim)
  float* lse;      // (row)
  i32 rows;        // a multiple of 32
  float scale;     // 1 / sqrt(dim) * log2(e)
};

float warp_max(float x) {
  for (u32 mask = 16; mask > 0; mask /= 2) x = ptx::max(x, ptx::shuffle_xor(x, mask));
  return x;
}
float warp_sum(float x) {
  for (u32 mask = 16; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
  return x;
}
// The number that lane `from` has.
float of_lane(float x, u32 from) {
  return __builtin_bit_cast(float, ptx::shuffle(__builtin_bit_cast(i32, x), from));
}

// --8<-- [start:kernel]
extern "C" __global__ void fulmen_kernel(const Params p) {
  const i32 i = static_cast<i32>(ptx::block_index() * 4 + ptx::thread_index() / 32);
  const i32 lane = static_cast<i32>(ptx::thread_index() % 32);
  float m = -kInfinity<float>, l = 0;  // of the keys so far: the largest score, the sum of exp
  float O[DIM / 32] = {};  // and the sum of exp(score - m) v, columns lane, lane + 32, ..
  for (i32 first = 0; first < p.rows; first += 32) {
    // S = Q K^T: a lane has one key.
    float s = 0;
    for (i32 d = 0; d < DIM; ++d) {
      s = ptx::fma(p.q[i * DIM + d], p.k[(first + lane) * DIM + d], s);
    }
    s *= p.scale;
    // What was summed relative to the old maximum is made relative to the new one.
    const float m_new = ptx::max(m, warp_max(s));
    const float shrink = ptx::exp2(m - m_new);  // exp2(-inf) = 0 at the first keys
    const float x = ptx::exp2(s - m_new);       // P
    l = l * shrink + warp_sum(x);
    for (i32 c = 0; c < DIM / 32; ++c) O[c] *= shrink;
    // O += P V: a lane has columns, and asks the others for their keys' P.
    for (u32 j = 0; j < 32; ++j) {
      const float weight = of_lane(x, j);
      const float* const v = p.v + (first + static_cast<i32>(j)) * DIM + lane;
      for (i32 c = 0; c < DIM / 32; ++c) O[c] = ptx::fma(weight, v[32 * c], O[c]);
    }
    m = m_new;
  }
  for (i32 c = 0; c < DIM / 32; ++c) p.o[i * DIM + lane + 32 * c] = O[c] / l;
  if (lane == 0) p.lse[i] = m * kLn2<float> + ptx::accurate_log(l);
}
// --8<-- [end:kernel]
