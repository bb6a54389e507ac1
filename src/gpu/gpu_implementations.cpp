// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table, and the choice by it.

#include "gpu/gpu_implementations.h"

#include "core/error.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/simt/plan.h"
#include "gpu/sm90_plan.h"

namespace fulmen {
namespace {

std::string naive_refusal(const Problem&, const Gpu&) { return ""; }
GpuNeeds naive_needs(const Problem&, const Gpu&) { return {}; }
u32 no_switches(const Problem&) { return 0; }

constexpr GpuImplementation kImplementations[] = {
    {Implementation::kSm90, "Hopper's copy engine and asynchronous tensor cores", true,
     sm90_refusal, sm90_needs, sm90_switches, true},
    {Implementation::kSm80, "tensor cores by mma.sync, every option", true, sm80_refusal,
     sm80_needs, sm80_switches},
    {Implementation::kSimt, "tiles on the ordinary arithmetic units, every option", false,
     simt_refusal, simt_needs, no_switches},
    {Implementation::kNaive, "one thread a row, every option", false, naive_refusal, naive_needs,
     no_switches},
};

// Why an implementation cannot take a problem, alignment of pointers included.
std::string refusal_of(const GpuImplementation& row, const Problem& problem, const Gpu& gpu) {
  std::string refusal = row.refusal(problem, gpu);
  if (!refusal.empty()) return refusal;
  if (const u32 fixed = problem.without & ~row.switches(problem); fixed != 0) {
    const auto lowest = static_cast<Optimisation>(fixed & (~fixed + 1));
    return sentence("has no switch that leaves out ", name(lowest));
  }
  if (problem.tile.given() && !(row.chooses_tiles && problem.operation == Operation::kForward)) {
    return sentence("has no tiles to choose from for ", name(problem.operation));
  }
  const i64 needed = row.needs(problem, gpu).alignment_bytes;
  if (problem.pointer_alignment >= needed) return "";
  return sentence("pointers must be multiples of ", needed, " bytes; one is a multiple of ",
                  problem.pointer_alignment, " only");
}

}  // namespace

std::span<const GpuImplementation> gpu_implementations() { return kImplementations; }

const GpuImplementation& gpu_implementation(Implementation implementation) {
  for (const GpuImplementation& row : kImplementations) {
    if (row.implementation == implementation) return row;
  }
  throw Error(Status::kUnsupported, sentence("implementation ", name(implementation),
                                             " is not in this version of fulmen"));
}

std::vector<Candidate> candidates(const Problem& problem, const Gpu& gpu) {
  const bool forced = problem.implementation != Implementation::kAuto;
  if (forced) gpu_implementation(problem.implementation);
  std::vector<Candidate> list;
  for (const GpuImplementation& row : kImplementations) {
    if (forced && row.implementation != problem.implementation) {
      list.push_back({row.implementation, false, sentence("not the one asked for; ", row.merit)});
      continue;
    }
    const std::string refusal = refusal_of(row, problem, gpu);
    const std::string reason = sentence(forced ? "asked for by name; " : "", row.merit);
    list.push_back({row.implementation, refusal.empty(), refusal.empty() ? reason : refusal});
  }
  return list;
}

Plan plan_of(const Problem& problem, const Gpu& gpu, Implementation implementation) {
  const GpuNeeds needs = gpu_implementation(implementation).needs(problem, gpu);
  Plan plan;
  plan.problem = problem;
  plan.gpu = gpu;
  plan.implementation = implementation;
  plan.tile = needs.tile;
  if (needs.workspace_bytes > 0) {
    plan.workspace_bytes = needs.workspace_bytes + kGpuWorkspaceAlignment - 1;
  }
  return plan;
}

}  // namespace fulmen
