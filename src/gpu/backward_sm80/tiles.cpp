// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which backward_sm80 a problem gets: its options, and the tiles for its head dimensions on a card.

#include <span>

#include "core/error.h"
#include "gpu/backward_sm80/plan.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/forward_sm80/shapes.h"
#include "gpu/params.h"
#include "gpu/tile_lists.h"

namespace fulmen::gpu {
namespace {

enum class Roles { kOne, kSplit, kSwapAb };

constexpr i64 kShortRows = 2048;  // of the queries of a sequence

// The first that fits is taken: head dimensions up to max_dim, room for min_blocks blocks on a
// multiprocessor.
struct BackwardShape {
  struct Tile {
    i32 rows, columns;
  };
  i32 max_dim;
  i32 warps = 8;
  Tile block;            // queries of a step, keys of a block
  Tile part = {32, 32};  // of a warp
  i32 dkv_rows = 32, dq_rows = 32;
  i32 stages = 2, pair_stages = 1;
  Roles roles = Roles::kOne;
  i32 min_blocks = 1;
  bool split_d = false;  // see BackwardSm80Config
};

// NVIDIA H200, 2026-11-28: docs/design/backward_sm80.md and the results that it names.
constexpr BackwardShape kShapes[] = {
    {.max_dim = 48, .warps = 4, .block = {64, 128}, .min_blocks = 2},
    {.max_dim = 64,
     .block = {128, 128},
     .part = {64, 32},
     .pair_stages = 2,
     .roles = Roles::kSwapAb},
    {.max_dim = 64, .warps = 4, .block = {64, 128}, .min_blocks = 2},
    {.max_dim = 64, .block = {64, 128}},
    {.max_dim = 64, .warps = 4, .block = {64, 64}},
    {.max_dim = 128, .block = {64, 128}, .pair_stages = 2, .roles = Roles::kSplit},
    {.max_dim = 128, .block = {64, 128}, .pair_stages = 2},
    {.max_dim = 128, .block = {64, 128}},
    {.max_dim = 128, .warps = 4, .block = {64, 64}, .stages = 1},
    {.max_dim = 256, .block = {64, 64}, .pair_stages = 2, .roles = Roles::kSplit},
    {.max_dim = 256, .block = {64, 64}, .part = {16, 32}, .pair_stages = 2},
    {.max_dim = 256, .block = {64, 64}, .part = {16, 32}},
    {.max_dim = 256, .block = {64, 64}, .part = {16, 32}, .stages = 1},
    {.max_dim = 256,
     .block = {32, 32},
     .part = {16, 16},
     .dkv_rows = 16,
     .dq_rows = 16,
     .stages = 1},
    {.max_dim = 320, .block = {32, 64}, .part = {16, 32}, .pair_stages = 2, .roles = Roles::kSplit},
    {.max_dim = 512,
     .block = {32, 32},
     .part = {16, 16},
     .pair_stages = 2,
     .roles = Roles::kSplit,
     .split_d = true},
    {.max_dim = 576, .block = {32, 32}, .part = {16, 16}, .pair_stages = 2, .roles = Roles::kSplit},
    {.max_dim = 576, .block = {32, 32}, .part = {16, 16}, .dkv_rows = 16, .dq_rows = 16},
    {.max_dim = 576,
     .block = {32, 32},
     .part = {16, 16},
     .dkv_rows = 16,
     .dq_rows = 16,
     .stages = 1},
    {.max_dim = 576,
     .block = {16, 16},
     .part = {16, 16},
     .dkv_rows = 16,
     .dq_rows = 16,
     .stages = 1},
};

// The same for float32 inputs, whose tiles are twice as large: docs/design/numerics.md.
constexpr BackwardShape kFloat32Shapes[] = {
    {.max_dim = 64, .block = {64, 128}, .pair_stages = 2},
    {.max_dim = 64, .block = {64, 128}},
    {.max_dim = 64, .warps = 4, .block = {64, 64}},
    {.max_dim = 64, .warps = 4, .block = {64, 64}, .stages = 1},
    {.max_dim = 128, .block = {64, 64}, .part = {16, 32}},
    {.max_dim = 128, .block = {64, 64}, .part = {16, 32}, .stages = 1},
    {.max_dim = 256,
     .block = {32, 32},
     .part = {16, 16},
     .dkv_rows = 16,
     .dq_rows = 16,
     .stages = 1},
    {.max_dim = 256,
     .block = {16, 16},
     .part = {16, 16},
     .dkv_rows = 16,
     .dq_rows = 16,
     .stages = 1},
};

std::span<const BackwardShape> shapes_of(const Problem& problem) {
  if (problem.dtype == DType::kFloat32) return kFloat32Shapes;
  return kShapes;
}

i32 rounded_up(i64 dim, i64 unit) {
  return static_cast<i32>(unit * max<i64>(ceil_div(dim, unit), 1));
}

// Whether dbias is what lies in shared memory as tiles of dS.
bool has_tiles_of_dbias(const Problem& problem) {
  const Tensor& dbias = problem.arrays[Array::kDBias];
  bool fits = size_bytes(problem.dtype) == 2 && dbias.dtype == problem.dtype &&
              !problem.score_map.is_modified() && !sm80_shares_dbias(problem) &&
              problem.pointer_alignment >= 16 && dbias.strides[3] == 1 && dbias.shape[3] % 8 == 0;
  for (int axis = 0; axis < 3; ++axis) {
    fits = fits && (dbias.shape[axis] <= 1 || dbias.strides[axis] % 8 == 0);
  }
  return fits;
}

// What kernels are compiled to know; they look up lengths, structured masks and sinks when they
// run.
ScoreOptions compiled_options(const Problem& problem) {
  ScoreOptions score = score_options_of(problem);
  score.mask_kind = MaskKind::kNone;
  score.varlen = score.sinks = score.stats = score.fp32_out = false;
  score.negative_scale &=
      score.bias == DType::kNone && !score.score_mod && !score.alibi && !score.user.score;
  return score;
}

BackwardSm80Config options_of(const Problem& problem, const Gpu& gpu) {
  BackwardSm80Config config;
  config.dtype = problem.dtype;
  config.precision = problem.precision;
  config.score = compiled_options(problem);
  config.score.user.captures = sums_captures(problem);
  config.aligned = has_aligned_rows(problem, Array::kDOut);
  config.pair_aligned = has_aligned_pairs(problem);
  config.dq = problem.has(Array::kDQ);
  config.dk = problem.has(Array::kDK);
  config.dv = problem.has(Array::kDV);
  config.dbias = sm80_makes_dbias(problem);
  config.accumulates_dbias = config.dbias && sm80_shares_dbias(problem);
  config.tiled_dbias = config.dbias && has_tiles_of_dbias(problem);
  config.split_sum = problem.has(Array::kSinks) && problem.has(Array::kDLse);
  config.deterministic = config.dq && problem.has_ordered_sums();
  config.hopper = gpu.compute_capability >= 90;
  return config;
}

bool is_plain(const BackwardSm80Config& config) {
  return !config.score.has_pair_terms() && !config.scales_scores() && !config.score.dropout;
}

// Tiles of dQ as wide as leaves one for every warp, and registers for options and slices.
i32 dq_dims(const BackwardSm80Config& config) {
  for (const i32 dims : {64, 48, 32}) {
    if ((dims == 64 && !is_plain(config)) || (dims > 32 && config.split_d)) continue;
    const bool divides = config.d_qk % dims == 0;
    if (divides && config.q_rows / config.dq_rows * (config.d_qk / dims) >= config.warps)
      return dims;
  }
  return 16;
}

bool may_split_roles(const BackwardSm80Config& config) {
  return is_plain(config) && !config.split_sum && config.dq && config.dk && config.dv &&
         config.d_qk == config.d_v;
}

void set_shape(BackwardSm80Config& config, const BackwardShape& shape, const Problem& problem) {
  // Options take registers: with any of them a warp's tile of S has 16 rows.
  const bool plain = is_plain(config);
  config.warps = shape.warps;
  config.q_rows = shape.block.rows;
  config.kv_rows = shape.block.columns;
  config.stages = shape.stages;
  config.pair_stages = config.tiled_dbias ? 1 : shape.pair_stages;
  config.split_roles = shape.roles != Roles::kOne;
  config.swap_ab = shape.roles == Roles::kSwapAb;
  config.s_rows = plain ? shape.part.rows : 16;
  config.s_columns = shape.part.columns;
  config.dkv_rows = shape.dkv_rows;
  config.dq_rows = shape.dq_rows;
  config.min_blocks = shape.min_blocks;
  // A second text for what is seen whole costs more than it saves where a mask cuts most steps.
  config.unrolled = config.split_roles && config.parts() > 1 &&
                    (!config.swap_ab || is_unmasked(problem) || problem.q_rows > kShortRows);
  config.late_prefetch = config.split_roles && shape.max_dim == 256;
  config.zeroes_dq = config.split_roles && shape.max_dim <= 128;
  config.split_d = shape.split_d;
  config.score.mask_tiles = has_mask_tiles(problem) && config.kv_rows % kPartRows == 0;
  config.d_qk = rounded_up(problem.dim_qk, i64{16} * config.kv_parts());
  config.d_v = rounded_up(problem.dim_v, i64{16} * config.kv_parts());
  config.dq_dims = dq_dims(config);
}

// Why a shape, set in `config`, is passed over; "" where it is the one to take.
std::string passed_over(const BackwardShape& shape, const BackwardSm80Config& config,
                        const Problem& problem, const Gpu& gpu) {
  if (max(problem.dim_qk, problem.dim_v) > shape.max_dim) {
    return sentence("is for head dimensions up to ", shape.max_dim);
  }
  if (config.split_roles && !may_split_roles(config)) {
    return "splits roles: for all of dq, dk and dv, of equal dims, without options";
  }
  const size_t bytes = static_cast<size_t>(config.shared_bytes());
  const size_t total = static_cast<size_t>(shape.min_blocks) * (bytes + kReservedSharedBytes);
  if (bytes > gpu.shared_bytes_per_block || total > gpu.shared_bytes_per_multiprocessor) {
    return sentence("needs ", bytes, " bytes of shared memory for each of ", shape.min_blocks,
                    " blocks");
  }
  return "";
}

}  // namespace

std::optional<BackwardSm80Config> backward_sm80_config(const Problem& problem, const Gpu& gpu,
                                                       std::vector<TileCandidate>* compared) {
  ++config_derivations();
  BackwardSm80Config config = options_of(problem, gpu);
  for (const BackwardShape& shape : shapes_of(problem)) {
    set_shape(config, shape, problem);
    std::string reason = passed_over(shape, config, problem, gpu);
    const bool chosen = reason.empty();
    if (chosen) reason = "the first that fits, of tiles in the order of their measured speed";
    if (compared != nullptr) {
      compared->push_back({{config.q_rows, config.kv_rows}, chosen, std::move(reason)});
    }
    if (!chosen) continue;
    if (leaves_out(problem, Optimisation::kPipeline)) config.stages = config.pair_stages = 1;
    config.swizzle = !leaves_out(problem, Optimisation::kSwizzle);
    config.full_blocks = !leaves_out(problem, Optimisation::kFullBlocks);
    return config;
  }
  return std::nullopt;
}

}  // namespace fulmen::gpu
