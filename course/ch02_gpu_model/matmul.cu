// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// C = A B, each block a tile of TILE x TILE numbers of C, each thread one of them. Tiles of A and B
// pass through shared memory, so that a number fetched once is used TILE times.
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

struct Params {
  const float* a;  // (row, depth)
  const float* b;  // (depth, column)
  float* c;        // (row, column)
  i32 rows;
  i32 columns;
  i32 depth;
};

// --8<-- [start:kernel]
extern "C" __global__ void fulmen_kernel(const Params p) {
  // Where this thread stands: x across, y down in the tile of its block.
  const i32 x = static_cast<i32>(ptx::thread_index()) % TILE;
  const i32 y = static_cast<i32>(ptx::thread_index()) / TILE;
  const i32 tiles_across = p.columns / TILE;
  const i32 row = static_cast<i32>(ptx::block_index()) / tiles_across * TILE + y;
  const i32 column = static_cast<i32>(ptx::block_index()) % tiles_across * TILE + x;

  float* const a = reinterpret_cast<float*>(ptx::shared_bytes());  // (TILE, TILE)
  float* const b = a + TILE * TILE;                                // (TILE, TILE)
  float sum = 0;
  for (i32 first = 0; first < p.depth; first += TILE) {
    a[y * TILE + x] = p.a[row * p.depth + first + x];
    b[y * TILE + x] = p.b[(first + y) * p.columns + column];
    ptx::block_sync();  // the tiles are whole
    for (i32 i = 0; i < TILE; ++i) sum = ptx::fma(a[y * TILE + i], b[i * TILE + x], sum);
    ptx::block_sync();  // all have read them: they may be written over
  }
  p.c[row * p.columns + column] = sum;
}
// --8<-- [end:kernel]
