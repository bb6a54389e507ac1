// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 9.2: two warps take turns, as warpgroups do in ping-pong. Each writes its number into
// `order`, 8 times, and the numbers shall alternate, beginning with warp 0. `count` in shared
// memory says how many there are. Use barriers 1 and 2: bar_sync(id, 64) waits until 64 threads
// have come to a barrier, bar_arrive(id, 64) comes to it and goes on. At the end no barrier has one
// waiting.
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
  for (i32 i = 0; i < 8; ++i) {
    if (lane == 0) {
      const u32 at = ptx::load_shared(count);
      p.order[at] = static_cast<i32>(warp);
      ptx::store_shared(count, at + 1);
    }
  }
}
