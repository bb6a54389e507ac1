// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// In which order query blocks are handed out. Heads form groups whose keys and values fit the L2
// cache together; a group is finished before the next one starts. Inside a group the query blocks
// with the most visible keys come first (under a causal mask the last ones), so that the shortest
// are left to even out the end. Plain integers, shared by kernels, planner and tests.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

struct QueryBlock {
  i32 q_block;  // rows q_block * q_rows and on
  i32 head;
  i32 batch;
};

struct BlockOrder {
  i32 num_q_blocks;
  i32 heads;  // query heads of one batch entry
  i32 batch;
  i32 heads_per_group;  // >= 1
  bool last_first;      // the last query blocks see the most keys

  constexpr i32 size() const { return num_q_blocks * heads * batch; }

  // Block number `index` of 0 .. size() - 1.
  constexpr QueryBlock at(i32 index) const {
    const i32 all_heads = heads * batch;
    const i32 per_group = min(heads_per_group, all_heads);
    const i32 group = index / (per_group * num_q_blocks);
    const i32 within = index - group * per_group * num_q_blocks;
    const i32 group_heads = min(per_group, all_heads - group * per_group);  // the last is smaller
    const i32 rank = within / group_heads;
    const i32 batch_head = group * per_group + (within - rank * group_heads);
    const i32 entry = batch_head / heads;
    return {last_first ? num_q_blocks - 1 - rank : rank, batch_head - entry * heads, entry};
  }
};

}  // namespace fulmen
