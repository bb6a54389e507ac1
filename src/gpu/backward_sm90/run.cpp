// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the Hopper backward are given by value: numbers when a plan is made, pointers
// and tensor maps in a run; and its launches.

#include "gpu/backward_sm90/plan.h"
#include "gpu/call.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"

namespace fulmen::gpu {
namespace {

BackwardPreprocessParams preprocess_params(const Problem& problem,
                                           const BackwardSm90Configs& configs,
                                           const BackwardSm90Layout& layout) {
  BackwardPreprocessParams params{};
  params.heads_q = static_cast<i32>(problem.heads_q);
  params.q_len = static_cast<i32>(problem.q_rows);
  params.padded_q_rows = static_cast<i32>(layout.padded_rows_per_head);
  params.dim_v = static_cast<i32>(problem.dim_v);
  params.num_rows = static_cast<i32>(layout.num_rows);
  // With sequences of different lengths sums are cleared with their rows.
  if (configs.preprocess.score.varlen) {
    params.sum_dims = static_cast<i32>(layout.counters_at / 4 / layout.num_rows);
  }
  params.num_zeros = (layout.zeroed_bytes - (params.sum_dims > 0 ? layout.counters_at : 0)) / 16;
  params.bounds = {static_cast<i32>(problem.max_q), static_cast<i32>(problem.max_kv), 0};
  params.kv_rows = static_cast<i32>(layout.kv_rows);
  if (configs.has_document_blocks()) params.q_rows = configs.main->q_rows;
  params.attention = attention_params(problem);
  return params;
}

BackwardParams main_params(const Problem& problem, const BackwardSm90Configs& configs,
                           const BackwardSm90Layout& layout) {
  const i64 shift =
      problem.alignment == Alignment::kBottomRight ? problem.kv_rows - problem.q_rows : 0;
  const double scale = problem.score_map.scale;
  BackwardParams params{};
  params.batch = static_cast<i32>(problem.num_sequences);
  params.heads_q = static_cast<i32>(problem.heads_q);
  params.heads_kv = static_cast<i32>(problem.heads_kv);
  params.group_size = static_cast<i32>(problem.group_size());
  params.shape = {static_cast<i32>(problem.max_q), static_cast<i32>(problem.max_kv),
                  static_cast<i32>(shift)};
  params.mask = problem.mask;
  params.scale = static_cast<float>(scale);
  params.scale_log2 = static_cast<float>(scale * kLog2E<double>);
  params.num_kv_blocks = static_cast<i32>(layout.num_kv_blocks);
  params.num_conversion_blocks = static_cast<i32>(layout.num_conversion_blocks);
  params.heads_per_group = layout.schedule.heads_per_group;
  params.last_heads = layout.schedule.last_heads;
  params.num_accum_slots = layout.schedule.num_accum_slots;
  params.lag = layout.schedule.lag;
  params.num_split = static_cast<i32>(layout.num_split);
  params.num_parts = static_cast<i32>(layout.num_parts);
  params.padded_rows_per_head = layout.padded_rows_per_head;
  params.dim_qk = static_cast<i32>(problem.dim_qk);
  params.dim_v = static_cast<i32>(problem.dim_v);
  params.attention = attention_params(problem);
  params.score_mod = score_mod_of(problem.score_map);
  params.kept_scale = static_cast<float>(problem.dropout.kept_scale());
  params.comes_first = configs.main.has_value();
  return params;
}

// The workspace, as the layout says.
class Workspace {
 public:
  Workspace(const BackwardSm90Layout& layout, char* begin) : layout_(layout), begin_(begin) {}

  void bind(BackwardPreprocessParams& params) const {
    const i64 zeros_at = params.sum_dims > 0 ? layout_.counters_at : 0;
    params.lse_log2 = at<float>(layout_.lse_at);
    params.delta = at<float>(layout_.delta_at);
    params.zeros = at<u32>(zeros_at);
    params.sums = at<float>(0);
    params.key_block_infos = at<KeyBlockInfo>(layout_.key_blocks_at);
    params.query_ranges = at<IdRange>(layout_.query_ranges_at);
    params.document_blocks = at<DocumentBlocks>(layout_.document_blocks_at);
  }

