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

// With accumulate: whatever computes the gradients writes them into the workspace, in the type of
// what they belong to, and one more kernel adds them to dq, dk and dv. So none of them has to know,
// and what is not finite may be computed again first. For 8k rows on as many keys, causal, 64 heads
// on 8 of 128 dims, 10 bytes an element are 0.2 ms of memory beside 5.6 ms.
bool adds_gradients(const Problem& problem);
Problem with_own_gradients(const Problem& problem);
PlanOrRefusal added(PlanOrRefusal made, const Problem& asked, const Problem& own);

// The kernel, for gradients of a dtype; vectors: of kAddedElements (kernels/params.h).
KernelLaunch add_gradients(DType dtype, i64 vectors);

// The plan of a problem whose kernels know that there is a user's expression: with its text, and,
// where gradients of what it reads are asked for, with sums for them in the workspace.
PlanOrRefusal with_expression(PlanOrRefusal made, const Problem& problem);

}  // namespace fulmen::gpu
