// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which keys a block of backward_sm80 owns: blocks go by groups of key/value heads. The host fills
// HeadGroupsSm80 with it.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/common/tile_tasks.cuh"

namespace fulmen {

constexpr HeadGroupsSm80 head_groups_sm80(const AttentionParams& p,
                                          const BackwardSm80Config& config, i64 lines, i64 ahead) {
  const auto count = [](i64 x) { return static_cast<u32>(x); };
  const i64 blocks = lines * num_tile_slots(p, p.kv_rows, config.kv_rows);
  const i64 row_tiles = lines * p.group_size() * num_tile_slots(p, p.q_rows, config.q_rows);
  return {count(lines),
          count(blocks),
          count(row_tiles),
          count(ceil_div(row_tiles, max<i64>(blocks, 1))),
          count(num_q_tiles(p, config.q_rows)),
          count(ahead)};
}

// Lines of key/value heads go group by group, so that what they read and dQ stay in the L2; within
// a group the first keys come first, since they are seen by the most rows under a causal mask.
constexpr TileTask key_task(u32 block, u32 lines, u32 heads, u32 slots, u32 lines_per_group) {
  const u32 first = block / (lines_per_group * slots) * lines_per_group;
  const u32 members = min(lines_per_group, lines - first);
  const u32 within = block - first * slots;
  const u32 line = first + within % members;
  return {line / heads, line % heads, within / members};
}

// The keys of a block.
struct KeyBlockSm80 {
  Sequence sequence;
  i32 kv_head;
  i32 first_key;
};

}  // namespace fulmen
