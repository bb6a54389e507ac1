// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// C += A B where A is 0 for hidden pairs, and hidden pairs take no part even when B holds inf or
// NaN (0 * NaN is NaN). Only blocks with hidden pairs pay: B is searched, and if something turns
// up, the product runs over a copy with zeros in those places, and their terms are added to the
// rows that do see them. Rows that see none get the same bits as if nothing had been there.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/kernels.h"

namespace fulmen::cpu {

// Which pairs of a product (row i of C, depth k) are hidden: addend[i * row_stride + k *
// depth_stride] = -inf. A null addend hides nothing.
template <class Real>
struct PairAddend {
  const Real* addend;
  i64 row_stride;
  i64 depth_stride;

  bool hides(i64 row, i64 k) const {
    return addend[row * row_stride + k * depth_stride] == -std::numeric_limits<Real>::infinity();
  }
};

template <class Real>
void add_unusual_terms(const Product<Real>& product, const PairAddend<Real>& pairs) {
  for (i64 k = 0; k < product.depth; ++k) {
    const Real* b = product.B + k * product.B_depth_stride;
    for (i64 n = 0; n < product.columns; ++n) {
      if (std::isfinite(b[n])) continue;
      for (i64 row = 0; row < product.rows; ++row) {
        if (pairs.hides(row, k)) continue;
        const Real a = product.A[row * product.A_row_stride + k * product.A_depth_stride];
        product.C[row * product.C_row_stride + n] += a * b[n];
      }
    }
  }
}

// B must be row-major (B_panel_stride = lanes). finite: scratch for depth rows of B.
template <class Real>
void multiply_visible(const Kernels<Real>& kernels, const Product<Real>& product,
                      const PairAddend<Real>& pairs, Real* finite, i64 finite_stride) {
  const View<Real> B{product.B, product.B_depth_stride};
  if (!pairs.addend || kernels.all_finite(B, product.depth, product.columns)) {
    return kernels.multiply(product);
  }
  for (i64 k = 0; k < product.depth; ++k) {
    const Real* from = B.data + k * B.stride;
    Real* to = finite + k * finite_stride;
    for (i64 n = 0; n < finite_stride; ++n) {
      to[n] = n < product.columns && std::isfinite(from[n]) ? from[n] : Real(0);
    }
  }
  Product<Real> usual = product;
  usual.B = finite;
  usual.B_depth_stride = finite_stride;
  kernels.multiply(usual);
  add_unusual_terms(product, pairs);
}

}  // namespace fulmen::cpu
