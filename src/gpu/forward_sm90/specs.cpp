// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Names, fields and allowances of the kernels of sm90's forward pass, and which of them CI
// compiles.

#include "core/error.h"
#include "core/tensor.h"
#include "gpu/decode_sm80/plan.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/mla_sm90/plan.h"
#include "gpu/params.h"
#include "kernels/common/sequences.cuh"

namespace fulmen::gpu {
namespace {

// The kernel's name among those that plans choose.
std::string distinction(const ForwardSm90Config& config) {
  const i32 heads = config.heads_per_tile;
  return sentence(name(config.dtype), "_d", config.d_qk, "_", config.d_v, "_",
                  64 * config.q_tiles(), "x", config.kv_rows,
                  heads == 1 ? "" : sentence("_heads", heads), name_suffix(config.score),
                  config.gathers  ? "_paged_by_rows"
                  : config.paged  ? "_paged"
                  : config.caches ? "_caches"
                                  : "",
                  config.pair_tiles() ? "_tiles" : "", config.mixed ? "_mixed" : "",
                  config.paired ? "_paired" : "", config.conditional ? "_conditional" : "");
}

// Bounds of the visible keys and what options keep of a row are spilled around the loops, not in
// them: up to 36 bytes with two-sided masks (window 1,024 at d 128 is 1.15 times FlashAttention-3
// with 20, H100, 2026-11-28), 12 without, 84 where every pair is looked up in memory, which is what
// takes the time then, up to 172 where documents are among them, and up to 212 with an O of 256
// columns (neither timed; sm80 is what is left).
// Without options nothing may spill. Beyond d 256 up to 88 and 168 bytes; not timed with them, but
// without them that kernel is 5 times as fast as sm80 (2026-11-28). Of e4m3 with an O in
// parts up to 160 bytes, 284 where sequences are packed, in the fallback and the scheduler, and of
// up to 128 dims 80 bytes with two-sided masks of packed sequences (untimed; simt is left). With an
// O of two products 36 bytes, 100 with two-sided masks, in the fallback. Of pairs of blocks 44
// bytes, more with two-sided masks, around the loops.
std::size_t spill_allowance(const ForwardSm90Config& config) {
  const ScoreOptions& score = config.score;
  if (score.has_pair_terms() && (config.split_dims || config.d_v > 192)) return 224;
  if (score.has_pair_terms()) return score.documents ? 192 : 128;
  if (config.adds_in_parts()) return 400;
  if (config.has_8_bits() && score.varlen) return 128;
  if (config.has_wide_output()) return 128;
  if (config.paired) return score.mask_kind == MaskKind::kBoth ? 112 : 64;
  if (config.has_8_bits() && config.d_qk > 128) return 96;
  if (score.mask_kind == MaskKind::kBoth) return config.split_dims ? 96 : 48;
  if (config.has_8_bits()) return 40;  // 36 bytes at d 64 causal
  if (!config.specialised) return 48;  // an ablation: a consumer is the producer, too
  const bool has_options = config.maps_scores() || score.varlen || score.sinks || score.stats;
  return has_options || config.conditional ? 16 : 0;
}

}  // namespace

KernelSpec forward_sm90_spec(const ForwardSm90Config& config) {
  return on_tensor_cores(spec_of<ForwardArguments>("forward_sm90/forward_sm90", "forward_sm90",
                                                   distinction(config), config),
                         config, spill_allowance(config));
}

KernelSpec sm90_key_ranges_spec(const ForwardSm90Config& config) {
  ForwardSm90Config needed;
  needed.kv_rows = config.kv_rows;
  needed.score.varlen = config.score.varlen;
  KernelSpec spec =
      spec_of<ForwardArguments>("common/documents_sm90", "document_ranges_sm90",
                                sentence(config.kv_rows, name_suffix(needed.score)), needed);
  spec.num_threads = kKeyRangeThreads;
  return spec;
}

KernelSpec sm90_values_spec(const ForwardSm90Config& config) {
  ForwardSm90Config needed;
  needed.dtype = config.dtype;
  needed.d_v = config.d_v;
  needed.kv_rows = config.kv_rows;
  needed.score.varlen = config.score.varlen;
  KernelSpec spec = spec_of<ForwardArguments>(
      "forward_sm90/values", "transpose_values_sm90",
      sentence(name(config.dtype), "_d", config.d_v, name_suffix(needed.score)), needed);
  spec.num_threads = kValueThreads;
  spec.shared_bytes = static_cast<size_t>(config.v_bytes());
  return spec;
}

namespace {

// One set of options, under a mask, in several sizes.
std::vector<KernelSpec> specs_of_sizes(Problem problem, const IntervalMask& mask,
                                       i64 heads = 1024) {
  const Gpu gpu = gpu_named("h100");
  constexpr i64 kDims[][2] = {{64, 64},   {80, 80},  {96, 96},  {128, 128}, {192, 128}, {192, 192},
                              {256, 256}, {128, 64}, {64, 256}, {512, 512}, {320, 320}};
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
        specs.push_back(forward_sm90_spec(forward_sm90_config(problem, gpu)));
      }
    }
  }
  return specs;
}

