// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Accumulators of mma and wgmma as a thread holds them: two rows, 8 apart, of 16, and of every 8
// columns two neighbours. Float i is of row i / 2 % 2. Scores that become -inf; words that the
// four lanes of a row exchange; operands of 8 bits.
#pragma once

#include "kernels/base.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// How far the column of float i lies behind the thread's first.
constexpr i32 fragment_column(i32 i) { return i / 4 * 8 + i % 2; }

// ---- Masks: scores become -inf ------------------------------------------------------------------

// In row r of the thread's two, those floats i for which is_hidden(i).
template <i32 kFloats, class IsHidden>
inline void hide_in_row(float (&S)[kFloats], i32 r, const IsHidden& is_hidden) {
#pragma unroll
  for (i32 i = 2 * r; i < kFloats; i += 4) {
#pragma unroll
    for (i32 c = 0; c < 2; ++c) {
      if (is_hidden(i + c)) S[i + c] = -kInfinity<float>;
    }
  }
}

// In the column of float i, i % 4 < 2, those rows r for which is_hidden(r).
template <i32 kFloats, class IsHidden>
inline void hide_in_column(float (&S)[kFloats], i32 i, const IsHidden& is_hidden) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    if (is_hidden(r)) S[i + 2 * r] = -kInfinity<float>;
  }
}

// In row r what lies outside of columns [begin, end), counted from the thread's first. kBegins,
// kEnds: which of the bounds can lie in the fragment.
template <bool kBegins, bool kEnds = true, i32 kFloats>
inline void hide_outside(float (&S)[kFloats], i32 r, i32 begin, i32 end) {
  hide_in_row(S, r, [=](i32 i) {
    const i32 column = fragment_column(i);
    return (kEnds && column >= end) || (kBegins && column < begin);
  });
}

// ---- Exchange between the four lanes of a quad --------------------------------------------------

// Word i of lane l goes to word l of lane i: that brings neighbours of a row into one lane, or
// decisions that one lane made to those that they are about.
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

// ---- Numbers of 8 bits -------------------------------------------------------------------------

// Four 8-bit numbers of keys or values become two registers of 16-bit ones, for products: bytes 0
// and 2, bytes 1 and 3. Sign and magnitude of a floating-point number are moved to where the wider
// type has them, and a multiplication by a power of two makes up for the other bias; it is exact,
// subnormal numbers too. An int8 is put into the last bits of a number whose unit in the last place
// is 1, from which that number is taken away.
struct WidenedPairs {
  u32 even;
  u32 odd;
};

// What of these bytes comes out finite though it is NaN or infinite: not 0 under kLostBits.
constexpr u32 kLostBits = 0x80808080;
template <DType kFrom, DType kTo>
constexpr u32 lost(u32 bytes) {
  if constexpr (kFrom == DType::kFloat8E4M3) return (bytes & 0x7f7f7f7f) + 0x01010101;
  if constexpr (kFrom == DType::kFloat8E5M2 && kTo == DType::kBFloat16) {
    return (bytes & 0x7f7f7f7f) + 0x04040404;
  }
  return 0;
}
template <DType kFrom, DType kTo>
constexpr bool may_lose() {
  return lost<kFrom, kTo>(0) != 0;
}

// The same number in both halves of a register.
constexpr u32 in_both(u32 bits) { return bits << 16 | bits; }

template <DType kTo>
WidenedPairs widen_int8(u32 bytes) {
  if constexpr (kTo == DType::kFloat16) {  // 1024 + 128 + x, an ulp of 1
    constexpr u32 kThousand = in_both(0x6400), kAway = in_both(0xe480);
    const u32 biased = bytes ^ 0x80808080;
    return {ptx::add_pairs<kTo>((biased & 0x00ff00ff) | kThousand, kAway),
            ptx::add_pairs<kTo>((biased >> 8 & 0x00ff00ff) | kThousand, kAway)};
  }
  // 128 + the last seven bits; less 128, or 256 for a negative number.
  constexpr u32 k128 = in_both(0x4300), kAway = in_both(0xc300);
  const u32 next = bytes >> 8;
  return {ptx::add_pairs<kTo>((bytes & 0x007f007f) | k128, (bytes & 0x00800080) | kAway),
          ptx::add_pairs<kTo>((next & 0x007f007f) | k128, (next & 0x00800080) | kAway)};
}

template <DType kFrom, DType kTo>
WidenedPairs widen_bytes(u32 bytes) {
  if constexpr (kFrom == DType::kInt8) return widen_int8<kTo>(bytes);
  if constexpr (kFrom == DType::kFloat8E5M2 && kTo == DType::kFloat16) {
    return {bytes << 8 & 0xff00ff00, bytes & 0xff00ff00};
  }
  constexpr bool kHasFourBits = kFrom == DType::kFloat8E4M3;  // of exponent; else five
  constexpr i32 kShift = (kTo == DType::kFloat16 ? 7 : 4) + (kHasFourBits ? 0 : 1);
  constexpr u32 kSign = in_both(0x8000), kMagnitude = in_both(0x7f << kShift);
  // 2^8; 2^120, 2^112: the difference of the biases.
  constexpr u32 kFactor = in_both(kTo == DType::kFloat16 ? 0x5c00 : kHasFourBits ? 0x7b80 : 0x7780);
  const u32 even = (bytes << 8 & kSign) | (bytes << kShift & kMagnitude);
  const u32 odd = (bytes & kSign) | (bytes >> (8 - kShift) & kMagnitude);
  return {ptx::multiply_pairs<kTo>(even, kFactor), ptx::multiply_pairs<kTo>(odd, kFactor)};
}

}  // namespace fulmen