  void bind(BackwardParams& params) const {
    params.part_sums = at<float>(layout_.part_sums_at);
    params.lse_log2 = at<float>(layout_.lse_at);
    params.delta = at<float>(layout_.delta_at);
    params.dq_accum = at<float>(0);
    params.next_tile = at<u32>(layout_.counters_at);
    params.done = params.next_tile + BackwardSm90Layout::kLaunches;
    params.freed = params.done + layout_.num_batch_kv_heads;
    params.nonfinite = nonfinite();
    params.parts_done = params.nonfinite + 1 + layout_.num_batch_kv_heads;
    params.dq_semaphore = params.parts_done + layout_.num_part_counters;
    params.key_block_infos = at<KeyBlockInfo>(layout_.key_blocks_at);
    params.document_blocks = at<DocumentBlocks>(layout_.document_blocks_at);
    params.tile_lists.words = key_lists();
  }

  void bind(BackwardDqParams& params) const {
    params.forward.tile_lists.words = query_lists();
    params.forward.next_block = at<u32>(layout_.counters_at) + BackwardSm90Layout::kLaunches - 1;
    params.forward.key_ranges = at<IdRange>(layout_.key_ranges_at);
    params.lse_log2 = at<float>(layout_.lse_at);
    params.delta = at<float>(layout_.delta_at);
    params.nonfinite = nonfinite();
  }

  u32* key_lists() const { return at<u32>(layout_.key_lists_at); }
  u32* query_lists() const { return at<u32>(layout_.query_lists_at); }
  IdRange* query_ranges() const { return at<IdRange>(layout_.query_ranges_at); }
  u32* nonfinite() const {
    return at<u32>(layout_.counters_at) + BackwardSm90Layout::kLaunches +
           2 * layout_.num_batch_kv_heads;
  }

 private:
  template <class T>
  T* at(i64 offset) const {
    return reinterpret_cast<T*>(begin_ + offset);
  }

