// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels for NEON with BF16: those of NEON, and products of bf16 by bfdot and bfmmla.
// cmake/isa.cmake gives this file its own flags; backend.cpp picks its tables at run time.

#include "cpu/isa/pairs.h"
#include "cpu/isa/table.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

// bfmmla multiplies 2 rows of 4 numbers by 4 numbers of 2 columns: twice the products of bfdot. A
// tile of 8 rows by a panel of 8 columns is 4 x 4 such squares.
constexpr int kSquares = 4;
static_assert(kLanes<float> == 2 * kSquares);

// Two steps of depth of 8 rows, or columns, two of them a vector, as an instruction takes them: of
// lines that lie beside each other, a step behind the other.
[[gnu::always_inline]] inline void load_depth_major(const Pair* at, i64 depth_stride,
                                                    Vector<u32> (&out)[kSquares]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const Vector<u32> first = load(at + half * 4), second = load(at + depth_stride + half * 4);
    out[2 * half] = __builtin_shufflevector(first, second, 0, 4, 1, 5);
    out[2 * half + 1] = __builtin_shufflevector(first, second, 2, 6, 3, 7);
  }
}

// Of lines that lie one behind the other, their steps beside each other.
[[gnu::always_inline]] inline void load_rows_of_pairs(const Pair* at, i64 row_stride,
                                                      Vector<u32> (&out)[kSquares]) {
#pragma GCC unroll 4
  for (int i = 0; i < kSquares; ++i) {
    const uint32x2_t one = vld1_u32(at + 2 * i * row_stride);
    const uint32x2_t other = vld1_u32(at + (2 * i + 1) * row_stride);
    out[i] = (Vector<u32>)vcombine_u32(one, other);
  }
}

[[gnu::always_inline]] inline FloatVector multiply_squares(Vector<u32> a, Vector<u32> b,
                                                           FloatVector c) {
  return (FloatVector)vbfmmlaq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
}

// Of 8 rows from `row` on and a panel, an even depth.
template <bool kDepthMajor>
[[gnu::noinline]] void multiply_eight_rows(const Product<float, Pair>& product, i64 row,
                                           i64 panel) {
  float* const C = product.C + row * product.C_row_stride + panel * kLanes<float>;
  FloatVector sums[kSquares][kSquares];
#pragma GCC unroll 4
  for (int i = 0; i < kSquares; ++i) {
    const float* const one = C + 2 * i * product.C_row_stride;
    const float* const other = one + product.C_row_stride;
#pragma GCC unroll 4
    for (int j = 0; j < kSquares; ++j) {
      sums[i][j] = FloatVector{};
      if (!product.accumulates) continue;
      sums[i][j] = (FloatVector)vcombine_f32(vld1_f32(one + 2 * j), vld1_f32(other + 2 * j));
      if (!product.row_scale) continue;
      const float* const scale = product.row_scale + row + 2 * i;
      sums[i][j] *= FloatVector{scale[0], scale[0], scale[1], scale[1]};
    }
  }
  const Pair* A = product.A + row * product.A_row_stride;
  const Pair* B = product.B + panel * product.B_panel_stride;
  for (i64 k = 0; k < product.depth; k += 2) {
    Vector<u32> a[kSquares], b[kSquares];
    if constexpr (kDepthMajor) {
      load_depth_major(A, product.A_depth_stride, a);
    } else {
      load_rows_of_pairs(A, product.A_row_stride, a);
    }
    load_depth_major(B, product.B_depth_stride, b);
#pragma GCC unroll 4
    for (int i = 0; i < kSquares; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kSquares; ++j) sums[i][j] = multiply_squares(a[i], b[j], sums[i][j]);
    }
    A += 2 * product.A_depth_stride;
    B += 2 * product.B_depth_stride;
  }
#pragma GCC unroll 4
  for (int i = 0; i < kSquares; ++i) {
    float* const one = C + 2 * i * product.C_row_stride;
#pragma GCC unroll 4
    for (int j = 0; j < kSquares; ++j) {
      vst1_f32(one + 2 * j, vget_low_f32((float32x4_t)sums[i][j]));
      vst1_f32(one + product.C_row_stride + 2 * j, vget_high_f32((float32x4_t)sums[i][j]));
    }
  }
}

// What is no whole number of 8 rows, or of two steps of depth, is multiplied by bfdot.
void multiply_by_squares(const Product<float, Pair>& product) {
  const bool is_depth_major = product.A_row_stride == 1;
  const bool lies_well = is_depth_major || product.A_depth_stride == 1;
  const i64 rows = lies_well ? product.rows / 8 * 8 : 0;
  Product<float, Pair> whole = product;
  whole.depth = product.depth / 2 * 2;
  for (i64 panel = 0; panel * kLanes<float> < product.columns; ++panel) {
    for (i64 row = 0; row < rows; row += 8) {
      is_depth_major ? multiply_eight_rows<true>(whole, row, panel)
                     : multiply_eight_rows<false>(whole, row, panel);
    }
  }
  multiply_beside(product, rows, whole.depth);
}

constexpr PairKernels with_squares(PairKernels kernels) {
  kernels.multiply = multiply_by_squares;
  return kernels;
}

constexpr PairKernels kSquareKernels = with_squares(kPairKernels);

// Squares in registers.
i64 square_products(i64 steps) {
  FloatVector chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = broadcast(static_cast<float>(i));
  const Vector<u32> a = broadcast(0x3f803f00u), b = broadcast(0x3e003d80u);
  for (i64 step = 0; step < steps; ++step) {
#pragma GCC unroll 24
    for (FloatVector& chain : chains) chain = multiply_squares(a, b, chain);
  }
  use(chains);
  return steps * kChains * 2 * 2 * 4 * 2;
}

}  // namespace

const IsaTables kTablesNeonBf16 = {table<float>("neonbf16"), table<double>("neonbf16"),
                                   with_products(square_products), &kSquareKernels};

}  // namespace fulmen::cpu
