// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// In which order the Hopper backward does its work. An item is one block of keys of one line. Lines
// form groups; a group is finished before the next one starts, so that its sums of dQ stay in the
// L2 cache. Inside a group the first block of keys of every line comes first: under a causal mask
// it has the most queries, and the last group may be larger, so that short items are left for the
// end. Where sums of dQ have an order the last comes first: it begins at
// queries that no other of the line begins at, and is ahead of those behind it at every tile. Where
// sequences differ a group is heads of one sequence, and there is no item without keys but one of a
// sequence that has none. Plain integers, shared by the kernel's roles and the tests.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/backward_sm90/config.h"
#include "kernels/common/documents_sm90.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/common/work_tile_sm90.cuh"

namespace fulmen {

struct BackwardItem {
  i32 line;
  i32 kv_block;
  i32 num_kv_blocks;  // of the line
  i32 q_begin;        // of its sequence
  i32 kv_begin;
  SequenceShape shape;
  i32 part = 0;  // of its queries, where it is split
};

template <BackwardConfig kConfig>
inline i32 num_backward_items(const BackwardParams& params) {
  if constexpr (kConfig.sequences) return params.places[0].all_kv_blocks * params.heads_kv;
  return params.num_lines() * params.num_kv_blocks;
}

// Number `index` of the items of lines first_line .. first_line + lines - 1, which are alike.
constexpr BackwardItem item_of_lines(const BackwardParams& params, i32 index, i32 first_line,
                                     i32 lines, i32 num_kv_blocks) {
  const i32 before_last = lines - params.last_lines;
  i32 first = before_last, count = params.last_lines;
  if (index < before_last * num_kv_blocks) {
    first = index / (params.lines_per_group * num_kv_blocks) * params.lines_per_group;
    count = min(params.lines_per_group, before_last - first);
  }
  const i32 within = index - first * num_kv_blocks;
  const i32 rank = within / count;
  return {first_line + first + within - rank * count, rank, num_kv_blocks, 0, 0, params.shape};
}

template <BackwardConfig kConfig>
inline BackwardItem backward_item(const BackwardParams& params, i32 index) {
  if constexpr (!kConfig.sequences) {
    BackwardItem item = item_of_lines(params, index, 0, params.num_lines(), params.num_kv_blocks);
    if (kConfig.ordered) item.kv_block = item.num_kv_blocks - 1 - item.kv_block;
    return item;
  } else {
    const BackwardPlace place = params.places[index / params.heads_kv];
    BackwardItem item =
        item_of_lines(params, index - place.first_block * params.heads_kv,
                      place.sequence * params.heads_kv, params.heads_kv, place.num_kv_blocks);
    item.q_begin = place.q_begin;
    item.kv_begin = place.kv_begin;
    item.shape = place.shape;
    return item;
  }
}

// Claims are of items, of the parts of the last items, and then only of dQ that is left to round.
struct BackwardClaims {
  i32 whole;  // items
  i32 split;  // items
  i32 parts;  // of each
  i32 lag;

  constexpr i32 of_items() const { return whole + split * parts; }
  constexpr i32 all() const { return of_items() + split + lag; }

