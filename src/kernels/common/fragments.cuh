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

// ---- Exchange between lanes ---------------------------------------------------------------------

template <i32 kCount>
struct Words {
  u32 word[kCount];
};

// The value of lane `lane`, of whole words.
template <class T>
T value_of_lane(const T& x, u32 lane) {
  auto words = __builtin_bit_cast(Words<i32(sizeof(T)) / 4>, x);
#pragma unroll
  for (u32& word : words.word) word = u32(ptx::shuffle(i32(word), lane));
  return __builtin_bit_cast(T, words);
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

// Four 8-bit numbers of keys or values become two registers of float16, which holds every one of
// them, for products: bytes 0 and 1, 2 and 3, or bytes 0 and 2, 1 and 3. An e5m2 is the upper half
// of a float16. Cards since Ada convert an e4m3 themselves; elsewhere its sign and magnitude are
// moved to where float16 has them, and a multiplication by 2^8 makes up for the other bias (exact,
// subnormal numbers too), which makes 480 of NaN. An int8 is put into the last bits of 1024 + 128,
// whose unit in the last place is 1, and that is taken away.
struct WidenedPairs {
  u32 first;
  u32 second;
};
enum class BytePairs { kNeighbours, kAlternate };

// Whether an e4m3 among these bytes is NaN: not 0 under kLostBits.
constexpr u32 kLostBits = 0x80808080;
constexpr u32 lost_e4m3(u32 bytes) { return (bytes & 0x7f7f7f7f) + 0x01010101; }

// The same number in both halves of a register.
constexpr u32 in_both(u32 bits) { return bits << 16 | bits; }

inline WidenedPairs shift_e4m3(u32 bytes) {  // alternate
  constexpr u32 kSign = in_both(0x8000), kMagnitude = in_both(0x3f80), k256 = in_both(0x5c00);
  const u32 even = (bytes << 8 & kSign) | (bytes << 7 & kMagnitude);
  const u32 odd = (bytes & kSign) | (bytes >> 1 & kMagnitude);
  return {ptx::multiply_pairs<DType::kFloat16>(even, k256),
          ptx::multiply_pairs<DType::kFloat16>(odd, k256)};
}

// kConverts: whether the card has cvt.rn.f16x2.e4m3x2.
template <DType kFrom, BytePairs kPairs, bool kConverts>
WidenedPairs widen_bytes(u32 bytes) {
  constexpr bool kNext = kPairs == BytePairs::kNeighbours;
  constexpr u32 kOtherPairs = 0x3120;  // bytes 1 and 2 swapped
  if constexpr (kFrom == DType::kInt8) {
    constexpr u32 kThousand = 0x64646464, kAway = in_both(0xe480);
    const u32 biased = bytes ^ 0x80808080;
    return {ptx::add_pairs<DType::kFloat16>(
                ptx::permute(biased, kThousand, kNext ? 0x4140 : 0x4240), kAway),
            ptx::add_pairs<DType::kFloat16>(
                ptx::permute(biased, kThousand, kNext ? 0x4342 : 0x4341), kAway)};
  } else if constexpr (kFrom == DType::kFloat8E5M2) {
    return {ptx::permute(bytes, 0, kNext ? 0x1404 : 0x2404),
            ptx::permute(bytes, 0, kNext ? 0x3424 : 0x3414)};
  } else if constexpr (kConverts) {
    const ptx::U32x2 pairs = ptx::widen_e4m3(kNext ? bytes : ptx::permute(bytes, 0, kOtherPairs));
    return {pairs.word[0], pairs.word[1]};
  } else {
    return shift_e4m3(kNext ? ptx::permute(bytes, 0, kOtherPairs) : bytes);
  }
}

}  // namespace fulmen
