// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Integers as expressions have them: overflow wraps, quotients are rounded towards minus infinity
// and are 0, as remainders are, where the divisor is. Called by every backend.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

constexpr i64 wrapped(u64 value) { return static_cast<i64>(value); }

template <class Int>
constexpr Int floor_quotient(Int a, Int b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<Int>(wrapped(0 - static_cast<u64>(a)));
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

template <class Int>
constexpr Int floor_remainder(Int a, Int b) {
  const u64 whole = static_cast<u64>(floor_quotient(a, b)) * static_cast<u64>(b);
  return b == 0 ? 0 : static_cast<Int>(wrapped(static_cast<u64>(a) - whole));
}

// The nearest 64-bit integer at or below x; 0 for NaN.
template <class Real>
constexpr i64 floor_of(Real x) {
  constexpr Real kBeyond = static_cast<Real>(0x1p63);
  constexpr i64 kMost = 0x7fffffffffffffffll;
  if (x != x) return 0;
  if (x >= kBeyond) return kMost;
  if (x < -kBeyond) return -kMost - 1;
  const i64 towards_zero = static_cast<i64>(x);
  return towards_zero - (static_cast<Real>(towards_zero) > x ? 1 : 0);
}

}  // namespace fulmen
