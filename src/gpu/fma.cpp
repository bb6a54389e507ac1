// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs without tiles, and a run.

#include "gpu/fma.h"

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/jit/spec_of.h"
#include "gpu/params.h"

namespace fulmen::gpu {

KernelSpec fma_spec(const std::string& file, const std::string& entry, const FmaConfig& config) {
  std::string distinction = name(config.dtype);
  if (config.rows > 0) {
    distinction += sentence("_", config.rows, "x", config.columns, "_d", config.max_dim_qk, "_",
                            config.max_dim_v);
  }
  if (config.adds_dq) distinction += "_adds_dq";
  KernelSpec spec = spec_of<AttentionParams>(file, entry, distinction, config);
  spec.num_threads = config.num_threads;
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
