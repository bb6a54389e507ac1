// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 4.2: log2 of the sum of 2^s over each row of S, one warp a row. It is right, and reads S
// twice. Make it read S once.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* s;  // (row, column)
  float* y;        // (row)
  i32 columns;     // a multiple of 32
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  const float* const s = p.s + static_cast<i32>(ptx::block_index()) * p.columns;
  const i32 lane = static_cast<i32>(ptx::thread_index());
  float m = -kInfinity<float>, l = 0;
  for (i32 j = lane; j < p.columns; j += 32) m = ptx::max(m, s[j]);
  for (u32 mask = 16; mask > 0; mask /= 2) m = ptx::max(m, ptx::shuffle_xor(m, mask));
  for (i32 j = lane; j < p.columns; j += 32) l += ptx::exp2(s[j] - m);
  for (u32 mask = 16; mask > 0; mask /= 2) l += ptx::shuffle_xor(l, mask);
  if (lane == 0) p.y[ptx::block_index()] = m + ptx::log2(l);
}
