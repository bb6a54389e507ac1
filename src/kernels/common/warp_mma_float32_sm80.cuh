// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Products of float32 numbers on tensor cores that read 11 significant bits of an input (tf32).
// Called by forward_sm80 and, through float32_block_products.cuh, by backward_sm80. With X the 11
// upper bits of x, rounded, and x' = x - X the rest, which a float32 holds exactly:
//   kTf32     x y ~ X Y
//   k3xTf32   x y ~ X y' + x' Y + X Y; what is left out is x' y', below 2^-24 |x y|, and the last
//             bit of x' and of y', 2^-23 of x and of y
// A tensor core cuts its sums off towards zero, every time in the same direction. Long sums are
// therefore added up by CUDA cores, which round to nearest: after every 64 terms, and after
// every call. Scores, whose errors grow in exponents, have sums of their own for the small products
// X y' and x' Y, and where they have few terms, of which one may be most of the sum, x' y' as well.
//
// Fragments (ptx/mma.cuh) are those of 16-bit products with a float32 instead of a pair, so
// ldmatrix serves operands that lie along the common axis. The others are read word by word, and
// there a step of 8 takes rows 0 2 4 6 1 3 5 7 in that order, as accumulators have their columns.
// (16 bytes at a time, the halves of a pair come in registers apart: 220 moves to 192 products,
// H200, 2026-11-28.)
#pragma once

#include "kernels/common/warp_mma_sm80.cuh"

namespace fulmen {

// Four words as a tensor core takes them: of a left operand (16 x 8), or of two right ones (8 x 8).
template <Precision kPrecision>
struct Tf32Operand {
  u32 upper[4];
  u32 lower[4];  // k3xTf32 only

  void set(const ptx::U32x4& x) {
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      if constexpr (kPrecision == Precision::kTf32) {
        upper[w] = ptx::round_to_tf32(x.word[w]);
      } else {  // a NaN is kept by `lower`
        upper[w] = ptx::round_number_to_tf32(x.word[w]);
        const float rest =
            __builtin_bit_cast(float, x.word[w]) - __builtin_bit_cast(float, upper[w]);
        lower[w] = __builtin_bit_cast(u32, rest);
      }
    }
  }
};

// big += X Y and small += the other products of one step, for kTiles row tiles and 16 columns from
// 16 n on (kPairs of them). All sums take one product before any takes the next: four of them, and
// neighbours do not wait for one another. kWhole: x' y' too.
template <Precision kPrecision, bool kWhole, i32 kTiles, i32 kPairs, i32 kFloats>
inline void multiply_split(float (&big)[kTiles][kFloats], float (&small)[kTiles][kFloats], i32 n,
                           const Tf32Operand<kPrecision> (&a)[kTiles],
                           const Tf32Operand<kPrecision> (&b)[kPairs]) {
  const auto each = [&](float (&sums)[kTiles][kFloats], const auto& left, const auto& right) {
#pragma unroll
    for (i32 half = 0; half < 2 * kPairs; ++half) {
      const u32(&words)[4] = right(b[half / 2]);
      const i32 w = half % 2 * 2;
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        ptx::mma_m16n8k8_tf32(&sums[t][8 * n + 4 * half], left(a[t]), words[w], words[w + 1]);
      }
    }
  };
  using Operand = Tf32Operand<kPrecision>;
  const auto upper = [](const Operand& x) -> const u32(&)[4] { return x.upper; };
  if constexpr (kPrecision == Precision::k3xTf32) {  // small ones first
    const auto lower = [](const Operand& x) -> const u32(&)[4] { return x.lower; };
    if constexpr (kWhole) each(small, lower, lower);
    each(small, upper, lower);
    each(small, lower, upper);
  }
  each(big, upper, upper);
}

// The same for all columns; left(t) and right(n) are the fragments of the step.
template <Precision kPrecision, bool kWhole, i32 kTiles, i32 kFloats, class Left, class Right>
inline void multiply_step(float (&big)[kTiles][kFloats], float (&small)[kTiles][kFloats],
                          const Left& left, const Right& right) {
  constexpr i32 kColumns = kFloats / 8;  // of 16
  constexpr i32 kAtOnce = kTiles == 1 && kColumns % 2 == 0 ? 2 : 1;
  Tf32Operand<kPrecision> a[kTiles];
#pragma unroll
  for (i32 t = 0; t < kTiles; ++t) a[t].set(left(t));
#pragma unroll
  for (i32 n = 0; n < kColumns; n += kAtOnce) {
    Tf32Operand<kPrecision> b[kAtOnce];
#pragma unroll
    for (i32 at = 0; at < kAtOnce; ++at) b[at].set(right(n + at));
    multiply_split<kPrecision, kWhole>(big, small, n, a, b);
  }
}

// C += sums, from float `first` of C on.
template <i32 kTiles, i32 kFloats, i32 kSums>
inline void add(float (&C)[kTiles][kFloats], i32 first, const float (&sums)[kTiles][kSums]) {
#pragma unroll
  for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) C[t][first + i] += sums[t][i];
  }
}