// Heads that share a tile, and documents with the kernel that looks for their ranges.
std::vector<KernelSpec> specs_of_decoding_and_documents(const Problem& problem) {
  const Gpu gpu = gpu_named("h100");
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
  std::vector<KernelSpec> specs;
  for (const i64 dim : {64, 128, 256}) {
    for (Problem* each : {&decode, &documents}) {
      each->dim_qk = each->dim_v = dim;
      specs.push_back(forward_sm90_spec(forward_sm90_config(*each, gpu)));
    }
  }
  specs.push_back(sm90_key_ranges_spec(forward_sm90_config(documents, gpu)));
  return specs;
}

// Both kernels of calls in which chunks of prompts and single rows meet.
std::vector<KernelSpec> specs_of_mixed(Problem problem) {
  const Gpu gpu = gpu_named("h100");
  problem.heads_kv = 8;
  problem.heads_q = 32;
  problem.num_sequences = 4;
  problem.dtype = problem.arrays[Array::kO].dtype = DType::kBFloat16;
  std::vector<KernelSpec> specs;
  for (const i64 dim : {64, 128, 256}) {
    problem.dim_qk = problem.dim_v = dim;
    problem.q_rows = problem.kv_rows = problem.max_q = problem.max_kv = 4096;
    ForwardSm90Config config = forward_sm90_config(problem, gpu);
    config.mixed = true;
    specs.push_back(forward_sm90_spec(config));
    problem.max_q = kFewRows / problem.group_size();
    specs.push_back(
        plan_decode_beside(problem, gpu, gpu.num_multiprocessors)->launches.front().spec);
  }
  return specs;
}

}  // namespace

namespace {

// With a bias and a mask that the copy engine brings.
Problem with_tiles(Problem problem) {
  problem.arrays[Array::kBias].dtype = DType::kBFloat16;
  problem.arrays[Array::kMask].dtype = DType::kBool;
  for (const Array array : {Array::kBias, Array::kMask}) {
    problem.arrays[array].strides[2] = 4096;
    problem.arrays[array].strides[3] = 1;
  }
  return problem;
}

// 16-bit q, k and v that may be rounded to e4m3: all kernels of such a plan.
std::vector<KernelSpec> specs_of_fp8(Problem problem) {
  const Gpu gpu = gpu_named("h100");
  problem.heads_q = problem.heads_kv = 16;
  problem.q_rows = problem.kv_rows = problem.max_q = problem.max_kv = 4096;
  problem.precision = Precision::kFp8;
  problem.implementation = Implementation::kSm90;
  problem.arrays[Array::kLse].dtype = DType::kFloat32;
  std::vector<KernelSpec> specs;
  constexpr i64 kDims[][2] = {{64, 64}, {80, 112}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
  for (const auto& [dim_qk, dim_v] : kDims) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      problem.dim_qk = dim_qk;
      problem.dim_v = dim_v;
      problem.dtype = dtype;
      for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
        const bool is_value = array == Array::kV || array == Array::kO;
        const i64 dim = is_value ? dim_v : dim_qk;
        problem.arrays[array] = {
            nullptr, dtype, 4, {1, 16, 4096, dim}, {16 * 4096 * dim, 4096 * dim, dim, 1}};
      }
      const PlanOrRefusal made = plan_forward_sm90(problem, gpu);
      for (const KernelLaunch& launch : made.plan->launches) specs.push_back(launch.spec);
    }
  }
  return specs;
}

