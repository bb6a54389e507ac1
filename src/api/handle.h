// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a fulmen_plan* points to, and how one is made.
#pragma once

#include "fulmen/fulmen.h"
#include "plan/plan.h"

struct fulmen_plan {
  fulmen::Plan plan;
};

namespace fulmen::api {

// Throws Error. Arrays are not looked at.
Plan make_plan(const fulmen_problem* problem, const fulmen_tensors* tensors,
               const fulmen_operation& operation);

}  // namespace fulmen::api
