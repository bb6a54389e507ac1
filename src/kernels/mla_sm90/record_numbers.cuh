// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Numbers of a record as float16: those of e4m3 times their scale, and the last 64 where they are
// values. What that would round, scores are not to have: rows that see it are computed again.
#pragma once

#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Whether products of e4m3 with a scale are numbers of float16, by the bits of a float32.
inline bool is_exact_scale(u32 scale) {
  constexpr u32 kLeast = 127 - 15, kMost = 127 + 7;
  const u32 exponent = scale >> 23 & 0xff;
  return scale << 1 == 0 || ((scale & 0x7fffff) == 0 && exponent - kLeast <= kMost - kLeast);
}

// Eight numbers; scale: twice.
inline ptx::U32x4 widened_record(u32 low, u32 high, u32 scale) {
  const ptx::U32x2 first = ptx::widen_e4m3(low), last = ptx::widen_e4m3(high);
  const auto times = [scale](u32 pair) {
    return ptx::multiply_pairs<DType::kFloat16>(pair, scale);
  };
  return {{times(first.word[0]), times(first.word[1]), times(last.word[0]), times(last.word[1])}};
}

// Eight of the 64 numbers of a key, which eight lanes have. Whether the largest of them ends
// beyond float16, or lies so low that others may be rounded by more than 2^-22 of it.
inline bool narrow_positions(ptx::U32x4& x) {
  constexpr u32 kLeast = 0x3e00, kMost = 0x477f;  // bfloat16: 2^-3, 65280
  u32 top = 0;
#pragma unroll
  for (u32& pair : x.word) {
    top = max(top, max(pair & 0x7fff, pair >> 16 & 0x7fff));
    const ptx::F32x2 numbers = ptx::unpack<DType::kBFloat16>(pair);
    pair = ptx::pack<DType::kFloat16>(numbers.word[0], numbers.word[1]);
  }
#pragma unroll
  for (u32 lanes = 1; lanes < 8; lanes *= 2) top = max(top, ptx::shuffle_xor(top, lanes));
  return top > kMost || (top != 0 && top < kLeast);
}

}  // namespace fulmen
