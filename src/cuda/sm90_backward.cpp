// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs, params and launches of backward_prepare_sm90 and backward_sm90.

#include "cuda/sm90_backward.h"

#include "core/error.h"
#include "cuda/config_text.h"
#include "cuda/fma_kernels.h"
#include "cuda/params.h"
#include "cuda/sm90_forward.h"
#include "plan/sm90_backward.h"
#include "plan/sm90_forward.h"

namespace fulmen::cuda {
namespace {

constexpr double kLog2OfNapier = 1.4426950408889634;

KernelSpec prepare_spec(const BackwardPrepareConfig& config) {
  KernelSpec spec;
  spec.name = sentence("backward_prepare_sm90_", name(config.dtype), "_d", config.dims,
                       config.has_stats ? "_stats" : "", config.sequences ? "_sequences" : "",
                       config.sinks ? "_sinks" : "");
  spec.include = "kernels/backward_prepare_sm90.cuh";
  spec.function = "fulmen::backward_prepare_sm90";
  spec.config_type = "fulmen::BackwardPrepareConfig";
  spec.config = {{"dtype", text(config.dtype)},
                 {"dims", text(config.dims)},
                 {"has_stats", text(config.has_stats)},
                 {"sequences", text(config.sequences)},
                 {"sinks", text(config.sinks)}};
  spec.params_type = "fulmen::BackwardPrepareParams";
  spec.params_bytes = sizeof(BackwardPrepareParams);
  spec.num_threads = config.threads();
  spec.min_blocks = BackwardPrepareConfig::kBlocksPerMultiprocessor;
  return spec;
}

std::string options_name(const BackwardConfig& config) {
  std::string text;
  if (config.signed_scale) text += "_signed";
  if (config.softcap) text += "_softcap";
  if (config.alibi) text += "_alibi";
  if (config.bias != DType::kNone) text += sentence("_bias_", name(config.bias));
  if (config.pair_mask) text += "_mask";
  if (config.documents) text += "_documents";
  if (config.dropout) text += "_dropout";
  return text;
}

KernelSpec backward_spec(const BackwardConfig& config) {
  constexpr const char* kMasks[] = {"", "_upper", "_both"};
  KernelSpec spec;
  spec.name = sentence("backward_sm90_", name(config.dtype), "_d", config.dims,
                       kMasks[static_cast<int>(config.mask)], config.has_stats ? "_stats" : "",
                       config.sequences ? "_sequences" : "", config.dq ? "" : "_no_dq",
                       config.dk ? "" : "_no_dk", config.dv ? "" : "_no_dv", options_name(config),
                       config.take_turns ? "" : "_no_turns", "_r", config.register_dims,
                       config.early_dv ? "" : "_late_dv", config.spread ? "" : "_in_step");
  spec.include = "kernels/backward_sm90.cuh";
  spec.function = "fulmen::backward_sm90";
  spec.config_type = "fulmen::BackwardConfig";
  spec.config = {{"dtype", text(config.dtype)},
                 {"dims", text(config.dims)},
                 {"q_rows", text(config.q_rows)},
                 {"mask", text(config.mask)},
                 {"has_stats", text(config.has_stats)},
                 {"sequences", text(config.sequences)},
                 {"dq", text(config.dq)},
                 {"dk", text(config.dk)},
                 {"dv", text(config.dv)},
                 {"signed_scale", text(config.signed_scale)},
                 {"softcap", text(config.softcap)},
                 {"alibi", text(config.alibi)},
                 {"bias", text(config.bias)},
                 {"pair_mask", text(config.pair_mask)},
                 {"documents", text(config.documents)},
                 {"dropout", text(config.dropout)},
                 {"register_dims", text(config.register_dims)},
                 {"take_turns", text(config.take_turns)},
                 {"early_dv", text(config.early_dv)},
                 {"spread", text(config.spread)}};
  spec.params_type = "fulmen::BackwardParams";
  spec.params_bytes = sizeof(BackwardParams);
  spec.num_threads = config.threads();
  spec.shared_bytes = static_cast<std::size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  spec.tensor_cores = true;
  spec.spill_allowance_bytes =
      config.divides_products() ? kSm90DividedSpillBytes : kSm90BackwardSpillBytes;
  return spec;
}

// Its config is the forward's, and so are the fields.
KernelSpec dq_spec(const AttentionConfig& config) {
  KernelSpec spec = sm90_forward_spec(config);
  spec.name = "backward_dq_" + spec.name.substr(spec.name.find("sm90"));
  spec.include = "kernels/backward_dq_sm90.cuh";
  spec.function = "fulmen::backward_dq_sm90";
  if (config.maps_scores() || config.dropout) spec.spill_allowance_bytes = kSm90DqSpillBytes;
  spec.params_type = "fulmen::BackwardDqParams";
  spec.params_bytes = sizeof(BackwardDqParams);
  return spec;
}

KernelSpec careful_spec(const BackwardCarefulConfig& config) {
  KernelSpec spec;
  spec.name = sentence("backward_careful_", name(config.dtype));
  spec.include = "kernels/backward_careful.cuh";
  spec.function = "fulmen::backward_careful";
  spec.config_type = "fulmen::BackwardCarefulConfig";
  spec.config = {{"dtype", text(config.dtype)}};
  spec.params_type = "fulmen::BackwardCarefulParams";
  spec.params_bytes = sizeof(BackwardCarefulParams);
  spec.num_threads = BackwardCarefulConfig::kThreads;
  return spec;
}

}  // namespace

BackwardPrepareParams sm90_prepare_params(const Problem& problem, const Sm90BackwardPlan& plan,
                                          char* workspace, u32* faults) {
  const Arrays& arrays = problem.arrays;
  const Tensor &o = arrays[Array::kO], &dout = arrays[Array::kDOut], &dlse = arrays[Array::kDLse];
  const Tensor& kept = arrays[problem.has(Array::kStats) ? Array::kStats : Array::kLse];
  BackwardPrepareParams params{};
  params.heads_q = static_cast<i32>(problem.heads_q);
  params.q_len = static_cast<i32>(problem.q_rows);
  params.padded_q_rows = static_cast<i32>(plan.rows_of_head);
  params.dim_v = static_cast<i32>(problem.dim_v);
  params.num_rows = static_cast<i32>(plan.num_rows);
  params.o = static_cast<const u16*>(o.data);
  params.o_stride_batch = o.strides[0];
  params.o_stride_head = o.strides[1];
  params.o_stride_row = o.strides[2];
  params.dout = static_cast<const u16*>(dout.data);
  params.dout_stride_batch = dout.strides[0];
  params.dout_stride_head = dout.strides[1];
  params.dout_stride_row = dout.strides[2];
  params.kept = static_cast<const float*>(kept.data);
  params.kept_stride_batch = kept.strides[0];
  params.kept_stride_head = kept.strides[1];
  params.kept_stride_row = kept.strides[2];
  params.kept_stride_part = kept.strides[3];
  params.dlse = static_cast<const float*>(dlse.data);
  params.dlse_stride_batch = dlse.strides[0];
  params.dlse_stride_head = dlse.strides[1];
  params.dlse_stride_row = dlse.strides[2];
  params.rows = reinterpret_cast<float*>(workspace + plan.rows_at);
  params.delta = reinterpret_cast<float*>(workspace + plan.delta_at);
  params.zeros = reinterpret_cast<u32*>(workspace);
  params.num_zeros = plan.zeroed_bytes / 16;
  const BackwardPrepareConfig config = sm90_prepare_config(problem);
  if (config.sequences || config.sinks) params.attention = attention_params(problem, faults);
  return params;
}

BackwardParams sm90_backward_params(const Problem& problem, const Sm90BackwardPlan& plan,
                                    char* workspace) {
  const Tensor& dq = problem.arrays[Array::kDQ];
  const i64 shift =
      problem.alignment == Alignment::kBottomRight ? problem.kv_rows - problem.q_rows : 0;
  BackwardParams params{};
  params.batch = static_cast<i32>(problem.num_sequences);
  params.heads_q = static_cast<i32>(problem.heads_q);
  params.heads_kv = static_cast<i32>(problem.heads_kv);
  params.shape = {static_cast<i32>(problem.max_q), static_cast<i32>(problem.max_kv),
                  static_cast<i32>(shift)};
  params.mask = problem.mask;
  params.scale = static_cast<float>(problem.score_map.scale);
  params.scale_log2 = static_cast<float>(problem.score_map.scale * kLog2OfNapier);
  params.num_kv_blocks = static_cast<i32>(plan.num_kv_blocks);
  params.num_finish_blocks = static_cast<i32>(plan.num_finish_blocks);
  params.lines_per_group = plan.schedule.lines_per_group;
  params.num_slots = plan.schedule.num_slots;
  params.lag = plan.schedule.lag;
  params.rows_of_head = plan.rows_of_head;
  params.dim_qk = static_cast<i32>(problem.dim_qk);
  params.rows = reinterpret_cast<const float*>(workspace + plan.rows_at);
  params.delta = reinterpret_cast<const float*>(workspace + plan.delta_at);
  params.dq_sums = reinterpret_cast<float*>(workspace);
  params.dq = static_cast<u16*>(dq.data);
  params.dq_stride_batch = dq.strides[0];
  params.dq_stride_head = dq.strides[1];
  params.dq_stride_row = dq.strides[2];
  u32* const counters = reinterpret_cast<u32*>(workspace + plan.counters_at);
  params.next_item = counters;  // of the first launch
  params.done = counters + Sm90BackwardPlan::kLaunches;
  params.freed = params.done + plan.num_lines;
  params.spoiled = params.freed + plan.num_lines;
  const Tensor &dk = problem.arrays[Array::kDK], &dv = problem.arrays[Array::kDV];
  params.dk = static_cast<u16*>(dk.data);
  params.dk_stride_batch = dk.strides[0];
  params.dk_stride_head = dk.strides[1];
  params.dk_stride_row = dk.strides[2];
  params.dv = static_cast<u16*>(dv.data);
  params.dv_stride_batch = dv.strides[0];
  params.dv_stride_head = dv.strides[1];
  params.dv_stride_row = dv.strides[2];
  params.dim_v = static_cast<i32>(problem.dim_v);
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
  u32* const next_block = params.next_item + Sm90BackwardPlan::kLaunches - 1;
  return {{},
          sm90_forward_params(problem, gpu, sm90_dq_config(problem), next_block, nullptr),
          params.rows_of_head,
          params.rows,
          params.delta,
          params.spoiled,
          sm90_backward_configs(problem).empty()};
}

std::vector<KernelLaunch> sm90_backward_launches(const Problem& problem, const Gpu& gpu) {
  const Sm90BackwardPlan plan = sm90_backward_plan(problem, gpu);
  KernelLaunch prepare{prepare_spec(sm90_prepare_config(problem))};
  prepare.num_blocks =
      i64{2} * gpu.num_multiprocessors * BackwardPrepareConfig::kBlocksPerMultiprocessor;
  std::vector<KernelLaunch> launches{prepare};
  const auto add = [&](KernelSpec spec, i64 num_blocks) {
    launches.push_back({std::move(spec), min<i64>(num_blocks, gpu.num_multiprocessors)});
    launches.back().overlap_previous = true;
  };
  for (const BackwardConfig& config : sm90_backward_configs(problem)) {
    add(backward_spec(config), plan.num_items());
  }
  if (sm90_separate_dq(problem)) {
    const AttentionConfig config = sm90_dq_config(problem);
    add(dq_spec(config), sm90_max_q_blocks(problem, config));
  }
  if (sm90_hides_pairs(problem)) add(careful_spec({problem.dtype}), gpu.num_multiprocessors);
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
  call.launch(0, sm90_prepare_params(problem, plan, call.workspace, call.faults));
  BackwardParams params = sm90_backward_params(problem, plan, call.workspace);
  const auto map = [&](Array array, i32 box_rows, TensorMap& map) {
    if (!problem.has(array)) return;
    encode(call.driver, tensor_box(problem.arrays[array], box_rows), map);
  };
  std::size_t next = 1;
  for (const BackwardConfig& config : sm90_backward_configs(problem)) {
    map(Array::kQ, config.q_rows, params.maps.q);
    map(Array::kK, config.kv_rows(), params.maps.k);
    map(Array::kV, config.kv_rows(), params.maps.v);
    map(Array::kDOut, config.q_rows, params.maps.dout);
    map(Array::kDK, 64, params.maps.dk);
    map(Array::kDV, 64, params.maps.dv);
    call.launch(next++, params);
    ++params.next_item;
    params.comes_first = false;
  }
  if (sm90_separate_dq(problem)) {
    const AttentionConfig config = sm90_dq_config(problem);
    BackwardDqParams dq = sm90_dq_params(problem, call.gpu, plan, call.workspace);
    map(Array::kQ, 64, dq.maps.q);
    map(Array::kK, config.kv_rows, dq.maps.k);
    map(Array::kV, config.kv_rows, dq.maps.v);
    map(Array::kDOut, 64, dq.maps.dout);
    call.launch(next++, dq);
  }
  if (sm90_hides_pairs(problem)) {
    call.launch(next++, BackwardCarefulParams{params.spoiled, attention_params(problem)});
  }
  if (next < call.kernels.size()) call.launch(next, side_gradient_params(problem, call.faults));
}

// Problems as far as configs depend on them: masks, sequences, gradients, options.
std::vector<std::vector<KernelSpec>> sm90_backward_specs() {
  std::vector<std::vector<KernelSpec>> entries;
  constexpr IntervalMask kMasks[] = {{}, {.causal = true}, {.causal = true, .window_left = 100}};
  for (const i64 dims : {64, 128, 192, 256}) {
    std::vector<KernelSpec> prepare, backward, dq;
    const auto add = [&](const Problem& problem) {
      for (const BackwardConfig& config : sm90_backward_configs(problem)) {
        backward.push_back(backward_spec(config));
      }
      if (sm90_separate_dq(problem)) dq.push_back(dq_spec(sm90_dq_config(problem)));
    };
    for (int variant = 0; variant < 8; ++variant) {  // bits: float16, stats, packed
      Problem problem;
      problem.score_map.scale = 1;
      problem.dim_qk = problem.dim_v = dims;
      problem.dtype = variant & 1 ? DType::kFloat16 : DType::kBFloat16;
      problem.arrays[Array::kStats].dtype = variant & 2 ? DType::kFloat32 : DType::kNone;
      problem.packed = variant & 4;
      for (int wanted = 1; wanted < 8; ++wanted) {  // bits: dq, dk, dv
        int bit = 0;
        for (const Array array : {Array::kDQ, Array::kDK, Array::kDV}) {
          problem.arrays[array].dtype = wanted >> bit++ & 1 ? problem.dtype : DType::kNone;
        }
        problem.mask = kMasks[wanted % 3];
        add(problem);
      }
      for (const IntervalMask& mask : kMasks) {
        problem.mask = mask;
        add(problem);
        Problem deterministic = problem;
        deterministic.deterministic = true;
        add(deterministic);
      }
      for (const bool sinks : {false, true}) {
        BackwardPrepareConfig config = sm90_prepare_config(problem);
        config.sinks = sinks;
        prepare.push_back(prepare_spec(config));
      }
      problem.score_map = {variant & 1 ? -1. : 1., variant & 2 ? 50. : 0.};
      if (variant & 4) problem.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
      if (variant & 2) problem.arrays[Array::kMask].dtype = DType::kBool;
      if (variant & 1) problem.arrays[Array::kBias].dtype = DType::kFloat32;
      if (variant & 4) problem.arrays[Array::kQIds].dtype = DType::kInt32;
      if (variant & 2) problem.dropout.threshold = 1;
      add(problem);
    }
    for (const auto& specs : {prepare, backward, dq}) entries.push_back(specs);
  }
  entries.push_back({careful_spec({DType::kBFloat16}), careful_spec({DType::kFloat16})});
  return entries;
}

}  // namespace fulmen::cuda
