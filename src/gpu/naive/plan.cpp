// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Launches of naive, one kernel a gradient.

#include "gpu/naive/plan.h"

#include "gpu/fma.h"
#include "gpu/params.h"
#include "kernels/common/tile_tasks.cuh"

namespace fulmen::gpu {

std::vector<KernelLaunch> naive_forward(const AttentionParams& params) {
  return {fma_launch(fma_spec("naive/forward_naive", "forward_naive", {.dtype = params.q.dtype}),
                     forward_naive_tasks(params))};
}

std::vector<KernelLaunch> naive_backward(const AttentionParams& params) {
  std::vector<KernelLaunch> launches;
  const auto add = [&](const char* entry, i64 num_tasks) {
    launches.push_back(
        fma_launch(fma_spec("naive/backward_naive", entry, {.dtype = params.q.dtype}), num_tasks));
  };
  if (params.dq.present()) add("backward_naive_dq", backward_naive_dq_tasks(params));
  if (dkdv_chunks(params) > 0) add("backward_naive_dkdv", backward_naive_dkdv_tasks(params));
  if (params.dbias.present()) add("backward_naive_dbias", backward_naive_dbias_tasks(params));
  if (params.dsinks.present()) add("backward_naive_dsinks", params.heads_q);
  return launches;
}

PlanOrRefusal plan_naive(const Problem& problem, const Gpu&) {
  auto plan = std::make_unique<FmaPlan>(problem);
  plan->launches = problem.operation == Operation::kForward ? naive_forward(plan->params)
                                                            : naive_backward(plan->params);
  return plan;
}

std::vector<std::vector<KernelSpec>> naive_specs() {
  const auto of_all_dtypes = [](const char* file, const char* entry) {
    std::vector<KernelSpec> specs;
    for (const DType dtype : kFloatTypes) specs.push_back(fma_spec(file, entry, {.dtype = dtype}));
    return specs;
  };
  return {of_all_dtypes("naive/forward_naive", "forward_naive"),
          of_all_dtypes("naive/backward_naive", "backward_naive_dq"),
          of_all_dtypes("naive/backward_naive", "backward_naive_dkdv"),
          of_all_dtypes("naive/backward_naive", "backward_naive_dbias"),
          of_all_dtypes("naive/backward_naive", "backward_naive_dsinks")};
}

}  // namespace fulmen::gpu
