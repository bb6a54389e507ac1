// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 9.1: every consumer arrives at `empty` when it has read a chunk, and the producer
// waits for the phase before its own: parity ^ 1, which a fresh barrier lets pass.
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"

using namespace fulmen;

struct Params {
  const float* x;  // (chunk, 256)
  float* y;        // (128)    thread t adds up numbers t and t + 128 of all chunks
  i32 chunks;
};

constexpr u32 kChunkBytes = 1024;

extern "C" __global__ void fulmen_kernel(const Params p) {
  const u32 base = ptx::dynamic_shared(), barriers = base + 2 * kChunkBytes;
  const auto place = [&](u32 j) { return base + j % 2 * kChunkBytes; };
  const auto full = [&](u32 j) { return barriers + j % 2 * 16; };
  const auto empty = [&](u32 j) { return full(j) + 8; };
  const auto parity = [](u32 j) { return j / 2 & 1; };
  const u32 thread = ptx::thread_index(), chunks = static_cast<u32>(p.chunks);
  if (thread == 0) {
    for (u32 j = 0; j < 2; ++j) {
      ptx::mbarrier_init(full(j), 1);
      ptx::mbarrier_init(empty(j), 128);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (thread == 128) {  // the producer
    for (u32 j = 0; j < chunks; ++j) {
      ptx::mbarrier_wait(empty(j), parity(j) ^ 1);
      ptx::mbarrier_arrive_expect(full(j), kChunkBytes);
      ptx::bulk_load(place(j), p.x + 256 * j, kChunkBytes, full(j));
    }
  }
  if (thread < 128) {  // the consumers
    float sum = 0;
    for (u32 j = 0; j < chunks; ++j) {
      ptx::mbarrier_wait(full(j), parity(j));
      for (u32 i = thread; i < 256; i += 128) {
        sum += __builtin_bit_cast(float, ptx::load_shared(place(j) + 4 * i));
      }
      ptx::mbarrier_arrive(empty(j));
    }
    p.y[thread] = sum;
  }
}
