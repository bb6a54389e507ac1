// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Down the list of candidates, to the first whose kernels pass the gate.

#include "gpu/prepared_plan.h"

#include <algorithm>
#include <future>

#include "gpu/gpu_implementations.h"

namespace fulmen::gpu {
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
// finds them in the cache. Failures are left to it too.
void compile_together(const std::vector<KernelLaunch>& launches, const std::string& arch) {
  if (launches.size() < 2) return;
  std::vector<std::future<void>> all;
  for (const KernelLaunch& launch : launches) {
    all.push_back(std::async(std::launch::async, [&launch, &arch] {
      try {
        machine_code(launch.spec, arch);
      } catch (const Error&) {  // said by who asks next
      }
    }));
  }
}

// Compiles and loads the kernels of one implementation.
void load(PreparedPlan& prepared, const std::vector<KernelLaunch>& launches) {
  compile_together(launches, prepared.device->arch());
  for (const KernelLaunch& launch : launches) {
    const LoadedKernel& kernel = prepare(*prepared.device, launch.spec);
    prepared.kernels.push_back({&kernel, launch.shape()});
    prepared.report.kernels.push_back(report_of(launch));
    add_use(prepared.report.kernels.back(), kernel.use, kernel.origin, kernel.blocks_resident);
  }
}

// Compiles them where that is possible.
void compile(PreparedPlan& prepared, const std::vector<KernelLaunch>& launches, const Gpu& gpu) {
  compile_together(launches, arch_name(gpu.compute_capability));
  for (const KernelLaunch& launch : launches) {
    KernelReport& report = prepared.report.kernels.emplace_back(report_of(launch));
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
      prepared.report.notes = {sentence("not compiled: ", error.what())};
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

// What remains was not needed.
void close(PreparedPlan& prepared) {
  const Implementation chosen = prepared.plan.implementation;
  for (Candidate& candidate : prepared.report.candidates) {
    if (!candidate.accepted || candidate.implementation == chosen) continue;
    candidate.accepted = false;
    candidate.reason = sentence("slower than ", name(chosen), "; ", candidate.reason);
  }
}

PreparedPlan prepare_on(const Problem& problem, const Gpu& gpu, const Device* device) {
  PreparedPlan prepared;
  prepared.device = device;
  prepared.report.candidates = candidates(problem, gpu);
  if (device != nullptr) prepared.report.index = device->ordinal();
  for (Candidate& candidate : prepared.report.candidates) {
    if (!candidate.accepted) continue;
    prepared.runner = &runner_of(candidate.implementation);
    prepared.kernels.clear();
    prepared.report.kernels.clear();
    try {
      auto launches = prepared.runner->launches(problem, gpu);
      for (KernelLaunch& launch : launches) launch.spec.is_ablation = problem.without != 0;
      check_blocks(launches);
      device != nullptr ? load(prepared, launches) : compile(prepared, launches, gpu);
    } catch (const Rejected& finding) {
      candidate.accepted = false;
      candidate.reason = finding.what();
      continue;
    }
    const GpuNeeds needs = gpu_implementation(candidate.implementation).needs(problem, gpu);
    prepared.plan = plan_of(problem, gpu, candidate.implementation);
    prepared.zeroed_bytes = needs.zeroed_bytes;
    prepared.alignment_bytes = needs.alignment_bytes;
    close(prepared);
    return prepared;
  }
  refuse(prepared.report.candidates, problem, gpu);
}

}  // namespace

PreparedPlan prepare_plan(const Problem& problem, const Device& device) {
  return prepare_on(problem, device.facts(), &device);
}

PreparedPlan prepare_plan(const Problem& problem, const Gpu& gpu) {
  return prepare_on(problem, gpu, nullptr);
}

std::string explain(const PreparedPlan& prepared) {
  GpuReport report = prepared.report;
  const std::string note = kernel_cache().note();
  if (!note.empty()) report.notes.push_back(note);
  return fulmen::explain(prepared.plan, report);
}

std::vector<BundleEntry> bundle_entries(const PreparedPlan& prepared) {
  const Gpu& gpu = prepared.plan.gpu;
  const std::string arch = arch_name(gpu.compute_capability);
  std::vector<BundleEntry> entries;
  for (const KernelLaunch& launch : prepared.runner->launches(prepared.plan.problem, gpu)) {
    entries.push_back({launch.spec, arch, machine_code(launch.spec, arch)});
  }
  return entries;
}

}  // namespace fulmen::gpu
