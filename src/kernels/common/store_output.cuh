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

// A tile of floats in shared memory: chunks of 32 columns, else as above. `own` is the thread's
// first row, the other 8 further. Floats must not be stored as products left them: ptxas would
// serialise those (C7514).
template <bool kSwizzle>
struct FloatTile {
  u32 address;
  u32 chunk_bytes;

  // Of row 0 or 1 of the thread, its two columns of the eight from `column` on.
  void store(i32 row, i32 column, ptx::F32x2 x) const {
    const u32 lane = ptx::thread_index() % 32;
    const u32 own = ptx::thread_index() % 128 / 32 * 16 + lane / 4 + 8 * u32(row);
    const u32 vector = u32(column) % 32 / 4 + lane % 4 / 2;
    const u32 at = address + u32(column) / 32 * chunk_bytes + own * 128 +
                   (kSwizzle ? vector ^ own % 8 : vector) * 16 + lane % 2 * 8;
    ptx::store_shared_x2(
        at, {{__builtin_bit_cast(u32, x.word[0]), __builtin_bit_cast(u32, x.word[1])}});
  }
};

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

// What becomes of a row of the tile that joins the part of it in memory.
struct JoinedRow {
  float* part;  // at a multiple of 8 bytes
  float mine, other;
  bool inside;  // of the sequence
  bool counts;  // else the row stays as it is
};

// take(column, pair): mine times columns kFirst to kEnd of row `row` of the tile + other times what
// is in memory, which says nothing where that is 0; if the row does not count, what is there, if
// kStays says that this is wanted. Asked for kAhead columns at a time. 16 bytes a thread, by an
// exchange within pairs of lanes, make ptxas serialise the products (C7511).
template <i32 kFirst, i32 kEnd, bool kStays, i32 kFloats, class Take>
inline void join_output_row(const float (&O)[kFloats], i32 row, const JoinedRow& joined, i32 dims,
                            const Take& take) {
  constexpr i32 kAhead = 64;
  const float* const part = joined.part + 2 * (ptx::thread_index() % 4);
  dims -= 2 * i32(ptx::thread_index() % 4);
  const bool asks = joined.inside && (joined.counts ? joined.other != 0 : kStays);
#pragma unroll
  for (i32 begin = kFirst; begin < kEnd; begin += kAhead) {
    ptx::F32x2 there[kAhead / 8] = {};
#pragma unroll
    for (i32 n = 0; n < kAhead / 8; ++n) {
      const i32 column = begin + 8 * n;
      if (column < kEnd && asks && column < dims) there[n] = ptx::load_l2_x2(part + column);
    }
#pragma unroll
    for (i32 n = 0; n < kAhead / 8; ++n) {
      const i32 column = begin + 8 * n, at = column / 2 + 2 * row;
      if (column >= kEnd) continue;
      ptx::F32x2 sum;
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        sum.word[c] = ptx::fma(there[n].word[c], joined.other, ptx::mul(O[at + c], joined.mine));
        if (kStays && !joined.counts) sum.word[c] = there[n].word[c];
      }
      take(column, sum);
    }
  }
}

}  // namespace fulmen
