// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What steps of an expression may be over a box of pairs: interval arithmetic, three-valued where a
// step is true or false. Bounds hold for every type of sums: those of floats are wider than any
// rounding. Source: Moore, Interval Analysis (1966).
#pragma once

#include <array>

#include "core/program.h"

namespace fulmen::expression {

// Every value of a step lies between both ends.
struct Bounds {
  double least = 0;  // of floats that are numbers
  double most = 0;
  i64 first = 0;  // of integers; of booleans 0 and 1
  i64 last = 0;
  bool may_be_nan = false;
};

// Of one or the other: of a box that two make.
Bounds either(const Bounds& a, const Bounds& b);

// What steps read of a box: rows, keys and positions from their first to their last.
struct BoxOperands {
  std::array<Bounds, static_cast<size_t>(Variable::kCount)> variables{};
  const double* scalars = nullptr;
  const Arrays* arrays = nullptr;
};

// rows, keys: not empty, within the lengths of the sequence.
BoxOperands box_of(const Problem& problem, const CacheSequence& sequence, i64 index, i64 head,
                   Interval rows, Interval keys);

// Of `count` elements of an array along its last axis, from one on.
Bounds elements_bounds(const Tensor& tensor, const std::array<i64, kMaxRank>& first, i64 count);

// A step from those that it takes. A read looks at all elements that its indices may mean, up to
// kMostElements of them; beyond that it may be anything.
inline constexpr i64 kMostElements = 4096;
Bounds bounds_of(const Step& step, const Bounds* values, const BoxOperands& operands);

}  // namespace fulmen::expression
