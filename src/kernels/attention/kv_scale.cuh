// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What numbers of 8 bits are multiplied by.
#pragma once

namespace fulmen {

// A scale as it counts: any finite number, else NaN. So an infinite one makes every value NaN,
// whatever the numbers are and whether they or sums of them are scaled.
template <class Real>
constexpr Real kv_scale(Real given) {
  return given + (given - given);
}

}  // namespace fulmen
