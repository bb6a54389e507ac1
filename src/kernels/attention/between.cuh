// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a step of an expression can be over a box of pairs, from what it takes can be: interval
// arithmetic (Moore, Interval Analysis, 1966). Integers lie between two ends, booleans are the
// integers 0 and 1. The text of a user's mask calls these (gpu/bounds_text.h), with integers
// that cannot leave 64 bits.
#pragma once

#include "kernels/attention/integers.cuh"

namespace fulmen {

// From least to most, both included. Floats that may be NaN: from -inf to inf, which no comparison
// decides.
template <class T>
struct Between {
  T least, most;
};
using Integers = Between<i64>;

// Of one value.
template <class T>
constexpr Between<T> between(T x) {
  return {x, x};
}
constexpr Between<float> between(float x) {
  return {x == x ? x : -kInfinity<float>, x == x ? x : kInfinity<float>};
}
constexpr Between<double> between(double x) {
  return {x == x ? x : -kInfinity<double>, x == x ? x : kInfinity<double>};
}

template <class T>
constexpr Between<T> joined(const Between<T>& a, const Between<T>& b) {
  return {min(a.least, b.least), max(a.most, b.most)};
}
template <class T>
constexpr Integers integers(const Between<T>& x) {
  return {static_cast<i64>(x.least), static_cast<i64>(x.most)};
}
template <class Real>
constexpr Between<Real> reals(const Integers& x) {
  return {static_cast<Real>(x.least), static_cast<Real>(x.most)};
}

// ---- Integers -----------------------------------------------------------------------------------

constexpr Integers sum(const Integers& a, const Integers& b) {
  return {a.least + b.least, a.most + b.most};
}
constexpr Integers difference(const Integers& a, const Integers& b) {
  return {a.least - b.most, a.most - b.least};
}
constexpr Integers negated(const Integers& a) { return {-a.most, -a.least}; }
constexpr Integers product(const Integers& a, const Integers& b) {
  const i64 of[] = {a.least * b.least, a.least * b.most, a.most * b.least, a.most * b.most};
  return {min(min(of[0], of[1]), min(of[2], of[3])), max(max(of[0], of[1]), max(of[2], of[3]))};
}
constexpr Integers smaller(const Integers& a, const Integers& b) {
  return {min(a.least, b.least), min(a.most, b.most)};
}
constexpr Integers larger(const Integers& a, const Integers& b) {
  return {max(a.least, b.least), max(a.most, b.most)};
}
constexpr Integers magnitude(const Integers& a) {
  return {max(max(a.least, -a.most), i64{0}), max(-a.least, a.most)};
}
// As bounded(x, low, high) of common/expression.cuh, whatever the order of its ends.
constexpr Integers clamped_between(const Integers& x, const Integers& low, const Integers& high) {
  if (low.most > high.least) return joined(joined(x, low), high);
  return smaller(larger(x, low), high);
}
// anything: what holds for all values.
constexpr Integers quotient(const Integers& a, const Integers& b, const Integers& anything) {
  if (b.least <= 0) return anything;
  return {floor_quotient(a.least, a.least < 0 ? b.least : b.most),
          floor_quotient(a.most, a.most < 0 ? b.most : b.least)};
}
// Below the divisor, and as it is within one period.
constexpr Integers remainder(const Integers& a, const Integers& b, const Integers& anything) {
  if (b.least <= 0) return anything;
  if (b.least == b.most && floor_quotient(a.least, b.most) == floor_quotient(a.most, b.most)) {
    return {floor_remainder(a.least, b.most), floor_remainder(a.most, b.most)};
  }
  return {0, b.most - 1};
}

// ---- Booleans -----------------------------------------------------------------------------------

inline constexpr Integers kEither{0, 1};

constexpr Integers truth(bool may_be_false, bool may_be_true) {
  return {may_be_false ? 0 : 1, may_be_true ? 1 : 0};
}
template <class T>
constexpr Integers is_less(const Between<T>& a, const Between<T>& b) {
  return truth(!(a.most < b.least), a.least < b.most);
}
template <class T>
constexpr Integers is_at_most(const Between<T>& a, const Between<T>& b) {
  const bool meet = a.most == b.least && a.most - a.most == 0;  // not at -inf, which NaN may be
  return truth(!(a.most < b.least || meet), a.least <= b.most);
}
template <class T>
constexpr Integers is_equal(const Between<T>& a, const Between<T>& b) {
  const bool are_apart = a.most < b.least || b.most < a.least;
  return truth(!(a.least == a.most && b.least == b.most && a.least == b.least), !are_apart);
}
constexpr Integers negation(const Integers& a) { return {1 - a.most, 1 - a.least}; }
template <class T>
constexpr Integers is_not_equal(const Between<T>& a, const Between<T>& b) {
  return negation(is_equal(a, b));
}
template <class T>
constexpr Between<T> chosen(const Integers& condition, const Between<T>& a, const Between<T>& b) {
  if (condition.least == condition.most) return condition.least != 0 ? a : b;
  return joined(a, b);
}

}  // namespace fulmen
