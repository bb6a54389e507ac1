// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which keys a block of backward_sm80 owns, which tiles of queries it meets, under what numbers
// backward_rows_sm80 keeps them, and how many blocks come to a tile before this one.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/backward_sm80/loader.cuh"
#include "kernels/common/tile_place.cuh"

namespace fulmen {

// Lines of key/value heads go group by group, so that what they read and dQ stay in the L2; within
// a group the first keys come first, since they are seen by the most rows under a causal mask.
constexpr TileTask key_task(u32 block, u32 lines, u32 heads, u32 slots, u32 lines_per_group) {
  const u32 first = block / (lines_per_group * slots) * lines_per_group;
  const u32 members = min(lines_per_group, lines - first);
  const u32 within = block - first * slots;
  const u32 line = first + within % members;
  return {line / heads, line % heads, within / members};
}

template <Sm80BackwardConfig kConfig>
struct BackwardRangesSm80 {
  const Sm80BackwardParams& params;
  const AttentionParams& p;
  KeyPlace place;
  i32 q_slot;  // of the first tile of queries, among num_slots of a head
  i32 num_slots;

  BackwardRangesSm80(const Sm80BackwardParams& params_, const KeyPlace& place_, i32 index)
      : params(params_),
        p(params_.attention),
        place(place_),
        q_slot(p.packed ? static_cast<i32>(first_slot(place.sequence.q_begin, index, kConfig.rows))
                        : 0),
        num_slots(static_cast<i32>(num_tile_slots(p, p.q_rows, kConfig.rows))) {}

  // The plan counts tiles in 31 bits.
  i32 tile_number(i32 head, i32 block) const {
    return static_cast<i32>(
        row_tile_number(p, place.sequence.batch, head, q_slot + block, num_slots));
  }

  // How many blocks of keys before this one add to a tile of queries.
  u32 turn_of(i64 block) const {
    const i64 own = place.first_key / kConfig.columns;
    i64 low = 0, high = own;
    while (low < high) {  // the first that does; from there to this one all do
      const i64 middle = (low + high) / 2;
      if (visited_by(middle * kConfig.columns).visit.end > block) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return static_cast<u32>(own - low);
  }

  BlockRange visited_by(i64 key) const {
    const SequenceShape& shape = place.sequence.shape;
    const i64 end = key + kConfig.columns;
    BlockRange found =
        visible_row_blocks(p.mask_options, shape, {key, min<i64>(end, shape.kv_len)}, kConfig.rows);
    if (end > shape.kv_len) found.full = {0, 0};  // no row sees the keys past the end
    return found;
  }

  // Leaves out tiles at both ends that see no document of the block. Where blocks take turns, all
  // must come.
  void narrow(BlockRange& range) const {
    range.full = {0, 0};
    if constexpr (kConfig.ordered) return;
    const i32 head = place.kv_head * static_cast<i32>(p.group_size());
    const i32 last = static_cast<i32>(range.visit.end);
    i32 begin = last, end = 0;
    for (i32 block = static_cast<i32>(range.visit.begin + lane_index()); block < last;
         block += 32) {
      const Sm80Columns hull = params.hulls[tile_number(head, block)];
      if (hull.begin >= place.first_key + kConfig.columns || hull.end <= place.first_key) continue;
      begin = min(begin, block);
      end = block + 1;
    }
    join_lanes(begin, end);
    range.visit = {begin, max(begin, end)};
  }
};

}  // namespace fulmen
