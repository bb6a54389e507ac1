// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 4.2: a lane keeps m and l of the columns that it has met, and the lanes' states are
// merged by shuffles, each time two of them.
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
  for (i32 j = lane; j < p.columns; j += 32) {
    const float x = s[j];
    const float m_new = ptx::max(m, x);
    l = l * ptx::exp2(m - m_new) + ptx::exp2(x - m_new);
    m = m_new;
  }
  for (u32 mask = 16; mask > 0; mask /= 2) {
    const float other_m = ptx::shuffle_xor(m, mask), other_l = ptx::shuffle_xor(l, mask);
    const float m_new = ptx::max(m, other_m);
    l = l * ptx::exp2(m - m_new) + other_l * ptx::exp2(other_m - m_new);
    m = m_new;
  }
  if (lane == 0) p.y[ptx::block_index()] = m + ptx::log2(l);
}
