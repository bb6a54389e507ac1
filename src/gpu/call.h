// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One run of a plan: where its arrays are now, its kernels on the device, and how they are
// launched.
#pragma once

#include <span>

#include "core/problem.h"
#include "gpu/driver/launch.h"
#include "gpu/expression_text.h"

namespace fulmen::gpu {

// One kernel of a plan, compiled and loaded.
struct PreparedKernel {
  const LoadedKernel* kernel;
  LaunchShape shape;
};

struct Call {
  const Problem& problem;  // the plan's, with the arrays of this run
  const Driver& driver;
  std::span<const PreparedKernel> kernels;  // in the order of GpuPlan::launches
  char* workspace;                          // at a multiple of 256; null where the plan needs none
  FaultBytes* faults;                       // of the device
  CUstream stream;
  double* capture_sums = nullptr;  // of gradients of what an expression reads

  // Enqueues kernel number `index`; `params` is read before this returns.
  template <class Params>
  void launch(std::size_t index, const Params& params) const {
    const LoadedKernel& kernel = *kernels[index].kernel;
    if (!kernel.spec.reads_expression) {
      return gpu::launch(kernel, kernels[index].shape, &params, stream);
    }
    const WithExpression<Params> all{params, expression_params(problem, capture_sums, faults)};
    gpu::launch(kernel, kernels[index].shape, &all, stream);
  }
};

}  // namespace fulmen::gpu