  const BackwardSm90Layout& layout_;
  char* begin_;
};

// document_ranges_sm90 reads queries as keys.
void queries_as_keys(AttentionParams& arrays) {
  arrays.kv_rows = arrays.q_rows;
  arrays.kv_ids = arrays.q_ids;
  arrays.cu_kv = arrays.cu_q;
  arrays.kv_lengths = arrays.q_lengths;
}

void map(const Call& call, Array array, i32 box_rows, TensorMap& map) {
  const Tensor& tensor = call.problem.arrays[array];
  if (tensor.present()) encode(call.driver, tensor_box(tensor, box_rows), map);
}

}  // namespace

void BackwardSm90Plan::set_params(const Problem& problem, const Gpu& gpu) {
  preprocess = preprocess_params(problem, configs, layout);
  main = main_params(problem, configs, layout);
  dq = {};
  if (configs.dq) {
    dq.forward = forward_sm90_params(problem, *configs.dq, gpu);
    dq.padded_rows_per_head = layout.padded_rows_per_head;
    dq.comes_first = !configs.main;
  }
  key_lists = query_lists = {};
  if (configs.main && configs.main->score.has_tile_lists()) {
    key_lists = tile_lists_params(problem, configs.lists_of_main());
    main.tile_lists = key_lists.lists;
  }
  if (configs.dq && configs.dq->score.has_tile_lists()) {
    query_lists = tile_lists_params(problem, configs.lists_of_dq());
    dq.forward.tile_lists = query_lists.lists;
  }
  query_ranges = {};
  query_ranges.params.shape.kv_len = static_cast<i32>(problem.q_rows);
  query_ranges.params.attention = attention_params(problem);
  side = side_gradient_params(problem);
}

BackwardPreprocessParams BackwardSm90Plan::preprocess_of(const Problem& problem, char* workspace,
                                                         FaultBytes* faults) const {
  BackwardPreprocessParams params = preprocess;
  bind_params(params.attention, problem, faults);
  Workspace(layout, workspace).bind(params);
  return params;
}

BackwardParams BackwardSm90Plan::main_of(const Problem& problem, char* workspace) const {
  BackwardParams params = main;
  bind_params(params.attention, problem, nullptr);
  Workspace(layout, workspace).bind(params);
  params.kept_scale = static_cast<float>(problem.dropout.kept_scale());
  return params;
}

BackwardDqParams BackwardSm90Plan::dq_of(const Problem& problem, char* workspace) const {
  BackwardDqParams params = dq;
  bind_params(params.forward.attention, problem, nullptr);
  Workspace(layout, workspace).bind(params);
  params.forward.kept_scale = static_cast<float>(problem.dropout.kept_scale());
  return params;
}

ForwardArguments BackwardSm90Plan::query_ranges_of(const Problem& problem, char* workspace) const {
  ForwardArguments arguments = query_ranges;
  bind_params(arguments.params.attention, problem, nullptr);
  queries_as_keys(arguments.params.attention);
  arguments.params.key_ranges = Workspace(layout, workspace).query_ranges();
  return arguments;
}

TileListsParams BackwardSm90Plan::tile_lists_of(bool by_keys, const Problem& problem,
                                                char* workspace, FaultBytes* faults) const {
  const Workspace parts(layout, workspace);
  TileListsParams params = by_keys ? key_lists : query_lists;
  bind_params(params.attention, problem, faults);
  params.lists.words = by_keys ? parts.key_lists() : parts.query_lists();
  return params;
}

BackwardFallbackParams BackwardSm90Plan::fallback_of(const Problem& problem,
                                                     char* workspace) const {
  BackwardFallbackParams params{Workspace(layout, workspace).nonfinite(), main.attention};
  bind_params(params.attention, problem, nullptr);
  return params;
}

void BackwardSm90Plan::run(const Call& call) const {
  const Problem& problem = call.problem;
  std::size_t next = 0;
  BackwardDqParams of_dq{};
  if (configs.dq) of_dq = dq_of(problem, call.workspace);
  if (layout.num_key_ranges > 0) call.launch(next++, ForwardArguments{{}, of_dq.forward});
  if (layout.num_query_ranges > 0) {
    call.launch(next++, query_ranges_of(problem, call.workspace));
  }
  call.launch(next++, preprocess_of(problem, call.workspace, call.faults));
  if (configs.dq && configs.dq->score.has_tile_lists()) {
    call.launch(next++, tile_lists_of(false, problem, call.workspace, call.faults));
  }
  if (configs.main && configs.main->score.has_tile_lists()) {
    call.launch(next++, tile_lists_of(true, problem, call.workspace, call.faults));
  }
  if (configs.main) {
    BackwardParams params = main_of(problem, call.workspace);
    map(call, Array::kQ, configs.main->q_rows, params.maps.q);
    map(call, Array::kK, configs.main->key_box_rows(), params.maps.k);
    map(call, Array::kV, configs.main->value_box_rows(), params.maps.v);
    map(call, Array::kDOut, configs.main->q_rows, params.maps.dout);
    map(call, Array::kDK, 64, params.maps.dk);
    map(call, Array::kDV, 64, params.maps.dv);
    encode_pairs(call, *configs.main, configs.main->q_rows, 128, params.maps);
    call.launch(next++, params);
  }
  if (configs.dq) {
    map(call, Array::kQ, 64, of_dq.maps.q);
    map(call, Array::kK, configs.dq->kv_rows, of_dq.maps.k);
    map(call, Array::kV, configs.dq->kv_rows, of_dq.maps.v);
    map(call, Array::kDOut, 64, of_dq.maps.dout);
    encode_pairs(call, *configs.dq, configs.dq->q_rows(), 64, of_dq.maps);
    call.launch(next++, of_dq);
  }
  if (configs.has_fallback) call.launch(next++, fallback_of(problem, call.workspace));
  if (next == call.kernels.size()) return;
  AttentionParams params = side;
  bind_params(params, problem, call.faults);
  if (row_terms_at > 0) set_row_terms(params, reinterpret_cast<u8*>(call.workspace + row_terms_at));
  for (; next < call.kernels.size(); ++next) call.launch(next, params);
}

}  // namespace fulmen::gpu
