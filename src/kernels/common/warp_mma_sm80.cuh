// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Products of a warp by mma.sync, whose operands come from swizzled tiles in shared memory through
// ldmatrix and whose sums stay in registers. A warp owns some tiles of 16 rows; every fragment of
// the right operand is read once for all of them. Accumulators are arrays of 8-column fragments,
// four floats each (ptx/mma.cuh): float i of lane l is row l / 4 + 8 (i / 2 % 2), column 8 (i / 4)
// + 2 (l % 4) + i % 2, or, interleaved, see ForwardSm80Config. Tiles hold 16-bit numbers, rows of
// any even number of 16-byte vectors one after the other without gaps. Vectors are exchanged within
// groups of 2, 4 or 8 by the number of the row, so that the same vector of eight neighbouring rows
// lies in eight different groups of four banks: then ldmatrix and 16-byte copies meet no bank
// conflict. Used by forward_sm80 and backward_sm80.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/forward_sm80/config.h"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

template <i32 kDims, bool kSwizzled>
struct SwizzledTile {
  static constexpr u32 kVectors = kDims / 8;
  static constexpr u32 kRowBytes = kVectors * 16;
  // Vectors that change places with each other. Rows begin 0, 2 or 4 groups of banks apart: 8, 4 or
  // 2 rows meet the same banks.
  static constexpr u32 kGroup = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 2;
  static constexpr u32 kBits = !kSwizzled ? 0 : kGroup == 8 ? 3 : kGroup == 4 ? 2 : 1;
  static constexpr u32 kMask = (1u << kBits) - 1;

  u32 base;

  static constexpr u32 exchange(u32 row) { return row >> (3 - kBits) & kMask; }
  constexpr u32 address(u32 row, u32 vector) const {
    return base + row * kRowBytes + ((vector ^ exchange(row)) << 4);
  }
};

// One lane's way through a tile for ldmatrix: row `row` (of its first matrices; others are
// multiples of 8 rows on) and, of every pair of vectors 2 k, 2 k + 1, number `half`.
template <i32 kDims, bool kSwizzled>
struct LaneRow {
  using Tile = SwizzledTile<kDims, kSwizzled>;
  u32 start;

  constexpr LaneRow(const Tile& tile, u32 row, u32 half)
      : start(tile.base + row * Tile::kRowBytes +
              ((Tile::exchange(row) ^ half % (Tile::kMask + 1)) << 4) +
              (half & ~Tile::kMask) * 16) {}

  // Vector pair k, rows further down by `rows`, a multiple of 8.
  constexpr u32 at(u32 k, u32 rows) const {
    const u32 vector = 2 * k;
    return (start ^ (vector & Tile::kMask) << 4) + (vector & ~Tile::kMask) * 16 +
           rows * Tile::kRowBytes;
  }
};

inline u32 lane_index() { return ptx::thread_index() % 32; }
inline u32 warp_index() { return ptx::thread_index() / 32; }

template <i32 kTiles, i32 kFloats>
inline void clear(float (&C)[kTiles][kFloats]) {
#pragma unroll
  for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) C[t][i] = 0;
  }
}

// Where a lane reads left operands (A, 16 x 16, row by row), from row `row` of the tile on.
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> left_rows(const SwizzledTile<kDims, kSwizzled>& tile, u32 row) {
  const u32 lane = lane_index();
  return {tile, row + lane % 16, lane / 16};
}
// Right operands that are transposed rows of the tile (B = T^T: 16 columns of B are 16 rows).
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> right_rows(const SwizzledTile<kDims, kSwizzled>& tile, u32 row = 0) {
  const u32 lane = lane_index();
  return {tile, row + lane / 16 * 8 + lane % 8, lane / 8 % 2};
}
// Right operands that are the tile itself (B = T: 16 rows of B are 16 rows), from vector pair
// `pair` on.
template <i32 kDims, bool kSwizzled>
LaneRow<kDims, kSwizzled> right_columns(const SwizzledTile<kDims, kSwizzled>& tile, u32 pair = 0) {
  const u32 lane = lane_index();
  return {tile, lane % 16, 2 * pair + lane / 16};
}

// A product of 32 bytes of each row of A: 16 numbers of 16 bits, 32 of e4m3.
template <DType kDType>
inline void multiply_fragment(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kDType == DType::kFloat8E4M3) {
    ptx::mma_m16n8k32_e4m3(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k16<kDType>(d, a, b0, b1);
  }
}

// S += A B over kSteps steps of 32 bytes along the common axis; left(k, t): A's fragment of row
// tile t, right(k, n): B's of columns 16 n .. + 15.
template <ForwardSm80Config kConfig, i32 kSteps, i32 kFloats, class Left, class Right>
inline void multiply(float (&S)[kConfig.row_tiles][kFloats], const Left& left, const Right& right) {
#pragma unroll
  for (i32 k = 0; k < kSteps; ++k) {
    ptx::U32x4 a[kConfig.row_tiles];
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) a[t] = left(k, t);
#pragma unroll
    for (i32 n = 0; n < kFloats / 8; ++n) {
      const ptx::U32x4 b = right(k, n);
#pragma unroll
      for (i32 t = 0; t < kConfig.row_tiles; ++t) {
        multiply_fragment<kConfig.dtype>(&S[t][8 * n], a[t].word, b.word[0], b.word[1]);
        multiply_fragment<kConfig.dtype>(&S[t][8 * n + 4], a[t].word, b.word[2], b.word[3]);
      }
    }
  }
}

