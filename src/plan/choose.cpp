// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The choice: implementations in order of preference, each with what it refuses.

#include <array>

#include "core/error.h"
#include "plan/plan.h"
#include "plan/tiled_workspace.h"

namespace fulmen {
namespace {

constexpr std::array kPreference{Implementation::kTiled, Implementation::kScalar};

// Both CPU implementations compute every problem that validate lets through.
const char* merit(Implementation implementation) {
  return implementation == Implementation::kTiled
             ? "SIMD tiles on all threads, memory linear in the sequence"
             : "the oracle: float64 in the order of the equations, one thread";
}

bool is_forced(const Problem& problem) { return problem.implementation != Implementation::kAuto; }

}  // namespace

std::vector<Candidate> candidates(const Problem& problem) {
  const Implementation chosen = is_forced(problem) ? problem.implementation : kPreference.front();
  std::vector<Candidate> list;
  for (const Implementation implementation : kPreference) {
    const bool accepted = implementation == chosen;
    std::string reason = accepted && is_forced(problem) ? "asked for by name; " : "";
    if (!accepted) reason = sentence(is_forced(problem) ? "not the one asked for" : "slower", "; ");
    list.push_back({implementation, accepted, reason + merit(implementation)});
  }
  return list;
}

Plan choose(const Problem& problem, const CpuDevice& device) {
  Plan plan;
  plan.problem = problem;
  plan.device = device;
  plan.implementation = is_forced(problem) ? problem.implementation : kPreference.front();
  if (plan.implementation == Implementation::kTiled) {
    plan.tile = tiled_tile(problem, device);
    plan.workspace_bytes = tiled_workspace_bytes(problem, plan.tile, device);
  }
  return plan;
}

}  // namespace fulmen