// C += A B over kSteps steps of 8, for kColumns times 16 columns from 16 first on. left(k, t): step
// k of rows 16 t of A; right(k, n): of columns 16 n of B.
template <Precision kPrecision, i32 kSteps, i32 kColumns, i32 kTiles, i32 kFloats, class Left,
          class Right>
inline void multiply_float32(float (&C)[kTiles][kFloats], i32 first, const Left& left,
                             const Right& right) {
  constexpr i32 kStepsOfSum = 8;
#pragma unroll
  for (i32 begin = 0; begin < kSteps; begin += kStepsOfSum) {
    float sums[kTiles][8 * kColumns] = {};
#pragma unroll
    for (i32 k = begin; k < min(begin + kStepsOfSum, kSteps); ++k) {
      multiply_step<kPrecision, false>(
          sums, sums, [&](i32 t) { return left(k, t); },
          [&](i32 n) { return right(k, first + n); });
    }
    add(C, 8 * first, sums);
  }
}

// S = A B of scores. Fragments are read a step ahead of the products that take them: left to the
// compiler, the steps of forward_sm80 at d 128 took 14 % more cycles.
template <Precision kPrecision, i32 kSteps, i32 kTiles, i32 kFloats, class Left, class Right>
inline void set_scores_float32(float (&S)[kTiles][kFloats], const Left& left, const Right& right) {
  constexpr i32 kFewSteps = 4;
  constexpr i32 kColumns = kFloats / 8;  // of 16
  float big[kTiles][kFloats] = {};
  clear(S);
  ptx::U32x4 a[2][kTiles], b[2][kColumns];
  const auto read = [&](i32 k) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) a[k % 2][t] = left(k, t);
#pragma unroll
    for (i32 n = 0; n < kColumns; ++n) b[k % 2][n] = right(k, n);
  };
  read(0);
#pragma unroll
  for (i32 k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) read(k + 1);
    multiply_step<kPrecision, kSteps <= kFewSteps>(
        big, S, [&](i32 t) { return a[k % 2][t]; }, [&](i32 n) { return b[k % 2][n]; });
  }
  add(S, 0, big);
}

// S = A B^T over kDims dims: left(k, t) gives A's fragment of step k and row tile t, B lies row by
// row in shared memory.
template <ForwardSm80Config kConfig, i32 kDims, i32 kFloats, class Left>
inline void multiply_rows_float32(float (&S)[kConfig.row_tiles][kFloats], const Left& left,
                                  const LaneRow<2 * kDims, kConfig.swizzle>& right) {
  set_scores_float32<kConfig.precision, kDims / 8>(
      S, left, [&](i32 k, i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
}

// A tile read word by word as right operands: 8 rows of a step are 8 rows of the tile, columns of
// the operand those of the tile, neighbouring pairs of 8.
template <i32 kWords, bool kSwizzled, i32 kSpan>
struct RightWords {
  PartRow<kWords, kSwizzled, kSpan> even, odd;  // rows of every pair of neighbours

  RightWords(const SwizzledTile<kWords, kSwizzled>& tile, u32 first)
      : even(lane_row(tile, 0), first), odd(lane_row(tile, 1), first) {}

  // Lane l: column l / 4 of every 8, rows 2 (l % 4) + odd of every 8.
  static LaneRow<kWords, kSwizzled> lane_row(const SwizzledTile<kWords, kSwizzled>& tile, u32 odd) {
    const u32 lane = lane_index();
    LaneRow<kWords, kSwizzled> row(tile, 2 * (lane % 4) + odd, lane / 16);
    row.start += lane / 4 % 4 * 4;
    return row;
  }

  ptx::U32x4 operator()(i32 k, i32 n) const {
    return {{ptx::load_shared(even.at(2 * n, 8 * k)), ptx::load_shared(odd.at(2 * n, 8 * k)),
             ptx::load_shared(even.at(2 * n + 1, 8 * k)),
             ptx::load_shared(odd.at(2 * n + 1, 8 * k))}};
  }
};

// O += P V: P in accumulators; V row by row, 16-bit words as tiles count them.
template <ForwardSm80Config kConfig, i32 kWords, i32 kFloats>
inline void multiply_columns_float32(float (&O)[kConfig.row_tiles][kWords / 4],
                                     const float (&P)[kConfig.row_tiles][kFloats],
                                     const SwizzledTile<kWords, kConfig.swizzle>& V) {
  constexpr i32 kColumns = kWords / 32;  // of 16
  // Whose sums are open at a time: 8 products in a row wait for no sum.
  constexpr i32 kPairs = kConfig.row_tiles == 1 && kColumns % 4 == 0 ? 4 : 2;
  const auto left = [&](i32 k, i32 t) {
    ptx::U32x4 x;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      x.word[w] = __builtin_bit_cast(u32, P[t][4 * k + w / 2 + w % 2 * 2]);
    }
    return x;
  };
  const RightWords<kWords, kConfig.swizzle, kWords / 16> right(V, 0);
#pragma unroll
  for (i32 first = 0; first < kColumns; first += kPairs) {
    multiply_float32<kConfig.precision, kFloats / 4, kPairs>(O, first, left, right);
  }
}

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
