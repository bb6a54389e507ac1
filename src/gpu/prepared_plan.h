// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A plan whose kernels are compiled, and loaded where its device is here: what a run needs, so that
// it only fills parameters and launches.
#pragma once

#include "gpu/call.h"
#include "gpu/gpu_plan.h"
#include "gpu/jit/bundle.h"
#include "plan/plan.h"

namespace fulmen::gpu {

// What is known of a GPU plan once its kernels were compiled.
struct KernelReport {
  std::string name;
  bool compiled = false;  // the six below are known
  InstructionCounts instructions;
  int registers = 0;
  size_t spill_bytes = 0;
  int blocks_resident = 0;  // on one multiprocessor
  std::string origin;       // where the machine code came from
  std::vector<std::string> findings;
  size_t shared_bytes = 0;
  int num_threads = 0;
  i64 num_blocks = 0;
};

struct PreparedPlan {
  Plan plan;
  Gpu gpu;
  const Device* device = nullptr;  // null: the plan is for a GPU that is not here
  std::unique_ptr<const GpuPlan> decision;
  std::vector<PreparedKernel> kernels;  // empty where there is no device
  std::vector<KernelReport> reports;    // of each kernel
  std::vector<Candidate> tried;         // in order of preference; the last one is chosen
  std::string note;                     // of the compiler; or ""
};

// The first implementation that takes the problem and whose kernels compile as they must. Throws
// Error: kUnsupported with every reason when there is none, and what compiling and loading throw.
PreparedPlan prepare_plan(const Problem& problem, const Device& device);

// Likewise for a GPU that is not here. Where there is no compiler, or none for its architecture,
// the plan says so in a note.
PreparedPlan prepare_plan(const Problem& problem, const Gpu& gpu);

// The plan as JSON, with what there is to say of the cache.
std::string explain(const PreparedPlan& prepared);

// The machine code of a plan, for a bundle.
std::vector<BundleEntry> bundle_entries(const PreparedPlan& prepared);

}  // namespace fulmen::gpu
