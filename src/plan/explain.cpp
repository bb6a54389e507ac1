// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A plan as one JSON object: what was chosen and why, what was not, and the arithmetic behind it.

#include <sstream>

#include "plan/plan.h"

namespace fulmen {
namespace {

// The texts of a plan are our own: printable ASCII without quotes or backslashes.
std::string quoted(const std::string& text) { return '"' + text + '"'; }

}  // namespace

std::string explain(const Plan& plan) {
  const Cost total = cost(plan.problem);
  std::string reason;
  std::string rejected;
  for (const Candidate& candidate : candidates(plan.problem)) {
    if (candidate.accepted) {
      reason = candidate.reason;
      continue;
    }
    if (!rejected.empty()) rejected += ", ";
    rejected += "{\"implementation\": " + quoted(name(candidate.implementation)) +
                ", \"reason\": " + quoted(candidate.reason) + "}";
  }
  std::ostringstream json;
  json.imbue(std::locale::classic());
  json.precision(17);
  json << "{\"operation\": " << quoted(name(plan.problem.operation))
       << ", \"implementation\": " << quoted(name(plan.implementation))
       << ", \"backend\": \"cpu\", \"reason\": " << quoted(reason) << ", \"rejected\": ["
       << rejected << "], \"tile\": ";
  if (plan.tile.rows > 0) {
    json << "{\"rows\": " << plan.tile.rows << ", \"columns\": " << plan.tile.columns << "}";
  } else {
    json << "null";
  }
  json << ", \"isa\": " << quoted(plan.device.isa) << ", \"threads\": "
       << (plan.implementation == Implementation::kScalar ? 1 : plan.device.num_threads)
       << ", \"workspace_bytes\": " << plan.workspace_bytes << ", \"pairs\": " << total.pairs
       << ", \"flops\": " << total.flops << ", \"bytes\": " << total.bytes
       << ", \"intensity\": " << (total.bytes > 0 ? total.flops / total.bytes : 0.0) << "}";
  return json.str();
}

}  // namespace fulmen
