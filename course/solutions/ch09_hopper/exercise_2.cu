// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 9.2: a warp's turn is a barrier of its own, which takes its 32 threads and the 32
// arrivals by which the other warp hands it over.
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  i32* order;  // (16)
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  const u32 count = ptx::dynamic_shared();
  const u32 warp = ptx::thread_index() / 32, lane = ptx::thread_index() % 32;
  if (ptx::thread_index() == 0) ptx::store_shared(count, 0);
  ptx::block_sync();
  if (warp == 1) ptx::bar_arrive(1, 64);  // the first turn is warp 0's
  for (i32 i = 0; i < 8; ++i) {
    ptx::bar_sync(1 + warp, 64);
    if (lane == 0) {
      const u32 at = ptx::load_shared(count);
      p.order[at] = static_cast<i32>(warp);
      ptx::store_shared(count, at + 1);
    }
    if (warp == 0 || i < 7) ptx::bar_arrive(2 - warp, 64);
  }
}
