// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Scores of rows that are too large for an lse in float32 (kHugeScore): backward_prepare_sm90
// leaves row_max and log2(row_sum) of such rows apart, and row_max 0 of all others. Called by the
// Hopper backward kernels before they take exponentials.
#pragma once

#include "kernels/ptx/math.cuh"

namespace fulmen {

struct HugeScores {
  float unit;  // of a score, in nats
  float per_unit;

  explicit HugeScores(float unit_) : unit(unit_), per_unit(1 / unit_) {}

  // s of a huge row relative to row_max: rounded as that was, and cut off at 0.
  float lowered(float s, float row_max) const {
    const float below = ptx::max(row_max - ptx::mul(s, unit), 0.f);
    return row_max != 0 ? -below * per_unit : s;
  }
};

}  // namespace fulmen
