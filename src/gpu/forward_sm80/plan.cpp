// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the sm80 kernels.

#include "gpu/forward_sm80/plan.h"

#include <span>

#include "core/error.h"
#include "gpu/backward_sm80/plan.h"
#include "gpu/forward_sm80/shapes.h"

namespace fulmen {
namespace {

constexpr i64 kMaxDim = 576;  // of q, k: rows of 16 queries and two blocks of 16 keys fit 99 KB
constexpr i64 kMaxBlocks = 0x7fffffff;
constexpr double kSmallestScale = 0x1p-60;  // by which slopes of ALiBi and caps are divided

std::span<const Sm80Shape> shapes_of(const Problem& problem) {
  if (problem.dtype != DType::kFloat32) return kShapes;
  if (problem.precision == Precision::kTf32) return kTf32Shapes;
  return k3xTf32Shapes;
}

i32 rounded_up(i64 dim, i64 unit) {
  return static_cast<i32>(unit * max<i64>(ceil_div(dim, unit), 1));
}

// How many options of the problem cost registers.
i32 num_options(const ForwardSm80Config& config) {
  const bool maps_alone = config.scales_scores && config.bias == DType::kNone;
  return config.mask + (config.bias != DType::kNone) + config.documents + maps_alone +
         config.softcap + config.alibi + config.dropout;
}

// A tile of a shape, with head dimensions as computed with. Long rows of V are cut into equal
// parts.
void set_tile(ForwardSm80Config& config, const Problem& problem, const Sm80Shape& shape,
              bool takes_many_registers) {
  const bool has_pairs = config.has_pairs();
  config.d_qk = rounded_up(problem.dim_qk, 16);
  const i64 parts = max<i64>(1, ceil_div(problem.dim_v, shape.max_v()));
  const i64 unit = problem.dtype == DType::kFloat32 ? 32 : 16 * shape.warps_n;
  config.d_v = rounded_up(ceil_div(problem.dim_v, parts), unit);
  config.warps = shape.warps;
  config.warps_n = shape.warps_n;
  config.row_tiles = takes_many_registers ? 1 : shape.row_tiles;
  config.kv_rows = shape.columns;
  if (has_pairs) config.kv_rows = shape.pair_columns;
  if (config.dropout) config.kv_rows = shape.dropout_columns;
  if (config.softcap) config.kv_rows = shape.softcap_columns;
  if (takes_many_registers) config.kv_rows = shape.many_columns;
  config.stage_blocks = has_pairs ? 1 : shape.stage_blocks;
  const bool has_numbers = config.mask || config.bias != DType::kNone || config.dropout;
  config.interleaved = has_numbers && !takes_many_registers && config.dtype != DType::kFloat32 &&
                       config.warp_columns() % 32 == 0;
  config.single_buffer = shape.single_buffer;
  config.stages = shape.single_buffer ? 1 : 2;
  config.min_blocks = shape.min_blocks;
  config.q_in_registers = shape.q_in_registers && num_options(config) == 0;
  config.predicates_copies = shape.predicates_copies;
  config.even_k = config.aligned && !config.predicates_copies && config.d_qk == problem.dim_qk &&
                  config.d_v * parts == problem.dim_v;
}

// Whether a shape was made for problems like this one.
bool suits(const Sm80Shape& shape, const Problem& problem, const ForwardSm80Config& config,
           bool takes_many_registers) {
  if ((shape.warps_n > 1 || shape.single_buffer) && takes_many_registers) return false;
  if (shape.single_buffer && num_options(config) > 0) return false;
  if (problem.batch_invariant) return shape.max_keys == kAnyLength;
  return problem.max_kv / (problem.mask.causal ? 2 : 1) <= shape.max_keys;
}

// Whether there is nothing to look up before a block begins, see ForwardSm80Config::dense.
bool is_dense(const Problem& problem) {
  const IntervalMask& mask = problem.mask;
  const bool has_lengths = problem.has(Array::kQLengths) || problem.has(Array::kKvLengths);
  return !problem.packed && !has_lengths && !problem.has(Array::kRng) &&
         mask.window_left == kNoLimit && mask.window_right == kNoLimit && mask.prefix == 0 &&
         mask.chunk == 0;
}

void set_options(ForwardSm80Config& config, const Problem& problem) {
  const bool has_bias = problem.has(Array::kBias);
  config.dtype = problem.dtype;
  config.precision = problem.precision;
  config.softcap = problem.score_map.softcap != 0;
  config.alibi = problem.has(Array::kAlibiSlopes);
  config.mask = problem.has(Array::kMask);
  if (has_bias) config.bias = problem.arrays[Array::kBias].dtype;
  config.documents = problem.has(Array::kQIds);
  config.pair_aligned = sm80_has_aligned_pairs(problem);
  config.scales_scores = has_bias || !(problem.score_map.scale > kSmallestScale);
  config.dropout = problem.dropout.enabled();
  config.stats = problem.has(Array::kStats);
  config.subtracts_max = problem.arrays[Array::kO].dtype == DType::kFloat32;
  config.aligned = sm80_has_aligned_rows(problem);
  config.fixed_length = is_dense(problem);
}

// Whether options leave a warp registers for 16 rows only: any two of them, and with float32 inputs
// any, or rows without units.
bool takes_many_registers(const ForwardSm80Config& config) {
  const i32 options = num_options(config);
  if (config.dtype == DType::kFloat32) return options > 0 || !config.aligned;
  return options + config.subtracts_max > 1;
}

// Zero warps where no shape fits.
ForwardSm80Config config_of(const Problem& problem, const Gpu& gpu) {
  ForwardSm80Config config;
  set_options(config, problem);
  const bool takes_many = takes_many_registers(config);
  // By three products one path through a block is 2 % faster than two (d 64 and 128, H200,
  // 2026-11-28); with options two of float32 do not fit the registers.
  const bool is_float32 = problem.dtype == DType::kFloat32;
  config.lazy_max = !is_float32 || (problem.precision == Precision::kTf32 && !takes_many);
  for (const Sm80Shape& shape : shapes_of(problem)) {
    if (!suits(shape, problem, config, takes_many)) continue;
    set_tile(config, problem, shape, takes_many);
    const size_t bytes = static_cast<size_t>(config.forward_shared_bytes());
    // The system keeps 1 KB of every block.
    const size_t total = static_cast<size_t>(shape.min_blocks) * (bytes + 1024);
    if (max(config.d_qk, config.d_v) <= shape.max_dim && bytes <= gpu.shared_bytes_per_block &&
        total <= gpu.shared_bytes_per_multiprocessor) {
      return config;
    }
  }
  config.warps = 0;
  return config;
}

std::string float32_refusal(const Problem& problem) {
  if (problem.precision == Precision::kFloat32) {
    return "computes float32 only with precision tf32 or 3xtf32, which nobody asked for";
  }
  const i64 widest = max(problem.dim_qk, problem.dim_v);
  if (widest <= kMaxFloat32Dim) return "";
  return sentence("head dimensions of float32 go up to ", kMaxFloat32Dim, "; the widest is ",
                  widest);
}

}  // namespace

std::string sm80_refusal(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability < 80) return "needs compute capability 8.0 (Ampere) or later";
  if (problem.dtype == DType::kFloat32) {
    const std::string refusal = float32_refusal(problem);
    if (!refusal.empty()) return refusal;
  } else if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) {
    return sentence("has no arithmetic for ", name(problem.dtype), ", only float16 and bfloat16");
  }
  if (problem.operation == Operation::kBackward) return sm80_backward_refusal(problem, gpu);
  if (problem.dim_qk > kMaxDim) {
    return sentence("head dimensions of q and k go up to ", kMaxDim, "; they are ", problem.dim_qk);
  }
  const ForwardSm80Config config = config_of(problem, gpu);
  if (config.warps == 0) {
    return sentence("its narrowest tiles need more than the ", gpu.shared_bytes_per_block,
                    " bytes of shared memory of a block");
  }
  const i64 slots = problem.packed
                        ? problem.q_rows / config.q_rows() + problem.num_sequences
                        : ceil_div(problem.q_rows, config.q_rows()) * problem.num_sequences;
  if (slots > kMaxBlocks / max<i64>(1, problem.heads_q * ceil_div(problem.dim_v, config.d_v))) {
    return "counts blocks of queries in 31 bits";
  }
  return "";
}

