// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of sm80: what it refuses, its kernels, its workspace.

#include "gpu/backward_sm80/plan.h"

#include "core/error.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/simt/plan.h"

namespace fulmen {
namespace {

constexpr i64 kMaxDim = 576;
constexpr i64 kMaxBlocks = 0x7fffffff;
constexpr i64 kLinesUnderMask = 8;   // query heads that are walked together
constexpr i64 kBlocksAtATime = 128;  // as many as a large card runs

// Tiles of an axis of all heads.
i64 tiles_of(const Problem& problem, i64 extent, i64 heads, i64 tile_rows) {
  const i64 slots = problem.packed ? extent / tile_rows + problem.num_sequences
                                   : ceil_div(extent, tile_rows) * problem.num_sequences;
  return slots > 2 * kMaxBlocks / max<i64>(heads, 1) ? 2 * kMaxBlocks : slots * heads;
}

// Whether rows of o and dout are 16-byte units, and what is kept of a row float32.
bool has_aligned_rows(const Problem& problem) {
  for (const Array array : {Array::kStats, Array::kLse, Array::kDLse}) {
    if (problem.has(array) && problem.arrays[array].dtype != DType::kFloat32) return false;
  }
  return sm80_has_aligned_rows(problem, Array::kO) && sm80_has_aligned_rows(problem, Array::kDOut);
}

bool needs_simt(const Problem& problem) {
  return (problem.has(Array::kDBias) && !sm80_has_dbias(problem)) || problem.has(Array::kDSinks);
}

}  // namespace

std::string sm80_backward_refusal(const Problem& problem, const Gpu& gpu) {
  if (!problem.has(Array::kDQ) && !problem.has(Array::kDK) && !problem.has(Array::kDV)) {
    return "computes dbias and dsinks only unrolled dq, dk or dv";
  }
  const DType dout = problem.arrays[Array::kDOut].dtype;
  if (dout != problem.dtype) return sentence("does not take dout of ", name(dout));
  if (max(problem.dim_qk, problem.dim_v) > kMaxDim) {
    return sentence("head dimensions of the backward pass go up to ", kMaxDim, "; they are ",
                    problem.dim_qk, " and ", problem.dim_v);
  }
  if (needs_simt(problem)) {
    const std::string refusal = gpu::simt_refusal(problem, gpu);
    if (!refusal.empty()) return "dbias and dsinks come from simt: " + refusal;
  }
  const BackwardSm80Config config = sm80_backward_tiles(problem, gpu);
  if (config.warps == 0) {
    return sentence("its narrowest tiles need more than the ", gpu.shared_bytes_per_block,
                    " bytes of shared memory of a block");
  }
  if (tiles_of(problem, problem.q_rows, problem.heads_q, config.q_rows) +
          tiles_of(problem, problem.kv_rows, problem.heads_kv, config.kv_rows) >
      kMaxBlocks) {
    return "counts blocks of queries and keys in 31 bits";
  }
  return "";
}

BackwardSm80Config sm80_backward_config(const Problem& problem, const Gpu& gpu) {
  BackwardSm80Config config = sm80_backward_tiles(problem, gpu);
  if (leaves_out(problem, Optimisation::kPipeline)) config.stages = config.pair_stages = 1;
  config.swizzle = !leaves_out(problem, Optimisation::kSwizzle);
  config.full_blocks = !leaves_out(problem, Optimisation::kFullBlocks);
  return config;
}

BackwardSm80Config sm80_rows_config(const Problem& problem, const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.q_rows = config.q_rows;
  reduced.d_qk = config.d_qk;
  reduced.dq = config.dq;
  reduced.split_sum = config.split_sum;
  reduced.hopper = config.hopper;
  reduced.aligned = has_aligned_rows(problem);
  reduced.documents = config.documents;
  return reduced;
}

BackwardSm80Config sm80_dbias_config(const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.accumulates_dbias = config.accumulates_dbias;
  reduced.tiled_dbias = config.tiled_dbias;
  return reduced;
}

BackwardSm80Config sm80_finish_config(const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.d_qk = config.d_qk;
  reduced.q_rows = config.q_rows;
  reduced.kv_rows = config.kv_rows;
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
  return !sm80_shares_dbias(problem) || !(problem.deterministic || problem.batch_invariant);
}

bool sm80_shares_dbias(const Problem& problem) {
  const Tensor& dbias = problem.arrays[Array::kDBias];
  return dbias.shape[0] != problem.num_sequences || dbias.shape[1] != problem.heads_q;
}

bool sm80_sees_all(const Problem& problem) {
  const IntervalMask& mask = problem.mask;
  return !mask.causal && mask.window_left == kNoLimit && mask.window_right == kNoLimit &&
         mask.chunk == 0;
}

i32 sm80_lines_per_group(const Problem& problem) {
  const i64 lines =
      sm80_sees_all(problem) ? 1 : max<i64>(kLinesUnderMask / problem.group_size(), 1);
  return static_cast<i32>(lines);
}

i32 sm80_groups_ahead(const Problem& problem, const BackwardSm80Config& config) {
  const i64 lines = sm80_lines_per_group(problem);
  const i64 all = (problem.packed ? 1 : problem.num_sequences) * problem.heads_kv;
  if (!config.zeroes_dq) return static_cast<i32>(ceil_div(all, lines));
  const i64 slots = problem.packed ? problem.kv_rows / config.kv_rows + problem.num_sequences
                                   : ceil_div(problem.kv_rows, config.kv_rows);
  return static_cast<i32>(ceil_div(kBlocksAtATime, max<i64>(lines * slots, 1)));
}

Sm80BackwardWorkspace sm80_backward_workspace(const Problem& problem,
                                              const BackwardSm80Config& config) {
  const auto aligned = [](i64 bytes) { return ceil_div(bytes, 256) * 256; };
  const i64 row_tiles = tiles_of(problem, problem.q_rows, problem.heads_q, config.q_rows);
  const i64 key_tiles = tiles_of(problem, problem.kv_rows, problem.heads_kv, config.kv_rows);
  Sm80BackwardWorkspace workspace{};
  workspace.suspect_n_blocks_at = row_tiles * 4;
  workspace.dq_semaphores_at = workspace.suspect_n_blocks_at + key_tiles * 4;
  workspace.next_n_block_at =
      workspace.dq_semaphores_at + (config.deterministic ? row_tiles * 4 : 0);
  workspace.zeroed_blocks_at = workspace.next_n_block_at + 4;
  const i64 lines = (problem.packed ? 1 : problem.num_sequences) * problem.heads_kv;
  workspace.dbias_accum_at = aligned(workspace.zeroed_blocks_at + lines * 4);
  const auto& extents = problem.arrays[Array::kDBias].shape;
  workspace.zeroed_bytes =
      workspace.dbias_accum_at +
      (config.accumulates_dbias ? extents[0] * extents[1] * extents[2] * extents[3] * 4 : 0);
  workspace.row_tiles_at = aligned(workspace.zeroed_bytes);
  workspace.key_bounds_at = aligned(workspace.row_tiles_at + row_tiles * config.row_bytes());
  workspace.dq_accum_at = aligned(workspace.key_bounds_at + (config.documents ? row_tiles * 8 : 0));
  workspace.row_terms_at =
      aligned(workspace.dq_accum_at + (config.dq ? row_tiles * config.dq_elems() * 4 : 0));
  const i64 rows = (problem.packed ? 1 : problem.num_sequences) * problem.heads_q * problem.q_rows;
  const size_t simt = needs_simt(problem) ? gpu::simt_workspace_bytes(problem.dtype, rows) : 0;
  workspace.bytes = workspace.row_terms_at + static_cast<i64>(simt);
  return workspace;
}

GpuNeeds sm80_backward_needs(const Problem& problem, const Gpu& gpu) {
  const BackwardSm80Config config = sm80_backward_config(problem, gpu);
  const Sm80BackwardWorkspace workspace = sm80_backward_workspace(problem, config);
  return {.tile = {config.q_rows, config.kv_rows},
          .workspace_bytes = static_cast<size_t>(workspace.bytes),
          .zeroed_bytes = static_cast<size_t>(workspace.zeroed_bytes),
          .alignment_bytes =
              config.aligned || (config.hides_pairs() && config.pair_aligned) || config.tiled_dbias
                  ? 16
                  : 1};
}

}  // namespace fulmen
