// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// In which order the Hopper backward does its work. An item is one block of keys of one line. Lines
// form groups; a group is finished before the next one starts, so that its sums of dQ stay in the
// L2 cache. Inside a group the first block of keys of every line comes first: under a causal mask
// it has the most queries. Where sequences differ a group is heads of one sequence, and there is no
// item without keys but one of a sequence that has none. Plain integers, shared by the kernel's
// roles and the tests.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/backward_config.h"
#include "kernels/sequences.cuh"
#include "kernels/tile/effective_mask.cuh"

namespace fulmen {

struct BackwardItem {
  i32 line;
  i32 kv_block;
  i32 num_kv_blocks;  // of the line
  i32 q_begin;        // of its sequence
  i32 kv_begin;
  SequenceShape shape;
};

template <BackwardConfig kConfig>
inline i32 num_backward_items(const BackwardParams& params) {
  if constexpr (kConfig.sequences) return params.places[0].all_kv_blocks * params.heads_kv;
  return params.num_lines() * params.num_kv_blocks;
}

// Number `index` of the items of lines first_line .. first_line + lines - 1, which are alike.
constexpr BackwardItem item_of_lines(const BackwardParams& params, i32 index, i32 first_line,
                                     i32 lines, i32 num_kv_blocks) {
  const i32 per_group = params.lines_per_group * num_kv_blocks;
  const i32 group = index / per_group;
  const i32 within = index - group * per_group;
  const i32 first = group * params.lines_per_group;
  const i32 count = min(params.lines_per_group, lines - first);  // the last group is smaller
  const i32 rank = within / count;
  return {first_line + first + within - rank * count, rank, num_kv_blocks, 0, 0, params.shape};
}

template <BackwardConfig kConfig>
inline BackwardItem backward_item(const BackwardParams& params, i32 index) {
  if constexpr (!kConfig.sequences) {
    return item_of_lines(params, index, 0, params.num_lines(), params.num_kv_blocks);
  } else {
    const i32 sequence = params.owners[index / params.heads_kv];
    const BackwardPlace place = params.places[sequence];
    BackwardItem item =
        item_of_lines(params, index - place.first_block * params.heads_kv,
                      sequence * params.heads_kv, params.heads_kv, place.num_kv_blocks);
    item.q_begin = place.q_begin;
    item.kv_begin = place.kv_begin;
    item.shape = place.shape;
    return item;
  }
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
  const i32 head = (line - sequence * params.heads_kv) * params.group_size();
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

// The steps of an item: all blocks of queries of all heads of its line that see its keys. `spread`
// rotates them, so that blocks of keys do not add to the same rows of dQ at the same time.
struct BackwardWalk {
  i32 begin;
  i32 count;  // blocks of queries of a head
  i32 rotation;
  i32 heads;

  constexpr i32 num_steps() const { return count * heads; }
};

template <BackwardConfig kConfig>
constexpr BackwardWalk backward_walk(const BackwardParams& params, const SequenceShape& shape,
                                     i32 kv_block) {
  const Interval visit =
      seeing_blocks<kConfig>(params.mask, shape, i64{kv_block} * kConfig.kv_rows(),
                             kConfig.kv_rows())
          .visit;
  BackwardWalk walk{i32(visit.begin), i32(visit.size()), 0, params.group_size()};
  if (kConfig.spread && kConfig.mask == MaskKind::kLength && walk.count > 0) {
    walk.rotation = kv_block * (kConfig.kv_rows() / kConfig.q_rows) % walk.count;
  }
  return walk;
}

// Where a walk stands.
struct BackwardStep {
  i32 head = 0;   // of the line
  i32 index = 0;  // of the block of queries, before rotation

  constexpr i32 q_block(const BackwardWalk& walk) const {
    const i32 rotated = index + walk.rotation;
    return walk.begin + (rotated >= walk.count ? rotated - walk.count : rotated);
  }
  constexpr void advance(const BackwardWalk& walk) {
    if (++index == walk.count) {
      index = 0;
      ++head;
    }
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
  const i64 pieces = i64{blocks} * params.group_size();
  return {item.line,
          i32(pieces * item.kv_block / item.num_kv_blocks),
          i32(pieces * (item.kv_block + 1) / item.num_kv_blocks),
          blocks,
          item.q_begin,
          item.shape.q_len};
}

}  // namespace fulmen