  // The item whose dQ claim `index` rounds; negative: none. Where parts are claimed nothing is
  // rounded, so that nobody waits for parts behind his own.
  constexpr i32 rounded(i32 index) const {
    if (index < whole) return index - lag;
    return index < of_items() ? -1 : index - of_items() + whole - lag;
  }
};

template <BackwardConfig kConfig>
inline BackwardClaims backward_claims(const BackwardParams& params) {
  const i32 items = num_backward_items<kConfig>(params);
  if constexpr (!kConfig.splits()) return {items, 0, 0, params.lag};
  return {items - params.num_split, params.num_split, params.num_parts, params.lag};
}

template <BackwardConfig kConfig>
inline BackwardItem claimed_item(const BackwardParams& params, const BackwardClaims& claims,
                                 i32 index) {
  if (!kConfig.splits() || index < claims.whole) return backward_item<kConfig>(params, index);
  const i32 number = (index - claims.whole) / claims.parts;
  BackwardItem item = backward_item<kConfig>(params, claims.whole + number);
  item.part = index - claims.whole - number * claims.parts;
  return item;
}

// Which one of the split items this is; negative: it is whole.
template <BackwardConfig kConfig>
constexpr i32 split_number(const BackwardParams& params, const BackwardItem& item) {
  if constexpr (!kConfig.splits()) return -1;
  const i32 from_end = (params.num_lines() - item.line) * item.num_kv_blocks - item.kv_block;
  return params.num_split - from_end;
}

// Claims whose dQ goes to the item's line.
template <BackwardConfig kConfig>
constexpr i32 claims_of_line(const BackwardParams& params, const BackwardItem& item) {
  if constexpr (!kConfig.splits()) return item.num_kv_blocks;
  const i32 behind = (params.num_lines() - 1 - item.line) * item.num_kv_blocks;
  const i32 split = min(max(params.num_split - behind, 0), item.num_kv_blocks);
  return item.num_kv_blocks + split * (params.num_parts - 1);
}

// The line's entry of the arrays' batch axis.
template <BackwardConfig kConfig>
constexpr i32 batch_of(const BackwardParams& params, i32 line) {
  return kConfig.sequences && params.attention.packed ? 0 : line / params.heads_kv;
}

// Where the rows of the line's first query head lie in what is kept per query row; those of the
// next head lie rows_of_head further.
template <BackwardConfig kConfig>
constexpr i64 first_kept_row(const BackwardParams& params, i32 line, i32 q_begin) {
  const i32 sequence = line / params.heads_kv;
  const i32 head = (line - sequence * params.heads_kv) * params.group_size;
  const i64 q_line = i64{batch_of<kConfig>(params, line)} * params.heads_q + head;
  return q_line * params.rows_of_head +
         padded_row(kConfig.sequences && params.attention.packed, sequence, q_begin);
}

// Blocks of queries that keys [begin, begin + count) are seen by.
template <BackwardConfig kConfig>
constexpr BlockRange seeing_blocks(const IntervalMask& mask, const SequenceShape& shape, i64 begin,
                                   i64 count) {
  const Interval keys{begin, min<i64>(begin + count, shape.kv_len)};
  if (keys.size() <= 0) return {{0, 0}, {0, 0}};
  return visible_row_blocks(effective_mask<kConfig>(mask), shape, keys, kConfig.q_rows);
}

// Where sums of dQ have an order: how many blocks of keys add to those of a block of queries before
// block `kv_block`. Those are the ones behind it that the last of the queries sees.
template <BackwardConfig kConfig>
constexpr u32 turn_of(const BackwardParams& params, i32 q_block, i32 kv_block) {
  const i64 last = min((q_block + 1) * kConfig.q_rows, params.shape.q_len) - 1;
  const IntervalMask mask = effective_mask<kConfig>(params.mask);
  const i64 end = visible_columns(mask, params.shape, last).end;
  return u32(ceil_div(end, kConfig.kv_rows())) - 1 - u32(kv_block);
}

// The steps of an item: all blocks of queries of all heads of its line that see its keys. `spread`
// rotates them, so that blocks of keys do not add to the same rows of dQ at the same time.
struct BackwardWalk {
  i32 begin;
  i32 count;  // blocks of queries of a head
  i32 rotation;
  i32 heads;
  i32 first = 0;  // step, where an item is split
  i32 num_steps = count * heads;
};

template <BackwardConfig kConfig>
constexpr BackwardWalk backward_walk(const BackwardParams& params, const SequenceShape& shape,
                                     i32 kv_block) {
  const Interval visit =
      seeing_blocks<kConfig>(params.mask, shape, i64{kv_block} * kConfig.kv_rows(),
                             kConfig.kv_rows())
          .visible;
  BackwardWalk walk{i32(visit.begin), i32(visit.size()), 0, params.group_size};
  if (kConfig.spread && kConfig.mask == MaskKind::kLength && walk.count > 0) {
    walk.rotation = kv_block * (kConfig.kv_rows() / kConfig.q_rows) % walk.count;
  }
  return walk;
}

// What documents leave of an item's steps.
template <BackwardConfig kConfig>
constexpr const BackwardVisit& visit_of(const BackwardParams& params, const BackwardItem& item) {
  const i64 first = first_key_range(params.attention, kConfig.kv_rows(),
                                    item.line / params.heads_kv, item.kv_begin);
  return params.visits[first + item.kv_block];
}

// The same of an item or a part of one.
template <BackwardConfig kConfig>
constexpr BackwardWalk backward_walk(const BackwardParams& params, const BackwardItem& item) {
  BackwardWalk walk = backward_walk<kConfig>(params, item.shape, item.kv_block);
  if constexpr (kConfig.documents) {
    if (walk.count <= 0) return walk;
    const BackwardVisit& visit = visit_of<kConfig>(params, item);
    const i32 end = min(walk.begin + walk.count, visit.end);
    walk.begin = max(walk.begin, visit.begin);
    walk.count = max(end - walk.begin, 0);
    walk.rotation = 0;
    walk.num_steps = walk.count * walk.heads;
  }
  if (split_number<kConfig>(params, item) < 0) return walk;
  walk.first = walk.num_steps * item.part / params.num_parts;
  walk.num_steps = walk.num_steps * (item.part + 1) / params.num_parts - walk.first;
  return walk;
}

// Where a walk stands.
struct BackwardStep {
  i32 head = 0;  // of the line
  i32 q_block;
  i32 left;  // blocks of queries of the head, with this one

  explicit constexpr BackwardStep(const BackwardWalk& walk)
      : q_block(walk.begin + walk.rotation), left(walk.count) {
    if (walk.first == 0) return;
    head = walk.first / walk.count;
    const i32 done = walk.first - head * walk.count;
    left -= done;
    q_block += done;
    if (q_block >= walk.begin + walk.count) q_block -= walk.count;
  }
  constexpr void advance(const BackwardWalk& walk) {
    if (++q_block == walk.begin + walk.count) q_block = walk.begin;
    if (--left > 0) return;
    left = walk.count;
    ++head;
  }
};

// Pieces of dQ (kFinishRows rows of one head) of a line that an item rounds.
struct BackwardRounding {
  i32 line;  // -1: none
  i32 begin;
  i32 end;
  i32 blocks;  // pieces of a head
  i32 q_begin;
  i32 q_len;
};

// What the item `lag` further on rounds of an item's line: its share.
constexpr BackwardRounding rounding_of(const BackwardParams& params, const BackwardItem& item) {
  const i32 blocks = i32(ceil_div(item.shape.q_len, BackwardConfig::kFinishRows));
  const i64 pieces = i64{blocks} * params.group_size;
  return {item.line,
          i32(pieces * item.kv_block / item.num_kv_blocks),
          i32(pieces * (item.kv_block + 1) / item.num_kv_blocks),
          blocks,
          item.q_begin,
          item.shape.q_len};
}

}  // namespace fulmen
