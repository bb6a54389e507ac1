// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Products whose operands all come from swizzled tiles, for warps that share out a result among
// them: any part of a tile as left or right operand, also transposed on the way. Fragments and sums
// are those of warp_products.cuh. What depends on the type of the numbers is in BlockProducts, for
// float32 in float32_block_products.cuh. Called by backward_sm80.
#pragma once

#include "kernels/common/warp_products.cuh"
#include "kernels/ptx/math.cuh"

namespace fulmen {

// A lane's way through kSpan neighbouring unit pairs of the rows of a tile, from pair number
// `first`, a multiple of kSpan. Where exchanged units stay inside such a span, the way is laid
// once.
template <i32 kDims, bool kSwizzled, i32 kSpan>
struct PartRow {
  using Tile = SwizzledTile<kDims, kSwizzled>;
  // Units of a span and of its place share no bits below the mask.
  static constexpr bool kAligned = 2 * kSpan % (Tile::kMask + 1) == 0 || (kSpan & (kSpan - 1)) == 0;

  LaneRow<kDims, kSwizzled> lane;
  u32 first;

  constexpr PartRow(const LaneRow<kDims, kSwizzled>& lane_, u32 first_)
      : lane(lane_), first(kAligned ? 0 : first_) {
    if constexpr (kAligned) lane.start = lane.at(first_, 0);
  }
  constexpr u32 at(u32 k, u32 rows) const { return lane.at(kAligned ? k : first + k, rows); }
};

// Left operands that are transposed columns of the tile (A = T^T: 16 rows of A are a unit pair).
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> left_columns(const SwizzledTile<kDims, kSwizzled>& tile) {
  return right_rows(tile);  // the same 8 x 8 matrices in the same order, read by ldmatrix.trans
}

// C += A B over kSteps steps of 16 along the common axis. left(k, t): fragment of rows 16 t of A;
// right(k, n): of columns 16 n of B. Fragments are read ahead of the products that take them, those
// of B by a step, those of A as soon as the last product of this step has taken its rows: left to
// the compiler, every product waited for its own.
template <DType kDType, i32 kSteps, i32 kTiles, i32 kFloats, class Left, class Right>
inline void multiply_tiles(float (&C)[kTiles][kFloats], const Left& left, const Right& right) {
  constexpr i32 kColumns = kFloats / 8;  // of 16
  ptx::U32x4 a[kTiles], b[2][kColumns];
  const auto read_right = [&](i32 k) {
#pragma unroll
    for (i32 n = 0; n < kColumns; ++n) b[k % 2][n] = right(k, n);
  };
#pragma unroll
  for (i32 t = 0; t < kTiles; ++t) a[t] = left(0, t);
  read_right(0);
#pragma unroll
  for (i32 k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) read_right(k + 1);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 n = 0; n < kColumns; ++n) {
        const u32(&words)[4] = b[k % 2][n].word;
        ptx::mma_m16n8k16<kDType>(&C[t][8 * n], a[t].word, words[0], words[1]);
        ptx::mma_m16n8k16<kDType>(&C[t][8 * n + 4], a[t].word, words[2], words[3]);
      }
      if (k + 1 < kSteps) a[t] = left(k + 1, t);
    }
  }
}

// What a type of numbers makes of products. Fragments are functions: of step k and rows 16 t of A,
// of step k and columns 16 n of B. A step is a unit pair long.
template <DType kDType, Precision kPrecision, bool kSwizzled>
struct BlockProducts {
  static constexpr i32 kStep = 16;

  // C += A B
  template <i32 kLength, i32 kTiles, i32 kFloats, class Left, class Right>
  static void multiply(float (&C)[kTiles][kFloats], const Left& left, const Right& right) {
    multiply_tiles<kDType, kLength / kStep>(C, left, right);
  }
  // C = A B of scores, or of what is multiplied with them.
  template <i32 kLength, i32 kTiles, i32 kFloats, class Left, class Right>
  static void set_scores(float (&C)[kTiles][kFloats], const Left& left, const Right& right) {
    clear(C);
    multiply<kLength>(C, left, right);
  }

  // A is the transpose of a tile of pairs, B is a tile. kSpan: fragments side by side, of which
  // `first` is the number of the first.
  template <i32 kSpan, i32 kWords>
  static auto left_columns(const SwizzledTile<kWords, kSwizzled>& pairs, u32 first) {
    const PartRow<kWords, kSwizzled, kSpan> way(fulmen::left_columns(pairs), first);
    return [way](i32 k, i32 t) { return ptx::ldmatrix_x4_trans(way.at(t, 16 * k)); };
  }
  template <i32 kSpan, i32 kWords>
  static auto right_columns(const SwizzledTile<kWords, kSwizzled>& tile, u32 first) {
    const PartRow<kWords, kSwizzled, kSpan> way(fulmen::right_columns(tile), first);
    return [way](i32 k, i32 n) { return ptx::ldmatrix_x4_trans(way.at(n, 16 * k)); };
  }

  // Accumulators of 16 rows and kStep columns as four matrices of a tile of pairs (ldmatrix.cuh),
  // and back.
  static ptx::U32x4 words(const float* S) {
    ptx::U32x4 x;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) x.word[w] = ptx::pack<kDType>(S[2 * w], S[2 * w + 1]);
    return x;
  }
  static void numbers(const ptx::U32x4& x, float* S) {
    using Element = typename ElementOf<kDType>::Type;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      S[2 * w] = widen(Element{static_cast<u16>(x.word[w])});
      S[2 * w + 1] = widen(Element{static_cast<u16>(x.word[w] >> 16)});
    }
  }
};

}  // namespace fulmen
