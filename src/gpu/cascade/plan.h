// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Calls of few query rows whose requests share their first keys (kv_shared): these keys are read
// once for the rows of all requests, the keys behind them by decode_sm80, and what both leave is
// added up. Pure.
#pragma once

#include "gpu/gpu_plan.h"

namespace fulmen::gpu {

// The plan, or null where sharing gains nothing or is not taken: then kv_shared is left out, which
// changes no result. plan_shared: of the pass over shared keys, an implementation's.
std::unique_ptr<GpuPlan> plan_cascade(const Problem& problem, const Gpu& gpu,
                                      PlanOrRefusal (*plan_shared)(const Problem& problem,
                                                                   const Gpu& gpu));

// The kernels around its passes: what CI compiles.
std::vector<KernelSpec> cascade_specs();

}  // namespace fulmen::gpu
