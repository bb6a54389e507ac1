// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Products by an instruction on tiles, as AMX has it: 16 rows of 64 bytes, one multiplication of 16
// x 32 by 32 x 16 numbers. A step of two by two sums takes two tiles of A and two of B for four
// multiplications. What does not fill a tile, at the end of the rows or of the depth, is multiplied
// by vectors. Tiles is the instruction set's, or for tests one in plain C++:
//   configure(), release()                   before the first tile of a thread's task, and after
//   zero<T>(), load<T>(rows, stride_bytes), store<T>(rows, stride_bytes)
//   multiply_add<C, A, B>()                  C[i][n] += the dot products of pairs A[i][k] B[k][n]
#pragma once

#include "cpu/isa/pairs.h"

namespace fulmen::cpu {
namespace {

constexpr i64 kTile = 16;  // rows, and lanes of a row
constexpr int kPanelTiles = kLanes<float> > kTile ? 2 : 1;

constexpr i64 kStripRows = 2 * kTile;

// Depth that is multiplied at once where A lies with its rows side by side (weights of the backward
// pass): so much of a strip is transposed first, 8 KiB, read again for each panel of B. Such a
// product has one term.
constexpr i64 kStripDepth = 64;

// Rows of A, a row of 16 lanes every `stride`.
struct Strip {
  const Pair* A;
  i64 stride;
  i64 row;  // of C
  i64 first;
  i64 depth;  // in whole tiles
};

// C[i][j] is tile 2 i + j, A[i] 4 + i, B[j] 6 + j.
template <class Tiles, int kRows, int kColumns>
[[gnu::noinline]] void multiply_tiles(const Product<float, Pair>& product, const Strip& strip,
                                      i64 panel) {
  static_assert(kColumns * kTile <= kLanes<float>);
  constexpr i64 kPairBytes = sizeof(Pair);
  const i64 C_bytes = product.C_row_stride * kPairBytes;
  float* const C = product.C + strip.row * product.C_row_stride + panel * kLanes<float>;
  const auto C_tile = [&](i64 i, i64 j) {
    return C + i * kTile * product.C_row_stride + j * kTile;
  };
  const bool starts_from_C = product.accumulates || strip.first > 0;
  const auto start = [&]<int kI, int kJ>(std::integral_constant<int, kI>,
                                         std::integral_constant<int, kJ>) {
    if constexpr (kI < kRows && kJ < kColumns) {
      if (starts_from_C) {
        Tiles::template load<2 * kI + kJ>(C_tile(kI, kJ), C_bytes);
      } else {
        Tiles::template zero<2 * kI + kJ>();
      }
    }
  };
  constexpr std::integral_constant<int, 0> kFirst;
  constexpr std::integral_constant<int, 1> kSecond;
  start(kFirst, kFirst);
  start(kFirst, kSecond);
  start(kSecond, kFirst);
  start(kSecond, kSecond);

  const Pair* const first =
      product.B + panel * product.B_panel_stride + strip.first * product.B_depth_stride;
  const i64 A_bytes = strip.stride * kPairBytes;
  const i64 B_bytes = product.B_depth_stride * kPairBytes;
  const i64 A_rows = kTile * strip.stride;
  const i64 B_step = kTile * product.B_depth_stride;
  for (i64 term = 0; term < product.terms.count; ++term) {
    const Pair* A = strip.A + product.terms.A[term];
    const Pair* B = first + product.terms.B[term];
    const Pair* const A_end = A + strip.depth;
    for (; A != A_end; A += kTile, B += B_step) {
      Tiles::template load<4>(A, A_bytes);
      Tiles::template load<6>(B, B_bytes);
      Tiles::template multiply_add<0, 4, 6>();
      if constexpr (kColumns > 1) {
        Tiles::template load<7>(B + kTile, B_bytes);
        Tiles::template multiply_add<1, 4, 7>();
      }
      if constexpr (kRows > 1) {
        Tiles::template load<5>(A + A_rows, A_bytes);
        Tiles::template multiply_add<2, 5, 6>();
        if constexpr (kColumns > 1) Tiles::template multiply_add<3, 5, 7>();
      }
    }
  }

  Tiles::template store<0>(C_tile(0, 0), C_bytes);
  if constexpr (kColumns > 1) Tiles::template store<1>(C_tile(0, 1), C_bytes);
  if constexpr (kRows > 1) Tiles::template store<2>(C_tile(1, 0), C_bytes);
  if constexpr (kRows > 1 && kColumns > 1) Tiles::template store<3>(C_tile(1, 1), C_bytes);
}

template <class Tiles, int kRows>
void multiply_strip(const Product<float, Pair>& product, const Strip& strip) {
  for (i64 panel = 0; panel * kLanes<float> < product.columns; ++panel) {
    if (kPanelTiles > 1 && product.columns - panel * kLanes<float> > kTile) {
      multiply_tiles<Tiles, kRows, kPanelTiles>(product, strip, panel);
    } else {
      multiply_tiles<Tiles, kRows, 1>(product, strip, panel);
    }
  }
}

// C[i] *= row_scale[i]
inline void scale_rows(const Product<float, Pair>& product, i64 rows) {
  for (i64 row = 0; row < rows; ++row) {
    float* const C = product.C + row * product.C_row_stride;
    const FloatVector scale = broadcast(product.row_scale[row]);
    for (i64 n = 0; n < product.columns; n += kWidth<float>) store(C + n, load(C + n) * scale);
  }
}

// C[i][n] *= scale[n]
inline void scale_columns(float* C, i64 C_row_stride, i64 rows, i64 columns, const float* scale) {
  for (i64 row = 0; row < rows; ++row) {
    float* const of_row = C + row * C_row_stride;
    for (i64 n = 0; n < columns; n += kWidth<float>) {
      store(of_row + n, load(of_row + n) * load(scale + n));
    }
  }
}

// The rows and the depth that fill tiles.
template <class Tiles>
void multiply_whole_tiles(const Product<float, Pair>& product, i64 rows, i64 depth) {
  if (product.accumulates && product.row_scale) scale_rows(product, rows);
  const bool transposes = product.A_depth_stride != 1;
  const i64 at_once = transposes ? kStripDepth : depth;
  alignas(64) Pair transposed[kStripRows * kStripDepth];
  for (i64 row = 0; row < rows; row += kStripRows) {
    const i64 count = min(kStripRows, rows - row);
    for (i64 first = 0; first < depth; first += at_once) {
      const Pair* const A = product.A + row * product.A_row_stride + first * product.A_depth_stride;
      Strip strip{A, product.A_row_stride, row, first, min(at_once, depth - first)};
      if (transposes) {
        transpose<Pair>({A, product.A_depth_stride}, strip.depth, count, transposed, kLanes<Pair>,
                        kStripDepth);
        strip.A = transposed;
        strip.stride = kStripDepth;
      }
      count > kTile ? multiply_strip<Tiles, 2>(product, strip)
                    : multiply_strip<Tiles, 1>(product, strip);
    }
  }
}

// As multiply of products.h.
template <class Tiles>
void multiply_by_tiles(const Product<float, Pair>& product) {
  const bool lies_in_rows = product.A_depth_stride == 1 || product.A_row_stride == 1;
  const i64 rows = lies_in_rows ? product.rows / kTile * kTile : 0;
  const i64 depth = product.depth / kTile * kTile;
  if (rows == 0 || depth == 0) return multiply<float, Pair>(product);
  multiply_whole_tiles<Tiles>(product, rows, depth);
  multiply_beside(product, rows, depth);
}

// The kernels of an instruction set, with products by tiles.
template <class Tiles>
constexpr PairKernels with_tiles(PairKernels kernels) {
  kernels.multiply = multiply_by_tiles<Tiles>;
  kernels.transposes_outputs = true;
  kernels.scale_columns = scale_columns;
  kernels.enter = Tiles::configure;
  kernels.leave = Tiles::release;
  return kernels;
}

}  // namespace
}  // namespace fulmen::cpu
