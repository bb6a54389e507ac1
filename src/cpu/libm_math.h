// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Math policy of SoftmaxState for single rows, from the C library; natural logarithms.
#pragma once

#include <cmath>
#include <limits>

namespace fulmen::cpu {

template <class T>
struct LibmMath {
  using Real = T;
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();
  static constexpr T kNatural = 1;
  static T exp(T x) { return std::exp(x); }
  static T log(T x) { return std::log(x); }
  static T tanh(T x) { return std::tanh(x); }
};

}  // namespace fulmen::cpu
