// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of the working type: turned into panels whose lanes are rows, and searched for inf and NaN.
#pragma once

#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

template <class Real>
void transpose(View<Real> in, i64 rows, i64 dims, Real* out, i64 panel_stride, i64 depth_stride) {
  constexpr i64 kPanel = kLanes<Real>;
  for (i64 first = 0; first < rows; first += kPanel, out += panel_stride) {
    const i64 present = rows - first < kPanel ? rows - first : kPanel;
    for (i64 lane = 0; lane < present; ++lane) {
      const Real* from = in.data + (first + lane) * in.stride;
      for (i64 d = 0; d < dims; ++d) out[d * depth_stride + lane] = from[d];
    }
    for (i64 lane = present; lane < kPanel; ++lane) {
      for (i64 d = 0; d < dims; ++d) out[d * depth_stride + lane] = Real(0);
    }
  }
}

// x - x is 0 for finite x, NaN for all else.
template <class Real>
bool all_finite(View<Real> in, i64 rows, i64 dims) {
  constexpr i64 kStep = kWidth<Real>;
  Vector<Real> sum{};
  for (i64 row = 0; row < rows; ++row) {
    const Real* from = in.data + row * in.stride;
    i64 d = 0;
    for (; d + kStep <= dims; d += kStep) sum += load(from + d) - load(from + d);
    for (; d < dims; ++d) sum[0] += from[d] - from[d];
  }
  return !any(sum != 0);
}

}  // namespace
}  // namespace fulmen::cpu
