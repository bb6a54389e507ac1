// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The decision of one implementation for a problem on a GPU: configs, launches, workspace layout
// and the parameters of its kernels. Made once, by plan(); a run only fills in pointers and
// launches. Pure: a file that decides includes this and none of gpu/driver.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"
#include "gpu/jit/kernel_spec.h"
#include "plan/gpu.h"
#include "plan/plan.h"

namespace fulmen::gpu {

struct Call;  // gpu/call.h

// One kernel and how a run launches it: the same for every run of a plan.
struct KernelLaunch {
  KernelSpec spec;
  i64 num_blocks = 0;
  unsigned cluster_size = 1;
  bool overlap_previous = false;

  LaunchShape shape() const { return {num_blocks, cluster_size, overlap_previous}; }
};

// One of the tiles that a plan compared, as data for explain().
struct TileCandidate {
  Tile tile;
  bool chosen = false;
  std::string reason;  // one clause: why it was chosen or passed over
};

// Families derive their own: it holds their configs, a template of the kernels' parameters with
// everything but pointers, tensor boxes and offsets into the workspace.
class GpuPlan {
 public:
  GpuPlan() = default;
  GpuPlan(const GpuPlan&) = delete;
  GpuPlan& operator=(const GpuPlan&) = delete;
  virtual ~GpuPlan() = default;

  Tile tile;                            // zero where there is none
  size_t workspace_bytes = 0;           // of memory at a multiple of kWorkspaceAlignment
  size_t zeroed_bytes = 0;              // the first so many are zero when the first kernel starts
  i64 alignment_bytes = 1;              // what every pointer must be a multiple of
  std::vector<KernelLaunch> launches;   // in the order in which a run launches them
  std::vector<TileCandidate> compared;  // in order; may be empty
  std::string note;                     // a sentence for explain(), or ""

  // Enqueues a run. Derives no config, allocates nothing, waits for nothing, reads no device
  // memory.
  virtual void run(const Call& call) const = 0;
};

// A plan, or why the implementation cannot: one clause.
struct PlanOrRefusal {
  std::unique_ptr<GpuPlan> plan;
  std::string refusal;

  PlanOrRefusal(std::string why_not) : refusal(std::move(why_not)) {}
  PlanOrRefusal(const char* why_not) : refusal(why_not) {}
  template <class Derived>
  PlanOrRefusal(std::unique_ptr<Derived> made) : plan(std::move(made)) {}
};

// Workspaces are used from a multiple of this on.
inline constexpr size_t kWorkspaceAlignment = 256;

// Whether a problem is to be computed without an optimisation.
constexpr bool leaves_out(const Problem& problem, Optimisation optimisation) {
  return (problem.without & static_cast<u32>(optimisation)) != 0;
}

// How many configs this thread has derived from problems. Functions that derive one add to it; by
// test a plan makes one for each of its passes, and a run none.
inline int& config_derivations() {
  thread_local int count = 0;
  return count;
}

}  // namespace fulmen::gpu
