// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Math policy of SoftmaxState for kernels that compute in full float32 or float64 precision:
// natural logarithms, no approximations.
#pragma once

#include "kernels/ptx/math.cuh"

namespace fulmen {

template <class T>
struct AccurateMath {
  using Real = T;
  static constexpr T kInfinity = fulmen::kInfinity<T>;
  static constexpr T kNatural = 1;
  static T exp(T x) { return ptx::accurate_exp(x); }
  static T log(T x) { return ptx::accurate_log(x); }
  static T tanh(T x) { return ptx::accurate_tanh(x); }
  static T sqrt(T x) { return ptx::accurate_sqrt(x); }
  static T abs(T x) { return ptx::magnitude(x); }
  static T quotient(T a, T b) { return a / b; }
  // The larger number; NaN only when both are.
  static T max(T a, T b) { return ptx::larger(a, b); }
  // a b, rounded: never a part of a fused multiply-add, so that equal scores stay equal.
  static T product(T a, T b) { return ptx::rounded_product(a, b); }
};

}  // namespace fulmen
