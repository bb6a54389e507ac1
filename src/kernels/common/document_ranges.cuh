// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which documents a block of rows can belong to: the least and the largest id in it. Blocks of keys
// whose range does not meet that of the queries are hidden, and where all ids are one every pair is
// visible, so that a kernel skips the former and asks nothing about the latter. Ids may come in any
// order; where documents are neighbours this finds all there is to skip. The ranges of keys are
// found by a kernel of their own (document_ranges_sm90.cuh), read by the planner of forward_sm90.
#pragma once

#include "kernels/common/id_ranges.cuh"
#include "kernels/forward_sm90/shared.cuh"

namespace fulmen {

// What documents leave of `range`, the blocks of keys of a warpgroup in lane w and of all of them
// in the lanes after: the blocks from the first to the last that any row can see, and of the full
// ones those that belong to one document with all rows of the warpgroup, up to the first that does
// not. All lanes of a warp.
template <AttentionConfig kConfig>
inline BlockRange narrowed(BlockRange range, const ForwardParams& params, const QueryBlock& block,
                           const Place& place, u32 lane) {
  const AttentionParams& p = params.attention;
  const IdRange* keys =
      params.key_ranges + first_key_range(p, kConfig.kv_rows, block.batch, place.kv_begin);
  IdRange ids[kConfig.q_tiles()], all_ids;
#pragma unroll
  for (i32 w = 0; w < kConfig.q_tiles(); ++w) {
    const i32 row = block.q_block * kConfig.q_rows() + w * kConfig.tile_rows();
    const i32 end = min(row + kConfig.tile_rows(), place.shape.q_len);
    ids[w] = ids_of_rows(p.q_ids, place.batch, place.q_begin + row, place.q_begin + end, lane);
    all_ids.add(ids[w].least);
    all_ids.add(ids[w].largest);
  }
  if (place.shape.q_len <= block.q_block * kConfig.q_rows()) return range;  // no rows, no ids
  Interval all{ptx::shuffle(i32(range.visit.begin), kConfig.warpgroups),
               ptx::shuffle(i32(range.visit.end), kConfig.warpgroups)};
  const auto meets = [&](i32 j) { return keys[j].meets(all_ids); };
  all.end = max<i64>(find_block<true>(all, lane, meets) + 1, all.begin + 1);
  all.begin = min<i64>(find_block<false>(all, lane, meets), all.end - 1);
#pragma unroll
  for (u32 w = 0; w < u32(kConfig.warpgroups); ++w) {
    const IdRange& own = ids[q_tile<kConfig>(w)];
    Interval full{max<i64>(ptx::shuffle(i32(range.full.begin), w), all.begin),
                  min<i64>(ptx::shuffle(i32(range.full.end), w), all.end)};
    const auto is_one = [&](i32 j) { return keys[j].is_one_with(own); };
    full.begin = find_block<false>(full, lane, is_one);
    full.end = find_block<false>(full, lane, [&](i32 j) { return !is_one(j); });
    if (lane == w) range.full = full;
  }
  if (lane >= u32(kConfig.warpgroups)) {
    range.visit = all;
  } else {
    range.visit.begin = min(max(range.visit.begin, all.begin), all.end - 1);
    range.visit.end = clamp(range.visit.end, range.visit.begin + 1, all.end);
  }
  return range;
}

}  // namespace fulmen
