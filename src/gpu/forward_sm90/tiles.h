// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which tile of kernels/forward_sm90/forward_sm90.cuh a problem gets: what the rules say, or member
// by member what the caller names. Called by plan.cpp. Pure.
#pragma once

#include "core/problem.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen {

inline constexpr i64 kShortRows = 1024;  // lengths up to this take the configs with a quick start

// Fills in the tile of a config that has its options.
void set_sm90_forward_tile(ForwardSm90Config& config, const Problem& problem);

}  // namespace fulmen
