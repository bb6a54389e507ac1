// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// In which order the Hopper backward does its work. An item is one block of keys of one line. Lines
// form groups; a group is finished before the next one starts, so that its sums of dQ stay in the
// L2 cache. Inside a group the first block of keys of every line comes first: under a causal mask
// it has the most queries. Plain integers, shared by the kernel's roles, the planner and the tests.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/backward_config.h"
#include "kernels/sequences.cuh"
#include "kernels/tile/effective_mask.cuh"

namespace fulmen {

struct BackwardItem {
  i32 line;
  i32 kv_block;
};

constexpr BackwardItem backward_item(const BackwardParams& params, i32 index) {
  const i32 per_group = params.lines_per_group * params.num_kv_blocks;
  const i32 group = index / per_group;
  const i32 within = index - group * per_group;
  const i32 first = group * params.lines_per_group;
  const i32 lines = min(params.lines_per_group, params.num_lines() - first);  // the last is smaller
  const i32 rank = within / lines;
  return {first + within - rank * lines, rank};
}

// The sequence of a line; lengths beyond the upper bounds, which a caller promised not to have, are
// cut off.
template <BackwardConfig kConfig>
inline Sequence backward_sequence(const BackwardParams& params, i32 index) {
  if constexpr (kConfig.sequences) {
    Sequence sequence = load_sequence(params.attention, index);
    sequence.shape.q_len = min(sequence.shape.q_len, params.shape.q_len);
    sequence.shape.kv_len = min(sequence.shape.kv_len, params.shape.kv_len);
    return sequence;
  } else {
    return {index, 0, 0, 0, 0, params.shape};
  }
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

// The pieces of dQ (kFinishRows rows of one head) of a line that item `kv_block` rounds.
constexpr Interval finished_pieces(const BackwardParams& params, i32 kv_block) {
  const i64 pieces = i64{params.num_finish_blocks} * params.group_size();
  return {pieces * kv_block / params.num_kv_blocks, pieces * (kv_block + 1) / params.num_kv_blocks};
}

}  // namespace fulmen
