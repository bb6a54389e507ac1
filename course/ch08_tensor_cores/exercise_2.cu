// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 8.2: a tile of 32 rows of 32 numbers of 16 bits: 64 bytes, four vectors of 16 bytes a
// row. It is written by rows and read by ldmatrix. The swizzle of the chapter is for rows of 128
// bytes. Find one for these: `place` says where vector 0 to 3 of a row lies in it.
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const u16* x;  // (32, 32)
  u16* y;        // (32, 32)
};

u32 place(u32 row, u32 vector) { return vector; }

extern "C" __global__ void fulmen_kernel(const Params p) {
  const u32 tile = ptx::dynamic_shared(), lane = ptx::thread_index();
  for (u32 at = lane; at < 32 * 4; at += 32) {
    const u32 row = at / 4, vector = at % 4;
    ptx::store_shared_x4(tile + 64 * row + 16 * place(row, vector),
                         ptx::load_global_x4(p.x + 8 * at));
  }
  ptx::warp_sync();
  for (u32 vector = 0; vector < 4; ++vector) {
    const ptx::U32x4 x = ptx::ldmatrix_x4(tile + 64 * lane + 16 * place(lane, vector));
    for (u32 i = 0; i < 4; ++i) {  // matrix i: rows 8 i to 8 i + 7 of this vector
      u16* const y = p.y + (8 * i + lane / 4) * 32 + 8 * vector + lane % 4 * 2;
      y[0] = static_cast<u16>(x.word[i]);
      y[1] = static_cast<u16>(x.word[i] >> 16);
    }
  }
}
