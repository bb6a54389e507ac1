// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Solution of 2.2: a row of the tile has 33 floats. Number (i, j) is in bank (33 i + j) % 32, which
// is (i + j) % 32: a different one for every i of a column, and for every j of a row.
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* x;  // (row, column)
  float* y;        // (column, row)
  i32 rows;        // and columns: multiples of 32
};

extern "C" __global__ void fulmen_kernel(const Params p) {
  float* const tile = reinterpret_cast<float*>(ptx::shared_bytes());  // (32, 33)
  const i32 lane = static_cast<i32>(ptx::thread_index());
  const i32 across = p.rows / 32;
  const i32 row = static_cast<i32>(ptx::block_index()) / across * 32;
  const i32 column = static_cast<i32>(ptx::block_index()) % across * 32;
  for (i32 i = 0; i < 32; ++i) tile[33 * i + lane] = p.x[(row + i) * p.rows + column + lane];
  ptx::warp_sync();
  for (i32 i = 0; i < 32; ++i) p.y[(column + i) * p.rows + row + lane] = tile[33 * lane + i];
}
