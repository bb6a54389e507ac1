// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A tile of 64 float16 columns in shared memory, and sums over the lanes that have a row: what CuTe
// calls a layout, a tiled copy and the layout of an accumulator. Included by flash_mma.cu alone.
#pragma once

#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

constexpr i32 kDim = 64, kRows = 64, kThreads = 128;
constexpr u32 kRowBytes = 2 * kDim;

// --8<-- [start:tile]
// Where 16 bytes lie: vector 0 to 7 of a row of 128 bytes. Eight rows, read at the same vector,
// meet eight different groups of four banks.
u32 address(u32 tile, u32 row, u32 vector) {
  return tile + row * kRowBytes + 16 * (SWIZZLE ? vector ^ (row % 8) : vector);
}

// Asks for a tile; it is there after a wait for its group, and a barrier.
void copy_tile(u32 tile, const u16* from, u32 rows) {
  for (u32 at = ptx::thread_index(); at < rows * 8; at += kThreads) {
    ptx::cp_async_16(address(tile, at / 8, at % 8), reinterpret_cast<const u8*>(from + 8 * at),
                     true);
  }
}
// --8<-- [end:tile]

// A row's numbers lie in the four lanes of a quad.
float quad_max(float x) {
  x = ptx::max(x, ptx::shuffle_xor(x, 1));
  return ptx::max(x, ptx::shuffle_xor(x, 2));
}
float quad_sum(float x) {
  x += ptx::shuffle_xor(x, 1);
  return x + ptx::shuffle_xor(x, 2);
}
