// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients that are not finite, where products met pairs that a mask hides: 0 times an infinity or
// NaN that nobody may see would show in them. Their lines are marked, and backward_careful computes
// them again.
#pragma once

#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// 0, or NaN if one of the numbers is an infinity or NaN.
template <i32 kFloats>
inline float probe(const float (&x)[kFloats]) {
  float found[4] = {};
#pragma unroll
  for (i32 i = 0; i < kFloats; ++i) found[i % 4] = ptx::fma(x[i], 0.f, found[i % 4]);
  return (found[0] + found[1]) + (found[2] + found[3]);
}

// By a warp together. spoiled: 1 + (line), the first for any.
inline void report_spoiled(u32* spoiled, i32 line, float probe) {
  if (ptx::any(probe != 0) && ptx::thread_index() % 32 == 0) {
    ptx::set_bits(spoiled, 1);
    ptx::set_bits(spoiled + 1 + line, 1);
  }
}

}  // namespace fulmen
