// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Launches of backward_preprocess_sm90, backward_sm90, backward_dq_sm90 and backward_fallback_sm90.

#include "gpu/backward_sm90/run.h"

#include "gpu/backward_sm90/specs.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/forward_sm90/run.h"
#include "gpu/forward_sm90/specs.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"
#include "gpu/sm90_problem.h"

namespace fulmen::gpu {

std::vector<KernelLaunch> sm90_backward_launches(const Problem& problem, const Gpu& gpu) {
  const Sm90BackwardPlan plan = sm90_backward_plan(problem, gpu);
  KernelLaunch prepare{sm90_preprocess_spec(sm90_preprocess_config(problem))};
  prepare.num_blocks =
      i64{gpu.num_multiprocessors} * BackwardPreprocessConfig::kBlocksPerMultiprocessor;
  std::vector<KernelLaunch> launches;
  const auto add_ranges = [&](i64 count, i32 block_rows) {
    if (count == 0) return;
    const ForwardSm90Config config{.kv_rows = block_rows, .sequences = reads_sequences(problem)};
    launches.push_back({sm90_key_ranges_spec(config), ceil_div(count, kKeyRangeThreads)});
  };
  add_ranges(plan.num_key_ranges, sm90_dq_config(problem).kv_rows);
  if (sm90_has_document_blocks(problem)) {
    add_ranges(plan.num_query_ranges, sm90_backward_configs(problem)[0].q_rows);
  }
  launches.push_back(prepare);
  const auto add = [&](KernelSpec spec, i64 num_blocks) {
    launches.push_back({std::move(spec), min<i64>(num_blocks, gpu.num_multiprocessors)});
    launches.back().overlap_previous = true;
  };
  for (const BackwardSm90Config& config : sm90_backward_configs(problem)) {
    add(sm90_backward_spec(config), plan.num_tiles());
  }
  if (sm90_separate_dq(problem)) {
    const ForwardSm90Config config = sm90_dq_config(problem);
    add(sm90_dq_spec(config), sm90_max_q_blocks(problem, config));
  }
  if (sm90_hides_pairs(problem)) add(sm90_fallback_spec({problem.dtype}), gpu.num_multiprocessors);
  if (problem.has(Array::kDSinks)) {
    const AttentionParams rest = side_gradient_params(problem);
    for (KernelLaunch& launch : simt_backward(rest, gpu.shared_bytes_per_block)) {
      launches.push_back(std::move(launch));
    }
  }
  return launches;
}

void sm90_backward_run(const Call& call) {
  const Problem& problem = call.problem;
  const Sm90BackwardPlan plan = sm90_backward_plan(problem, call.gpu);
  std::size_t next = 0;
  if (plan.num_key_ranges > 0) {
    const BackwardDqParams dq = sm90_dq_params(problem, call.gpu, plan, call.workspace);
    call.launch(next++, ForwardArguments{{}, dq.forward});
  }
  if (plan.num_query_ranges > 0) {
    call.launch(next++, sm90_query_ranges_arguments(problem, plan, call.workspace));
  }
  call.launch(next++, sm90_preprocess_params(problem, plan, call.workspace, call.faults));
  BackwardParams params = sm90_backward_params(problem, plan, call.workspace);
  const auto map = [&](Array array, i32 box_rows, TensorMap& map) {
    if (!problem.has(array)) return;
    encode(call.driver, tensor_box(problem.arrays[array], box_rows), map);
  };
  for (const BackwardSm90Config& config : sm90_backward_configs(problem)) {
    map(Array::kQ, config.q_rows, params.maps.q);
    map(Array::kK, config.kv_rows(), params.maps.k);
    map(Array::kV, config.kv_rows(), params.maps.v);
    map(Array::kDOut, config.q_rows, params.maps.dout);
    map(Array::kDK, 64, params.maps.dk);
    map(Array::kDV, 64, params.maps.dv);
    call.launch(next++, params);
    ++params.next_tile;
    params.comes_first = false;
  }
  if (sm90_separate_dq(problem)) {
    const ForwardSm90Config config = sm90_dq_config(problem);
    BackwardDqParams dq = sm90_dq_params(problem, call.gpu, plan, call.workspace);
    map(Array::kQ, 64, dq.maps.q);
    map(Array::kK, config.kv_rows, dq.maps.k);
    map(Array::kV, config.kv_rows, dq.maps.v);
    map(Array::kDOut, 64, dq.maps.dout);
    call.launch(next++, dq);
  }
  if (sm90_hides_pairs(problem)) {
    call.launch(next++, BackwardFallbackParams{params.nonfinite, attention_params(problem)});
  }
  if (next < call.kernels.size()) call.launch(next, side_gradient_params(problem, call.faults));
}

}  // namespace fulmen::gpu
