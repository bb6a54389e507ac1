// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table, and the way down it, to the first whose kernels pass the gate.

#include "gpu/implementations.h"

#include <algorithm>
#include <future>

#include "core/error.h"
#include "gpu/backend.h"
#include "gpu/backward_sm80/plan.h"
#include "gpu/backward_sm90/plan.h"
#include "gpu/call.h"
#include "gpu/cascade/plan.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/gradient_plans.h"
#include "gpu/jit/module.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"

namespace fulmen::gpu {
namespace {

constexpr GpuImplementation kImplementations[] = {
    {Implementation::kSm90,
     "Hopper's copy engine and asynchronous tensor cores",
     true,
     {.plan = plan_forward_sm90,
      .switches = forward_sm90_switches,
      .chooses_tiles = true,
      .takes_caches = true,
      .takes_quantised = true,
      .takes_slots = true,
      .takes_blocks = true,
      .takes_expressions = true,
      .takes_fp8 = true,
      .accumulates = true},
     {.plan = plan_backward_sm90,
      .switches = backward_sm90_switches,
      .takes_blocks = true,
      .takes_expressions = true}},
    {Implementation::kSm80,
     "tensor cores by mma.sync, every option",
     true,
     {.plan = plan_forward_sm80,
      .switches = forward_sm80_switches,
      .takes_caches = true,
      .takes_quantised = true,
      .takes_expressions = true},
     {.plan = plan_backward_sm80, .switches = backward_sm80_switches, .takes_expressions = true}},
    {Implementation::kSimt,
     "tiles on CUDA cores, every option",
     false,
     {.plan = plan_simt,
      .takes_caches = true,
      .takes_quantised = true,
      .takes_slots = true,
      .takes_blocks = true,
      .takes_expressions = true,
      .accumulates = true},
     {.plan = plan_simt, .takes_blocks = true, .takes_expressions = true}},
    {Implementation::kNaive,
     "one thread a row, every option",
     false,
     {.plan = plan_naive,
      .takes_caches = true,
      .takes_quantised = true,
      .takes_slots = true,
      .takes_blocks = true,
      .takes_expressions = true,
      .accumulates = true},
     {.plan = plan_naive, .takes_blocks = true, .takes_expressions = true}},
};

PlanOrRefusal plan_pass(const GpuImplementation& row, const Pass& pass, const Problem& problem,
                        const Gpu& gpu) {
  if (row.tensor_cores && problem.has(Array::kKvShared) && !user_terms_of(problem).any() &&
      !problem.has(Array::kBlocks)) {
    if (auto cascade = plan_cascade(problem, gpu, pass.plan)) return cascade;
  }
  if (adds_gradients(problem)) {
    const Problem own = with_own_gradients(problem);
    return added(plan_pass(row, pass, own, gpu), problem, own);
  }
  if (!row.tensor_cores || !misses_gradients(problem)) return pass.plan(problem, gpu);
  const Problem all = with_all_gradients(problem);
  return only_asked(pass.plan(all, gpu), problem, all);
}

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
  if (problem.has_caches() && !pass.takes_caches) {
    return sentence("does not take ", name(problem.cache_array()));
  }
  if (problem.slots && !pass.takes_slots) return "does not take a page_table of slots";
  if (problem.has_segments() && !pass.takes_expressions) return "does not take q_segments";
  if (user_terms_of(problem).any() && !pass.takes_expressions) {
    return "does not take an expression (score, mask)";
  }
  if (problem.wants_captures() && problem.has_ordered_sums()) {
    return "adds up the gradients of what a score reads in no order of its own, which "
           "deterministic asks for, as do bits that depend on no other entry";
  }
  if (problem.accumulate && !adds_gradients(problem) && !pass.accumulates) {
    return "does not take accumulate";
  }
  if (problem.has(Array::kBlocks) && !pass.takes_blocks) return "does not take lists of blocks";
  if (problem.is_quantised() && !pass.takes_quantised) {
    return sentence("does not take k and v of ", name(problem.kv_dtype()));
  }
  Problem each = problem;
  if (each.precision == Precision::kFp8 && !pass.takes_fp8) each.precision = Precision::kFloat32;
  PlanOrRefusal made = with_expression(plan_pass(row, pass, each, gpu), problem);
  if (made.plan == nullptr) return made;
  std::string refusal = refusal_of(pass, *made.plan, problem, gpu);
  if (!refusal.empty()) return refusal;
  for (KernelLaunch& launch : made.plan->launches) launch.spec.is_ablation = problem.without != 0;
  return made;
}

namespace {

KernelReport report_of(const KernelLaunch& launch) {
  KernelReport report;
  report.name = launch.spec.name;
  report.shared_bytes = launch.spec.shared_bytes;
  report.num_threads = launch.spec.num_threads;
  report.num_blocks = launch.num_blocks;
  return report;
}

void add_use(KernelReport& report, const ResourceUse& use, Origin origin, int blocks_resident) {
  report.compiled = true;
  report.registers = use.registers;
  report.spill_bytes = std::max(use.spill_store_bytes, use.spill_load_bytes);
  report.blocks_resident = blocks_resident;
  report.origin = name(origin);
  report.findings = use.findings;
  report.instructions = use.instructions;
}

// Compiles several kernels at once, so that a plan takes as long as its slowest one: what follows
// finds them in the cache, and reports what fails.
void compile_together(const std::vector<KernelLaunch>& launches, const std::string& arch) {
  if (launches.size() < 2) return;
  std::vector<std::future<void>> all;
  for (const KernelLaunch& launch : launches) {
    all.push_back(std::async(std::launch::async, [&launch, &arch] {
      try {
        machine_code(launch.spec, arch);
      } catch (const Error&) {  // load() or compile() meets it again
      }
    }));
  }
}

// Compiles and loads the kernels of one implementation.
void load(PreparedPlan& prepared) {
  const std::vector<KernelLaunch>& launches = prepared.decision->launches;
  compile_together(launches, prepared.device->arch());
  for (const KernelLaunch& launch : launches) {
    const LoadedKernel& kernel = prepare(*prepared.device, launch.spec);
    prepared.kernels.push_back({&kernel, launch.shape()});
    add_use(prepared.reports.emplace_back(report_of(launch)), kernel.use, kernel.origin,
            kernel.blocks_resident);
  }
}

// Compiles them where that is possible.
void compile(PreparedPlan& prepared) {
  const std::vector<KernelLaunch>& launches = prepared.decision->launches;
  const Gpu& gpu = prepared.gpu;
  compile_together(launches, arch_name(gpu.compute_capability));
  for (const KernelLaunch& launch : launches) {
    KernelReport& report = prepared.reports.emplace_back(report_of(launch));
    try {
      const auto kernel = machine_code(launch.spec, arch_name(gpu.compute_capability));
      const ResourceUse use = resource_use(kernel->log, kernel->cubin);
      add_use(report, use, kernel->origin,
              blocks_per_multiprocessor(gpu, use.registers, launch.spec.num_threads,
                                        launch.spec.shared_bytes));
    } catch (const Rejected&) {
      throw;
    } catch (const Error& error) {
      const bool no_compiler =
          error.status() == Status::kNotFound || error.status() == Status::kUnsupported;
      if (!no_compiler) throw;
      prepared.note = sentence("not compiled: ", error.what());
    }
  }
}

void check_blocks(const std::vector<KernelLaunch>& launches) {
  for (const KernelLaunch& launch : launches) {
    if (launch.num_blocks <= kMaxBlocks) continue;
    throw Rejected(sentence(launch.spec.name, " would need ", launch.num_blocks,
                            " blocks; a launch has at most ", kMaxBlocks, ": split the batch"));
  }
}

[[noreturn]] void refuse(const std::vector<Candidate>& candidates, const Problem& problem,
                         const Gpu& gpu) {
  std::string reasons;
  for (const Candidate& candidate : candidates) {
    const bool is_forced = problem.implementation == candidate.implementation;
    if (problem.implementation != Implementation::kAuto && !is_forced) continue;
    reasons += sentence(reasons.empty() ? "" : "; ", name(candidate.implementation), ": ",
                        candidate.reason);
  }
  throw Error(Status::kUnsupported,
              sentence("no ", problem.implementation == Implementation::kAuto ? "" : "such ",
                       "implementation takes this ", name(problem.operation), " problem on ",
                       gpu.name, " (", reasons, ")"));
}

void check_implementation(const Problem& problem) {
  if (problem.implementation != Implementation::kAuto) gpu_implementation(problem.implementation);
}

Plan plan_of(const Problem& problem, Implementation implementation, const GpuPlan& decision) {
  Plan plan;
  plan.problem = problem;
  plan.implementation = implementation;
  plan.tile = decision.tile;
  if (decision.workspace_bytes > 0) {
    plan.workspace_bytes = decision.workspace_bytes + kWorkspaceAlignment - 1;
  }
  return plan;
}

// Plans and compiles with one implementation; false where it cannot, with the reason as tried.
bool try_with(const GpuImplementation& row, const Problem& problem, PreparedPlan& prepared) {
  Candidate& candidate = prepared.tried.emplace_back(Candidate{row.implementation, false, ""});
  PlanOrRefusal made = plan_with(row, problem, prepared.gpu);
  candidate.reason = made.refusal;
  if (made.plan == nullptr) return false;
  prepared.decision = std::move(made.plan);
  prepared.kernels.clear();
  prepared.reports.clear();
  try {
    check_blocks(prepared.decision->launches);
    prepared.device != nullptr ? load(prepared) : compile(prepared);
  } catch (const Rejected& finding) {
    candidate.reason = finding.what();
    return false;
  }
  const bool is_forced = problem.implementation != Implementation::kAuto;
  candidate.accepted = true;
  candidate.reason = sentence(is_forced ? "asked for by name; " : "", row.merit);
  prepared.plan = plan_of(problem, row.implementation, *prepared.decision);
  return true;
}

PreparedPlan prepare_on(const Problem& problem, const Gpu& gpu, const Device* device) {
  check_implementation(problem);
  PreparedPlan prepared;
  prepared.gpu = gpu;
  prepared.device = device;
  for (const GpuImplementation& row : gpu_implementations()) {
    if (try_with(row, problem, prepared)) return prepared;
  }
  refuse(prepared.tried, problem, gpu);
}

}  // namespace

PreparedPlan prepare_plan(const Problem& problem, const Device& device) {
  return prepare_on(problem, device.facts(), &device);
}

PreparedPlan prepare_plan(const Problem& problem, const Gpu& gpu) {
  return prepare_on(problem, gpu, nullptr);
}

std::vector<BundleEntry> bundle_entries(const PreparedPlan& prepared, const Problem& problem) {
  const std::string arch = arch_name(prepared.gpu.compute_capability);
  std::vector<BundleEntry> entries;
  const auto add = [&](const KernelSpec& spec) {
    entries.push_back({spec, arch, machine_code(spec, arch)});
  };
  for (const KernelLaunch& launch : prepared.decision->launches) add(launch.spec);
  if (!problem.has_caches()) return entries;
  for (const KernelSpec& spec : append_specs_of(problem.dtype, problem.kv_dtype())) add(spec);
  for (const KernelSpec& spec : merge_specs()) add(spec);
  for (const KernelSpec& spec : quantise_specs_of(problem)) add(spec);
  if (!problem.slots) return entries;
  for (const KernelSpec& spec : indexer_specs_of(problem.dtype, problem.kv_rows)) add(spec);
  return entries;
}

}  // namespace fulmen::gpu
