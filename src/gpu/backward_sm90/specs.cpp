// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Configs as text, names, and what a kernel may spill.

#include "core/error.h"
#include "core/tensor.h"
#include "gpu/backward_sm90/plan.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

// What a kernel may spill: the producers, a thread each, and the warps next to them keep their
// ranges in 24 registers. The consumers' loop over full blocks loads at most one spilled word
// (disassembled, NVRTC 13.0; 320 bytes in all without sequences). A window over packed sequences
// has 964; more would go to the simt kernels.
constexpr size_t kSpillBytes = 1472;
// Where products are divided: each warpgroup's loop over work tiles is a copy of its own, and is
// spilled around the loops over steps, which spill nothing without options (disassembled). 2,276
// bytes with every option over packed sequences; beyond 256 dims 2,656 with two-sided masks over
// packed sequences, 3,100 of float16.
constexpr size_t kDividedSpillBytes = 2304, kWideSpillBytes = 3200;
// backward_dq_sm90 with options: 912 bytes with every option at 256 dims, 140 at 64; not timed.
constexpr size_t kDqSpillBytes = 1024;

}  // namespace

KernelSpec backward_preprocess_spec(const BackwardPreprocessConfig& config) {
  KernelSpec spec = spec_of<BackwardPreprocessParams>(
      "backward_sm90/preprocess", "backward_preprocess_sm90",
      sentence(name(config.dtype), "_d", config.dims, name_suffix(config.score)), config);
  spec.num_threads = config.threads();
  spec.min_blocks = config.resident_blocks();
  return spec;
}

KernelSpec backward_sm90_spec(const BackwardSm90Config& config) {
  const std::string distinction = sentence(
      name(config.dtype), "_d", config.dims, name_suffix(config.score), config.dq ? "" : "_no_dq",
      config.dk ? "" : "_no_dk", config.dv ? "" : "_no_dv", config.pair_bytes() > 0 ? "_tiles" : "",
      config.deterministic ? "_deterministic" : "", config.paired ? "_paired" : "",
      config.shares_loads ? "_shared_loads" : "", config.whole_heads ? "_whole_heads" : "",
      config.ping_pong ? "" : "_no_ping_pong", "_r", config.register_dims,
      config.early_dv ? "" : "_late_dv", config.staggered ? "" : "_not_staggered");
  return on_tensor_cores(
      spec_of<BackwardParams>("backward_sm90/backward_sm90", "backward_sm90", distinction, config),
      config,
      !config.divides_products() ? kSpillBytes
      : config.dims > 256        ? kWideSpillBytes
                                 : kDividedSpillBytes);
}

// Its config is the forward's, and so are the fields.
KernelSpec backward_dq_spec(const ForwardSm90Config& config) {
  KernelSpec spec = forward_sm90_spec(config);
  spec.name = "backward_dq_" + spec.name.substr(spec.name.find("sm90"));
  spec.include = "kernels/dq_sm90/backward_dq_sm90.cuh";
  spec.function = "fulmen::backward_dq_sm90";
  if (config.maps_scores() || config.score.dropout) spec.spill_allowance_bytes = kDqSpillBytes;
  set_params<BackwardDqParams>(spec);
  return spec;
}

KernelSpec backward_fallback_spec(const BackwardFallbackConfig& config) {
  KernelSpec spec = spec_of<BackwardFallbackParams>(
      "backward_sm90/fallback", "backward_fallback_sm90",
      sentence(name(config.dtype), name_suffix(config.user)), config);
  spec.num_threads = BackwardFallbackConfig::kThreads;
  return spec;
}

// Of scores and pairs, by bits of a number.
static void set_options(Problem& problem, int variant) {
  problem.score_map = {variant & 1 ? -1. : 1., variant & 2 ? 50. : 0.};
  if (variant & 4) problem.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
  if (variant & 2) problem.arrays[Array::kMask].dtype = DType::kBool;
  if (variant & 1) problem.arrays[Array::kBias].dtype = DType::kFloat32;
  if (variant & 4) problem.arrays[Array::kQIds].dtype = DType::kInt32;
  if (variant & 2) problem.dropout.threshold = 1;
}

// So many short heads that thread blocks have whole ones, where they can.
static Problem with_whole_heads(Problem problem, const IntervalMask& mask) {
  problem.mask = mask;
  problem.num_sequences = problem.max_q = problem.max_kv = 512;
  problem.heads_q = problem.heads_kv = 8;
  return problem;
}

// Problems as far as configs depend on them: masks, sequences, gradients, options.
std::vector<std::vector<KernelSpec>> backward_sm90_specs() {
  std::vector<std::vector<KernelSpec>> entries;
  constexpr IntervalMask kMasks[] = {{}, {.causal = true}, {.causal = true, .window_left = 100}};
  for (const i64 dims : {64, 128, 192, 256, 320}) {
    std::vector<KernelSpec> prepare, backward, dq;
    const auto add = [&](const Problem& problem) {
      if (!wide_refusal(problem).empty()) return;
      const BackwardSm90Configs configs = backward_sm90_configs(problem);
      if (configs.main) backward.push_back(backward_sm90_spec(*configs.main));
      if (configs.dq) dq.push_back(backward_dq_spec(*configs.dq));
    };
    for (int variant = 0; variant < 8; ++variant) {  // bits: float16, stats, packed
      Problem problem;
      problem.score_map.scale = 1;
      problem.dim_qk = problem.dim_v = dims;
      problem.dtype = variant & 1 ? DType::kFloat16 : DType::kBFloat16;
      problem.arrays[Array::kStats].dtype = variant & 2 ? DType::kFloat32 : DType::kNone;
      problem.packed = {(variant & 4) != 0, (variant & 4) != 0};
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
        if (variant != 2 && !(variant == 3 && dims == 256)) continue;
        deterministic.max_q = deterministic.max_kv = 4096;  // so many that sums are deterministic
        add(deterministic);
      }
      for (const bool sinks : {false, true}) {
        BackwardPreprocessConfig config = backward_sm90_configs(problem).preprocess;
        config.score.sinks = sinks;
        prepare.push_back(backward_preprocess_spec(config));
      }
      for (const IntervalMask& mask : kMasks) add(with_whole_heads(problem, mask));
      set_options(problem, variant);
      add(problem);
      for (const Array array : {Array::kBias, Array::kMask}) {  // which the copy engine brings
        problem.arrays[array].strides[2] = 4096;
        problem.arrays[array].strides[3] = 1;
      }
      if (variant & 3) add(problem);
      if (variant & 4) {
        prepare.push_back(backward_preprocess_spec(backward_sm90_configs(problem).preprocess));
      }
    }
    for (const auto& specs : {prepare, backward, dq}) entries.push_back(specs);
  }
  entries.push_back({backward_fallback_spec({.dtype = DType::kBFloat16}),
                     backward_fallback_spec({.dtype = DType::kFloat16})});
  return entries;
}

}  // namespace fulmen::gpu
