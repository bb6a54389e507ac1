// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The way of a warpgroup's 64 x d_v output tile from wgmma fragments to global memory: through
// shared memory and the copy engine, or from the registers, 16 bytes a thread. Called at the end of
// a block of queries; rows past the end of the sequence are not written.
#pragma once

#include "kernels/common/fragments.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Writes the tile to shared memory: chunks of 64 columns, `chunk_bytes` apart, 128-byte rows,
// 16-byte vectors of row r exchanged by r % 8 as the copy engine expects, unless not kSwizzle.
template <DType kDType, bool kSwizzle = true, i32 kFloats>
inline void stage_output_tile(const float (&O)[kFloats], u32 tile, u32 chunk_bytes) {
  const u32 thread = ptx::thread_index() % 128;
  const u32 lane = thread % 32;
  const u32 row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (i32 i = 0; i < kFloats / 8; ++i) {  // 16 columns
    const u32 unit = 2 * i + lane / 16;
    const u32 column = kSwizzle ? unit % 8 ^ row % 8 : unit % 8;
    const u32 address = tile + unit / 8 * chunk_bytes + row * 128 + (column << 4);
    ptx::U32x4 x;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      x.word[w] = ptx::pack<kDType>(O[8 * i + 2 * w], O[8 * i + 2 * w + 1]);
    }
    ptx::stmatrix_x4(address, x);
  }
}

// Sets row 0 or 1 of the thread to 0.
template <i32 kFloats>
inline void clear_row(float (&O)[kFloats], i32 row) {
#pragma unroll
  for (i32 i = 2 * row; i < kFloats; i += 4) O[i] = O[i + 1] = 0;
}

// Writes one row of the tile (0: the thread's first, 1: the one 8 further) to `out`, its first
// element, if it is inside the sequence: `dims` elements, a multiple of 8. All lanes of a quad take
// part.
template <DType kDType, i32 kFloats>
inline void store_output_row(const float (&O)[kFloats], i32 row, u16* out, bool inside, i32 dims) {
  const i32 lane = ptx::thread_index() % 4;
#pragma unroll
  for (i32 i = 0; i < kFloats; i += 16) {  // 32 columns
    ptx::U32x4 x{};
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      const i32 at = i + 4 * w + 2 * row;
      if (at < kFloats) x.word[w] = ptx::pack<kDType>(O[at], O[at + 1]);
    }
    transpose_quad(x);
    const i32 column = 2 * i + 8 * lane;
    if (inside && column < dims) ptx::store_global_x4(out + column, x);
  }
}

// The same unrounded.
template <i32 kFloats>
inline void store_output_row(const float (&O)[kFloats], i32 row, float* out, bool inside,
                             i32 dims) {
  const i32 lane = ptx::thread_index() % 4;
#pragma unroll
  for (i32 i = 0; i < kFloats; i += 4) {  // 8 columns
    const i32 column = 2 * i + 2 * lane;
    if (!inside || column >= dims) continue;
    out[column] = O[i + 2 * row];
    out[column + 1] = O[i + 2 * row + 1];
  }
}

// out = mine times a row of the tile + other times what `out` holds, which says nothing where that
// is 0; of rows on multiples of 8 bytes. What is there is asked for kAhead columns at a time. 16
// bytes a thread, by an exchange within pairs of lanes, make ptxas serialise the products (C7511).
template <i32 kFloats>
inline void join_output_row(const float (&O)[kFloats], i32 row, float mine, float* out, float other,
                            bool inside, i32 dims) {
  constexpr i32 kAhead = 64;
  out += 2 * (ptx::thread_index() % 4);
  dims -= 2 * (ptx::thread_index() % 4);
#pragma unroll
  for (i32 begin = 0; begin < 2 * kFloats; begin += kAhead) {
    ptx::F32x2 part[kAhead / 8] = {};
#pragma unroll
    for (i32 n = 0; n < kAhead / 8; ++n) {
      const i32 column = begin + 8 * n;
      const bool is_there = inside && column < dims && other != 0;
      if (column < 2 * kFloats && is_there) part[n] = ptx::load_l2_x2(out + column);
    }
#pragma unroll
    for (i32 n = 0; n < kAhead / 8; ++n) {
      const i32 column = begin + 8 * n, at = column / 2 + 2 * row;
      if (column >= 2 * kFloats) continue;
      const float x = ptx::fma(part[n].word[0], other, O[at] * mine);
      const float y = ptx::fma(part[n].word[1], other, O[at + 1] * mine);
      if (inside && column < dims) ptx::store_l2_x2(out + column, {x, y});
    }
  }
}

}  // namespace fulmen
