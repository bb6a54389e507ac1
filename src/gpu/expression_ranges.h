// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which values the integers of an expression can have, whatever the arrays hold: what 32 bits hold
// is computed in 32 bits. Pure.
#pragma once

#include <limits>
#include <vector>

#include "core/problem.h"

namespace fulmen::gpu {

// Ends included.
struct Range {
  i64 least = std::numeric_limits<i64>::min();
  i64 most = std::numeric_limits<i64>::max();

  bool fits32() const {
    constexpr i64 kMost32 = std::numeric_limits<i32>::max();
    return least >= -kMost32 - 1 && most <= kMost32;
  }
  bool is_all() const {
    return least == std::numeric_limits<i64>::min() && most == std::numeric_limits<i64>::max();
  }
};

// Whether sizes are such that 32 bits hold every difference of positions and every offset into an
// array: all but the largest problems, and those with positions of their own.
bool is_ordinary(const Problem& problem);

// Of each step of the problem's expression; of use for integers.
std::vector<Range> integer_ranges(const Problem& problem);

}  // namespace fulmen::gpu
