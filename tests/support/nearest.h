// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rounding to a 16-bit type by search, not by bits: the table of all its finite values, the nearer
// of two neighbours, ties to the one with the even last bit. Slow, and independent of the library.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/base.cuh"

namespace fulmen::test {

// The value of 1 sign, `exponent_bits` exponent and `fraction_bits` fraction bits, IEEE 754 style.
inline double decode(u16 bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction ? std::nan("") : sign * HUGE_VAL;
  }
  const double significand = std::ldexp(fraction, -fraction_bits) + (exponent ? 1.0 : 0.0);
  return sign * std::ldexp(significand, (exponent ? exponent : 1) - bias);
}

class NearestSearch {
 public:
  NearestSearch(int exponent_bits, int fraction_bits)
      : infinity_(static_cast<u16>(((1 << exponent_bits) - 1) << fraction_bits)) {
    for (u16 bits = 0; bits < infinity_; ++bits) {
      values_.push_back(decode(bits, exponent_bits, fraction_bits));
    }
    // Where the next value would be, were the exponent not at its end.
    values_.push_back(2 * values_.back() - values_[values_.size() - 2]);
  }

  u16 infinity() const { return infinity_; }
  double value(u16 magnitude) const { return values_[magnitude]; }  // up to infinity()

  // Of x that is not NaN.
  u16 round(double x) const {
    const u16 sign = std::signbit(x) ? 0x8000 : 0;
    const double magnitude = std::abs(x);
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    if (above == values_.end()) return static_cast<u16>(sign | infinity_);
    u16 bits = static_cast<u16>(above - values_.begin());
    if (*above != magnitude) {
      const double up = *above - magnitude;  // exact: neighbours are within a factor of 2, or 0
      const double down = magnitude - *(above - 1);
      if (down < up || (down == up && bits % 2 == 1)) --bits;
    }
    return static_cast<u16>(sign | bits);
  }

 private:
  u16 infinity_;
  std::vector<double> values_;  // rising
};

inline const NearestSearch& nearest_f16() {
  static const NearestSearch search(5, 10);
  return search;
}

inline const NearestSearch& nearest_bf16() {
  static const NearestSearch search(8, 7);
  return search;
}

}  // namespace fulmen::test
