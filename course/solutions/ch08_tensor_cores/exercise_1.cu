// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 8.1: words of A are neighbours in memory, words of B are not: its rows are 8 apart.
// That is what ldmatrix.trans is for.
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const u16* a;  // (16, 16)
  const u16* b;  // (16, 8)
  float* d;      // (16, 8)
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  const u32 g = ptx::thread_index() / 4, q = ptx::thread_index() % 4;
  u32 a[4] = {}, b[2] = {};
  for (u32 i = 0; i < 4; ++i) {
    const u16* const at = p.a + (g + i % 2 * 8) * 16 + 2 * q + i / 2 * 8;
    a[i] = at[0] | static_cast<u32>(at[1]) << 16;
  }
  for (u32 i = 0; i < 2; ++i) {
    const u16* const at = p.b + (2 * q + 8 * i) * 8 + g;
    b[i] = at[0] | static_cast<u32>(at[8]) << 16;
  }
  float d[4] = {};
  ptx::mma_m16n8k16<DType::kFloat16>(d, a, b[0], b[1]);
  for (u32 i = 0; i < 4; ++i) p.d[(g + i / 2 * 8) * 8 + 2 * q + i % 2] = d[i];
}
