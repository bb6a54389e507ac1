// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which keys a block of backward_sm80 owns: blocks go by groups of key/value heads. The host fills
// HeadGroupsSm80 with it.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/common/tile_tasks.cuh"

namespace fulmen {

// kv_heads: of a group; ahead: how many groups later a block zeroes dq_accum.
constexpr HeadGroupsSm80 head_groups_sm80(const AttentionParams& p,
                                          const BackwardSm80Config& config, i64 kv_heads,
                                          i64 ahead) {
  const auto count = [](i64 x) { return static_cast<u32>(x); };
  const i64 n_blocks = kv_heads * num_kv_slots(p, config.kv_rows);
  const i64 m_blocks = kv_heads * p.group_size() * num_q_slots(p, config.q_rows);
  return {count(kv_heads),
          count(n_blocks),
          count(m_blocks),
          count(ceil_div(m_blocks, max<i64>(n_blocks, 1))),
          count(num_q_tiles(p, config.q_rows)),
          count(ahead)};
}

// The n_block of a block of the launch. Key/value heads go group by group, so that what they read
// and dQ stay in the L2; within a group the first keys come first, since under a causal mask the
// most rows see them. batch_heads: key/value heads of all batch entries.
constexpr TileTask key_task(u32 block, u32 batch_heads, u32 heads, u32 slots, u32 heads_per_group) {
  const u32 first = block / (heads_per_group * slots) * heads_per_group;
  const u32 group_heads = min(heads_per_group, batch_heads - first);
  const u32 within = block - first * slots;
  const u32 batch_head = first + within % group_heads;
  return {batch_head / heads, batch_head % heads, within / group_heads};
}

// The keys of a block.
struct KeyBlockSm80 {
  Sequence sequence;
  i32 kv_head;
  i32 first_key;
};

}  // namespace fulmen
