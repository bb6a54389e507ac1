// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The implementations on GPUs: one table, which says of each how it plans a pass. A new
// implementation is a row of it. And the first of them that takes a problem and whose kernels pass
// the gate, compiled, and loaded where its device is here: what a run needs, so that it only fills
// parameters and launches.
#pragma once

#include <span>

#include "gpu/call.h"
#include "gpu/gpu_plan.h"
#include "gpu/jit/bundle.h"
#include "plan/plan.h"

namespace fulmen::gpu {

// One implementation's forward or backward.
struct Pass {
  // Called once where the implementation is tried, with pointers that may be unknown.
  PlanOrRefusal (*plan)(const Problem& problem, const Gpu& gpu);
  // The optimisations that its kernels for a problem can be made without; null: none. Called only
  // for a problem that leaves some out.
  u32 (*switches)(const Problem& problem, const Gpu& gpu) = nullptr;
  bool chooses_tiles = false;      // a problem may name a tile that is not the table's
  bool takes_caches = false;       // page_table, page_indptr, kv_start, positions, tree
  bool takes_quantised = false;    // k and v of 8 bits, k_scale, v_scale
  bool takes_slots = false;        // a page_table of slots
  bool takes_blocks = false;       // lists of blocks
  bool takes_expressions = false;  // a score or a mask of the user's
  bool takes_fp8 = false;          // knows precision "fp8"; others are asked without it
  bool accumulates = false;        // forward: merges its result with what o and stats hold
};

struct GpuImplementation {
  Implementation implementation;
  const char* merit;          // one clause
  bool tensor_cores = false;  // its products run on them
  Pass forward;
  Pass backward;
};

// In order of preference.
std::span<const GpuImplementation> gpu_implementations();

const GpuImplementation& gpu_implementation(Implementation implementation);

// The plan of one implementation, or why it is not used: another one was asked for, it refuses the
// problem, has no switch for an optimisation, no choice of tiles, or needs aligned pointers.
PlanOrRefusal plan_with(const GpuImplementation& row, const Problem& problem, const Gpu& gpu);

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

// The machine code of a plan, for a bundle; where its problem is over caches, that of appends to
// them and of merges as well.
std::vector<BundleEntry> bundle_entries(const PreparedPlan& prepared, const Problem& problem);

}  // namespace fulmen::gpu
