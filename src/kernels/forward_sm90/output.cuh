// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How O += P V of a block of keys is added. Of 16 bits a tensor core does. Its sums of e4m3 keep 14
// bits (emulator/tensor_core.h): one takes the keys of a block alone, and is added to O in float32.
// Up to 128 dims registers hold it beside O and S, so that it runs under the softmax. Beyond, O
// leaves them for a part of the columns beside another, or for S: products come in turn, and the
// softmax runs under those of the other warpgroup.
#pragma once

#include "kernels/common/products_sm90.cuh"
#include "kernels/forward_sm90/config.h"

namespace fulmen {

template <ForwardSm90Config kConfig>
using Output = float[kConfig.o_dims() / 2];

// Of e4m3, the product of a block of keys.
template <ForwardSm90Config kConfig>
inline constexpr bool kAddsBlocks = kConfig.has_8_bits() && !kConfig.adds_in_parts();
template <ForwardSm90Config kConfig>
using BlockOutput = float[kAddsBlocks<kConfig> ? kConfig.o_dims() / 2 : 1];

// O += P V in parts of the columns: while one is added, the next is multiplied. All is done then.
template <ForwardSm90Config kConfig>
inline void add_in_parts(Output<kConfig>& O, const u32 (&P)[kConfig.weight_words()], u32 v) {
  constexpr i32 kDims = kConfig.part_dims();
  float parts[2][kDims / 2];
  issue_output<kConfig>(parts[0], P, v, false);
#pragma unroll
  for (i32 d = 0; d < kConfig.o_dims(); d += kDims) {
    const i32 next = d + kDims;
    float (&part)[kDims / 2] = parts[d / kDims % 2];
    if (next < kConfig.o_dims()) {
      issue_output<kConfig>(parts[next / kDims % 2], P, v + u32(next) * 128, false);
      ptx::wgmma_wait<1>();
    } else {
      ptx::wgmma_wait<0>();
    }
    ptx::wgmma_fence_operand(part);
#pragma unroll
    for (i32 i = 0; i < kDims / 2; ++i) O[d / 2 + i] += part[i];
  }
}

// Issues O += P V, or the product of a block alone, which add_block adds when it is there.
template <ForwardSm90Config kConfig>
inline void issue_block(Output<kConfig>& O, BlockOutput<kConfig>& block,
                        const u32 (&P)[kConfig.weight_words()], u32 v, bool begun) {
  if constexpr (kConfig.adds_in_parts()) {
    add_in_parts<kConfig>(O, P, v);
  } else if constexpr (kAddsBlocks<kConfig>) {
    issue_output<kConfig>(block, P, v, false);
  } else {
    issue_output<kConfig>(O, P, v, begun);
  }
}

template <ForwardSm90Config kConfig>
inline void add_block(Output<kConfig>& O, const BlockOutput<kConfig>& block) {
  if constexpr (!kAddsBlocks<kConfig>) return;
#pragma unroll
  for (i32 i = 0; i < kConfig.o_dims() / 2; ++i) O[i] += block[i];
}

}  // namespace fulmen
