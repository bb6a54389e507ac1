// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the sm80 backward kernels.

#include "plan/sm80_backward.h"

#include <span>

#include "core/error.h"
#include "plan/simt.h"
#include "plan/sm80.h"

namespace fulmen {
namespace {

constexpr i64 kMaxDim = 576;
constexpr i64 kMaxBlocks = 0x7fffffff;
constexpr i64 kLinesUnderMask = 8;  // query heads that are walked together

// Widest first. A shape is taken for head dimensions up to max_dim where it leaves room for
// min_blocks blocks on a multiprocessor.
struct TileShape {
  i32 max_dim, warps, rows, columns, stages, pair_stages, s_rows, s_columns, kv_rows, dq_rows;
  i32 min_blocks;
  bool split_roles;
};
constexpr TileShape kShapes[] = {
    {48, 4, 64, 128, 2, 1, 32, 32, 32, 32, 2, false},
    {64, 8, 128, 128, 2, 2, 32, 64, 64, 32, 1, true},
    {64, 4, 64, 128, 2, 1, 32, 32, 32, 32, 2, false},
    {64, 8, 64, 128, 2, 1, 32, 32, 32, 32, 1, false},
    {64, 4, 64, 64, 2, 1, 32, 32, 32, 32, 1, false},
    {128, 8, 64, 128, 2, 2, 64, 32, 32, 32, 1, true},
    {128, 8, 64, 128, 2, 2, 32, 32, 32, 32, 1, false},
    {128, 8, 64, 128, 2, 1, 32, 32, 32, 32, 1, false},
    {128, 4, 64, 64, 1, 1, 32, 32, 32, 32, 1, false},
    {256, 8, 64, 64, 2, 2, 32, 32, 32, 32, 1, true},
    {256, 8, 64, 64, 2, 2, 16, 32, 32, 32, 1, false},
    {256, 8, 64, 64, 2, 1, 16, 32, 32, 32, 1, false},
    {256, 8, 64, 64, 1, 1, 16, 32, 32, 32, 1, false},
    {256, 8, 32, 32, 1, 1, 16, 16, 16, 16, 1, false},
    {320, 8, 32, 64, 2, 2, 16, 32, 32, 32, 1, true},
    {576, 8, 32, 32, 2, 2, 16, 16, 32, 32, 1, true},
    {576, 8, 32, 32, 2, 1, 16, 16, 16, 16, 1, false},
    {576, 8, 32, 32, 1, 1, 16, 16, 16, 16, 1, false},
    {576, 8, 16, 16, 1, 1, 16, 16, 16, 16, 1, false},
};

// The same for float32 inputs, whose tiles are twice as large.
constexpr TileShape kFloat32Shapes[] = {
    {64, 8, 64, 128, 2, 2, 32, 32, 32, 32, 1, false},
    {64, 8, 64, 128, 2, 1, 32, 32, 32, 32, 1, false},
    {64, 4, 64, 64, 2, 1, 32, 32, 32, 32, 1, false},
    {64, 4, 64, 64, 1, 1, 32, 32, 32, 32, 1, false},
    {128, 8, 64, 64, 2, 1, 16, 32, 32, 32, 1, false},
    {128, 8, 64, 64, 1, 1, 16, 32, 32, 32, 1, false},
    {256, 8, 32, 32, 1, 1, 16, 16, 16, 16, 1, false},
    {256, 8, 16, 16, 1, 1, 16, 16, 16, 16, 1, false},
};

std::span<const TileShape> shapes_of(const Problem& problem) {
  if (problem.dtype == DType::kFloat32) return kFloat32Shapes;
  return kShapes;
}

i32 rounded_up(i64 dim, i64 unit) {
  return static_cast<i32>(unit * max<i64>(ceil_div(dim, unit), 1));
}

// Whether dbias has one element for the pairs of several heads.
bool is_broadcast(const Problem& problem) {
  const Tensor& dbias = problem.arrays[Array::kDBias];
  return dbias.shape[0] != problem.num_sequences || dbias.shape[1] != problem.heads_q;
}

void set_options(Sm80BackwardConfig& config, const Problem& problem, const Gpu& gpu) {
  const bool has_bias = problem.has(Array::kBias);
  config.mask = problem.has(Array::kMask);
  config.bias = has_bias ? problem.arrays[Array::kBias].dtype : DType::kNone;
  config.pair_units = sm80_has_pair_units(problem);
  config.documents = problem.has(Array::kQIds);
  config.dbias = sm80_has_dbias(problem);
  config.sums_dbias = config.dbias && is_broadcast(problem);
  config.dtype = problem.dtype;
  config.precision = problem.precision;
  config.dq = problem.has(Array::kDQ);
  config.dk = problem.has(Array::kDK);
  config.dv = problem.has(Array::kDV);
  config.softcap = problem.score_map.softcap != 0;
  config.alibi = problem.has(Array::kAlibiSlopes);
  config.natural = has_bias || config.softcap || config.alibi || !(problem.score_map.scale > 0);
  config.dropout = problem.dropout.enabled();
  config.split_sum = problem.has(Array::kSinks) && problem.has(Array::kDLse);
  config.ordered = config.dq && (problem.deterministic || problem.batch_invariant);
  config.hopper = gpu.compute_capability >= 90;
  config.units = sm80_has_units(problem, Array::kDOut);
}

bool is_plain(const Sm80BackwardConfig& config) {
  return !config.hides_pairs() && !config.documents && !config.natural && !config.dropout;
}

// Tiles of dQ as wide as leaves one for every warp, and registers for options.
i32 dq_dims(const Sm80BackwardConfig& config) {
  for (const i32 dims : {64, 48, 32}) {
    if (dims == 64 && !is_plain(config)) continue;
    const bool divides = config.d_qk % dims == 0;
    if (divides && config.rows / config.dq_rows * (config.d_qk / dims) >= config.warps) return dims;
  }
  return 16;
}

bool may_split_roles(const Sm80BackwardConfig& config) {
  return is_plain(config) && !config.split_sum && config.dq && config.dk && config.dv &&
         config.d_qk == config.d_v;
}

void set_shape(Sm80BackwardConfig& config, const TileShape& shape, const Problem& problem) {
  // Options take registers: with any of them a warp's tile of S has 16 rows.
  const bool plain = is_plain(config);
  config.warps = shape.warps;
  config.rows = shape.rows;
  config.columns = shape.columns;
  config.stages = shape.stages;
  config.pair_stages = shape.pair_stages;
  config.split_roles = shape.split_roles;
  config.s_rows = plain ? shape.s_rows : 16;
  config.s_columns = shape.s_columns;
  config.kv_rows = shape.kv_rows;
  config.dq_rows = shape.dq_rows;
  config.min_blocks = shape.min_blocks;
  config.d_qk = rounded_up(problem.dim_qk, i64{16} * config.kv_parts());
  config.d_v = rounded_up(problem.dim_v, i64{16} * config.kv_parts());
  config.dq_dims = dq_dims(config);
}

// Zero warps where no shape fits.
Sm80BackwardConfig config_of(const Problem& problem, const Gpu& gpu) {
  Sm80BackwardConfig config;
  set_options(config, problem, gpu);
  for (const TileShape& shape : shapes_of(problem)) {
    set_shape(config, shape, problem);
    if (config.split_roles && !may_split_roles(config)) continue;
    const size_t bytes = static_cast<size_t>(config.shared_bytes());
    // The system keeps 1 KB of every block.
    const size_t total = static_cast<size_t>(shape.min_blocks) * (bytes + 1024);
    if (max(problem.dim_qk, problem.dim_v) <= shape.max_dim &&
        bytes <= gpu.shared_bytes_per_block && total <= gpu.shared_bytes_per_multiprocessor) {
      return config;
    }
  }
  config.warps = 0;
  return config;
}

// Tiles of an axis of all heads.
i64 tiles_of(const Problem& problem, i64 extent, i64 heads, i64 tile_rows) {
  const i64 slots = problem.packed ? extent / tile_rows + problem.num_sequences
                                   : ceil_div(extent, tile_rows) * problem.num_sequences;
  return slots > 2 * kMaxBlocks / max<i64>(heads, 1) ? 2 * kMaxBlocks : slots * heads;
}

// Whether rows of o and dout are 16-byte units, and what is kept of a row float32.
bool has_row_units(const Problem& problem) {
  for (const Array array : {Array::kStats, Array::kLse, Array::kDLse}) {
    if (problem.has(array) && problem.arrays[array].dtype != DType::kFloat32) return false;
  }
  return sm80_has_units(problem, Array::kO) && sm80_has_units(problem, Array::kDOut);
}

bool needs_simt(const Problem& problem) {
  return (problem.has(Array::kDBias) && !sm80_has_dbias(problem)) || problem.has(Array::kDSinks);
}

}  // namespace

std::string sm80_backward_refusal(const Problem& problem, const Gpu& gpu) {
  if (!problem.has(Array::kDQ) && !problem.has(Array::kDK) && !problem.has(Array::kDV)) {
    return "computes dbias and dsinks only beside dq, dk or dv";
  }
  const DType dout = problem.arrays[Array::kDOut].dtype;
  if (dout != problem.dtype) return sentence("does not take dout of ", name(dout));
  if (max(problem.dim_qk, problem.dim_v) > kMaxDim) {
    return sentence("head dimensions of the backward pass go up to ", kMaxDim, "; they are ",
                    problem.dim_qk, " and ", problem.dim_v);
  }
  if (needs_simt(problem)) {
    const std::string refusal = simt_refusal(problem, gpu);
    if (!refusal.empty()) return "dbias and dsinks come from simt: " + refusal;
  }
  const Sm80BackwardConfig config = config_of(problem, gpu);
  if (config.warps == 0) {
    return sentence("its narrowest tiles need more than the ", gpu.shared_bytes_per_block,
                    " bytes of shared memory of a block");
  }
  if (tiles_of(problem, problem.q_rows, problem.heads_q, config.rows) +
          tiles_of(problem, problem.kv_rows, problem.heads_kv, config.columns) >
      kMaxBlocks) {
    return "counts blocks of queries and keys in 31 bits";
  }
  return "";
}

Sm80BackwardConfig sm80_backward_config(const Problem& problem, const Gpu& gpu) {
  Sm80BackwardConfig config = config_of(problem, gpu);
  if (leaves_out(problem, Optimisation::kPipeline)) config.stages = config.pair_stages = 1;
  config.swizzle = !leaves_out(problem, Optimisation::kSwizzle);
  config.full_blocks = !leaves_out(problem, Optimisation::kFullBlocks);
  return config;
}

Sm80BackwardConfig sm80_rows_config(const Problem& problem, const Sm80BackwardConfig& config) {
  Sm80BackwardConfig reduced;
  reduced.dtype = config.dtype;
  reduced.rows = config.rows;
  reduced.d_qk = config.d_qk;
  reduced.dq = config.dq;
  reduced.split_sum = config.split_sum;
  reduced.hopper = config.hopper;
  reduced.units = has_row_units(problem);
  reduced.documents = config.documents;
  return reduced;
}

Sm80BackwardConfig sm80_dbias_config(const Sm80BackwardConfig& config) {
  Sm80BackwardConfig reduced;
  reduced.dtype = config.dtype;
  reduced.sums_dbias = config.sums_dbias;
  return reduced;
}

Sm80BackwardConfig sm80_finish_config(const Sm80BackwardConfig& config) {
  Sm80BackwardConfig reduced;
  reduced.dtype = config.dtype;
  reduced.d_qk = config.d_qk;
  reduced.rows = config.rows;
  reduced.columns = config.columns;
  reduced.dq_rows = config.dq_rows;
  reduced.dq_dims = config.dq_dims;
  reduced.hopper = config.hopper;
  return reduced;
}

// Every row of pairs has one of its own there; sums of several are made in any order.
bool sm80_has_dbias(const Problem& problem) {
  if (!problem.has(Array::kDBias) || problem.packed) return false;
  const Tensor& dbias = problem.arrays[Array::kDBias];
  if (dbias.shape[2] != problem.q_rows || dbias.shape[3] != problem.kv_rows) return false;
  return !is_broadcast(problem) || !(problem.deterministic || problem.batch_invariant);
}

i32 sm80_lines_per_group(const Problem& problem) {
  const IntervalMask& mask = problem.mask;
  const bool is_full = !mask.causal && mask.window_left == kNoLimit &&
                       mask.window_right == kNoLimit && mask.chunk == 0;
  const i64 lines = is_full ? 1 : max<i64>(kLinesUnderMask / problem.group_size(), 1);
  return static_cast<i32>(lines);
}

Sm80BackwardWorkspace sm80_backward_workspace(const Problem& problem,
                                              const Sm80BackwardConfig& config) {
  const auto aligned = [](i64 bytes) { return ceil_div(bytes, 256) * 256; };
  const i64 row_tiles = tiles_of(problem, problem.q_rows, problem.heads_q, config.rows);
  const i64 key_tiles = tiles_of(problem, problem.kv_rows, problem.heads_kv, config.columns);
  Sm80BackwardWorkspace workspace{};
  workspace.suspect_keys_at = row_tiles * 4;
  workspace.turns_at = workspace.suspect_keys_at + key_tiles * 4;
  workspace.next_block_at = workspace.turns_at + (config.ordered ? row_tiles * 4 : 0);
  workspace.dbias_sums_at = aligned(workspace.next_block_at + 4);
  const auto& extents = problem.arrays[Array::kDBias].shape;
  workspace.zeroed_bytes =
      workspace.dbias_sums_at +
      (config.sums_dbias ? extents[0] * extents[1] * extents[2] * extents[3] * 4 : 0);
  workspace.row_tiles_at = aligned(workspace.zeroed_bytes);
  workspace.hulls_at = aligned(workspace.row_tiles_at + row_tiles * config.row_bytes());
  workspace.dq_sums_at = aligned(workspace.hulls_at + (config.documents ? row_tiles * 8 : 0));
  workspace.row_terms_at =
      aligned(workspace.dq_sums_at + (config.dq ? row_tiles * config.dq_elems() * 4 : 0));
  const i64 rows = (problem.packed ? 1 : problem.num_sequences) * problem.heads_q * problem.q_rows;
  const size_t simt = needs_simt(problem) ? simt_workspace_bytes(problem.dtype, rows) : 0;
  workspace.bytes = workspace.row_terms_at + static_cast<i64>(simt);
  return workspace;
}

GpuNeeds sm80_backward_needs(const Problem& problem, const Gpu& gpu) {
  const Sm80BackwardConfig config = sm80_backward_config(problem, gpu);
  const Sm80BackwardWorkspace workspace = sm80_backward_workspace(problem, config);
  return {.tile = {config.rows, config.columns},
          .workspace_bytes = static_cast<size_t>(workspace.bytes),
          .zeroed_bytes = static_cast<size_t>(workspace.zeroed_bytes),
          .alignment_bytes = config.units || (config.hides_pairs() && config.pair_units) ? 16 : 1};
}

}  // namespace fulmen
