// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs and grid sizes of the naive kernels.

#include "cuda/fma_kernels.h"

#include "core/dtype.h"
#include "kernels/fma_config.h"
#include "kernels/naive_tasks.cuh"

namespace fulmen::cuda {
namespace {

constexpr DType kFloatTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16,
                                 DType::kBFloat16};

// "fulmen::DType::kFloat32"
std::string dtype_text(DType dtype) {
  constexpr const char* kNames[] = {"kNone",     "kFloat64", "kFloat32", "kFloat16",
                                    "kBFloat16", "kBool",    "kInt32",   "kInt64"};
  return sentence("fulmen::DType::", kNames[static_cast<int>(dtype)]);
}

// entry: "forward_naive", defined in kernels/<file>.cuh.
KernelSpec naive_spec(const std::string& file, const std::string& entry, DType dtype) {
  KernelSpec spec;
  spec.name = sentence(entry, "_", name(dtype));
  spec.include = sentence("kernels/", file, ".cuh");
  spec.function = "fulmen::" + entry;
  spec.config_type = "fulmen::FmaConfig";
  spec.num_threads = FmaConfig{}.num_threads;
  spec.config = {{"dtype", dtype_text(dtype)}, {"num_threads", std::to_string(spec.num_threads)}};
  spec.params_type = "fulmen::AttentionParams";
  spec.params_bytes = sizeof(AttentionParams);
  return spec;
}

KernelLaunch naive_launch(const std::string& file, const std::string& entry, DType dtype,
                          i64 num_tasks) {
  KernelLaunch launch{naive_spec(file, entry, dtype), 0};
  launch.num_blocks = ceil_div(num_tasks, launch.spec.num_threads);
  return launch;
}

}  // namespace

std::vector<KernelLaunch> naive_forward(const AttentionParams& params) {
  return {naive_launch("forward_naive", "forward_naive", params.q.dtype,
                       forward_naive_tasks(params))};
}

std::vector<KernelLaunch> naive_backward(const AttentionParams& params) {
  std::vector<KernelLaunch> launches;
  const auto add = [&](const char* entry, i64 num_tasks) {
    launches.push_back(naive_launch("backward_naive", entry, params.q.dtype, num_tasks));
  };
  if (params.dq.present()) add("backward_naive_dq", backward_naive_dq_tasks(params));
  if (dkdv_chunks(params) > 0) add("backward_naive_dkdv", backward_naive_dkdv_tasks(params));
  if (params.dbias.present()) add("backward_naive_dbias", backward_naive_dbias_tasks(params));
  if (params.dsinks.present()) add("backward_naive_dsinks", params.heads_q);
  return launches;
}

std::vector<std::vector<KernelSpec>> naive_specs() {
  const auto of_all_dtypes = [](const char* file, const char* entry) {
    std::vector<KernelSpec> specs;
    for (const DType dtype : kFloatTypes) specs.push_back(naive_spec(file, entry, dtype));
    return specs;
  };
  return {of_all_dtypes("forward_naive", "forward_naive"),
          of_all_dtypes("backward_naive", "backward_naive_dq"),
          of_all_dtypes("backward_naive", "backward_naive_dkdv"),
          of_all_dtypes("backward_naive", "backward_naive_dbias"),
          of_all_dtypes("backward_naive", "backward_naive_dsinks")};
}

}  // namespace fulmen::cuda
