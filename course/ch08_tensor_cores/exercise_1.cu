// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 8.1: D = A B with one mma.sync of a warp, A 16 x 16, B 16 x 8. The operands are read
// from global memory, without ldmatrix; lane l has, with g = l / 4 and q = l % 4,
//   d   0, 1: row g, columns 2q, 2q + 1     2, 3: row g + 8, the same columns
//   a   0: row g, columns 2q, 2q + 1   1: row g + 8   2: row g, columns + 8   3: row g + 8, + 8
//   b   0: rows 2q, 2q + 1, column g   1: rows + 8
// and of two numbers in a word the first is the lower half. Fill a and b.
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
  // yours
  float d[4] = {};
  ptx::mma_m16n8k16<DType::kFloat16>(d, a, b[0], b[1]);
  for (u32 i = 0; i < 4; ++i) p.d[(g + i / 2 * 8) * 8 + 2 * q + i % 2] = d[i];
}
