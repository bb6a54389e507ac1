// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The way of a warpgroup's 64 x d_v output tile from wgmma fragments to global memory: through
// shared memory and the copy engine, or from the registers, 16 bytes a thread. Called at the end of
// a block of queries; rows past the end of the sequence are not written.
#pragma once

#include "kernels/config.h"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Writes the tile to shared memory: chunks of 64 columns, `chunk_bytes` apart, 128-byte rows,
// 16-byte units of row r exchanged by r % 8 as the copy engine expects.
template <DType kDType, i32 kFloats>
inline void stage_output_tile(const float (&O)[kFloats], u32 tile, u32 chunk_bytes) {
  const u32 thread = ptx::thread_index() % 128;
  const u32 lane = thread % 32;
  const u32 row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (i32 i = 0; i < kFloats / 8; ++i) {  // 16 columns
    const u32 unit = 2 * i + lane / 16;
    const u32 address = tile + unit / 8 * chunk_bytes + row * 128 + ((unit % 8 ^ row % 8) << 4);
    ptx::U32x4 x;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      x.word[w] = ptx::pack<kDType>(O[8 * i + 2 * w], O[8 * i + 2 * w + 1]);
    }
    ptx::stmatrix_x4(address, x);
  }
}

// Transposes over the four lanes of a quad: word i of lane l goes to word l of lane i.
inline void transpose_quad(ptx::U32x4& x) {
  const u32 lane = ptx::thread_index();
#pragma unroll
  for (u32 distance = 2; distance >= 1; distance /= 2) {
    const bool upper = lane & distance;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const u32 sent = upper ? x.word[i] : x.word[i + distance];
      const u32 received = ptx::shuffle_xor(sent, distance);
      (upper ? x.word[i] : x.word[i + distance]) = received;
    }
  }
}

// Writes one row of the tile (0: the thread's first, 1: the one 8 further) to `out`, its first
// element, if it is inside the sequence. All lanes of a quad take part.
template <DType kDType, i32 kFloats>
inline void store_output_row(const float (&O)[kFloats], i32 row, u16* out, bool inside) {
  const u32 lane = ptx::thread_index() % 4;
#pragma unroll
  for (i32 i = 0; i < kFloats / 16; ++i) {  // 32 columns
    ptx::U32x4 x;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      x.word[w] = ptx::pack<kDType>(O[16 * i + 4 * w + 2 * row], O[16 * i + 4 * w + 2 * row + 1]);
    }
    transpose_quad(x);
    if (inside) ptx::store_global_x4(out + 32 * i + 8 * lane, x);
  }
}

}  // namespace fulmen
