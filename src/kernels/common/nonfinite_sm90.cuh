// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients that are not finite: where a product met pairs that a mask hides, 0 times an infinity
// or NaN of a hidden row shows in them. The kernels mark the head, and backward_fallback_sm90
// computes its gradients again.
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

// By a warp together. nonfinite: 1 + (batch_kv_head), the first for any.
inline void mark_nonfinite(u32* nonfinite, i32 line, float probe) {
  if (ptx::any(probe != 0) && ptx::thread_index() % 32 == 0) {
    ptx::set_bits(nonfinite, 1);
    ptx::set_bits(nonfinite + 1 + line, 1);
  }
}

}  // namespace fulmen
