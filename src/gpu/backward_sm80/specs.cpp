// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Names, configs and allowances of the kernels of sm80's backward pass, and which of them CI
// compiles.

#include "core/error.h"
#include "gpu/backward_sm80/plan.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

constexpr int kSideThreads = 256;  // kSm80PreprocessThreads, kSm80PostprocessThreads
constexpr int kSideBlocks = 4;
// What the main kernel may spill, a third above the most that was met (NVRTC 13.0): 848 bytes at
// d 128 with every option and rows that are not aligned for sm_80; for sm_90a 704 with every
// option, 540 at d 256 without any. Its loops over tiles load at most two spilled words an
// iteration; the rest is written and read where a block stores what the array's strides do not let
// it store 16 bytes at a time.
constexpr size_t kSpillBytes = 1152;

// Whether rows of o and dout are 16-byte vectors, and LSE, stats and dlse float32.
bool has_aligned_outputs(const Problem& problem) {
  for (const Array array : {Array::kStats, Array::kLse, Array::kDLse}) {
    if (problem.has(array) && problem.arrays[array].dtype != DType::kFloat32) return false;
  }
  return has_aligned_rows(problem, Array::kO) && has_aligned_rows(problem, Array::kDOut);
}

// Those parts of a config on which the kernels around the main one depend, so that fewer of them
// are compiled.
BackwardSm80Config preprocess_config(const Problem& problem, const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.q_rows = config.q_rows;
  reduced.d_qk = config.d_qk;
  reduced.dq = config.dq;
  reduced.dbias = config.dbias;  // how much larger P is kept; of float16 also by roles
  reduced.split_roles = config.split_roles && config.dtype == DType::kFloat16;
  reduced.split_sum = config.split_sum;
  reduced.hopper = config.hopper;
  reduced.aligned = has_aligned_outputs(problem);
  reduced.score.documents = config.score.documents;
  return reduced;
}

BackwardSm80Config postprocess_config(const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.d_qk = config.d_qk;
  reduced.q_rows = config.q_rows;
  reduced.kv_rows = config.kv_rows;
  reduced.dq_rows = config.dq_rows;
  reduced.dq_dims = config.dq_dims;
  reduced.dbias = config.dbias;  // how much larger dS is kept
  reduced.hopper = config.hopper;
  reduced.score.user = config.score.user;  // rows are computed again
  reduced.score.user.captures = false;
  return reduced;
}

BackwardSm80Config dbias_config(const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.accumulates_dbias = config.accumulates_dbias;
  reduced.tiled_dbias = config.tiled_dbias;
  return reduced;
}

KernelSpec backward_spec(const char* file, const char* entry, const std::string& distinction,
                         const BackwardSm80Config& config) {
  const bool has_precision = config.precision != Precision::kFloat32;
  return spec_of<BackwardSm80Params>(
      sentence("backward_sm80/", file), entry,
      sentence(has_precision ? name(config.precision) : name(config.dtype), distinction), config);
}

// A kernel before or after the main one.
KernelSpec side_spec(const char* entry, const std::string& distinction,
                     const BackwardSm80Config& config) {
  KernelSpec spec = backward_spec("pre_and_postprocess", entry, distinction, config);
  spec.num_threads = kSideThreads;
  spec.min_blocks = kSideBlocks;
  return spec;
}

const char* dbias_suffix(const BackwardSm80Config& config) {
  if (config.accumulates_dbias) return "_accumulated";
  return config.tiled_dbias ? "_tiled" : "";
}

}  // namespace

KernelSpec backward_preprocess_sm80_spec(const Problem& problem,
                                         const BackwardSm80Config& main_config) {
  const BackwardSm80Config config = preprocess_config(problem, main_config);
  KernelSpec spec =
      side_spec("backward_preprocess_sm80",
                sentence("_", config.q_rows, config.dq ? sentence("_dq", config.d_qk) : "",
                         config.dbias ? "_dbias" : "", config.split_roles ? "_split_roles" : "",
                         config.split_sum ? "_split_sum" : "", config.hopper ? "_hopper" : "",
                         name_suffix(config.score), config.aligned ? "" : "_unaligned"),
                config);
  spec.shared_bytes = static_cast<size_t>(config.q_rows) * 4;
  spec.shared_bytes_text = "kConfig.q_rows * 4";
  return spec;
}

