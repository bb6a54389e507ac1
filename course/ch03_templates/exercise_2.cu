// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 3.2: the 32 lanes of a warp stand in groups of kLanes neighbours, and each lane shall
// get the sum of its group. Group is compiled for 2, 4, 8, 16 and 32. Use as few shuffles as there
// are halvings of a group.
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

template <u32 kLanes>
struct Group {
  static_assert(kLanes >= 2 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0);
  static float sum(float x) { return x; }
};

struct Params {
  const float* x;  // (32)
  float* y;        // (32)
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  const u32 lane = ptx::thread_index();
  p.y[lane] = Group<LANES>::sum(p.x[lane]);
}
