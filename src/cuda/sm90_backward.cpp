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

namespace fulmen::cuda {
namespace {

constexpr double kLog2OfE = 1.4426950408889634;

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

KernelSpec backward_spec(const BackwardConfig& config) {
  constexpr const char* kMasks[] = {"", "_upper", "_both"};
  KernelSpec spec;
  spec.name = sentence("backward_sm90_", name(config.dtype), "_d", config.dims,
                       kMasks[static_cast<int>(config.mask)], config.has_stats ? "_stats" : "",
                       config.sequences ? "_sequences" : "", config.dq ? "" : "_no_dq",
                       config.dk ? "" : "_no_dk", config.dv ? "" : "_no_dv");
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
                 {"dv", text(config.dv)}};
  spec.params_type = "fulmen::BackwardParams";
  spec.params_bytes = sizeof(BackwardParams);
  spec.num_threads = config.threads();
  spec.shared_bytes = static_cast<std::size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  spec.tensor_cores = true;
  spec.spill_allowance_bytes = kSm90BackwardSpillBytes;
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

// What the kernel for dsinks alone gets.
AttentionParams dsinks_params(const Problem& problem, u32* faults) {
  AttentionParams params = attention_params(problem, faults);
  params.dq = params.dk = params.dv = ArrayView{};
  return params;
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
  params.scale_log2 = static_cast<float>(problem.score_map.scale * kLog2OfE);
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
  params.next_item = counters;
  params.done = counters + 1;
  params.freed = params.done + plan.num_lines;
  params.spoiled = params.freed + plan.num_lines;
  if (!sm90_backward_config(problem).sequences) return params;
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
  return params;
}

std::vector<KernelLaunch> sm90_backward_launches(const Problem& problem, const Gpu& gpu) {
  const Sm90BackwardPlan plan = sm90_backward_plan(problem, gpu);
  KernelLaunch prepare{prepare_spec(sm90_prepare_config(problem))};
  prepare.num_blocks =
      i64{2} * gpu.num_multiprocessors * BackwardPrepareConfig::kBlocksPerMultiprocessor;
  KernelLaunch backward{backward_spec(sm90_backward_config(problem))};
  backward.num_blocks = min<i64>(plan.num_items(), gpu.num_multiprocessors);
  backward.overlap_previous = true;
  std::vector<KernelLaunch> launches{prepare, backward};
  if (sm90_backward_config(problem).hides_pairs()) {
    KernelLaunch careful{careful_spec({problem.dtype})};
    careful.num_blocks = gpu.num_multiprocessors;
    careful.overlap_previous = true;
    launches.push_back(careful);
  }
  if (problem.has(Array::kDSinks)) {
    const AttentionParams rest = dsinks_params(problem, nullptr);
    for (KernelLaunch& launch : simt_backward(rest, gpu.shared_bytes_per_block)) {
      launches.push_back(std::move(launch));
    }
  }
  return launches;
}

void sm90_backward_run(const Call& call) {
  const Problem& problem = call.problem;
  const BackwardConfig config = sm90_backward_config(problem);
  const Sm90BackwardPlan plan = sm90_backward_plan(problem, call.gpu);
  call.launch(0, sm90_prepare_params(problem, plan, call.workspace, call.faults));
  BackwardParams params = sm90_backward_params(problem, plan, call.workspace);
  const auto map = [&](Array array, i32 box_rows, TensorMap& map) {
    if (!problem.has(array)) return;
    encode(call.driver, tensor_box(problem.arrays[array], box_rows), map);
  };
  map(Array::kQ, config.q_rows, params.maps.q);
  map(Array::kK, BackwardConfig::kKvRows, params.maps.k);
  map(Array::kV, BackwardConfig::kKvRows, params.maps.v);
  map(Array::kDOut, config.q_rows, params.maps.dout);
  map(Array::kDK, 64, params.maps.dk);
  map(Array::kDV, 64, params.maps.dv);
  call.launch(1, params);
  std::size_t next = 2;
  if (config.hides_pairs()) {
    call.launch(next++, BackwardCarefulParams{params.spoiled, attention_params(problem)});
  }
  if (next < call.kernels.size()) call.launch(next, dsinks_params(problem, call.faults));
}

std::vector<std::vector<KernelSpec>> sm90_backward_specs() {
  std::vector<std::vector<KernelSpec>> entries;
  for (const i32 dims : {64, 128}) {
    for (const bool has_stats : {false, true}) {
      std::vector<KernelSpec> prepare;
      std::vector<KernelSpec> backward;
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        BackwardConfig config;
        config.dtype = dtype;
        config.dims = dims;
        config.q_rows = dims == 64 ? 128 : 64;
        config.has_stats = has_stats;
        for (const bool sequences : {false, true}) {
          prepare.push_back(prepare_spec({dtype, dims, has_stats, sequences, false}));
          prepare.push_back(prepare_spec({dtype, dims, has_stats, sequences, true}));
          config.sequences = sequences;
          for (const MaskKind mask : {MaskKind::kLength, MaskKind::kUpper, MaskKind::kBoth}) {
            config.mask = mask;
            backward.push_back(backward_spec(config));
          }
        }
        for (int wanted = 1; wanted < 7; ++wanted) {  // bits: dq, dk, dv
          config.dq = wanted & 1;
          config.dk = wanted & 2;
          config.dv = wanted & 4;
          backward.push_back(backward_spec(config));
        }
      }
      entries.push_back(prepare);
      entries.push_back(backward);
    }
  }
  entries.push_back({careful_spec({DType::kBFloat16}), careful_spec({DType::kFloat16})});
  return entries;
}

}  // namespace fulmen::cuda
