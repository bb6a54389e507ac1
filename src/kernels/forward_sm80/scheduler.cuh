// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tile scheduler of forward_sm80: the work tile of each block of a launch. Heads go group by
// group, so that K and V of those that are at work fit the L2; within a group the last rows come
// first, since under a causal mask they see the most keys and should not be left for the end; heads
// are neighbours. Long rows of V are cut into parts, a block each.
#pragma once

#include "kernels/common/tile_tasks.cuh"
#include "kernels/forward_sm80/config.h"

namespace fulmen {

constexpr i64 num_v_parts(const AttentionParams& p, i64 part_dims) {
  return max<i64>(1, ceil_div(p.dim_v, part_dims));
}

// Blocks of a forward launch.
constexpr i64 num_forward_sm80_blocks(const AttentionParams& p, const ForwardSm80Config& config) {
  return num_q_tiles(p, config.q_rows()) * num_v_parts(p, config.d_v);
}

// Division by a number that only the host knows, as a product: exact for dividends below 2^31
// (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
struct Divisor {
  u32 value = 1;
  u32 multiplier = 0x80000000u;
  u32 shift = 31;

  constexpr Divisor() = default;
  constexpr explicit Divisor(u32 divisor) : value(divisor) {
    shift = 31;
    while (shift < 62 && (u64{1} << (shift - 31)) < divisor) ++shift;
    multiplier = static_cast<u32>(((u64{1} << shift) + divisor - 1) / divisor);
  }
  constexpr u32 quotient(u32 dividend) const {
    return static_cast<u32>(static_cast<u64>(dividend) * multiplier >> shift);
  }
};

struct WorkTileSm80 {
  TileTask task;
  u32 kv_head;
  u32 part;
};

// Fewer than 2^31 blocks.
struct ForwardTileSchedulerSm80 {
  u32 slots = 1;  // of a head of a batch entry
  u32 group_heads = 1;
  u32 full_groups = 0;
  Divisor group_blocks;  // of a full group
  Divisor full_group;    // of a full group: its heads times parts of V
  Divisor last_group;    // of the group that is not full
  Divisor parts;         // of V
  Divisor heads_q;
  Divisor group_size;

  constexpr ForwardTileSchedulerSm80() = default;
  // Blocks of a group are neighbours: its K and V fit the L2 together.
  constexpr ForwardTileSchedulerSm80(const AttentionParams& p, const ForwardSm80Config& config,
                                     i32 heads_per_group) {
    const u32 num_parts = static_cast<u32>(num_v_parts(p, config.d_v));
    const u32 batch_heads = static_cast<u32>(p.batch_extent() * p.heads_q);
    group_heads = max(1u, min(static_cast<u32>(heads_per_group), batch_heads));
    slots = static_cast<u32>(num_q_slots(p, config.q_rows()));
    full_groups = batch_heads / group_heads;
    group_blocks = Divisor(max(1u, group_heads * num_parts * slots));
    full_group = Divisor(group_heads * num_parts);
    last_group = Divisor(max(1u, batch_heads % group_heads) * num_parts);
    parts = Divisor(num_parts);
    heads_q = Divisor(max(1u, static_cast<u32>(p.heads_q)));
    group_size = Divisor(p.heads_kv == 0 ? 1u : static_cast<u32>(p.group_size()));
  }

  constexpr WorkTileSm80 at(u32 block) const {
    const u32 group = group_blocks.quotient(block);
    const u32 within = block - group * group_blocks.value;
    const bool is_full = group < full_groups;
    const Divisor& own = is_full ? full_group : last_group;
    const u32 rank = own.quotient(within);
    const u32 in_rank = within - rank * own.value;
    const u32 in_group = parts.quotient(in_rank);
    const u32 batch_head = group * group_heads + in_group;
    const u32 batch = heads_q.quotient(batch_head);
    const u32 head = batch_head - batch * heads_q.value;
    return {{batch, head, slots - 1 - rank},
            group_size.quotient(head),
            in_rank - in_group * parts.value};
  }
};

// What a launch of forward_sm80 gets. The arrays come last: heads look for a user's expression
// behind them.
struct ForwardSm80Params {
  ForwardTileSchedulerSm80 scheduler;
  TileLists tile_lists;  // with config.score.mask_tiles
  AttentionParams attention;
};

}  // namespace fulmen
