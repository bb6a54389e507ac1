// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which documents a block of rows can belong to: the least and the largest id in it. Blocks of keys
// whose range does not meet that of the queries are hidden, and where all ids are one every pair is
// visible, so that a kernel skips the former and asks nothing about the latter. Ids may come in any
// order; where documents are neighbours this finds all there is to skip. The ranges of keys are
// found by a kernel of their own (document_ranges_sm90.cuh), read by the planner of forward_sm90.
#pragma once

#include "kernels/tile/forward_shared.cuh"
#include "kernels/tile/pair_terms.cuh"

namespace fulmen {

// Blocks of keys are numbered through: those of a sequence from here on. Packed sequences begin
// anywhere, so each may leave a number unused.
template <AttentionConfig kConfig>
constexpr i64 first_key_range(const AttentionParams& p, i64 sequence, i64 kv_begin) {
  if (p.packed) return kv_begin / kConfig.kv_rows + sequence;
  return sequence * ceil_div(p.kv_rows, kConfig.kv_rows);
}

// The sequence that has block number `range`, if any has.
template <AttentionConfig kConfig>
inline i64 sequence_of_key_range(const AttentionParams& p, i64 range) {
  if (!p.packed) return range / ceil_div(p.kv_rows, kConfig.kv_rows);
  i64 low = 0, high = p.num_sequences - 1;
#pragma unroll 1
  while (low < high) {  // the last one that begins at or before it
    const i64 middle = (low + high + 1) / 2;
    const i64 begin = load_index(p.cu_kv, middle * p.cu_kv.strides[3]);
    if (first_key_range<kConfig>(p, middle, begin) <= range) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// All lanes of a warp: of what each lane found, that of all.
inline IdRange united(IdRange range) {
#pragma unroll 1
  for (u32 distance = 16; distance >= 1; distance /= 2) {
    const auto other = [&](i64 id) {
      return __builtin_bit_cast(i64, ptx::shuffle_xor(__builtin_bit_cast(double, id), distance));
    };
    const i64 least = other(range.least), largest = other(range.largest);
    range = {min(range.least, least), max(range.largest, largest)};
  }
  return range;
}

// Ids of query rows [begin, end) of a sequence; all lanes of a warp.
inline IdRange query_ids(const AttentionParams& p, const Place& place, i32 begin, i32 end,
                         u32 lane) {
  IdRange range;
#pragma unroll 1
  for (i32 i = begin + i32(lane); i < min(end, place.shape.q_len); i += 32) {
    range.add(load_id(p.q_ids, p.q_ids.offset(place.batch, 0, 0, place.q_begin + i)));
  }
  return united(range);
}

// The first block of `blocks`, or with kLast the last, for which `holds`; where none: the end of
// `blocks`, or its begin less 1. All lanes of a warp, 32 blocks at once.
template <bool kLast, class Holds>
inline i32 find_block(Interval blocks, u32 lane, const Holds& holds) {
#pragma unroll 1
  for (i32 done = 0; done < i32(blocks.size()); done += 32) {
    const i32 offset = done + i32(lane);
    const i32 block = kLast ? i32(blocks.end) - 1 - offset : i32(blocks.begin) + offset;
    const u32 found = ptx::ballot(offset < i32(blocks.size()) && holds(block));
    if (found == 0) continue;
    const i32 at = done + ptx::count_ones((found & (0 - found)) - 1);  // the lowest bit
    return kLast ? i32(blocks.end) - 1 - at : i32(blocks.begin) + at;
  }
  return i32(kLast ? blocks.begin - 1 : blocks.end);
}

// What documents leave of `range`, the blocks of keys of a warpgroup in lane w and of all of them
// in the lanes after: the blocks from the first to the last that any row can see, and of the full
// ones those that belong to one document with all rows of the warpgroup, up to the first that does
// not. All lanes of a warp.
template <AttentionConfig kConfig>
inline BlockRange narrowed(BlockRange range, const ForwardParams& params, const QueryBlock& block,
                           const Place& place, u32 lane) {
  const AttentionParams& p = params.attention;
  const IdRange* keys =
      params.key_ranges + first_key_range<kConfig>(p, block.batch, place.kv_begin);
  IdRange ids[kConfig.q_tiles()], all_ids;
#pragma unroll
  for (i32 w = 0; w < kConfig.q_tiles(); ++w) {
    const i32 row = block.q_block * kConfig.q_rows() + w * kConfig.tile_rows();
    ids[w] = query_ids(p, place, row, row + kConfig.tile_rows(), lane);
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
