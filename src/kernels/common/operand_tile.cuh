// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How a tile of 16-bit numbers lies in shared memory as an operand of wgmma, in units of 8 columns
// (16 bytes): in chunks of 64 columns whose 128-byte rows have their units exchanged by row % 8
// (the copy engine's 128-byte swizzle); or, the ablation, unit by unit, all rows of one after the
// other, which wgmma reads as well but the copy engine moves 16 bytes at a time.
#pragma once

#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace fulmen {

template <i32 kRows, bool kSwizzle>
struct OperandTile {
  u32 base;

  constexpr u32 unit(u32 row, u32 unit) const {
    if constexpr (!kSwizzle) return base + (unit * kRows + row) * 16;
    return base + unit / 8 * kRows * 128 + row * 128 + ((unit % 8 ^ row % 8) << 4);
  }

  // As rows of an operand: A, or B as N x K. Columns from `dim` on, a multiple of 16.
  static constexpr u32 kUpper = kSwizzle ? ptx::kSwizzledRows : ptx::plain_units(128);
  constexpr u32 descriptor() const {
    return ptx::wgmma_descriptor(base, kSwizzle ? 16 : kRows * 16);
  }
  static constexpr u32 columns_from(i32 dim) {
    return (kSwizzle ? dim / 64 * kRows * 128 + dim % 64 * 2 : dim * kRows * 2) >> 4;
  }

  // As a transposed B, K x N. Rows from `row` on, a multiple of 16.
  static constexpr u32 kUpperTransposed =
      kSwizzle ? ptx::kSwizzledRows : ptx::plain_units(kRows * 16);
  constexpr u32 descriptor_transposed() const {
    return ptx::wgmma_descriptor(base, kSwizzle ? kRows * 128 : 128);
  }
  static constexpr u32 rows_from(i32 row) { return (kSwizzle ? row * 128 : row * 16) >> 4; }
};

// The first kDims columns of a tile's first 64 rows as left operands of a warpgroup: four registers
// for 16 columns.
template <i32 kDims, i32 kRows, bool kSwizzle, i32 kWords>
inline void load_left_columns(u32 (&words)[kWords], OperandTile<kRows, kSwizzle> tile) {
  const u32 thread = ptx::thread_index() % 128;
  const u32 row = thread / 32 * 16 + thread % 16;
#pragma unroll
  for (i32 d = 0; d < kDims; d += 16) {
    const ptx::U32x4 x = ptx::ldmatrix_x4(tile.unit(row, d / 8 + thread % 32 / 16));
#pragma unroll
    for (i32 w = 0; w < 4; ++w) words[d / 4 + w] = x.word[w];
  }
}

}  // namespace fulmen
