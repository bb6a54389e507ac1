// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which heads and sequences share lines, and launches.

#include "gpu/tile_lists.h"

#include <algorithm>

#include "core/program.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

using expression::Op;
using expression::Variable;

// Whether a mask reads one of the variables.
bool reads(const Problem& problem, std::initializer_list<Variable> variables) {
  const expression::Program& program = *problem.program;
  const expression::Goal& goal = program.mask_goal;
  return std::ranges::any_of(goal.constant, [&](i32 index) {
    const expression::Step& step = program.step(index);
    return step.op == Op::kVariable &&
           std::ranges::find(variables, static_cast<Variable>(step.index)) != variables.end();
  });
}

i64 num_line_heads(const Problem& problem) {
  if (problem.has(Array::kBlocks)) return problem.arrays[Array::kBlocks].shape[1];
  if (reads(problem, {Variable::kH})) return problem.heads_q;
  return reads(problem, {Variable::kHk}) ? problem.heads_kv : 1;
}

bool has_lines_by_batch(const Problem& problem) {
  if (problem.has(Array::kBlocks)) return problem.arrays[Array::kBlocks].strides[0] != 0;
  return score_options_of(problem).varlen || reads(problem, {Variable::kB});
}

i64 num_lines(const Problem& problem, const TileListsParams& params) {
  const i64 batch = params.lists.by_batch ? problem.num_sequences : 1;
  return batch * params.lists.heads * params.lists.lines;
}

KernelLaunch list_tiles(const TileListsParams& params, bool by_keys) {
  KernelSpec spec =
      spec_of<TileListsParams>("tile_lists/list_tiles", "list_tiles",
                               by_keys ? "by_keys" : "by_queries", TileListsConfig{by_keys});
  spec.num_threads = TileListsConfig::kThreads;
  return {std::move(spec), ceil_div(params.num_lists, TileListsConfig::kThreads / 32)};
}

KernelLaunch mask_tiles(const Problem& problem, const ScoreOptions& score,
                        const TileListsParams& params, const TileShape& shape) {
  const MaskTilesConfig config{
      problem.dtype,
      shape.by_keys,
      static_cast<i32>(shape.by_keys ? shape.q_rows : shape.kv_rows),
      {.mask_kind = score.mask_kind, .varlen = score.varlen, .user = score.user}};
  KernelSpec spec = spec_of<TileListsParams>(
      "tile_lists/mask_tiles", "mask_tiles",
      sentence(name(problem.dtype), name_suffix(config.score),
               shape.by_keys ? "_by_keys_" : "_by_queries_", config.tile_rows),
      config);
  spec.num_threads = config.threads();
  spec.shared_bytes = MaskTilesConfig::kSharedBytes;
  const i64 parts = params.lists.lines * (shape.by_keys ? shape.kv_rows : shape.q_rows) / kPartRows;
  const i64 heads = num_lines(problem, params) / params.lists.lines;  // of all sequences
  return {std::move(spec),
          heads * ceil_div(parts, i64{MaskTilesConfig::kParts}) * params.lists.groups};
}

}  // namespace

bool has_mask_tiles(const Problem& problem) {
  constexpr i64 kFewKeys = 128;
  return problem.has_mask_expression() && !problem.has(Array::kBlocks) && !problem.has_caches() &&
         (problem.max_kv > kFewKeys || problem.has_segments());
}

TileListsParams tile_lists_params(const Problem& problem, const TileShape& shape) {
  const i64 q_tiles = ceil_div(problem.max_q, shape.q_rows);
  const i64 kv_tiles = ceil_div(problem.max_kv, shape.kv_rows);
  TileListsParams params{};
  params.attention = attention_params(problem);
  params.mask = problem.mask;
  params.lists.lines = static_cast<i32>(shape.by_keys ? kv_tiles : q_tiles);
  params.lists.groups = static_cast<i32>(ceil_div(shape.by_keys ? q_tiles : kv_tiles, 32));
  params.lists.heads = static_cast<i32>(num_line_heads(problem));
  params.lists.by_batch = has_lines_by_batch(problem);
  params.q_rows = static_cast<i32>(shape.q_rows);
  params.kv_rows = static_cast<i32>(shape.kv_rows);
  if (problem.has(Array::kBlocks)) {
    const i64 of_head = problem.arrays[Array::kBlocks].shape[2];
    const i64 batch = params.lists.by_batch ? problem.num_sequences : 1;
    params.q_blocks = static_cast<i32>(of_head);
    params.num_lists = static_cast<i32>(batch * params.lists.heads * of_head);
  }
  return params;
}

i64 tile_lists_bytes(const Problem& problem, const TileListsParams& params) {
  const i64 words = problem.has(Array::kBlocks) ? 2 : 4;
  return num_lines(problem, params) * params.lists.groups * words * i64{sizeof(u32)};
}

KernelLaunch fill_tile_lists(const Problem& problem, const ScoreOptions& score,
                             const TileListsParams& params, const TileShape& shape) {
  return problem.has(Array::kBlocks) ? list_tiles(params, shape.by_keys)
                                     : mask_tiles(problem, score, params, shape);
}

bool fits_blocks(const Problem& problem, const TileShape& shape) {
  if (!problem.has(Array::kBlocks)) return true;
  return problem.block_kv % (shape.by_keys ? kPartRows : shape.kv_rows) == 0 &&
         problem.block_q % (shape.by_keys ? shape.q_rows : kPartRows) == 0;
}

}  // namespace fulmen::gpu
