// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Products of one warp's rows with a whole tile of float32 numbers, on tensor cores that read 11
// significant bits of an input (tf32). Called by forward_sm80.
//   kTf32     x y ~ r(x) r(y), r rounding to nearest
//   k3xTf32   x = X + x' where X are the upper bits:   x y ~ X y' + x' Y + X Y, small ones first;
//             what is left out, x' y', is below 2^-20 |x y|
// A tensor core cuts its sums off towards zero, every time in the same direction. Sums that go on
// for long are therefore added up by the ordinary units, which round to nearest: those over the
// keys after every block and, with k3xTf32, those over the dims after every 16.
//
// Fragments (ptx/mma.cuh) are those of 16-bit products with a float32 in the place of a pair, so
// ldmatrix serves Q and K. P comes from accumulators, so a step of 8 keys takes keys 0 2 4 6 1 3 5
// 7 in that order, and reads V word by word. (16 bytes at a time, the halves of a pair come in
// registers apart: 220 moves beside 192 products, H200, 2026-11-28.)
#pragma once

#include "kernels/tile/warp_products.cuh"

namespace fulmen {

// What a tensor core is given for kWords words.
template <Precision kPrecision, i32 kWords>
struct Tf32Operand {
  u32 big[kWords];
  u32 small[kWords];  // k3xTf32 only

  void set(i32 at, u32 word) {
    if constexpr (kPrecision == Precision::kTf32) {
      big[at] = ptx::round_to_tf32(word);
    } else {
      const float upper = __builtin_bit_cast(float, word & 0xffffe000u);
      big[at] = word;  // the tensor core itself reads the upper bits alone
      small[at] = __builtin_bit_cast(u32, __builtin_bit_cast(float, word) - upper);
    }
  }
};

// Of a step of 8 along the common axis.
template <Precision kPrecision>
using LeftOperand = Tf32Operand<kPrecision, 4>;
template <Precision kPrecision>
using RightOperand = Tf32Operand<kPrecision, 2>;

// The three products of a step, for kTiles row tiles and kRights times 8 columns. Each of them goes
// through all accumulators before the next: neighbours do not wait for one another.
template <Precision kPrecision, i32 kTiles, i32 kRights, i32 kFloats>
inline void multiply_float32(float (&sums)[kTiles][kFloats],
                             const LeftOperand<kPrecision> (&a)[kTiles],
                             const RightOperand<kPrecision> (&b)[kRights]) {
  const auto each = [&](const auto& multiply) {
#pragma unroll
    for (i32 n = 0; n < kRights; ++n) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) multiply(&sums[t][4 * n], a[t], b[n]);
    }
  };
  if constexpr (kPrecision == Precision::k3xTf32) {
    each([](float* sum, const auto& left, const auto& right) {
      ptx::mma_m16n8k8_tf32(sum, left.big, right.small[0], right.small[1]);
    });
    each([](float* sum, const auto& left, const auto& right) {
      ptx::mma_m16n8k8_tf32(sum, left.small, right.big[0], right.big[1]);
    });
  }
  each([](float* sum, const auto& left, const auto& right) {
    ptx::mma_m16n8k8_tf32(sum, left.big, right.big[0], right.big[1]);
  });
}

// S = A B^T over kDims dims: left(k, t) gives A's fragment of step k and row tile t, B lies row by
// row in shared memory.
template <Sm80Config kConfig, i32 kDims, i32 kFloats, class Left>
inline void multiply_rows_float32(float (&S)[kConfig.row_tiles][kFloats], const Left& left,
                                  const LaneRow<2 * kDims, kConfig.swizzle>& right) {
  constexpr i32 kTiles = kConfig.row_tiles;
  constexpr i32 kSteps = kConfig.precision == Precision::k3xTf32 ? 2 : kDims / 8;  // of one sum
#pragma unroll
  for (i32 first = 0; first < kDims / 8; first += kSteps) {
    float sums[kTiles][kFloats] = {};
#pragma unroll
    for (i32 k = first; k < first + kSteps; ++k) {
      LeftOperand<kConfig.precision> a[kTiles];
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        const ptx::U32x4 x = left(k, t);
#pragma unroll
        for (i32 w = 0; w < 4; ++w) a[t].set(w, x.word[w]);
      }
      RightOperand<kConfig.precision> b[kFloats / 4];
#pragma unroll
      for (i32 n = 0; n < kFloats / 8; ++n) {
        const ptx::U32x4 x = ptx::ldmatrix_x4(right.at(k, 16 * n));
#pragma unroll
        for (i32 w = 0; w < 4; ++w) b[2 * n + w / 2].set(w % 2, x.word[w]);
      }
      multiply_float32(sums, a, b);
    }
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) S[t][i] = first == 0 ? sums[t][i] : S[t][i] + sums[t][i];
    }
  }
}

// One lane's way through V: dim lane / 4 of every 8, of keys 2 (lane % 4) + odd of every 8.
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> lane_keys(const SwizzledTile<kDims, kSwizzled>& tile, u32 odd) {
  const u32 lane = lane_index();
  LaneRow<kDims, kSwizzled> keys(tile, 2 * (lane % 4) + odd, lane / 16);
  keys.start += lane / 4 % 4 * 4;
  return keys;
}

// O += P V: P in accumulators; V row by row, 16-bit words as tiles count them.
template <Sm80Config kConfig, i32 kWords, i32 kFloats>
inline void multiply_columns_float32(float (&O)[kConfig.row_tiles][kWords / 4],
                                     const float (&P)[kConfig.row_tiles][kFloats],
                                     const SwizzledTile<kWords, kConfig.swizzle>& V) {
  constexpr i32 kTiles = kConfig.row_tiles;
  constexpr i32 kRights = 4;  // fragments of 8 dims whose sums are open at a time
  constexpr i32 kFragments = kWords / 16;
  const auto even = lane_keys(V, 0);
  const auto odd = lane_keys(V, 1);
#pragma unroll
  for (i32 first = 0; first < kFragments; first += kRights) {
    float sums[kTiles][4 * kRights] = {};
#pragma unroll
    for (i32 k = 0; k < kFloats / 4; ++k) {
      LeftOperand<kConfig.precision> a[kTiles];
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 w = 0; w < 4; ++w) {
          a[t].set(w, __builtin_bit_cast(u32, P[t][4 * k + w / 2 + w % 2 * 2]));
        }
      }
      RightOperand<kConfig.precision> b[kRights];
#pragma unroll
      for (i32 n = 0; n < kRights; ++n) {
        b[n].set(0, ptx::load_shared(even.at(first + n, 8 * k)));
        b[n].set(1, ptx::load_shared(odd.at(first + n, 8 * k)));
      }
      multiply_float32(sums, a, b);
    }
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < 4 * kRights; ++i) O[t][4 * first + i] += sums[t][i];
    }
  }
}

}  // namespace fulmen
