// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plans as JSON: what was chosen and why, what was not, and the arithmetic behind it.

#include "plan/explain.h"

#include "core/error.h"

namespace fulmen {

using json::field;
using json::list;
using json::number;
using json::quoted;

std::string tile_text(const Tile& tile) {
  if (tile.rows == 0) return "null";
  return sentence("{", field("rows", std::to_string(tile.rows)), ", ",
                  field("columns", std::to_string(tile.columns)), "}");
}

std::string choice_text(const Plan& plan, const char* backend,
                        const std::vector<Candidate>& candidates) {
  std::string reason;
  std::vector<std::string> rejected;
  for (const Candidate& candidate : candidates) {
    if (candidate.implementation == plan.implementation) {
      reason = candidate.reason;
      continue;
    }
    rejected.push_back(sentence("{",
                                field("implementation", quoted(name(candidate.implementation))),
                                ", ", field("reason", quoted(candidate.reason)), "}"));
  }
  return sentence(field("operation", quoted(name(plan.problem.operation))), ", ",
                  field("implementation", quoted(name(plan.implementation))), ", ",
                  field("backend", quoted(backend)), ", ", field("reason", quoted(reason)), ", ",
                  field("rejected", list(rejected)), ", ", field("tile", tile_text(plan.tile)));
}

std::string cost_text(const Plan& plan, const Cost& total) {
  const double intensity = total.bytes > 0 ? total.flops / total.bytes : 0.0;
  return sentence(field("workspace_bytes", std::to_string(plan.workspace_bytes)), ", ",
                  field("pairs", number(total.pairs)), ", ", field("flops", number(total.flops)),
                  ", ", field("bytes", number(total.bytes)), ", ",
                  field("intensity", number(intensity)));
}

std::string explain(const Plan& plan) {
  const int threads = plan.implementation == Implementation::kScalar ? 1 : plan.device.num_threads;
  return sentence("{", choice_text(plan, "cpu", candidates(plan.problem)), ", ",
                  field("isa", quoted(plan.device.isa)), ", ",
                  field("threads", std::to_string(threads)), ", ",
                  cost_text(plan, cost(plan.problem)), "}");
}

}  // namespace fulmen
