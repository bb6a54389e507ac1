// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// C (+)= A B for blocks that fit the second cache: register tiles of kTileRows x 2 vectors. A is
// read one element at a time and spread over the lanes, B one panel of `kLanes` columns at a time;
// a panel (depth x 64 to 128 bytes) stays in the first cache while all rows of A pass by. Every
// element is one chain of multiply-adds over rising k, whatever the tile, so that results do not
// depend on how rows fall into tiles.
#pragma once

#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

template <class Real, int kRows>
[[gnu::noinline]] void multiply_tile(const Product<Real>& product, i64 row, i64 panel) {
  constexpr int kStep = kWidth<Real>;
  Vector<Real> sum[kRows][kTileVectors];
  Real* const C = product.C + row * product.C_row_stride + panel * kLanes<Real>;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      sum[i][v] = Vector<Real>{};
      if (product.accumulates) sum[i][v] = load(C + i * product.C_row_stride + v * kStep);
      if (product.row_scale) sum[i][v] *= product.row_scale[row + i];
    }
  }
  const Real* A = product.A + row * product.A_row_stride;
  const Real* B = product.B + panel * product.B_panel_stride;
  for (i64 k = 0; k < product.depth; ++k) {
    Vector<Real> b[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) b[v] = load(B + v * kStep);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vector<Real> a = broadcast(A[i * product.A_row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) sum[i][v] = multiply_add(a, b[v], sum[i][v]);
    }
    A += product.A_depth_stride;
    B += product.B_depth_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      store(C + i * product.C_row_stride + v * kStep, sum[i][v]);
    }
  }
}

// The last rows, fewer than kTileRows.
template <class Real, int kRows>
void multiply_rest(const Product<Real>& product, i64 row, i64 panel) {
  if constexpr (kRows > 0) {
    if (product.rows - row == kRows) return multiply_tile<Real, kRows>(product, row, panel);
    multiply_rest<Real, kRows - 1>(product, row, panel);
  }
}

template <class Real>
void multiply(const Product<Real>& product) {
  for (i64 panel = 0; panel * kLanes<Real> < product.columns; ++panel) {
    i64 row = 0;
    for (; row + kTileRows <= product.rows; row += kTileRows) {
      multiply_tile<Real, kTileRows>(product, row, panel);
    }
    multiply_rest<Real, kTileRows - 1>(product, row, panel);
  }
}

}  // namespace
}  // namespace fulmen::cpu
