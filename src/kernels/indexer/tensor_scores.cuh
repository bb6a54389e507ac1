// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Scores of a tile of keys on the tensor cores. A warp has 16 keys as the rows of its products and
// meets the heads of q, eight at a time, as columns: a thread then has two heads of two keys in
// registers, weighs what is positive, and four threads add what they have of a key. Numbers of 8
// bits become 16 on their way into shared memory, exactly.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/indexer/config.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Eight numbers in their place in shared memory, as numbers of kTo.
template <DType kFrom, DType kTo>
void put_eight(const u8* from, u32 to) {
  using From = typename ElementOf<kFrom>::Type;
  using To = typename ElementOf<kTo>::Type;
  if constexpr (kFrom == kTo) {
    ptx::store_shared_x4(to, ptx::load_global_x4(reinterpret_cast<const u16*>(from)));
  } else {
    struct Eight {
      From element[8];
    };
    const Eight numbers = __builtin_bit_cast(Eight, load_element<u64>(from));
    ptx::U32x4 words;
    for (i32 i = 0; i < 4; ++i) {
      const u32 low = __builtin_bit_cast(u16, narrow(widen(numbers.element[2 * i]), To{}));
      const u32 high = __builtin_bit_cast(u16, narrow(widen(numbers.element[2 * i + 1]), To{}));
      words.word[i] = low | high << 16;
    }
    ptx::store_shared_x4(to, words);
  }
}

// The scores of the 16 keys of a warp, from tiles (heads, kDim) and (keys, kDim) whose rows are
// padded: of the thread's two keys, lane / 4 and 8 further, once its four threads have added.
template <DType kDType, i32 kDim>
struct TensorScores {
  static constexpr u32 kRowBytes = 2 * (kDim + IndexerConfig::kPadding);
  static constexpr i32 kSteps = kDim / 16;

  u32 K[kSteps][4];

  void load_keys(u32 tile, i32 first_key, i32 lane) {
    const u32 row = tile + static_cast<u32>(first_key + lane % 16) * kRowBytes;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const ptx::U32x4 x =
          ptx::ldmatrix_x4(row + 32u * static_cast<u32>(step) + 16u * static_cast<u32>(lane / 16));
      for (i32 i = 0; i < 4; ++i) K[step][i] = x.word[i];
    }
  }

  // sums[key] += sum over the heads from `head` on, up to eight and below `heads`, of weight max(0,
  // scale[key] dot).
  void add_heads(u32 tile, i32 head, i32 heads, const float* weights, const float (&scale)[2],
                 float (&sums)[2], i32 lane) const {
    const u32 row = tile + static_cast<u32>(head + lane % 8) * kRowBytes;
    float S[4] = {};
#pragma unroll
    for (i32 step = 0; step < kSteps; step += 2) {
      const ptx::U32x4 q =
          ptx::ldmatrix_x4(row + 32u * static_cast<u32>(step) + 16u * static_cast<u32>(lane / 8));
      ptx::mma_m16n8k16<kDType>(S, K[step], q.word[0], q.word[1]);
      ptx::mma_m16n8k16<kDType>(S, K[step + 1], q.word[2], q.word[3]);
    }
    for (i32 i = 0; i < 4; ++i) {
      const i32 own = head + 2 * (lane % 4) + i % 2;
      if (own < heads) sums[i / 2] += weights[own] * rectified(S[i] * scale[i / 2]);
    }
  }

  static void add_threads(float (&sums)[2]) {
    for (float& sum : sums) {
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
    }
  }
};

}  // namespace fulmen
