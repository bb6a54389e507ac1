// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a fulmen_plan* points to, and how one is made.
#pragma once

#include <memory>

#include "fulmen/fulmen.h"
#include "fulmen/fulmen_experimental.h"
#include "gpu/backend.h"
#include "plan/plan.h"

struct fulmen_plan {
  fulmen::Plan plan;
  std::shared_ptr<const fulmen::gpu::PreparedPlan> gpu;  // null: for the CPU
  fulmen::Arrays arrays;                                 // as they were given, for same_layout
};

namespace fulmen::api {

// Throws Error. Arrays are not looked at, but for where q is. experiment: may be null.
fulmen_plan make_plan(const fulmen_problem* problem, const fulmen_tensors* tensors,
                      const fulmen_operation& operation,
                      const fulmen_experiment* experiment = nullptr);

// The JSON object of a plan.
std::string explain(const fulmen_plan& plan);

}  // namespace fulmen::api