bool sm80_has_aligned_pairs(const Problem& problem) {
  for (const Array array : {Array::kMask, Array::kBias}) {
    if (!problem.has(array)) continue;
    const Tensor& tensor = problem.arrays[array];
    const i64 unit = 16 / size_bytes(tensor.dtype);
    bool fits = tensor.strides[3] == 1 && tensor.shape[3] % unit == 0;
    for (int axis = 0; axis < 3; ++axis) {
      fits = fits && (tensor.shape[axis] <= 1 || tensor.strides[axis] % unit == 0);
    }
    if (!fits || problem.pointer_alignment < 16) return false;
  }
  return true;
}

bool sm80_has_aligned_rows(const Problem& problem, Array last) {
  const i64 unit = 16 / size_bytes(problem.dtype);  // elements
  const auto is_aligned = [&](Array array) {
    const Tensor& tensor = problem.arrays[array];
    bool fits = tensor.dtype == problem.dtype && tensor.strides[3] == 1;
    for (int axis = 0; axis < 3; ++axis) {
      fits = fits && (tensor.shape[axis] <= 1 || tensor.strides[axis] % unit == 0);
    }
    return fits;
  };
  return problem.pointer_alignment >= 16 && problem.dim_qk % unit == 0 &&
         problem.dim_v % unit == 0 && is_aligned(Array::kQ) && is_aligned(Array::kK) &&
         is_aligned(Array::kV) && is_aligned(last);
}

