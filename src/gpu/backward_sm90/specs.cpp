// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Configs as text, names, and what a kernel may spill.

#include "gpu/backward_sm90/specs.h"

#include "core/error.h"
#include "gpu/backward_sm90/plan.h"
#include "gpu/forward_sm90/specs.h"
#include "gpu/jit/config_text.h"

namespace fulmen::gpu {
namespace {

std::string options_name(const BackwardSm90Config& config) {
  return sentence(config.signed_scale ? "_signed" : "", FULMEN_SUFFIX(softcap),
                  FULMEN_SUFFIX(alibi), bias_suffix(config.bias), config.pair_mask ? "_mask" : "",
                  FULMEN_SUFFIX(documents), FULMEN_SUFFIX(dropout));
}

}  // namespace

KernelSpec sm90_preprocess_spec(const BackwardPreprocessConfig& config) {
  const std::string distinction =
      sentence(name(config.dtype), "_d", config.dims, config.has_stats ? "_stats" : "",
               FULMEN_SUFFIX(sequences), FULMEN_SUFFIX(sinks), FULMEN_SUFFIX(documents));
  KernelSpec spec =
      spec_of("backward_sm90", "backward_preprocess_sm90", distinction,
              FULMEN_KERNEL_TYPES(BackwardPreprocessConfig, BackwardPreprocessParams),
              {FULMEN_FIELD(dtype), FULMEN_FIELD(dims), FULMEN_FIELD(has_stats),
               FULMEN_FIELD(sequences), FULMEN_FIELD(sinks), FULMEN_FIELD(documents)});
  spec.include = "kernels/backward_sm90/preprocess.cuh";
  spec.num_threads = config.threads();
  spec.min_blocks = config.resident_blocks();
  return spec;
}

KernelSpec sm90_backward_spec(const BackwardSm90Config& config) {
  constexpr const char* kMasks[] = {"", "_right", "_left", "_both"};
  const std::string distinction = sentence(
      name(config.dtype), "_d", config.dims, kMasks[static_cast<int>(config.mask)],
      config.has_stats ? "_stats" : "", FULMEN_SUFFIX(sequences), config.dq ? "" : "_no_dq",
      config.dk ? "" : "_no_dk", config.dv ? "" : "_no_dv", FULMEN_SUFFIX(deterministic),
      options_name(config), config.ping_pong ? "" : "_no_turns", "_r", config.register_dims,
      config.early_dv ? "" : "_late_dv", config.staggered ? "" : "_in_step");
  KernelSpec spec = spec_of("backward_sm90", "backward_sm90", distinction,
                            FULMEN_KERNEL_TYPES(BackwardSm90Config, BackwardParams),
                            {FULMEN_FIELD(dtype),        FULMEN_FIELD(dims),
                             FULMEN_FIELD(q_rows),       FULMEN_FIELD(mask),
                             FULMEN_FIELD(has_stats),    FULMEN_FIELD(sequences),
                             FULMEN_FIELD(dq),           FULMEN_FIELD(dk),
                             FULMEN_FIELD(dv),           FULMEN_FIELD(deterministic),
                             FULMEN_FIELD(signed_scale), FULMEN_FIELD(softcap),
                             FULMEN_FIELD(alibi),        FULMEN_FIELD(bias),
                             FULMEN_FIELD(pair_mask),    FULMEN_FIELD(documents),
                             FULMEN_FIELD(dropout),      FULMEN_FIELD(register_dims),
                             FULMEN_FIELD(ping_pong),    FULMEN_FIELD(early_dv),
                             FULMEN_FIELD(staggered)});
  spec.num_threads = config.threads();
  spec.shared_bytes = static_cast<std::size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  spec.tensor_cores = true;
  spec.spill_allowance_bytes =
      config.divides_products() ? kSm90DividedSpillBytes : kSm90BackwardSpillBytes;
  return spec;
}

// Its config is the forward's, and so are the fields.
KernelSpec sm90_dq_spec(const ForwardSm90Config& config) {
  KernelSpec spec = sm90_forward_spec(config);
  spec.name = "backward_dq_" + spec.name.substr(spec.name.find("sm90"));
  spec.include = "kernels/dq_sm90/backward_dq_sm90.cuh";
  spec.function = "fulmen::backward_dq_sm90";
  if (config.maps_scores() || config.dropout) spec.spill_allowance_bytes = kSm90DqSpillBytes;
  spec.params_type = "fulmen::BackwardDqParams";
  spec.params_bytes = sizeof(BackwardDqParams);
  return spec;
}

KernelSpec sm90_fallback_spec(const BackwardFallbackConfig& config) {
  KernelSpec spec = spec_of("backward_sm90", "backward_fallback_sm90", name(config.dtype),
                            FULMEN_KERNEL_TYPES(BackwardFallbackConfig, BackwardFallbackParams),
                            {FULMEN_FIELD(dtype)});
  spec.include = "kernels/backward_sm90/fallback.cuh";
  spec.num_threads = BackwardFallbackConfig::kThreads;
  return spec;
}

// Problems as far as configs depend on them: masks, sequences, gradients, options.
std::vector<std::vector<KernelSpec>> sm90_backward_specs() {
  std::vector<std::vector<KernelSpec>> entries;
  constexpr IntervalMask kMasks[] = {{}, {.causal = true}, {.causal = true, .window_left = 100}};
  for (const i64 dims : {64, 128, 192, 256}) {
    std::vector<KernelSpec> prepare, backward, dq;
    const auto add = [&](const Problem& problem) {
      for (const BackwardSm90Config& config : sm90_backward_configs(problem)) {
        backward.push_back(sm90_backward_spec(config));
      }
      if (sm90_separate_dq(problem)) dq.push_back(sm90_dq_spec(sm90_dq_config(problem)));
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
        if (variant != 2) continue;
        deterministic.max_q = deterministic.max_kv = 4096;  // so many that sums are deterministic
        add(deterministic);
      }
      for (const bool sinks : {false, true}) {
        BackwardPreprocessConfig config = sm90_preprocess_config(problem);
        config.sinks = sinks;
        prepare.push_back(sm90_preprocess_spec(config));
      }
      problem.score_map = {variant & 1 ? -1. : 1., variant & 2 ? 50. : 0.};
      if (variant & 4) problem.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
      if (variant & 2) problem.arrays[Array::kMask].dtype = DType::kBool;
      if (variant & 1) problem.arrays[Array::kBias].dtype = DType::kFloat32;
      if (variant & 4) problem.arrays[Array::kQIds].dtype = DType::kInt32;
      if (variant & 2) problem.dropout.threshold = 1;
      add(problem);
      if (variant & 4) prepare.push_back(sm90_preprocess_spec(sm90_preprocess_config(problem)));
    }
    for (const auto& specs : {prepare, backward, dq}) entries.push_back(specs);
  }
  entries.push_back(
      {sm90_fallback_spec({DType::kBFloat16}), sm90_fallback_spec({DType::kFloat16})});
  return entries;
}

}  // namespace fulmen::gpu
