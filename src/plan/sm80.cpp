// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the sm80 kernels.

#include "plan/sm80.h"

#include <span>

#include "core/error.h"
#include "plan/sm80_backward.h"

namespace fulmen {
namespace {

constexpr i64 kMaxDim = 576;  // of q, k: rows of 16 queries and two blocks of 16 keys fit 99 KB
constexpr i64 kMaxBlocks = 0x7fffffff;
constexpr double kSmallestScale = 0x1p-60;  // by which slopes of ALiBi and caps are divided

// The first that fits is taken: head dimensions up to max_dim, room for min_blocks blocks on a
// multiprocessor.
struct TileShape {
  i32 max_dim, warps, row_tiles, columns, min_blocks;
  i32 many_columns = columns;     // where options leave a warp 16 rows
  i32 pair_columns = columns;     // with a mask, a bias or documents alone
  i32 dropout_columns = columns;  // with dropout alone
  i32 team_warps = 1;             // more: not where options take many registers
  i32 stage_blocks = 1;           // but one where arrays belong to pairs

  // Dims of V that one block takes: 128 sums a thread, in teams up to 160.
  constexpr i32 max_v() const { return team_warps > 1 ? max_dim : 256; }
};
// NVIDIA H200, 2026-11-28: bench/results/2026-11-28-sm80-variants-h200.jsonl, decisions 25, 30.
constexpr TileShape kShapes[] = {
    {.max_dim = 48,
     .warps = 4,
     .row_tiles = 2,
     .columns = 64,
     .min_blocks = 2,
     .dropout_columns = 32},
    {.max_dim = 64,
     .warps = 4,
     .row_tiles = 2,
     .columns = 64,
     .min_blocks = 2,
     .dropout_columns = 32,
     .stage_blocks = 2},
    {.max_dim = 64,
     .warps = 4,
     .row_tiles = 2,
     .columns = 64,
     .min_blocks = 2,
     .dropout_columns = 32},
    {.max_dim = 80, .warps = 4, .row_tiles = 2, .columns = 32, .min_blocks = 2},
    {.max_dim = 96,
     .warps = 4,
     .row_tiles = 2,
     .columns = 48,
     .min_blocks = 2,
     .many_columns = 32,
     .pair_columns = 32,
     .dropout_columns = 32},
    {.max_dim = 96, .warps = 4, .row_tiles = 2, .columns = 32, .min_blocks = 2},
    {.max_dim = 128,
     .warps = 4,
     .row_tiles = 2,
     .columns = 48,
     .min_blocks = 2,
     .many_columns = 64,
     .pair_columns = 32,
     .dropout_columns = 32},
    {.max_dim = 128,
     .warps = 4,
     .row_tiles = 2,
     .columns = 32,
     .min_blocks = 2,
     .many_columns = 64},
    {.max_dim = 192, .warps = 8, .row_tiles = 1, .columns = 64, .min_blocks = 1},
    {.max_dim = 256, .warps = 8, .row_tiles = 2, .columns = 64, .min_blocks = 1, .team_warps = 2},
    {.max_dim = 256, .warps = 8, .row_tiles = 1, .columns = 64, .min_blocks = 1},
    {.max_dim = 256, .warps = 8, .row_tiles = 1, .columns = 32, .min_blocks = 1},
    {.max_dim = 256, .warps = 4, .row_tiles = 1, .columns = 32, .min_blocks = 1},
    {.max_dim = 320, .warps = 8, .row_tiles = 2, .columns = 32, .min_blocks = 1, .team_warps = 2},
    {.max_dim = 576, .warps = 8, .row_tiles = 1, .columns = 32, .min_blocks = 1, .team_warps = 2},
    {.max_dim = 576, .warps = 4, .row_tiles = 1, .columns = 32, .min_blocks = 1},
    {.max_dim = 576, .warps = 4, .row_tiles = 1, .columns = 16, .min_blocks = 1},
    {.max_dim = 576, .warps = 2, .row_tiles = 1, .columns = 16, .min_blocks = 1},
    {.max_dim = 576, .warps = 1, .row_tiles = 1, .columns = 16, .min_blocks = 1},
};

// The same for float32 inputs, whose tiles are twice as large: by one tf32 product, by three.
constexpr i64 kMaxFloat32Dim = 256;
constexpr TileShape kTf32Shapes[] = {
    {64, 4, 2, 64, 2, 32}, {64, 4, 2, 32, 2},  {128, 8, 1, 64, 1, 32},
    {128, 4, 1, 32, 2},    {128, 4, 1, 32, 1}, {256, 4, 1, 32, 1},
    {256, 4, 1, 16, 1},    {256, 2, 1, 16, 1}, {256, 1, 1, 16, 1},
};
constexpr TileShape k3xTf32Shapes[] = {
    {64, 4, 2, 32, 2},  {128, 4, 1, 32, 2}, {128, 4, 1, 32, 1}, {256, 4, 1, 32, 1},
    {256, 4, 1, 16, 1}, {256, 2, 1, 16, 1}, {256, 1, 1, 16, 1},
};

std::span<const TileShape> shapes_of(const Problem& problem) {
  if (problem.dtype != DType::kFloat32) return kShapes;
  if (problem.precision == Precision::kTf32) return kTf32Shapes;
  return k3xTf32Shapes;
}

i32 rounded_up(i64 dim, i64 unit) {
  return static_cast<i32>(unit * max<i64>(ceil_div(dim, unit), 1));
}

// A tile of a shape, with head dimensions as computed with. Long rows of V are cut into equal
// parts.
void set_tile(Sm80Config& config, const Problem& problem, const TileShape& shape,
              bool takes_many_registers) {
  const bool has_pairs = config.mask || config.bias != DType::kNone || config.documents;
  config.d_qk = rounded_up(problem.dim_qk, 16);
  const i64 parts = max<i64>(1, ceil_div(problem.dim_v, shape.max_v()));
  const i64 unit = problem.dtype == DType::kFloat32 ? 32 : 16 * shape.team_warps;
  config.d_v = rounded_up(ceil_div(problem.dim_v, parts), unit);
  config.warps = shape.warps;
  config.team_warps = shape.team_warps;
  config.row_tiles = takes_many_registers ? 1 : shape.row_tiles;
  config.columns = shape.columns;
  if (has_pairs) config.columns = shape.pair_columns;
  if (config.dropout) config.columns = shape.dropout_columns;
  if (takes_many_registers) config.columns = shape.many_columns;
  config.stage_blocks = has_pairs ? 1 : shape.stage_blocks;
  config.min_blocks = shape.min_blocks;
}

void set_options(Sm80Config& config, const Problem& problem) {
  const bool has_bias = problem.has(Array::kBias);
  config.dtype = problem.dtype;
  config.precision = problem.precision;
  config.softcap = problem.score_map.softcap != 0;
  config.alibi = problem.has(Array::kAlibiSlopes);
  config.mask = problem.has(Array::kMask);
  if (has_bias) config.bias = problem.arrays[Array::kBias].dtype;
  config.documents = problem.has(Array::kQIds);
  config.pair_units = sm80_has_pair_units(problem);
  config.natural = has_bias || !(problem.score_map.scale > kSmallestScale);
  config.dropout = problem.dropout.enabled();
  config.stats = problem.has(Array::kStats);
  config.exact = problem.arrays[Array::kO].dtype == DType::kFloat32;
  config.units = sm80_has_units(problem);
}

// Whether options leave a warp registers for 16 rows only: any two of them, and with float32 inputs
// any, or rows without units.
bool takes_many_registers(const Sm80Config& config) {
  const bool maps_alone = config.natural && config.bias == DType::kNone;
  const i32 options = config.mask + (config.bias != DType::kNone) + config.documents + maps_alone +
                      config.softcap + config.alibi + config.dropout;
  if (config.dtype == DType::kFloat32) return options > 0 || !config.units;
  return options + config.exact > 1;
}

// Zero warps where no shape fits.
Sm80Config config_of(const Problem& problem, const Gpu& gpu) {
  Sm80Config config;
  set_options(config, problem);
  const bool takes_many = takes_many_registers(config);
  // By three products one path through a block is 2 % faster than two (d 64 and 128, H200,
  // 2026-11-28); with options two of float32 do not fit the registers.
  const bool is_float32 = problem.dtype == DType::kFloat32;
  config.lazy_max = !is_float32 || (problem.precision == Precision::kTf32 && !takes_many);
  for (const TileShape& shape : shapes_of(problem)) {
    if (shape.team_warps > 1 && takes_many) continue;
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
  const Sm80Config config = config_of(problem, gpu);
  if (config.warps == 0) {
    return sentence("its narrowest tiles need more than the ", gpu.shared_bytes_per_block,
                    " bytes of shared memory of a block");
  }
  const i64 slots = problem.packed
                        ? problem.q_rows / config.rows() + problem.num_sequences
                        : ceil_div(problem.q_rows, config.rows()) * problem.num_sequences;
  if (slots > kMaxBlocks / max<i64>(1, problem.heads_q * ceil_div(problem.dim_v, config.d_v))) {
    return "counts blocks of queries in 31 bits";
  }
  return "";
}

bool sm80_has_pair_units(const Problem& problem) {
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

bool sm80_has_units(const Problem& problem, Array last) {
  const i64 unit = 16 / size_bytes(problem.dtype);  // elements
  const auto has_units = [&](Array array) {
    const Tensor& tensor = problem.arrays[array];
    bool fits = tensor.dtype == problem.dtype && tensor.strides[3] == 1;
    for (int axis = 0; axis < 3; ++axis) {
      fits = fits && (tensor.shape[axis] <= 1 || tensor.strides[axis] % unit == 0);
    }
    return fits;
  };
  return problem.pointer_alignment >= 16 && problem.dim_qk % unit == 0 &&
         problem.dim_v % unit == 0 && has_units(Array::kQ) && has_units(Array::kK) &&
         has_units(Array::kV) && has_units(last);
}

Sm80Config sm80_forward_config(const Problem& problem, const Gpu& gpu) {
  Sm80Config config = config_of(problem, gpu);
  const auto keeps = [&problem](Optimisation each) { return !leaves_out(problem, each); };
  if (!keeps(Optimisation::kPipeline)) config.stages = 1;
  config.swizzle &= keeps(Optimisation::kSwizzle);
  config.full_blocks &= keeps(Optimisation::kFullBlocks);
  config.exact |= !keeps(Optimisation::kFoldedScale);
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
  const Sm80Config config = config_of(problem, gpu);
  const bool has_pairs = config.mask || config.bias != DType::kNone;
  return {.tile = {config.rows(), config.columns},
          .alignment_bytes = config.units || (has_pairs && config.pair_units) ? 16 : 1};
}

i32 sm80_lines_per_group(const Problem& problem, const Gpu& gpu, const Sm80Config& config) {
  const i64 lines = max<i64>(1, (problem.packed ? 1 : problem.num_sequences) * problem.heads_q);
  const i64 bytes = max<i64>(1, problem.kv_rows * (problem.dim_qk + problem.dim_v) *
                                    size_bytes(problem.dtype) / problem.group_size());
  i64 wanted = max<i64>(1, static_cast<i64>(gpu.l2_bytes / 2) / bytes);
  if (problem.mask.causal) {
    const i64 blocks = max<i64>(1, ceil_div(problem.q_rows, config.rows()));  // of a line
    const i64 at_once = i64{gpu.num_multiprocessors} * config.min_blocks;
    wanted = max(wanted, ceil_div(4 * at_once, blocks));
  }
  return static_cast<i32>(ceil_div(lines, ceil_div(lines, wanted)));
}

}  // namespace fulmen
