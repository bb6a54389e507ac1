// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Kernels of forward_sm80 as data: one from its config, and those that CI compiles.

#include "core/error.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/forward_sm80/shapes.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/params.h"
#include "kernels/forward_sm80/scheduler.cuh"

namespace fulmen::gpu {
namespace {

// Up to 452 bytes with every option at d 256 (NVRTC 13.0, sm_90a), around the loop over the keys:
// its path for blocks that every row sees whole reads none of them.
constexpr size_t kSpillBytes = 512;

}  // namespace

KernelSpec forward_sm80_spec(const ForwardSm80Config& config) {
  const bool has_pairs = config.score.mask || config.score.bias != DType::kNone;
  const bool pads = config.aligned && !config.even_k && !config.predicates_copies;
  const std::string distinction = sentence(
      config.dtype == DType::kFloat32 ? name(config.precision) : name(config.dtype),
      config.o_dtype == DType::kFloat16 ? "_to_float16" : "", "_d", config.d_qk, "_", config.d_v,
      "_", config.q_rows(), "x", config.kv_rows,
      config.warps_n > 1 ? sentence("_warps_n", config.warps_n) : "", name_suffix(config.score),
      has_pairs && !config.pair_aligned ? "_unaligned_pairs" : "",
      config.aligned ? "" : "_unaligned", pads ? "_padded" : "",
      config.fixed_length ? "_fixed_length" : "", config.caches ? "_caches" : "");
  KernelSpec spec = on_tensor_cores(
      spec_of<ForwardSm80Params>("forward_sm80/forward_sm80", "forward_sm80", distinction, config),
      config, kSpillBytes);
  spec.min_blocks = config.min_blocks;
  return spec;
}

namespace {

// Head dimensions that between them use the widest and the narrowest tiles.
constexpr i64 kCompiledDims[][2] = {{64, 64}, {128, 128}, {256, 256},
                                    {96, 96}, {192, 128}, {576, 512}};

std::vector<KernelSpec> specs_of(Problem problem, const Gpu& gpu) {
  std::vector<KernelSpec> specs;
  const auto add = [&](DType dtype) {
    problem.dtype = dtype;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
      problem.arrays[array].dtype = dtype;
    }
    specs.push_back(forward_sm80_spec(*forward_sm80_config(problem, gpu)));
  };
  for (const auto& [dim_qk, dim_v] : kCompiledDims) {
    problem.dim_qk = dim_qk;
    problem.dim_v = dim_v;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) add(dtype);
  }
  return specs;
}

std::vector<KernelSpec> float32_specs_of(Problem problem, const Gpu& gpu) {
  problem.dtype = DType::kFloat32;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    problem.arrays[array].dtype = problem.dtype;
  }
  std::vector<KernelSpec> specs;
  for (const auto& [dim_qk, dim_v] : kCompiledDims) {
    if (dim_qk > kMaxFloat32Dim) continue;
    problem.dim_qk = dim_qk;
    problem.dim_v = dim_v;
    for (const Precision precision : {Precision::k3xTf32, Precision::kTf32}) {
      problem.precision = precision;
      specs.push_back(forward_sm80_spec(*forward_sm80_config(problem, gpu)));
    }
  }
  return specs;
}

}  // namespace

std::vector<std::vector<KernelSpec>> forward_sm80_specs(const Gpu& gpu) {
  Problem plain;
  plain.score_map.scale = 1;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    plain.arrays[array].strides[3] = 1;
  }
  Problem saving = plain;
  saving.arrays[Array::kStats].dtype = DType::kFloat32;
  saving.mask.window_left = 1;  // lengths are looked up
  Problem capped = plain;
  capped.score_map = {1, 50};
  capped.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
  Problem pairs = plain;
  pairs.arrays[Array::kMask].dtype = DType::kBool;
  Problem all = capped;
  all.arrays[Array::kBias].dtype = all.arrays[Array::kStats].dtype = DType::kFloat32;
  all.dropout.threshold = 1;
  Problem unaligned = all;
  unaligned.arrays[Array::kQ].strides[3] = 2;
  unaligned.packed = {true, true};
  Problem over_caches = plain;
  over_caches.arrays[Array::kKvStart].dtype = DType::kInt32;
  return {specs_of(plain, gpu),      float32_specs_of(plain, gpu),
          specs_of(saving, gpu),     specs_of(capped, gpu),
          specs_of(pairs, gpu),      specs_of(all, gpu),
          specs_of(unaligned, gpu),  float32_specs_of(unaligned, gpu),
          specs_of(over_caches, gpu)};
}

std::vector<KernelSpec> forward_sm80_e4m3_specs(const Gpu& gpu) {
  std::vector<KernelSpec> specs;
  Problem problem;
  problem.score_map.scale = 1;
  problem.arrays[Array::kO].strides[3] = 1;
  for (const Array array : {Array::kQ, Array::kK, Array::kV}) {
    problem.arrays[array].dtype = DType::kFloat8E4M3;
    problem.arrays[array].strides[3] = 1;
  }
  for (const auto& [dim_qk, dim_v] : kCompiledDims) {
    if (dim_qk > 256) continue;
    problem.dim_qk = dim_qk;
    problem.dim_v = dim_v;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      problem.dtype = problem.arrays[Array::kO].dtype = dtype;
      for (const bool is_windowed : {false, true}) {
        problem.mask.window_left = is_windowed ? 1 : kNoLimit;
        specs.push_back(forward_sm80_spec(*forward_sm80_config(problem, gpu)));
      }
    }
  }
  return specs;
}

}  // namespace fulmen::gpu
