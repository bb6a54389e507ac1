// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table.

#include "gpu/implementations.h"

#include "core/error.h"
#include "gpu/backward_sm80/plan.h"
#include "gpu/backward_sm90/plan.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/simt/plan.h"

namespace fulmen::gpu {
namespace {

constexpr GpuImplementation kImplementations[] = {
    {Implementation::kSm90,
     "Hopper's copy engine and asynchronous tensor cores",
     true,
     {plan_forward_sm90, forward_sm90_switches, true},
     {plan_backward_sm90, backward_sm90_switches}},
    {Implementation::kSm80,
     "tensor cores by mma.sync, every option",
     true,
     {plan_forward_sm80, forward_sm80_switches},
     {plan_backward_sm80, backward_sm80_switches}},
    {Implementation::kSimt, "tiles on CUDA cores, every option", false, {plan_simt}, {plan_simt}},
    {Implementation::kNaive, "one thread a row, every option", false, {plan_naive}, {plan_naive}},
};

std::string refusal_of(const Pass& pass, const GpuPlan& plan, const Problem& problem,
                       const Gpu& gpu) {
  if (problem.without != 0) {
    const u32 switches = pass.switches == nullptr ? 0 : pass.switches(problem, gpu);
    if (const u32 fixed = problem.without & ~switches; fixed != 0) {
      const auto lowest = static_cast<Optimisation>(fixed & (~fixed + 1));
      return sentence("has no switch that leaves out ", name(lowest));
    }
  }
  if (problem.tile.given() && !pass.chooses_tiles) {
    return sentence("has no tiles to choose from for ", name(problem.operation));
  }
  if (problem.pointer_alignment >= plan.alignment_bytes) return "";
  return sentence("pointers must be multiples of ", plan.alignment_bytes,
                  " bytes; one is a multiple of ", problem.pointer_alignment, " only");
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

PlanOrRefusal plan_with(const GpuImplementation& row, const Problem& problem, const Gpu& gpu) {
  const bool is_forced = problem.implementation != Implementation::kAuto;
  if (is_forced && row.implementation != problem.implementation) {
    return sentence("not the one asked for; ", row.merit);
  }
  const Pass& pass = problem.operation == Operation::kForward ? row.forward : row.backward;
  PlanOrRefusal made = pass.plan(problem, gpu);
  if (made.plan == nullptr) return made;
  std::string refusal = refusal_of(pass, *made.plan, problem, gpu);
  if (!refusal.empty()) return refusal;
  for (KernelLaunch& launch : made.plan->launches) launch.spec.is_ablation = problem.without != 0;
  return made;
}

}  // namespace fulmen::gpu
