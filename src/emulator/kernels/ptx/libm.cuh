// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What src/kernels/ptx/libm.cuh declares, on the host.
#pragma once

#include <cmath>

namespace fulmen::ptx {

inline float accurate_exp(float x) { return std::exp(x); }
inline double accurate_exp(double x) { return std::exp(x); }
inline float accurate_log(float x) { return std::log(x); }
inline double accurate_log(double x) { return std::log(x); }
inline float accurate_tanh(float x) { return std::tanh(x); }
inline double accurate_tanh(double x) { return std::tanh(x); }

// A NaN of either kind counts as missing, and -0 as below 0.
template <class Real>
Real larger(Real a, Real b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
inline float rounded_product(float a, float b) { return a * b; }
inline double rounded_product(double a, double b) { return a * b; }

}  // namespace fulmen::ptx
