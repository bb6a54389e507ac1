// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 2.1: all numbers are in the tile before any is read. Threads of other warps write the
// half that a thread reads, and nothing else makes it wait for them.
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* x;  // (block, 128)
  float* y;        // (block, 128)
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  float* const tile = reinterpret_cast<float*>(ptx::shared_bytes());  // (128)
  const u32 thread = ptx::thread_index();
  const u32 first = 128 * ptx::block_index();
  tile[thread] = p.x[first + thread];
  ptx::block_sync();
  p.y[first + thread] = tile[127 - thread];
}
