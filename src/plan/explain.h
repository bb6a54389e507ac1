// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Those parts of explain()'s JSON object that plans for CPUs and GPUs have in common.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace fulmen {

// "{"rows": 64, "columns": 32}"; null where there is no tile.
std::string tile_text(const Tile& tile);

// From "operation" to "tile". backend: "cpu" or "cuda".
std::string choice_text(const Plan& plan, const char* backend,
                        const std::vector<Candidate>& candidates);

// From "workspace_bytes" to "intensity".
std::string cost_text(const Plan& plan, const Cost& total);

}  // namespace fulmen
