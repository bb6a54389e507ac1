// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Four words of four neighbouring lanes, a 4 x 4 matrix, transposed by shuffles. A row of a wgmma
// fragment lies spread over such a quad: this brings neighbours into one lane, or decisions that
// one lane made to those that they are about.
#pragma once

#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Transposes over the four lanes of a quad: word i of lane l goes to word l of lane i.
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
