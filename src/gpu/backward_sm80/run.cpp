// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs, params and launches of backward_preprocess_sm80, backward_sm80, backward_postprocess_sm80
// and backward_dbias_sm80.

#include "gpu/backward_sm80/run.h"

#include "core/error.h"
#include "gpu/backward_sm80/plan.h"
#include "gpu/fma.h"
#include "gpu/jit/config_text.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"
#include "kernels/backward_sm80/scheduler.cuh"

namespace fulmen::gpu {
namespace {

constexpr int kRowsThreads = 256;  // kSm80PreprocessThreads, kSm80PostprocessThreads
constexpr int kRowsBlocks = 4;
constexpr i64 kDbiasBlocks = 4096;

std::vector<ConfigField> fields_of(const BackwardSm80Config& config) {
  return {FULMEN_FIELD(dtype),
          FULMEN_FIELD(precision),
          FULMEN_FIELD(d_qk),
          FULMEN_FIELD(d_v),
          FULMEN_FIELD(warps),
          FULMEN_FIELD(q_rows),
          FULMEN_FIELD(kv_rows),
          FULMEN_FIELD(stages),
          FULMEN_FIELD(pair_stages),
          FULMEN_FIELD(split_roles),
          FULMEN_FIELD(swap_ab),
          FULMEN_FIELD(unrolled),
          FULMEN_FIELD(late_prefetch),
          FULMEN_FIELD(zeroes_dq),
          FULMEN_FIELD(aligned),
          FULMEN_FIELD(s_rows),
          FULMEN_FIELD(s_columns),
          FULMEN_FIELD(dkv_rows),
          FULMEN_FIELD(dq_rows),
          FULMEN_FIELD(dq_dims),
          FULMEN_FIELD(min_blocks),
          FULMEN_FIELD(dq),
          FULMEN_FIELD(dk),
          FULMEN_FIELD(dv),
          FULMEN_FIELD(mask),
          FULMEN_FIELD(bias),
          FULMEN_FIELD(pair_aligned),
          FULMEN_FIELD(documents),
          FULMEN_FIELD(dbias),
          FULMEN_FIELD(accumulates_dbias),
          FULMEN_FIELD(tiled_dbias),
          FULMEN_FIELD(scales_scores),
          FULMEN_FIELD(softcap),
          FULMEN_FIELD(alibi),
          FULMEN_FIELD(dropout),
          FULMEN_FIELD(split_sum),
          FULMEN_FIELD(deterministic),
          FULMEN_FIELD(hopper),
          FULMEN_FIELD(swizzle),
          FULMEN_FIELD(full_blocks),
          FULMEN_FIELD(split_d)};
}

KernelSpec backward_spec(const char* entry, const std::string& distinction,
                         const BackwardSm80Config& config) {
  const bool has_precision = config.precision != Precision::kFloat32;
  return spec_of("backward_sm80", entry,
                 sentence(has_precision ? name(config.precision) : name(config.dtype), distinction),
                 FULMEN_KERNEL_TYPES(BackwardSm80Config, BackwardSm80Params), fields_of(config));
}

KernelSpec rows_spec(const Problem& problem, const BackwardSm80Config& main_config) {
  const BackwardSm80Config config = sm80_rows_config(problem, main_config);
  KernelSpec spec =
      backward_spec("backward_preprocess_sm80",
                    sentence("_", config.q_rows, config.dq ? sentence("_dq", config.d_qk) : "",
                             config.split_sum ? "_split" : "", FULMEN_SUFFIX(hopper),
                             FULMEN_SUFFIX(documents), config.aligned ? "" : "_any"),
                    config);
  spec.num_threads = kRowsThreads;
  spec.min_blocks = kRowsBlocks;
  spec.shared_bytes = static_cast<std::size_t>(config.q_rows) * 4;
  spec.shared_bytes_text = "kConfig.q_rows * 4";
  return spec;
}

KernelSpec main_spec(const BackwardSm80Config& config) {
  const std::string distinction = sentence(
      "_d", config.d_qk, "_", config.d_v, "_", config.q_rows, "x", config.kv_rows,
      FULMEN_SUFFIX(dq), FULMEN_SUFFIX(dk), FULMEN_SUFFIX(dv), FULMEN_SUFFIX(mask),
      bias_suffix(config.bias), FULMEN_SUFFIX(documents),
      config.accumulates_dbias ? "_dbias_sums"
      : config.tiled_dbias     ? "_dbias_tiles"
      : config.dbias           ? "_dbias"
                               : "",
      config.pair_aligned || !config.hides_pairs() ? "" : "_words", FULMEN_SUFFIX(scales_scores),
      FULMEN_SUFFIX(softcap), FULMEN_SUFFIX(alibi), FULMEN_SUFFIX(dropout),
      config.split_sum ? "_split" : "", FULMEN_SUFFIX(deterministic), config.aligned ? "" : "_any");
  KernelSpec spec = backward_spec("backward_sm80", distinction, config);
  spec.num_threads = config.threads();
  spec.min_blocks = config.min_blocks;
  spec.shared_bytes = static_cast<std::size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  spec.tensor_cores = true;
  spec.spill_allowance_bytes = kSm80BackwardSpillBytes;
  return spec;
}

KernelSpec dbias_spec(const BackwardSm80Config& config) {
  KernelSpec spec = backward_spec("backward_dbias_sm80",
                                  config.accumulates_dbias ? "_sums"
                                  : config.tiled_dbias     ? "_tiles"
                                                           : "",
                                  sm80_dbias_config(config));
  spec.num_threads = kRowsThreads;
  spec.min_blocks = kRowsBlocks;
  return spec;
}

KernelSpec finish_spec(const BackwardSm80Config& config) {
  KernelSpec spec =
      backward_spec("backward_postprocess_sm80",
                    sentence("_d", config.d_qk, "_", config.q_rows, "x", config.kv_rows, "_",
                             config.dq_rows, "x", config.dq_dims, FULMEN_SUFFIX(hopper)),
                    sm80_finish_config(config));
  spec.num_threads = kRowsThreads;
  spec.min_blocks = kRowsBlocks;
  return spec;
}

// What prepares, the kernel that computes, what finishes; dbias before them or after.
std::vector<KernelLaunch> own_launches(const Problem& problem, const BackwardSm80Config& config,
                                       const AttentionParams& params) {
  const i64 row_tiles = num_q_tiles(params, config.q_rows);
  const i64 key_tiles = num_kv_tiles(params, config.kv_rows);
  const i64 finish_blocks = sm80_postprocess_blocks(row_tiles, key_tiles);
  std::vector<KernelLaunch> launches{{rows_spec(problem, config), row_tiles},
                                     {main_spec(config), key_tiles, 1, config.hopper},
                                     {finish_spec(config), finish_blocks, 1, config.hopper}};
  if (config.dbias) {
    launches.insert(config.accumulates_dbias ? launches.end() : launches.begin(),
                    {dbias_spec(config), kDbiasBlocks});
  }
  return launches;
}

// What is left for simt.
AttentionParams side_params(const Problem& problem, const BackwardSm80Config& config,
                            u32* faults = nullptr) {
  AttentionParams params = side_gradient_params(problem, faults);
  if (config.dbias) params.dbias = ArrayView{};
  return params;
}

}  // namespace

std::vector<KernelLaunch> sm80_backward_launches(const Problem& problem, const Gpu& gpu) {
  const BackwardSm80Config config = sm80_backward_config(problem, gpu);
  const AttentionParams params = attention_params(problem);
  std::vector<KernelLaunch> launches = own_launches(problem, config, params);
  for (KernelLaunch& launch :
       simt_backward(side_params(problem, config), gpu.shared_bytes_per_block)) {
    launches.push_back(std::move(launch));
  }
  return launches;
}

void sm80_backward_run(const Call& call) {
  const Problem& problem = call.problem;
  const BackwardSm80Config config = sm80_backward_config(problem, call.gpu);
  const Sm80BackwardWorkspace workspace = sm80_backward_workspace(problem, config);
  const auto at = [&](i64 offset) { return reinterpret_cast<u32*>(call.workspace + offset); };
  BackwardSm80Params params{};
  params.attention = attention_params(problem, call.faults);
  params.row_tiles = reinterpret_cast<u8*>(call.workspace + workspace.row_tiles_at);
  params.key_bounds = reinterpret_cast<KeyRangeSm80*>(call.workspace + workspace.key_bounds_at);
  params.dq_accum = reinterpret_cast<float*>(call.workspace + workspace.dq_accum_at);
  params.dbias_accum = reinterpret_cast<float*>(call.workspace + workspace.dbias_accum_at);
  params.suspect_m_blocks = at(0);
  params.suspect_n_blocks = at(workspace.suspect_n_blocks_at);
  params.dq_semaphores = at(workspace.dq_semaphores_at);
  params.next_n_block = at(workspace.next_n_block_at);
  params.zeroed_blocks = at(workspace.zeroed_blocks_at);
  params.groups = head_groups_sm80(params.attention, config, sm80_lines_per_group(problem),
                                   sm80_groups_ahead(problem, config));
  const std::size_t num_own = config.dbias ? 4 : 3;
  for (std::size_t i = 0; i < num_own; ++i) call.launch(i, params);
  if (call.kernels.size() == num_own) return;
  AttentionParams rest = side_params(problem, config, call.faults);
  set_row_terms(rest, reinterpret_cast<u8*>(call.workspace + workspace.row_terms_at));
  for (std::size_t i = num_own; i < call.kernels.size(); ++i) call.launch(i, rest);
}

std::vector<std::vector<KernelSpec>> sm80_backward_specs(const Gpu& gpu) {
  constexpr i64 kDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {96, 96}, {192, 128}, {512, 512}};
  std::vector<KernelSpec> plain, with_options, around, float32;
  const auto add = [&](std::vector<KernelSpec>& specs, Problem problem) {
    for (const auto& [dim_qk, dim_v] : kDims) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        problem.dim_qk = dim_qk;
        problem.dim_v = dim_v;
        problem.dtype = dtype;
        for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO, Array::kDOut}) {
          problem.arrays[array].dtype = dtype;
          problem.arrays[array].strides[3] = dtype == DType::kBFloat16 ? 1 : 2;  // units, or none
        }
        const BackwardSm80Config config = sm80_backward_config(problem, gpu);
        specs.push_back(main_spec(config));
        around.push_back(rows_spec(problem, config));
        around.push_back(finish_spec(config));
        if (config.dbias) around.push_back(dbias_spec(config));
      }
    }
  };
  const auto add_float32 = [&](Problem problem) {
    problem.dtype = DType::kFloat32;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO, Array::kDOut}) {
      problem.arrays[array].dtype = problem.dtype;
      problem.arrays[array].strides[3] = 1;  // units
    }
    for (const Precision precision : {Precision::k3xTf32, Precision::kTf32}) {
      problem.precision = precision;
      for (const i64 dim : {64, 128, 256, 96}) {
        problem.dim_qk = problem.dim_v = dim;
        const BackwardSm80Config config = sm80_backward_config(problem, gpu);
        float32.push_back(main_spec(config));
        around.push_back(rows_spec(problem, config));
        around.push_back(finish_spec(config));
        if (config.dbias) around.push_back(dbias_spec(config));
      }
    }
  };
  const auto with = [](Problem problem, std::initializer_list<Array> arrays) {
    for (const Array array : arrays) problem.arrays[array].dtype = DType::kFloat32;
    return problem;
  };
  Problem none;
  none.operation = Operation::kBackward;
  none.score_map.scale = 1;
  const Problem all = with(none, {Array::kDQ, Array::kDK, Array::kDV});
  add(plain, all);
  add(plain, with(none, {Array::kDQ}));
  add(plain, with(none, {Array::kDK, Array::kDV}));
  Problem capped = with(all, {Array::kAlibiSlopes});
  capped.score_map.softcap = 50;
  add(with_options, capped);
  Problem pairs = with(all, {Array::kMask, Array::kQIds});
  pairs.deterministic = true;
  add(with_options, pairs);
  Problem dropping = all;
  dropping.dropout.threshold = 1;
  add(with_options, dropping);
  Problem everything = with(capped, {Array::kBias, Array::kDBias, Array::kSinks, Array::kDLse});
  everything.dropout.threshold = 1;
  add(with_options, everything);
  add_float32(all);
  add_float32(everything);
  return {plain, with_options, around, float32};
}

}  // namespace fulmen::gpu
