// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs without tiles, and a run.

#include "gpu/fma.h"

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/jit/spec_of.h"
#include "gpu/params.h"
#include "kernels/common/fma_config.h"

namespace fulmen::gpu {

KernelSpec fma_spec(const std::string& file, const std::string& entry, DType dtype) {
  constexpr int kThreads = FmaConfig{}.num_threads;
  KernelSpec spec = spec_of("", entry, name(dtype), FULMEN_KERNEL_TYPES(FmaConfig, AttentionParams),
                            {{"dtype", text(dtype)}, {"num_threads", text(kThreads)}});
  spec.include = sentence("kernels/", file, ".cuh");
  spec.num_threads = kThreads;
  return spec;
}

KernelLaunch fma_launch(const KernelSpec& spec, i64 num_tasks) {
  return {spec, ceil_div(num_tasks, spec.num_threads)};
}

FmaPlan::FmaPlan(const Problem& problem) : params(attention_params(problem)) {}

void FmaPlan::run(const Call& call) const {
  AttentionParams bound = params;
  bind_params(bound, call.problem, call.faults);
  if (call.workspace != nullptr) set_row_terms(bound, reinterpret_cast<u8*>(call.workspace));
  for (std::size_t i = 0; i < call.kernels.size(); ++i) call.launch(i, bound);
}

void set_row_terms(AttentionParams& params, u8* workspace) {
  const i64 rows = params.q_rows;
  const DType real = params.q.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  params.row_terms = {workspace, {params.heads_q * rows * 4, rows * 4, 4, 1}, real};
}

}  // namespace fulmen::gpu
