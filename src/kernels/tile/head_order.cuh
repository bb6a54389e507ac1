// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The order of the blocks of a launch. Heads go group by group, so that K and V of those that are
// at work fit the L2; within a group the last rows come first, since they see the most keys under a
// causal mask and should not be left for the end; heads are neighbours. Long rows of V are cut into
// parts, a block each.
#pragma once

#include "kernels/sm80_config.h"
#include "kernels/tile_place.cuh"

namespace fulmen {

constexpr i64 num_v_parts(const AttentionParams& p, i64 part_dims) {
  return max<i64>(1, ceil_div(p.dim_v, part_dims));
}

// Blocks of a forward launch.
constexpr i64 forward_sm80_blocks(const AttentionParams& p, const Sm80Config& config) {
  return num_q_tiles(p, config.rows()) * num_v_parts(p, config.d_v);
}

struct HeadBlock {
  TileTask task;
  i64 part;
};

// Fewer than 2^31 blocks, so 32 bits do.
constexpr HeadBlock head_block(const Sm80Params& params, u32 block, i64 num_parts, i64 num_slots) {
  const u32 parts = static_cast<u32>(num_parts);
  const u32 slots = static_cast<u32>(num_slots);
  const u32 heads_q = static_cast<u32>(params.attention.heads_q);
  const u32 lines = static_cast<u32>(params.attention.batch_extent()) * heads_q;
  const u32 group_lines = static_cast<u32>(params.heads_per_group);
  const u32 group = block / (group_lines * parts * slots);
  const u32 first = group * group_lines;
  const u32 members = min(group_lines, lines - first) * parts;
  const u32 within = block - first * parts * slots;
  const u32 line = first + within % members / parts;
  return {{line / heads_q, line % heads_q, slots - 1 - within / members}, within % parts};
}

}  // namespace fulmen