// S = A B^T over kDims dims; B row by row in shared memory.
template <ForwardSm80Config kConfig, i32 kDims, i32 kFloats, class Left>
inline void multiply_rows(float (&S)[kConfig.row_tiles][kFloats], const Left& left,
                          const LaneRow<kDims, kConfig.swizzle>& right) {
  clear(S);
  multiply<kConfig, kDims / 16>(
      S, left, [&](i32 k, i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
}

// O += P T over kRows rows of T, which lies row by row; of its pairs of vectors every kStride-th.
template <ForwardSm80Config kConfig, i32 kRows, i32 kStride, i32 kDims, i32 kFloats, class Left>
inline void multiply_columns(float (&O)[kConfig.row_tiles][kFloats], const Left& left,
                             const LaneRow<kDims, kConfig.swizzle>& right) {
  multiply<kConfig, kRows / 16>(
      O, left, [&](i32 k, i32 n) { return ptx::ldmatrix_x4_trans(right.at(kStride * n, 16 * k)); });
}

// O += P T of e4m3 over kRows rows of T, which lies row by row. A tensor core takes 8-bit operands
// along the sum alone: of the pairs of bytes that ldmatrix transposes, those of one dim and four
// rows are put together, so that of 16 dims fragments have the even ones and the odd ones. Rows 2
// q, 2 q + 1, 8 + 2 q and 9 + 2 q of 16 are neighbours then, as a lane has its weights: left(k, t)
// are those of 32 rows. Sums of kRows rows, which a tensor core cuts off, are added to O in
// float32. order_dims() brings O into the order of dims.
template <ForwardSm80Config kConfig, i32 kRows, i32 kDims, i32 kFloats, class Left>
inline void multiply_columns_e4m3(float (&O)[kConfig.row_tiles][kFloats], const Left& left,
                                  const SwizzledTile<kDims, kConfig.swizzle>& tile) {
  using Tile = SwizzledTile<kDims, kConfig.swizzle>;
  const u32 lane = lane_index();
#pragma unroll
  for (u32 n = 0; n < kFloats / 8; ++n) {
    float sum[kConfig.row_tiles][8];
    clear(sum);
#pragma unroll
    for (u32 k = 0; k < kRows / 32; ++k) {
      // Rows 32 further exchange their vectors alike.
      const u32 first = tile.address(lane, n) + k * 32 * Tile::kRowBytes;
      const ptx::U32x4 x = ptx::ldmatrix_x4_trans(first);
      const u32 even[2] = {ptx::permute(x.word[0], x.word[1], 0x6420),
                           ptx::permute(x.word[2], x.word[3], 0x6420)};
      const u32 odd[2] = {ptx::permute(x.word[0], x.word[1], 0x7531),
                          ptx::permute(x.word[2], x.word[3], 0x7531)};
#pragma unroll
      for (i32 t = 0; t < kConfig.row_tiles; ++t) {
        const ptx::U32x4 a = left(i32(k), t);
        ptx::mma_m16n8k32_e4m3(sum[t], a.word, even[0], even[1]);
        ptx::mma_m16n8k32_e4m3(sum[t] + 4, a.word, odd[0], odd[1]);
      }
    }
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < 8; ++i) O[t][8 * n + u32(i)] += sum[t][i];
    }
  }
}

// Of each 16 dims lane q of a quad has 4 q to 4 q + 3, the even ones before the odd ones; it gets
// those that accumulators of 16 bits have: 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q.
template <i32 kTiles, i32 kFloats>
inline void order_dims(float (&O)[kTiles][kFloats]) {
  const u32 lane = lane_index();
  const bool has_upper = lane % 2 != 0;
  const auto value_of = [](float x, u32 from) {
    return __builtin_bit_cast(float, ptx::shuffle(__builtin_bit_cast(i32, x), from));
  };
#pragma unroll
  for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
    for (i32 at = 0; at < kFloats; at += 8) {
#pragma unroll
      for (i32 h = 0; h < 4; h += 2) {
        float* const x = O[t] + at + h;
        const float own[4] = {x[0], x[4], x[1], x[5]};  // in the order of dims
#pragma unroll
        for (u32 far = 0; far < 2; ++far) {
          const u32 from = lane / 4 * 4 + 2 * far + lane % 4 / 2;
#pragma unroll
          for (u32 i = 0; i < 2; ++i) {
            const float lower = value_of(own[i], from), upper = value_of(own[2 + i], from);
            x[4 * far + i] = has_upper ? upper : lower;
          }
        }
      }
    }
  }
}

// A lane's way through kSpan neighbouring vector pairs of the rows of a tile, from pair number
// `first`, a multiple of kSpan. Where exchanged vectors stay inside such a span, the way is laid
// once.
template <i32 kDims, bool kSwizzled, i32 kSpan>
struct PartRow {
  using Tile = SwizzledTile<kDims, kSwizzled>;
  // Vectors of a span and of its place share no bits below the mask.
  static constexpr bool kAligned = 2 * kSpan % (Tile::kMask + 1) == 0 || (kSpan & (kSpan - 1)) == 0;

  LaneRow<kDims, kSwizzled> lane;
  u32 first;

  constexpr PartRow(const LaneRow<kDims, kSwizzled>& lane_, u32 first_)
      : lane(lane_), first(kAligned ? 0 : first_) {
    if constexpr (kAligned) lane.start = lane.at(first_, 0);
  }
  constexpr u32 at(u32 k, u32 rows) const { return lane.at(kAligned ? k : first + k, rows); }
};

// Left operands that are transposed columns of the tile (A = T^T: 16 rows of A are a vector pair).
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
// of step k and columns 16 n of B. A step is a vector pair long.
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
