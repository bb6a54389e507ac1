// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Accumulators of mma and wgmma as a thread holds them: two rows, 8 apart, of 16, and of every 8
// columns two neighbours. Float i is of row i / 2 % 2. Scores that become -inf; and words that the
// four lanes of a row exchange.
#pragma once

#include "kernels/base.cuh"
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

}  // namespace fulmen
