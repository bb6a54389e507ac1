// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The implementations on GPUs, as the run time sees them: which kernels a problem takes, and how a
// run launches them. An implementation is a row of this table and a row of the table in
// gpu/gpu_implementations.h, which says what it refuses and needs.
#pragma once

#include <span>
#include <vector>

#include "core/problem.h"
#include "gpu/driver/launch.h"
#include "kernels/params.h"

namespace fulmen::gpu {

// One kernel and how a call launches it: the same for every run of a plan.
struct KernelLaunch {
  KernelSpec spec;
  i64 num_blocks = 0;
  unsigned cluster_size = 1;
  bool overlap_previous = false;

  LaunchShape shape() const { return {num_blocks, cluster_size, overlap_previous}; }
};

// One of them, compiled and loaded.
struct PreparedKernel {
  const LoadedKernel* kernel;
  LaunchShape shape;
};

// One run.
struct Call {
  const Problem& problem;  // with the arrays of this run
  const Gpu& gpu;
  const Driver& driver;
  std::span<const PreparedKernel> kernels;  // in the order of the implementation's launches()
  char* workspace;                          // as gpu/gpu_implementations.h says; null where 0
  u32* faults;                              // kernels set bits of Fault in it
  CUstream stream;

  // Enqueues kernel number `index`; `params` is read before this returns.
  template <class Params>
  void launch(std::size_t index, const Params& params) const {
    gpu::launch(*kernels[index].kernel, kernels[index].shape, &params, stream);
  }
};

struct Runner {
  Implementation implementation;
  // In the order in which a run launches them; from extents alone, since pointers may be unknown.
  std::vector<KernelLaunch> (*launches)(const Problem& problem, const Gpu& gpu);
  // Enqueues a run. Allocates nothing, waits for nothing, reads no device memory.
  void (*run)(const Call& call);
};

const Runner& runner_of(Implementation implementation);

}  // namespace fulmen::gpu
