// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 11.2: the value is a part of the tile that holds the keys.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

constexpr i32 kDim = LATENT + ROTATED, kFloats = kDim + 1;  // of a row of the tile: other banks
constexpr i32 kThreads = 128, kOwn = HEADS / 4, kColumns = LATENT / 32;

struct Params {
  const float* q;      // (request, head, kDim)    W_k^T q, then the rotated part of q
  const float* cache;  // (request, row, kDim)     c, then the rotated part of the key
  float* o;            // (request, head, LATENT)  to be multiplied by W_v
  i32 rows;            // a multiple of 32
  float scale;         // 1 / sqrt(dim of a head and its rotated part) * log2(e)
};

float warp_max(float x) {
  for (u32 mask = 16; mask > 0; mask /= 2) x = ptx::max(x, ptx::shuffle_xor(x, mask));
  return x;
}
float warp_sum(float x) {
  for (u32 mask = 16; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
  return x;
}
float of_lane(float x, u32 from) {
  return __builtin_bit_cast(float, ptx::shuffle(__builtin_bit_cast(i32, x), from));
}

extern "C" __global__ void fulmen_kernel(const Params p) {
  float* const Q = reinterpret_cast<float*>(ptx::shared_bytes());  // (HEADS, kDim)
  float* const tile = Q + HEADS * kDim;                            // (32, kFloats)
  const i32 thread = static_cast<i32>(ptx::thread_index()), lane = thread % 32;
  const i32 request = static_cast<i32>(ptx::block_index());
  const float* const cache = p.cache + request * p.rows * kDim;
  for (i32 at = thread; at < HEADS * kDim; at += kThreads) Q[at] = p.q[request * HEADS * kDim + at];
  float m[kOwn], l[kOwn] = {}, O[kOwn][kColumns] = {};
  for (i32 h = 0; h < kOwn; ++h) m[h] = -kInfinity<float>;
  for (i32 first = 0; first < p.rows; first += 32) {
    for (i32 at = thread; at < 32 * kDim; at += kThreads) {
      tile[at / kDim * kFloats + at % kDim] = cache[first * kDim + at];
    }
    ptx::block_sync();  // Q and the tile are whole
    for (i32 h = 0; h < kOwn; ++h) {
      const float* const q = Q + (thread / 32 * kOwn + h) * kDim;
      float s = 0;  // a lane has a row: all kDim numbers of it are the key
      for (i32 d = 0; d < kDim; ++d) s = ptx::fma(q[d], tile[lane * kFloats + d], s);
      s *= p.scale;
      const float m_new = ptx::max(m[h], warp_max(s));
      const float shrink = ptx::exp2(m[h] - m_new), weight = ptx::exp2(s - m_new);
      l[h] = l[h] * shrink + warp_sum(weight);
      m[h] = m_new;
      for (i32 c = 0; c < kColumns; ++c) O[h][c] *= shrink;
      for (i32 j = 0; j < 32; ++j) {  // the first LATENT numbers are the value
        const float w = of_lane(weight, static_cast<u32>(j));
        for (i32 c = 0; c < kColumns; ++c) {
          O[h][c] = ptx::fma(w, tile[j * kFloats + lane + 32 * c], O[h][c]);
        }
      }
    }
    ptx::block_sync();  // all have used it
  }
  for (i32 h = 0; h < kOwn; ++h) {
    float* const o = p.o + (request * HEADS + thread / 32 * kOwn + h) * LATENT + lane;
    for (i32 c = 0; c < kColumns; ++c) o[32 * c] = O[h][c] / l[h];
  }
}