ForwardSm80Config sm80_forward_config(const Problem& problem, const Gpu& gpu) {
  ForwardSm80Config config = config_of(problem, gpu);
  const auto keeps = [&problem](Optimisation each) { return !leaves_out(problem, each); };
  if (!keeps(Optimisation::kPipeline)) {
    config.stages = 1;
    config.single_buffer = config.predicates_copies = false;
  }
  config.swizzle &= keeps(Optimisation::kSwizzle);
  config.full_blocks &= keeps(Optimisation::kFullBlocks);
  config.subtracts_max |= !keeps(Optimisation::kFoldedScale);
  config.lazy_max &= keeps(Optimisation::kLazyRescale);
  config.lazy_rescale &= keeps(Optimisation::kLazyRescale);
  return config;
}

u32 sm80_switches(const Problem& problem) {
  const u32 shared = static_cast<u32>(Optimisation::kSwizzle) |
                     static_cast<u32>(Optimisation::kPipeline) |
                     static_cast<u32>(Optimisation::kFullBlocks);
  if (problem.operation == Operation::kBackward) return shared;
  return shared | static_cast<u32>(Optimisation::kLazyRescale) |
         static_cast<u32>(Optimisation::kFoldedScale);
}

GpuNeeds sm80_needs(const Problem& problem, const Gpu& gpu) {
  if (problem.operation == Operation::kBackward) return sm80_backward_needs(problem, gpu);
  const ForwardSm80Config config = config_of(problem, gpu);
  const bool has_pairs = config.mask || config.bias != DType::kNone;
  return {.tile = {config.q_rows(), config.kv_rows},
          .alignment_bytes = config.aligned || (has_pairs && config.pair_aligned) ? 16 : 1};
}

i32 sm80_forward_heads_per_group(const Problem& problem, const Gpu& gpu,
                                 const ForwardSm80Config& config) {
  const i64 batch_heads =
      max<i64>(1, (problem.packed ? 1 : problem.num_sequences) * problem.heads_q);
  const i64 bytes = max<i64>(1, problem.kv_rows * (problem.dim_qk + problem.dim_v) *
                                    size_bytes(problem.dtype) / problem.group_size());
  i64 wanted = max<i64>(1, static_cast<i64>(gpu.l2_bytes / 2) / bytes);
  if (problem.mask.causal) {
    const i64 blocks = max<i64>(1, ceil_div(problem.q_rows, config.q_rows()));  // of a line
    const i64 at_once = i64{gpu.num_multiprocessors} * config.min_blocks;
    wanted = max(wanted, ceil_div(4 * at_once, blocks));
  }
  return static_cast<i32>(ceil_div(batch_heads, ceil_div(batch_heads, wanted)));
}

}  // namespace fulmen
