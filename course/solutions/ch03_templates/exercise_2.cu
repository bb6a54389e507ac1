// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 3.2: after the step with mask 2^s a lane has the sum of the 2^(s+1) lanes around it.
// The bound of the loop is a constant, so that it is unrolled into log2(kLanes) shuffles.
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

template <u32 kLanes>
struct Group {
  static_assert(kLanes >= 2 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0);
  static float sum(float x) {
#pragma unroll
    for (u32 mask = 1; mask < kLanes; mask *= 2) x += ptx::shuffle_xor(x, mask);
    return x;
  }
};

struct Params {
  const float* x;  // (32)
  float* y;        // (32)
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  const u32 lane = ptx::thread_index();
  p.y[lane] = Group<LANES>::sum(p.x[lane]);
}
