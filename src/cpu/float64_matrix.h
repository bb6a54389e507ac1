// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A float64 copy of the rows of one head, for the scalar oracle: loaded from an array of any dtype
// and strides, stored back with one rounding.
#pragma once

#include <vector>

#include "core/tensor.h"

namespace fulmen::cpu {

struct Matrix {
  Matrix(i64 num_rows, i64 num_cols)
      : rows(num_rows), cols(num_cols), values(static_cast<size_t>(num_rows * num_cols)) {}
  double* operator[](i64 row) { return values.data() + row * cols; }
  const double* operator[](i64 row) const { return values.data() + row * cols; }

  i64 rows;
  i64 cols;
  std::vector<double> values;
};

inline Matrix load(const Tensor& tensor, i64 batch, i64 head, i64 begin, i64 rows) {
  Matrix matrix(rows, tensor.shape[3]);
  for (i64 i = 0; i < rows; ++i) {
    for (i64 d = 0; d < matrix.cols; ++d) matrix[i][d] = tensor.real(batch, head, begin + i, d);
  }
  return matrix;
}

// Rows past the matrix, up to `slot`, are zero-filled. An absent tensor is not wanted.
inline void store(const Tensor& tensor, const Matrix& matrix, i64 batch, i64 head, i64 begin,
                  i64 slot) {
  if (!tensor.present()) return;
  for (i64 i = 0; i < slot; ++i) {
    for (i64 d = 0; d < tensor.shape[3]; ++d) {
      tensor.set_real(batch, head, begin + i, d, i < matrix.rows ? matrix[i][d] : 0.0);
    }
  }
}

inline double dot(const double* a, const double* b, i64 size) {
  double sum = 0;
  for (i64 d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

// y += a x
inline void axpy(double a, const double* x, double* y, i64 size) {
  for (i64 d = 0; d < size; ++d) y[d] += a * x[d];
}

}  // namespace fulmen::cpu
