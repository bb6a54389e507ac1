// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// JSON, as far as the library writes it: quoted text, numbers without the locale, lists, members.
// And those parts of explain()'s object that plans for CPUs and GPUs have in common.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace fulmen::json {

// "text", with quotes, backslashes and control characters escaped.
std::string quoted(const std::string& text);

// A number that reads back as the same one; null where it is not finite.
std::string number(double value);

// [a, b, c] of texts that are JSON already.
std::string list(const std::vector<std::string>& items);

// "key": value, where the value is JSON already.
std::string field(const char* key, const std::string& value);

}  // namespace fulmen::json

namespace fulmen {

// "{"rows": 64, "columns": 32}"; null where there is no tile.
std::string tile_text(const Tile& tile);

// From "operation" to "tile". backend: "cpu" or "cuda".
std::string choice_text(const Plan& plan, const char* backend,
                        const std::vector<Candidate>& candidates);

// From "workspace_bytes" to "intensity".
std::string cost_text(const Plan& plan, const Cost& total);

}  // namespace fulmen
