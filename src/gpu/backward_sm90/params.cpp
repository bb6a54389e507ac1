// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the Hopper backward are given by value, but for the tensor maps.

#include "gpu/params.h"

#include "gpu/backward_sm90/run.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/forward_sm90/run.h"
#include "gpu/sm90_problem.h"

namespace fulmen::gpu {
namespace {

constexpr double kLog2OfNapier = 1.4426950408889634;

}  // namespace

BackwardPreprocessParams sm90_preprocess_params(const Problem& problem,
                                                const Sm90BackwardPlan& plan, char* workspace,
                                                u32* faults) {
  BackwardPreprocessParams params{};
  params.heads_q = static_cast<i32>(problem.heads_q);
  params.q_len = static_cast<i32>(problem.q_rows);
  params.padded_q_rows = static_cast<i32>(plan.padded_rows_per_head);
  params.dim_v = static_cast<i32>(problem.dim_v);
  params.num_rows = static_cast<i32>(plan.num_rows);
  params.lse_log2 = reinterpret_cast<float*>(workspace + plan.rows_at);
  params.delta = reinterpret_cast<float*>(workspace + plan.delta_at);
  const bool apart = reads_sequences(problem);  // sums are cleared with their rows
  const i64 zeros_at = apart ? plan.counters_at : 0;
  params.zeros = reinterpret_cast<u32*>(workspace + zeros_at);
  params.num_zeros = (plan.zeroed_bytes - zeros_at) / 16;
  params.sums = reinterpret_cast<float*>(workspace);
  if (apart) params.sum_dims = static_cast<i32>(plan.counters_at / 4 / plan.num_rows);
  params.bounds = {static_cast<i32>(problem.max_q), static_cast<i32>(problem.max_kv), 0};
  params.kv_rows = static_cast<i32>(plan.kv_rows);
  params.key_block_infos = reinterpret_cast<KeyBlockInfo*>(workspace + plan.key_blocks_at);
  if (sm90_has_document_blocks(problem)) {
    params.query_ranges = reinterpret_cast<const IdRange*>(workspace + plan.query_ranges_at);
    params.q_rows = sm90_backward_configs(problem)[0].q_rows;
    params.document_blocks = reinterpret_cast<DocumentBlocks*>(workspace + plan.document_blocks_at);
  }
  params.attention = attention_params(problem, faults);
  return params;
}

BackwardParams sm90_backward_params(const Problem& problem, const Sm90BackwardPlan& plan,
                                    char* workspace) {
  const i64 shift =
      problem.alignment == Alignment::kBottomRight ? problem.kv_rows - problem.q_rows : 0;
  BackwardParams params{};
  params.batch = static_cast<i32>(problem.num_sequences);
  params.heads_q = static_cast<i32>(problem.heads_q);
  params.heads_kv = static_cast<i32>(problem.heads_kv);
  params.group_size = static_cast<i32>(problem.group_size());
  params.shape = {static_cast<i32>(problem.max_q), static_cast<i32>(problem.max_kv),
                  static_cast<i32>(shift)};
  params.mask = problem.mask;
  params.scale = static_cast<float>(problem.score_map.scale);
  params.scale_log2 = static_cast<float>(problem.score_map.scale * kLog2OfNapier);
  params.num_kv_blocks = static_cast<i32>(plan.num_kv_blocks);
  params.num_conversion_blocks = static_cast<i32>(plan.num_conversion_blocks);
  params.heads_per_group = plan.schedule.heads_per_group;
  params.last_heads = plan.schedule.last_heads;
  params.num_accum_slots = plan.schedule.num_accum_slots;
  params.lag = plan.schedule.lag;
  params.num_split = static_cast<i32>(plan.num_split);
  params.num_parts = static_cast<i32>(plan.num_parts);
  params.part_sums = reinterpret_cast<float*>(workspace + plan.part_sums_at);
  params.padded_rows_per_head = plan.padded_rows_per_head;
  params.dim_qk = static_cast<i32>(problem.dim_qk);
  params.lse_log2 = reinterpret_cast<const float*>(workspace + plan.rows_at);
  params.delta = reinterpret_cast<const float*>(workspace + plan.delta_at);
  params.dq_accum = reinterpret_cast<float*>(workspace);
  u32* const counters = reinterpret_cast<u32*>(workspace + plan.counters_at);
  params.next_tile = counters;  // of the first launch
  params.done = counters + Sm90BackwardPlan::kLaunches;
  params.freed = params.done + plan.num_batch_kv_heads;
  params.nonfinite = params.freed + plan.num_batch_kv_heads;
  params.parts_done = params.nonfinite + 1 + plan.num_batch_kv_heads;
  params.dq_semaphore = params.parts_done + 2 * plan.num_split;
  params.dim_v = static_cast<i32>(problem.dim_v);
  params.key_block_infos = reinterpret_cast<const KeyBlockInfo*>(workspace + plan.key_blocks_at);
  params.document_blocks =
      reinterpret_cast<const DocumentBlocks*>(workspace + plan.document_blocks_at);
  params.attention = attention_params(problem, nullptr);
  if (problem.score_map.softcap != 0) {
    params.softcap_in =
        static_cast<float>(2 * problem.score_map.scale / problem.score_map.softcap * kLog2OfNapier);
    params.softcap_out = static_cast<float>(problem.score_map.softcap * kLog2OfNapier);
  }
  params.kept_scale = static_cast<float>(problem.dropout.kept_scale());
  params.comes_first = true;
  return params;
}

BackwardDqParams sm90_dq_params(const Problem& problem, const Gpu& gpu,
                                const Sm90BackwardPlan& plan, char* workspace) {
  const BackwardParams params = sm90_backward_params(problem, plan, workspace);
  u32* const next_block = params.next_tile + Sm90BackwardPlan::kLaunches - 1;
  BackwardDqParams dq{};
  dq.forward = sm90_forward_params(problem, gpu, sm90_dq_config(problem), next_block, nullptr);
  dq.forward.key_ranges = reinterpret_cast<IdRange*>(workspace + plan.key_ranges_at);
  dq.padded_rows_per_head = params.padded_rows_per_head;
  dq.lse_log2 = params.lse_log2;
  dq.delta = params.delta;
  dq.nonfinite = params.nonfinite;
  dq.comes_first = sm90_backward_configs(problem).empty();
  return dq;
}

ForwardArguments sm90_query_ranges_arguments(const Problem& problem, const Sm90BackwardPlan& plan,
                                             char* workspace) {
  ForwardArguments arguments{};
  ForwardParams& params = arguments.params;
  params.shape.kv_len = static_cast<i32>(problem.q_rows);
  params.key_ranges = reinterpret_cast<IdRange*>(workspace + plan.query_ranges_at);
  params.attention = attention_params(problem);
  AttentionParams& arrays = params.attention;
  arrays.kv_rows = arrays.q_rows;
  arrays.kv_ids = arrays.q_ids;
  arrays.cu_kv = arrays.cu_q;
  arrays.kv_lengths = arrays.q_lengths;
  return arguments;
}

}  // namespace fulmen::gpu
