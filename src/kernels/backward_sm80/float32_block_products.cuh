// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// BlockProducts of float32 numbers, by one tf32 product or by three. Pairs (P, dS) lie in shared
// memory as accumulators hold them: of every 8 columns first those of even number, then the odd
// ones, which is the order in which RightWords takes rows. Called by backward_sm80.
#pragma once

#include "kernels/common/float32_products.cuh"

namespace fulmen {

template <Precision kPrecision, bool kSwizzled>
struct BlockProducts<DType::kFloat32, kPrecision, kSwizzled> {
  static constexpr i32 kStep = 8;

  template <i32 kLength, i32 kTiles, i32 kFloats, class Left, class Right>
  static void multiply(float (&C)[kTiles][kFloats], const Left& left, const Right& right) {
    multiply_float32<kPrecision, kLength / kStep, kFloats / 8>(C, 0, left, right);
  }

  // C = A B of scores, or of what is multiplied with them.
  template <i32 kLength, i32 kTiles, i32 kFloats, class Left, class Right>
  static void set_scores(float (&C)[kTiles][kFloats], const Left& left, const Right& right) {
    set_scores_float32<kPrecision, kLength / kStep>(C, left, right);
  }

  // Lane l: row l / 4 of every 8, along the common axis 2 (l % 4) and the next.
  template <i32 kSpan, i32 kWords>
  static auto left_columns(const SwizzledTile<kWords, kSwizzled>& pairs, u32 first) {
    using Way = PartRow<kWords, kSwizzled, 2 * kSpan>;
    const u32 lane = lane_index();
    const auto way_of = [&](u32 odd) {
      LaneRow<kWords, kSwizzled> row(pairs, 2 * (lane % 4) + odd, lane / 4 % 2);
      row.start += lane / 8 * 4;
      return Way(row, 2 * first);
    };
    const Way even = way_of(0), odd = way_of(1);
    return [even, odd](i32 k, i32 t) {
      return ptx::U32x4{
          {ptx::load_shared(even.at(2 * t, 8 * k)), ptx::load_shared(even.at(2 * t + 1, 8 * k)),
           ptx::load_shared(odd.at(2 * t, 8 * k)), ptx::load_shared(odd.at(2 * t + 1, 8 * k))}};
    };
  }
  template <i32 kSpan, i32 kWords>
  static auto right_columns(const SwizzledTile<kWords, kSwizzled>& tile, u32 first) {
    return RightWords<kWords, kSwizzled, 2 * kSpan>(tile, 2 * first);
  }

  static ptx::U32x4 words(const float* S) {
    return {{__builtin_bit_cast(u32, S[0]), __builtin_bit_cast(u32, S[2]),
             __builtin_bit_cast(u32, S[1]), __builtin_bit_cast(u32, S[3])}};
  }
  static void numbers(const ptx::U32x4& x, float* S) {
#pragma unroll
    for (i32 w = 0; w < 4; ++w) S[w % 2 * 2 + w / 2] = __builtin_bit_cast(float, x.word[w]);
  }
};

}  // namespace fulmen
