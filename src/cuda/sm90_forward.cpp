// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs and launches of forward_sm90.

#include "cuda/sm90_forward.h"

#include "core/error.h"
#include "cuda/config_text.h"
#include "cuda/params.h"
#include "plan/sm90_forward.h"

namespace fulmen::cuda {
namespace {

constexpr double kLog2OfE = 1.4426950408889634;

std::vector<ConfigField> fields_of(const AttentionConfig& config) {
  return {FULMEN_FIELD(dtype),
          FULMEN_FIELD(d_qk),
          FULMEN_FIELD(d_v),
          FULMEN_FIELD(warpgroups),
          FULMEN_FIELD(kv_rows),
          FULMEN_FIELD(stages),
          FULMEN_FIELD(q_slots),
          FULMEN_FIELD(mask),
          FULMEN_FIELD(q_register_dims),
          FULMEN_FIELD(shift_rule),
          FULMEN_FIELD(stage_output),
          FULMEN_FIELD(cache_hints),
          FULMEN_FIELD(swizzle),
          FULMEN_FIELD(ping_pong),
          FULMEN_FIELD(skip_full_masks),
          FULMEN_FIELD(overlap),
          FULMEN_FIELD(longest_first),
          FULMEN_FIELD(folded_scale),
          FULMEN_FIELD(sequences),
          FULMEN_FIELD(signed_scale),
          FULMEN_FIELD(softcap),
          FULMEN_FIELD(alibi),
          FULMEN_FIELD(sinks),
          FULMEN_FIELD(stats),
          FULMEN_FIELD(wide_output),
          FULMEN_FIELD(bias),
          FULMEN_FIELD(pair_mask),
          FULMEN_FIELD(documents),
          FULMEN_FIELD(dropout),
          FULMEN_FIELD(split_dims),
          FULMEN_FIELD(heads_per_tile),
          FULMEN_FIELD(skips_documents),
          FULMEN_FIELD(specialised)};
}

// What distinguishes the kernel among those that plans choose.
std::string kernel_name(const AttentionConfig& config) {
  constexpr const char* kMasks[] = {"", "_upper", "_both"};
  return sentence("forward_sm90_", name(config.dtype), "_d", config.d_qk, "_", config.d_v, "_",
                  64 * config.q_tiles(), "x", config.kv_rows,
                  config.heads_per_tile == 1 ? "" : sentence("_heads", config.heads_per_tile),
                  kMasks[static_cast<int>(config.mask)], config.sequences ? "_sequences" : "",
                  config.signed_scale ? "_signed" : "", config.softcap ? "_softcap" : "",
                  config.alibi ? "_alibi" : "", config.sinks ? "_sinks" : "",
                  config.stats ? "_stats" : "", config.wide_output ? "_wide" : "",
                  config.bias == DType::kNone ? "" : sentence("_bias_", name(config.bias)),
                  config.pair_mask ? "_mask" : "", config.documents ? "_documents" : "",
                  config.dropout ? "_dropout" : "");
}

// Bounds of the visible keys and what options keep of a row are spilled around the loops, not in
// them: up to 36 bytes with two-sided masks (window 1,024 at d 128 is 1.15 times FlashAttention-3
// with 20, H100, 2026-11-28), 12 without, 84 where every pair is looked up in memory, which is what
// takes the time then, up to 172 where documents are among them, and up to 212 beside an O of 256
// columns (neither timed; sm80 is what is left).
// Without options nothing may spill. Beyond d 256 up to 88 and 168 bytes; not timed with them, but
// without them that kernel is 5 times as fast as sm80 (2026-11-28).
std::size_t spill_allowance(const AttentionConfig& config) {
  if (config.has_pair_terms() && (config.split_dims || config.d_v > 192)) return 224;
  if (config.has_pair_terms()) return config.documents ? 192 : 128;
  if (config.mask == MaskKind::kBoth) return config.split_dims ? 96 : 48;
  if (!config.specialised) return 48;  // an ablation: those that compute also load
  return config.maps_scores() || config.sequences || config.sinks || config.stats ? 16 : 0;
}

}  // namespace

KernelSpec sm90_forward_spec(const AttentionConfig& config) {
  KernelSpec spec;
  spec.name = kernel_name(config);
  spec.include = "kernels/forward_sm90.cuh";
  spec.function = "fulmen::forward_sm90";
  spec.config_type = "fulmen::AttentionConfig";
  spec.config = fields_of(config);
  spec.params_type = "fulmen::ForwardArguments";
  spec.params_bytes = sizeof(ForwardArguments);
  spec.num_threads = config.threads();
  spec.shared_bytes = static_cast<std::size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  spec.tensor_cores = true;
  spec.spill_allowance_bytes = spill_allowance(config);
  return spec;
}

ForwardBoxes sm90_forward_boxes(const Arrays& arrays, const AttentionConfig& config) {
  ForwardBoxes boxes{tensor_box(arrays[Array::kQ], config.tile_rows()),
                     tensor_box(arrays[Array::kK], config.kv_rows),
                     tensor_box(arrays[Array::kV], config.kv_rows),
                     tensor_box(arrays[Array::kO], 64)};
  for (TensorBox* box : {&boxes.q, &boxes.k, &boxes.v, &boxes.o}) box->swizzle = config.swizzle;
  if (!config.swizzle) boxes.q.box_dims = boxes.k.box_dims = boxes.v.box_dims = 8;
  return boxes;
}

ForwardParams sm90_forward_params(const Problem& problem, const Gpu& gpu,
                                  const AttentionConfig& config, u32* next_block, u32* faults) {
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

namespace {

KernelSpec key_ranges_spec(const AttentionConfig& config) {
  const AttentionConfig needed{.kv_rows = config.kv_rows, .sequences = config.sequences};
  KernelSpec spec = sm90_forward_spec(needed);
  spec.name =
      sentence("document_ranges_sm90_", config.kv_rows, config.sequences ? "_sequences" : "");
  spec.include = "kernels/document_ranges_sm90.cuh";
  spec.function = "fulmen::document_ranges_sm90";
  spec.num_threads = kKeyRangeThreads;
  spec.shared_bytes = 0;
  spec.shared_bytes_text = "";
  spec.tensor_cores = false;
  return spec;
}

}  // namespace

std::vector<KernelLaunch> sm90_forward_launches(const Problem& problem, const Gpu& gpu) {
  const AttentionConfig config = sm90_forward_config(problem);
  KernelLaunch launch{sm90_forward_spec(config)};
  launch.num_blocks = min<i64>(sm90_max_q_blocks(problem, config), gpu.num_multiprocessors);
  launch.overlap_previous = true;  // as far as it sets up its barriers
  if (!config.skips_documents) return {launch};
  KernelLaunch ranges{key_ranges_spec(config)};
  ranges.num_blocks =
      ceil_div(static_cast<i64>(sm90_num_key_ranges(problem, config)), kKeyRangeThreads);
  return {ranges, launch};
}

void sm90_forward_run(const Call& call) {
  if (call.kernels.back().shape.num_blocks == 0) return;
  const Problem& problem = call.problem;
  const AttentionConfig config = sm90_forward_config(problem);
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

// Problems as far as configs depend on them: each set of options in several sizes.
std::vector<std::vector<KernelSpec>> sm90_forward_specs() {
  constexpr i64 kDims[][2] = {{64, 64},   {80, 80},   {96, 96},  {128, 128}, {192, 128},
                              {192, 192}, {256, 256}, {128, 64}, {64, 256},  {512, 512}};
  std::vector<std::vector<KernelSpec>> entries;
  const auto add = [&](Problem problem, const IntervalMask& mask, i64 heads = 1024) {
    problem.mask = mask;
    problem.heads_q = problem.heads_kv = heads;
    std::vector<KernelSpec> specs;
    for (const auto& [dim_qk, dim_v] : kDims) {
      problem.dim_qk = dim_qk;
      problem.dim_v = dim_v;
      for (const i64 rows : {i64{512}, i64{4096}}) {
        for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
          problem.q_rows = problem.kv_rows = problem.max_q = problem.max_kv = rows;
          problem.dtype = problem.arrays[Array::kO].dtype = dtype;
          specs.push_back(sm90_forward_spec(sm90_forward_config(problem)));
        }
      }
    }
    entries.push_back(specs);
  };
  Problem problem;
  problem.score_map.scale = 1;
  problem.num_sequences = 1;
  add(problem, {});
  add(problem, {.causal = true});
  add(problem, {.causal = true, .window_left = 100});
  add(problem, {.causal = true}, 1);
  Problem decode = problem;
  decode.heads_kv = 8;
  decode.heads_q = 32;
  decode.q_rows = decode.max_q = 4;
  decode.kv_rows = decode.max_kv = 4096;
  decode.dtype = decode.arrays[Array::kO].dtype = DType::kBFloat16;
  Problem documents = decode;
  documents.heads_kv = 32;
  documents.q_rows = documents.max_q = 4096;
  documents.arrays[Array::kQIds].dtype = DType::kInt32;
  entries.emplace_back();
  for (const i64 dim : {64, 128, 256}) {
    for (Problem* each : {&decode, &documents}) {
      each->dim_qk = each->dim_v = dim;
      entries.back().push_back(sm90_forward_spec(sm90_forward_config(*each)));
    }
  }
  entries.back().push_back(key_ranges_spec(sm90_forward_config(documents)));
  Problem packed = problem;
  packed.packed = true;
  packed.arrays[Array::kStats].dtype = DType::kFloat32;
  add(packed, {.causal = true});
  Problem capped = packed;
  capped.score_map.softcap = 50;
  capped.arrays[Array::kSinks].dtype = DType::kFloat32;
  add(capped, {.causal = true, .window_left = 100});
  Problem biased = problem;
  biased.score_map.scale = -1;
  biased.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
  add(biased, {.causal = true});
  Problem pairs = problem;
  pairs.arrays[Array::kBias].dtype = DType::kFloat32;
  for (const Array array : {Array::kMask, Array::kQIds, Array::kStats}) {
    pairs.arrays[array].dtype = DType::kInt32;
  }
  pairs.dropout.threshold = 1;
  add(pairs, {.causal = true});
  add(pairs, {.causal = true}, 1);
  return entries;
}

}  // namespace fulmen::cuda