KernelSpec backward_sm80_spec(const BackwardSm80Config& config) {
  const std::string distinction = sentence(
      "_d", config.d_qk, "_", config.d_v, "_", config.q_rows, "x", config.kv_rows,
      config.dq ? "_dq" : "", config.dk ? "_dk" : "", config.dv ? "_dv" : "",
      name_suffix(config.score), config.dbias ? sentence("_dbias", dbias_suffix(config)) : "",
      config.pair_aligned || !config.copies_pairs() ? "" : "_unaligned_pairs",
      config.split_sum ? "_split_sum" : "", config.deterministic ? "_deterministic" : "",
      config.aligned ? "" : "_unaligned");
  KernelSpec spec = on_tensor_cores(
      backward_spec("backward_sm80", "backward_sm80", distinction, config), config, kSpillBytes);
  spec.min_blocks = config.min_blocks;
  return spec;
}

KernelSpec backward_dbias_sm80_spec(const BackwardSm80Config& config) {
  return side_spec("backward_dbias_sm80", dbias_suffix(config), dbias_config(config));
}

KernelSpec backward_postprocess_sm80_spec(const BackwardSm80Config& config) {
  return side_spec(
      "backward_postprocess_sm80",
      sentence("_d", config.d_qk, "_", config.q_rows, "x", config.kv_rows, "_", config.dq_rows, "x",
               config.dq_dims, config.dbias ? "_dbias" : "", config.hopper ? "_hopper" : "",
               name_suffix(postprocess_config(config).score)),
      postprocess_config(config));
}

namespace {

// The main kernel of problems of one kind, in the tiles of several head dimensions, and what runs
// before and after it.
void add_specs(std::vector<KernelSpec>& main, std::vector<KernelSpec>& around, Problem problem,
               const Gpu& gpu) {
  const BackwardSm80Config config = *backward_sm80_config(problem, gpu);
  main.push_back(backward_sm80_spec(config));
  around.push_back(backward_preprocess_sm80_spec(problem, config));
  around.push_back(backward_postprocess_sm80_spec(config));
  if (config.dbias) around.push_back(backward_dbias_sm80_spec(config));
}

void set_inputs(Problem& problem, DType dtype, i64 dim_qk, i64 dim_v) {
  problem.dtype = dtype;
  problem.dim_qk = dim_qk;
  problem.dim_v = dim_v;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO, Array::kDOut}) {
    problem.arrays[array].dtype = dtype;
    problem.arrays[array].strides[3] = dtype == DType::kFloat16 ? 2 : 1;  // not aligned, or aligned
  }
}

// Problems whose kernels CI compiles.
struct CompiledProblems {
  Problem all, dq_alone, dkdv_alone, capped, pairs, dropping, everything;
  CompiledProblems() {
    const auto with = [](Problem problem, std::initializer_list<Array> arrays) {
      for (const Array array : arrays) problem.arrays[array].dtype = DType::kFloat32;
      return problem;
    };
    Problem none;
    none.operation = Operation::kBackward;
    none.score_map.scale = 1;
    all = with(none, {Array::kDQ, Array::kDK, Array::kDV});
    dq_alone = with(none, {Array::kDQ});
    dkdv_alone = with(none, {Array::kDK, Array::kDV});
    capped = with(all, {Array::kAlibiSlopes});
    capped.score_map = {1, 50};
    pairs = with(all, {Array::kMask, Array::kQIds});
    pairs.deterministic = true;
    dropping = all;
    dropping.dropout.threshold = 1;
    everything = with(capped, {Array::kBias, Array::kDBias, Array::kSinks, Array::kDLse});
    everything.dropout.threshold = 1;
  }
};

}  // namespace

std::vector<std::vector<KernelSpec>> backward_sm80_specs(const Gpu& gpu) {
  constexpr i64 kDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {96, 96}, {192, 128}, {512, 512}};
  std::vector<KernelSpec> plain, with_options, around, float32;
  const auto add = [&](std::vector<KernelSpec>& specs, Problem problem) {
    for (const auto& [dim_qk, dim_v] : kDims) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        set_inputs(problem, dtype, dim_qk, dim_v);
        add_specs(specs, around, problem, gpu);
      }
    }
  };
  const auto add_float32 = [&](Problem problem) {
    for (const Precision precision : {Precision::k3xTf32, Precision::kTf32}) {
      problem.precision = precision;
      for (const i64 dim : {64, 128, 256, 96}) {
        set_inputs(problem, DType::kFloat32, dim, dim);
        add_specs(float32, around, problem, gpu);
      }
    }
  };
  const CompiledProblems problems;
  for (const Problem& problem : {problems.all, problems.dq_alone, problems.dkdv_alone}) {
    add(plain, problem);
  }
  for (const Problem& problem :
       {problems.capped, problems.pairs, problems.dropping, problems.everything}) {
    add(with_options, problem);
  }
  add_float32(problems.all);
  add_float32(problems.everything);
  return {plain, with_options, around, float32};
}

}  // namespace fulmen::gpu