// q, k and v of e4m3, with the kernel that transposes V.
std::vector<KernelSpec> specs_of_8_bits(Problem problem) {
  const Gpu gpu = gpu_named("h100");
  problem.heads_q = problem.heads_kv = 1024;
  problem.q_rows = problem.kv_rows = problem.max_q = problem.max_kv = 4096;
  problem.dtype = problem.arrays[Array::kO].dtype = DType::kBFloat16;
  for (const Array array : {Array::kQ, Array::kK, Array::kV}) {
    problem.arrays[array].dtype = DType::kFloat8E4M3;
  }
  std::vector<KernelSpec> specs;
  constexpr i64 kDims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
  for (const auto& [dim_qk, dim_v] : kDims) {
    problem.dim_qk = dim_qk;
    problem.dim_v = dim_v;
    const ForwardSm90Config config = forward_sm90_config(problem, gpu);
    specs.push_back(forward_sm90_spec(config));
    specs.push_back(sm90_values_spec(config));
  }
  return specs;
}

}  // namespace

std::vector<std::vector<KernelSpec>> forward_sm90_specs() {
  Problem plain;
  plain.score_map.scale = 1;
  plain.num_sequences = 1;
  Problem packed = plain;
  packed.packed = {true, true};
  packed.arrays[Array::kStats].dtype = DType::kFloat32;
  Problem capped = packed;
  capped.score_map = {1, 50};
  capped.arrays[Array::kSinks].dtype = DType::kFloat32;
  Problem sloped = plain;
  sloped.score_map.scale = -1;
  sloped.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
  Problem pairs = plain;
  pairs.arrays[Array::kBias].dtype = DType::kFloat32;
  for (const Array array : {Array::kMask, Array::kQIds, Array::kStats}) {
    pairs.arrays[array].dtype = DType::kInt32;
  }
  pairs.dropout.threshold = 1;
  Problem left_padded = plain;
  left_padded.arrays[Array::kKvStart].dtype = DType::kInt32;
  Problem paged = capped;
  paged.packed.kv = false;
  paged.page_rows = 16;
  paged.arrays[Array::kPageTable].dtype = DType::kInt32;
  Problem mixed = plain;
  mixed.packed.q = true;
  mixed.page_rows = 16;
  mixed.mask.causal = true;
  for (const Array array : {Array::kPageTable, Array::kCuQ, Array::kKvLengths}) {
    mixed.arrays[array].dtype = DType::kInt32;
  }
  Problem paged_by_rows = paged;
  paged_by_rows.page_rows = 1;
  const IntervalMask causal{.causal = true};
  Problem causal_8_bits = packed;
  causal_8_bits.mask = causal;
  const IntervalMask window{.causal = true, .window_left = 100};
  return {specs_of_sizes(plain, {}),
          specs_of_sizes(plain, causal),
          specs_of_sizes(plain, window),
          specs_of_sizes(plain, causal, 1),
          specs_of_decoding_and_documents(plain),
          specs_of_sizes(packed, causal),
          specs_of_sizes(capped, window),
          specs_of_sizes(sloped, causal),
          specs_of_sizes(pairs, causal),
          specs_of_sizes(pairs, causal, 1),
          specs_of_sizes(with_tiles(plain), {}),
          specs_of_sizes(with_tiles(plain), causal, 1),
          specs_of_sizes(left_padded, causal),
          specs_of_sizes(paged, causal),
          specs_of_sizes(paged_by_rows, window),
          specs_of_mixed(mixed),
          specs_of_8_bits(plain),
          specs_of_8_bits(causal_8_bits),
          specs_of_fp8(plain),
          mla_sm90_specs()};
}

}  // namespace fulmen::gpu
