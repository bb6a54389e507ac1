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

#include "cpu/isa/few_row_tiles.h"
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

// Strips of kRows tiles of rows, one below the other: of C from a row on, and of A, a row every
// `stride`.
struct Strips {
  const Pair* A;
  i64 stride;
  i64 depth;      // in whole tiles
  i64 first = 0;  // of the depth
  i64 row = 0;
  i64 count = 0;
};

// Two by two tiles of sums: C[i][j] is tile 2 i + j, A[i] 4 + i, B[j] 6 + j. What sums start from
// is loaded, and those before them are stored, between the first multiplications.
template <class Tiles, int kRows, int kColumns>
struct TilesOfSums {
  template <int kTileOfC>
  [[gnu::always_inline]] i64 at() const {
    return kTileOfC / 2 * C_down + kTileOfC % 2 * kTile;
  }

  template <int kTileOfC>
  [[gnu::always_inline]] void start() const {
    if (before) Tiles::template store<kTileOfC>(before + at<kTileOfC>(), C_bytes);
    if (starts_from_C) {
      Tiles::template load<kTileOfC>(C + at<kTileOfC>(), C_bytes);
    } else {
      Tiles::template zero<kTileOfC>();
    }
  }

  template <bool kStarts>
  [[gnu::always_inline]] void add(const Pair* A, const Pair* B) const {
    if constexpr (kStarts) start<0>();
    Tiles::template load<4>(A, A_bytes);
    Tiles::template load<6>(B, B_bytes);
    Tiles::template multiply_add<0, 4, 6>();
    if constexpr (kColumns > 1) {
      if constexpr (kStarts) start<1>();
      Tiles::template load<7>(B + kTile, B_bytes);
      Tiles::template multiply_add<1, 4, 7>();
    }
    if constexpr (kRows > 1) {
      if constexpr (kStarts) start<2>();
      Tiles::template load<5>(A + A_down, A_bytes);
      Tiles::template multiply_add<2, 5, 6>();
    }
    if constexpr (kRows > 1 && kColumns > 1) {
      if constexpr (kStarts) start<3>();
      Tiles::template multiply_add<3, 5, 7>();
    }
  }

  [[gnu::always_inline]] void store_last() const {
    Tiles::template store<0>(before, C_bytes);
    if constexpr (kColumns > 1) Tiles::template store<1>(before + at<1>(), C_bytes);
    if constexpr (kRows > 1) Tiles::template store<2>(before + at<2>(), C_bytes);
    if constexpr (kRows > 1 && kColumns > 1) {
      Tiles::template store<3>(before + at<3>(), C_bytes);
    }
  }

  i64 A_bytes, A_down, B_bytes, C_bytes, C_down;
  bool starts_from_C;
  float* C;
  float* before = nullptr;  // where the sums in tiles belong
};

// One panel of C, of all strips.
template <class Tiles, int kRows, int kColumns>
[[gnu::noinline]] void multiply_tiles(const Product<float, Pair>& product, const Strips& strips,
                                      i64 panel) {
  static_assert(kColumns * kTile <= kLanes<float>);
  constexpr i64 kPairBytes = sizeof(Pair);
  TilesOfSums<Tiles, kRows, kColumns> sums{
      .A_bytes = strips.stride * kPairBytes,
      .A_down = kTile * strips.stride,
      .B_bytes = product.B_depth_stride * kPairBytes,
      .C_bytes = product.C_row_stride * kPairBytes,
      .C_down = kTile * product.C_row_stride,
      .starts_from_C = product.accumulates || strips.first > 0,
      .C = product.C + strips.row * product.C_row_stride + panel * kLanes<float>};
  const i64 B_step = kTile * product.B_depth_stride;
  const Pair* const first_B =
      product.B + panel * product.B_panel_stride + strips.first * product.B_depth_stride;
  const Pair* strip_A = strips.A;
  for (i64 strip = 0; strip < strips.count; ++strip) {
    for (i64 term = 0; term < product.terms.count; ++term) {
      const Pair* A = strip_A + product.terms.A[term];
      const Pair* B = first_B + product.terms.B[term];
      const Pair* const A_end = A + strips.depth;
      if (term == 0) {
        sums.template add<true>(A, B);
        A += kTile;
        B += B_step;
      }
      for (; A != A_end; A += kTile, B += B_step) sums.template add<false>(A, B);
    }
    sums.before = sums.C;
    sums.C += kRows * sums.C_down;
    strip_A += kRows * sums.A_down;
  }
  sums.store_last();
}

template <class Tiles, int kRows>
void multiply_strips(const Product<float, Pair>& product, const Strips& strips) {
  if (strips.count == 0) return;
  for (i64 panel = 0; panel * kLanes<float> < product.columns; ++panel) {
    if (kPanelTiles > 1 && product.columns - panel * kLanes<float> > kTile) {
      multiply_tiles<Tiles, kRows, kPanelTiles>(product, strips, panel);
    } else {
      multiply_tiles<Tiles, kRows, 1>(product, strips, panel);
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

// Whole strips, then the tile of rows that is left.
template <class Tiles>
void multiply_rows(const Product<float, Pair>& product, i64 rows, Strips strips) {
  strips.count = rows / kStripRows;
  multiply_strips<Tiles, 2>(product, strips);
  const i64 done = strips.count * kStripRows;
  strips.row += done;
  strips.A += done * strips.stride;
  strips.count = (rows - done) / kTile;
  multiply_strips<Tiles, 1>(product, strips);
}

// The rows and the depth that fill tiles.
template <class Tiles>
void multiply_whole_tiles(const Product<float, Pair>& product, i64 rows, i64 depth) {
  if (product.accumulates && product.row_scale) scale_rows(product, rows);
  Strips strips{product.A, product.A_row_stride, depth};
  if (product.A_depth_stride == 1) return multiply_rows<Tiles>(product, rows, strips);
  alignas(64) Pair transposed[kStripRows * kStripDepth];
  strips.A = transposed;
  strips.stride = kStripDepth;
  for (; strips.row < rows; strips.row += kStripRows) {
    const i64 count = min(kStripRows, rows - strips.row);
    for (strips.first = 0; strips.first < depth; strips.first += kStripDepth) {
      strips.depth = min(kStripDepth, depth - strips.first);
      const Pair* const A =
          product.A + strips.row * product.A_row_stride + strips.first * product.A_depth_stride;
      transpose<Pair>({A, product.A_depth_stride}, strips.depth, count, transposed, kLanes<Pair>,
                      kStripDepth);
      multiply_rows<Tiles>(product, count, strips);
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
  if (kernels.terms == 1) {
    using FewRows = FewRowTiles<Tiles>;
    kernels.few_rows.arrange = FewRows::arrange;
    kernels.few_rows.dot = FewRows::dot;
    kernels.few_rows.add = FewRows::add;
    kernels.few_rows_by_tiles = FewRows::multiplies;
  }
  kernels.enter = Tiles::configure;
  kernels.leave = Tiles::release;
  return kernels;
}

}  // namespace
}  // namespace fulmen::cpu
