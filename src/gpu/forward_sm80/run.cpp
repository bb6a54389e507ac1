// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Specs and launches of forward_sm80.

#include "gpu/forward_sm80/run.h"

#include "core/error.h"
#include "gpu/backward_sm80/run.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/jit/config_text.h"
#include "gpu/params.h"
#include "kernels/forward_sm80/scheduler.cuh"

namespace fulmen::gpu {
namespace {

std::vector<ConfigField> fields_of(const ForwardSm80Config& config) {
  return {FULMEN_FIELD(dtype),
          FULMEN_FIELD(precision),
          FULMEN_FIELD(d_qk),
          FULMEN_FIELD(d_v),
          FULMEN_FIELD(warps),
          FULMEN_FIELD(warps_n),
          FULMEN_FIELD(row_tiles),
          FULMEN_FIELD(kv_rows),
          FULMEN_FIELD(stages),
          FULMEN_FIELD(stage_blocks),
          FULMEN_FIELD(min_blocks),
          FULMEN_FIELD(q_in_registers),
          FULMEN_FIELD(interleaved),
          FULMEN_FIELD(fixed_length),
          FULMEN_FIELD(mask),
          FULMEN_FIELD(bias),
          FULMEN_FIELD(pair_aligned),
          FULMEN_FIELD(documents),
          FULMEN_FIELD(scales_scores),
          FULMEN_FIELD(softcap),
          FULMEN_FIELD(alibi),
          FULMEN_FIELD(dropout),
          FULMEN_FIELD(subtracts_max),
          FULMEN_FIELD(swizzle),
          FULMEN_FIELD(full_blocks),
          FULMEN_FIELD(lazy_max),
          FULMEN_FIELD(lazy_rescale),
          FULMEN_FIELD(stats),
          FULMEN_FIELD(aligned),
          FULMEN_FIELD(even_k),
          FULMEN_FIELD(predicates_copies),
          FULMEN_FIELD(single_buffer)};
}

// The kernel's name among those that plans choose.
std::string distinction(const ForwardSm80Config& config) {
  const bool is_float32 = config.dtype == DType::kFloat32;
  return sentence(
      is_float32 ? name(config.precision) : name(config.dtype), "_d", config.d_qk, "_", config.d_v,
      "_", config.q_rows(), "x", config.kv_rows, config.warps_n > 1 ? "_teams" : "",
      FULMEN_SUFFIX(mask), bias_suffix(config.bias),
      (config.mask || config.bias != DType::kNone) && !config.pair_aligned ? "_words" : "",
      FULMEN_SUFFIX(documents), FULMEN_SUFFIX(scales_scores), FULMEN_SUFFIX(softcap),
      FULMEN_SUFFIX(alibi), FULMEN_SUFFIX(dropout), FULMEN_SUFFIX(subtracts_max),
      FULMEN_SUFFIX(stats), config.aligned ? "" : "_any",
      !config.aligned || config.even_k || config.predicates_copies ? "" : "_filled",
      config.fixed_length ? "" : "_ragged");
}

}  // namespace

KernelSpec sm80_forward_spec(const ForwardSm80Config& config) {
  KernelSpec spec =
      spec_of("forward_sm80", "forward_sm80", distinction(config),
              FULMEN_KERNEL_TYPES(ForwardSm80Config, ForwardSm80Params), fields_of(config));
  spec.num_threads = config.threads();
  spec.min_blocks = config.min_blocks;
  spec.shared_bytes = static_cast<std::size_t>(config.forward_shared_bytes());
  spec.shared_bytes_text = "kConfig.forward_shared_bytes()";
  spec.tensor_cores = true;
  // Up to 452 bytes with every option at d 256 (NVRTC 13.0, sm_90a), around the loop over the keys:
  // its path for blocks that every row sees whole reads none of them.
  spec.spill_allowance_bytes = 512;
  return spec;
}

std::vector<KernelLaunch> sm80_launches(const Problem& problem, const Gpu& gpu) {
  if (problem.operation == Operation::kBackward) return sm80_backward_launches(problem, gpu);
  const ForwardSm80Config config = sm80_forward_config(problem, gpu);
  return {{sm80_forward_spec(config), num_forward_sm80_blocks(attention_params(problem), config)}};
}

void sm80_run(const Call& call) {
  if (call.problem.operation == Operation::kBackward) return sm80_backward_run(call);
  const AttentionParams attention = attention_params(call.problem, call.faults);
  const ForwardSm80Config config = sm80_forward_config(call.problem, call.gpu);
  const ForwardSm80Params params{
      attention, {attention, config, sm80_forward_heads_per_group(call.problem, call.gpu, config)}};
  call.launch(0, params);
}

namespace {

KernelSpec forward_spec(Problem problem, const Gpu& gpu, DType dtype) {
  problem.dtype = dtype;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    problem.arrays[array].dtype = dtype;
  }
  return sm80_forward_spec(sm80_forward_config(problem, gpu));
}

}  // namespace

std::vector<std::vector<KernelSpec>> sm80_specs(const Gpu& gpu) {
  constexpr i64 kDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {96, 96}, {192, 128}, {576, 512}};
  std::vector<std::vector<KernelSpec>> entries;
  const auto add = [&](Problem problem) {
    std::vector<KernelSpec> specs;
    for (const auto& [dim_qk, dim_v] : kDims) {
      problem.dim_qk = dim_qk;
      problem.dim_v = dim_v;
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        specs.push_back(forward_spec(problem, gpu, dtype));
      }
    }
    entries.push_back(specs);
  };
  const auto add_float32 = [&](Problem problem) {
    std::vector<KernelSpec> specs;
    for (const auto& [dim_qk, dim_v] : kDims) {
      if (dim_qk > 256) continue;
      problem.dim_qk = dim_qk;
      problem.dim_v = dim_v;
      for (const Precision precision : {Precision::k3xTf32, Precision::kTf32}) {
        problem.precision = precision;
        specs.push_back(forward_spec(problem, gpu, DType::kFloat32));
      }
    }
    entries.push_back(specs);
  };
  Problem plain;
  plain.score_map.scale = 1;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    plain.arrays[array].strides[3] = 1;
  }
  add(plain);
  add_float32(plain);
  Problem saving = plain;
  saving.arrays[Array::kStats].dtype = DType::kFloat32;
  saving.mask.window_left = 1;  // not dense
  add(saving);
  Problem capped = plain;
  capped.score_map.softcap = 50;
  capped.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
  add(capped);
  Problem pairs = plain;
  pairs.arrays[Array::kMask].dtype = DType::kBool;
  add(pairs);
  Problem all = capped;
  all.arrays[Array::kBias].dtype = all.arrays[Array::kStats].dtype = DType::kFloat32;
  all.dropout.threshold = 1;
  add(all);
  all.arrays[Array::kQ].strides[3] = 2;  // rows without units
  all.packed = true;
  add(all);
  add_float32(all);
  return entries;
}

}  // namespace fulmen::gpu
