// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the general implementations, naive and simt, have in common: kernels on
// CUDA cores, with an FmaConfig, given AttentionParams. Both take every option;
// they differ in speed. merge.h has one such kernel, with parameters of its own.
#pragma once

#include <string>

#include "gpu/gpu_plan.h"
#include "kernels/params.h"
#include "kernels/simt/config.h"

namespace fulmen::gpu {

inline constexpr DType kFloatTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16,
                                        DType::kBFloat16};

// entry: "backward_naive_dq", which is defined in kernels/<file>.cuh.
KernelSpec fma_spec(const std::string& file, const std::string& entry, const FmaConfig& config);

// A kernel with one thread a task.
KernelLaunch fma_launch(const KernelSpec& spec, i64 num_tasks);

// A plan whose kernels all get AttentionParams.
class FmaPlan final : public GpuPlan {
 public:
  explicit FmaPlan(const Problem& problem);
  void run(const Call& call) const override;

  AttentionParams params;  // but for pointers
};

// Names the workspace of a backward pass of simt (gpu/simt/plan.h).
void set_row_terms(AttentionParams& params, u8* workspace);

}  // namespace fulmen::gpu
