// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Numbers of 8 bits from rows of more:
//
//   values = R (x - c) / scale    c: of each dim, R: Hadamard, orthogonal
//
// What the softmax makes of q k is what it makes of (R q) R (k - c), since R keeps products and a
// row of scores loses one number by c; single dims that are large everywhere are gone by c, and
// what is left of them is spread over all by R, so that one scale serves them. The arrays of a
// call, for the host and for kernels, and what both mean by c, R and scales.
// Source: Ashkboos et al., QuaRot (2024); Zhang et al., SageAttention (2024),
// section 3.2.
#pragma once

#include "kernels/attention/sequence.cuh"

namespace fulmen {

// The arrays of fulmen_quantise: tensors on the host, views in kernels.
template <class Array>
struct QuantiseArrays {
  Array x;         // (batch, head, row, dim)
  Array values;    // likewise: written
  Array constant;  // (batch, head, 1, dim)    broadcast: stride 0, as below
  Array scale;     // (batch, head, row, 1), or (batch, head, 1, dim)
  Array lengths;   // (1, 1, 1, batch)
};

struct QuantiseExtents {
  i64 batch = 0;
  i64 heads = 0;
  i64 rows = 0;
  i64 dim = 0;
  bool rotate = false;
  bool find_constant = false;  // it is written
  bool find_scale = false;     // likewise
  bool scales_rows = false;    // each row has a scale
  bool scales_dims = false;    // each dim has one
  float part = 1;              // a scale is the largest number of its group times this
};

// Rows are rotated in parts of so many dims, the largest power of two that divides them.
constexpr i32 rotated_dims(i32 dim) { return dim & -dim; }

// 1 / sqrt(n) of a power of two.
constexpr float inverse_root(i32 n) {
  float root = 1;
  for (; n >= 4; n /= 4) root /= 2;
  return n == 2 ? root * 0.70710678f : root;
}

// c is the mean of a sample of the rows that count: so many, evenly spread, of those that are
// finite.
inline constexpr i32 kSampledRows = 256;
inline constexpr float kLargestSquare = 0x1p120f;  // of a row that is finite
constexpr i64 num_sampled(i64 rows) { return min<i64>(rows, kSampledRows); }
constexpr i64 sampled_row(i64 i, i64 rows) { return i * rows / num_sampled(rows); }

// By a dim whose mean is c, of `count` rows: summed over dims, less the squares of the rows, at
// least 0 where c is half of a row or more. Else nothing is taken off: it would gain nothing.
constexpr float gain_of_constant(float c, i64 count) {
  return 4 * c * c * static_cast<float>(count);
}

// The largest number of a type of 8 bits.
constexpr float largest_of(DType dtype) {
  return dtype == DType::kFloat8E4M3 ? 448.f : dtype == DType::kFloat8E5M2 ? 57344.f : 127.f;
}

// A scale that is found is at least this, so that zeros stay zeros.
inline constexpr float kLeastScale = 0x1p-100f;

}  // namespace fulmen
