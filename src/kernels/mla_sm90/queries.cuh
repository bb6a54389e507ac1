// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of Q on their way into the registers of mla_sm90's scores, whose four neighbouring lanes
// share a row.
#pragma once

#include "kernels/common/fragments.cuh"
#include "kernels/decode_sm80/operands.cuh"

namespace fulmen {

// What 1 of a row of Q counts as float16, its largest number at 2^14 .. 2^15: exact but for numbers
// 2^29 times smaller. top: the magnitude of that one, as bits of a float, whose order is that of
// numbers.
inline float unit_of_largest(u32 top) {
  constexpr u32 kFourteen = 14u << 23, kLargest = 254u << 23;
  const u32 power = max(top & 0x7f800000, kSmallestPower + kFourteen);
  return __builtin_bit_cast(float, min(power, kLargest) - kFourteen);
}
// Of 8 numbers of bfloat16.
inline u32 largest_of(const ptx::U32x4& x) {
  constexpr u32 kMagnitude = 0x7fffffff;
  u32 top = 0;
#pragma unroll
  for (const u32 pair : x.word) top = max(top, max(pair << 16 & kMagnitude, pair & kMagnitude));
  return top;
}

// Of a row that four lanes share. from: 8 of its bfloat16; every 32nd from there on is the lane's.
template <i32 kTiles>
float unit_of_row(const u16* from, bool counts) {
  u32 top = 0;
#pragma unroll 6
  for (i32 vector = 0; vector < kTiles * 8; vector += 4) {
    if (!counts) break;
    top = max(top, largest_of(ptx::load_global_x4(from + vector * 8)));
  }
  top = max(top, ptx::shuffle_xor(top, 1));
  top = max(top, ptx::shuffle_xor(top, 2));
  return unit_of_largest(top);
}

// Eight numbers.
template <DType kFrom, DType kTo>
ptx::U32x4 scaled(ptx::U32x4 x, float factor) {
#pragma unroll
  for (u32& pair : x.word) {
    const ptx::F32x2 numbers = ptx::unpack<kFrom>(pair);
    pair = ptx::pack<kTo>(numbers.word[0] * factor, numbers.word[1] * factor);
  }
  return x;
}

// Four words, every second from x on, of each of the four lanes: lane i has word i of all of them.
inline void transpose_words(u32* x) {
  ptx::U32x4 words{{x[0], x[2], x[4], x[6]}};
  transpose_quad(words);
#pragma unroll
  for (i32 i = 0; i < 4; ++i) x[2 * i] = words.word[i];
}

}  // namespace fulmen
