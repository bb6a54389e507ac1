// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One backward problem with its data, and what right gradients are: float64, and how far from it
// the error rule of the project lets a 16-bit result lie, row by row.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/backward_sm90/config.h"

namespace fulmen::test {

struct BackwardShape {
  i32 q_len;
  i32 kv_len;
  i32 heads_q = 2;
  i32 heads_kv = 2;
  i32 batch = 1;
  i32 dim_qk = 0;  // 0: the tile's
  i32 dim_v = 0;
  bool top_left = false;
  bool dlse = false;
  bool sinks = false;
  bool huge = false;  // scores of a million, exact where dim_qk is a power of 4
  bool low = false;   // scores near -100, and all values alike, so that dS cancels nothing
};

// (batch, head, row, dim), contiguous.
struct Matrix {
  i32 batch, heads, rows, dims;
  std::vector<double> data;

  Matrix(i32 batch, i32 heads, i32 rows, i32 dims)
      : batch(batch),
        heads(heads),
        rows(rows),
        dims(dims),
        data(static_cast<size_t>(i64{batch} * heads * rows * dims)) {}
  double* row(i32 b, i32 h, i64 r) {
    return &data[static_cast<size_t>(((i64{b} * heads + h) * rows + r) * dims)];
  }
  const double* row(i32 b, i32 h, i64 r) const { return const_cast<Matrix*>(this)->row(b, h, r); }
};

struct Gradients {
  Matrix dq, dk, dv;
};

// What found gradients are judged by.
struct Expected {
  Gradients reference, plain, magnitude;
};

class BackwardProblem {
 public:
  BackwardProblem(const BackwardSm90Config& config, const BackwardShape& shape,
                  const IntervalMask& mask);

  const BackwardShape& shape() const { return shape_; }
  const IntervalMask& mask() const { return mask_; }
  SequenceShape sequence() const {
    return {shape_.q_len, shape_.kv_len, shape_.top_left ? 0 : shape_.kv_len - shape_.q_len};
  }
  double scale() const;
  static float sink(i32 head) { return static_cast<float>(head % 3) - 0.5f; }
  u16 round(double x) const;
  double value(u16 bits) const;

  // What does not hold of `found`; empty when every row obeys the error rule. Gradients without
  // data were not asked for.
  std::string difference(const Gradients& found) const;

  Matrix q, k, v, dout;        // values of the 16-bit type
  Matrix o, lse, stats, dlse;  // o rounded; the others are float32

 private:
  DType dtype_;
  BackwardShape shape_;
  IntervalMask mask_;
  mutable std::optional<Expected> expected_;  // found at the first question
};

}  // namespace fulmen::test
