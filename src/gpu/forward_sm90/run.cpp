// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps, params and launches of forward_sm90.

#include "gpu/forward_sm90/run.h"

#include "gpu/forward_sm90/plan.h"
#include "gpu/forward_sm90/specs.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

constexpr double kLog2OfE = 1.4426950408889634;

}  // namespace

ForwardBoxes sm90_forward_boxes(const Arrays& arrays, const ForwardSm90Config& config) {
  ForwardBoxes boxes{tensor_box(arrays[Array::kQ], config.tile_rows()),
                     tensor_box(arrays[Array::kK], config.kv_rows),
                     tensor_box(arrays[Array::kV], config.kv_rows),
                     tensor_box(arrays[Array::kO], 64)};
  for (TensorBox* box : {&boxes.q, &boxes.k, &boxes.v, &boxes.o}) box->swizzle = config.swizzle;
  if (!config.swizzle) boxes.q.box_dims = boxes.k.box_dims = boxes.v.box_dims = 8;
  return boxes;
}

ForwardParams sm90_forward_params(const Problem& problem, const Gpu& gpu,
                                  const ForwardSm90Config& config, u32* next_block, u32* faults) {
  const auto length = [](i64 rows) { return static_cast<i32>(rows); };
  const i64 shift =
      problem.alignment == Alignment::kBottomRight ? problem.kv_rows - problem.q_rows : 0;
  ForwardParams params{};
  params.batch = length(problem.num_sequences);
  params.heads_q = length(problem.heads_q);
  params.heads_kv = length(problem.heads_kv);
  params.shape = {length(problem.q_rows), length(problem.kv_rows), length(shift)};
  params.mask = problem.mask;
  params.scale_log2 = static_cast<float>(problem.score_map.scale * kLog2OfE);
  params.num_q_blocks = static_cast<i32>(ceil_div(problem.q_rows, config.q_rows()));
  params.heads_per_group = sm90_heads_per_group(problem, gpu);
  params.next_block = next_block;
  params.scale = static_cast<float>(problem.score_map.scale);
  if (config.softcap) {
    params.softcap_in =
        static_cast<float>(2 * problem.score_map.scale / problem.score_map.softcap * kLog2OfE);
    params.softcap_out = static_cast<float>(problem.score_map.softcap * kLog2OfE);
  }
  params.kept_scale = static_cast<float>(problem.dropout.kept_scale());
  params.attention = attention_params(problem, faults);
  return params;
}

std::vector<KernelLaunch> sm90_forward_launches(const Problem& problem, const Gpu& gpu) {
  const ForwardSm90Config config = sm90_forward_config(problem);
  KernelLaunch launch{sm90_forward_spec(config)};
  launch.num_blocks = min<i64>(sm90_max_q_blocks(problem, config), gpu.num_multiprocessors);
  launch.overlap_previous = true;  // as far as it sets up its barriers
  if (!config.skips_documents) return {launch};
  KernelLaunch ranges{sm90_key_ranges_spec(config)};
  ranges.num_blocks =
      ceil_div(static_cast<i64>(sm90_num_key_ranges(problem, config)), kKeyRangeThreads);
  return {ranges, launch};
}

void sm90_forward_run(const Call& call) {
  if (call.kernels.back().shape.num_blocks == 0) return;
  const Problem& problem = call.problem;
  const ForwardSm90Config config = sm90_forward_config(problem);
  const ForwardBoxes boxes = sm90_forward_boxes(problem.arrays, config);
  ForwardArguments arguments{};
  encode(call.driver, boxes.q, arguments.maps.q);
  encode(call.driver, boxes.k, arguments.maps.k);
  encode(call.driver, boxes.v, arguments.maps.v);
  if (config.stage_output) encode(call.driver, boxes.o, arguments.maps.o);
  u32* const counter = sm90_counts_blocks(problem, call.gpu, config)
                           ? reinterpret_cast<u32*>(call.workspace)
                           : nullptr;
  arguments.params = sm90_forward_params(problem, call.gpu, config, counter, call.faults);
  if (config.skips_documents) {
    arguments.params.key_ranges = reinterpret_cast<IdRange*>(call.workspace + kKeyRangesOffset);
    call.launch(0, arguments);
  }
  call.launch(call.kernels.size() - 1, arguments);
}

}  // namespace fulmen::gpu
