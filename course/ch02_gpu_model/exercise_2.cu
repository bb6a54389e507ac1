// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exercise 2.2: y = x transposed, tile by tile: rows of 32 are read, rows of 32 are written, and in
// between they stand in shared memory. Reading a column there meets one bank 32 times. Lay the tile
// out so that neither access has a conflict; there are 1,056 floats of room.
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* x;  // (row, column)
  float* y;        // (column, row)
  i32 rows;        // and columns: multiples of 32
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  float* const tile = reinterpret_cast<float*>(ptx::shared_bytes());  // (32, 32)
  const i32 lane = static_cast<i32>(ptx::thread_index());
  const i32 across = p.rows / 32;
  const i32 row = static_cast<i32>(ptx::block_index()) / across * 32;
  const i32 column = static_cast<i32>(ptx::block_index()) % across * 32;
  for (i32 i = 0; i < 32; ++i) tile[32 * i + lane] = p.x[(row + i) * p.rows + column + lane];
  ptx::warp_sync();
  for (i32 i = 0; i < 32; ++i) p.y[(column + i) * p.rows + row + lane] = tile[32 * lane + i];
}
