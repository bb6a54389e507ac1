// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What holds for the gradients of every implementation, as plans around its own. Pure.
#pragma once

#include "gpu/gpu_plan.h"

namespace fulmen::gpu {

// On tensor cores tiles and kernels follow from which of dq, dk and dv are made, and with them the
// order of sums. So that a gradient has its bits whatever else is asked for, deterministic calls
// make all three; those that no caller asked for lie in the workspace.
bool misses_gradients(const Problem& problem);
Problem with_all_gradients(const Problem& problem);
PlanOrRefusal only_asked(PlanOrRefusal made, const Problem& asked, const Problem& all);

// The plan of a problem whose kernels know that there is a user's expression: with its text, and,
// where gradients of what it reads are asked for, with sums for them in the workspace.
PlanOrRefusal with_expression(PlanOrRefusal made, const Problem& problem);

}  // namespace fulmen::gpu
