// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The blocks of keys that lists of tiles leave to a block of queries, for forward_sm90 and
// backward_dq_sm90: the producer walks over them and tells the consumers, with K of each, which it
// is and what comes next.
#pragma once

#include "kernels/forward_sm90/storage.cuh"
#include "kernels/tile_lists/config.h"

namespace fulmen {

// For a warpgroup from which the lists hide a block: keys past every length, which its intervals
// hide.
template <ForwardSm90Config kConfig>
inline constexpr i32 kHiddenBlock = (0x7fffffff - 255) / kConfig.kv_rows;

template <ForwardSm90Config kConfig>
struct KeyWalk {
  static constexpr i32 kParts = kConfig.q_tiles();

  struct Tile {
    i32 block;  // negative: there is none
    u32 kinds;  // kHidden << part, kPlain << part
  };
  static constexpr u32 kHidden = 1, kPlain = 4;

  TileLine<kParts, kConfig.score.mask_tiles> line;
  struct Blocks {
    i32 begin, end;
  } full[kParts];  // what intervals show to all rows of a part
  i32 begin, end;  // blocks that they show to any
  i32 group;
  u32 left;  // of the group

  // Of work tile number `count`.
  KeyWalk(const ForwardStorage<kConfig>& shared, const ForwardParams& params,
          const QueryBlock& block, u32 count)
      : line(params.tile_lists, params.tile_lists.line_number(block.batch, block.head,
                                                              params.heads_q, block.q_block)) {
#pragma unroll
    for (i32 w = 0; w < kParts; ++w) {
      const u32 slot = shared.key_blocks(count, w);
      full[w] = {i32(ptx::load_shared(slot + 4)), i32(ptx::load_shared(slot + 8))};
      begin = i32(ptx::load_shared(slot + 16));
      end = i32(ptx::load_shared(slot + 20));
    }
    group = (end - 1) / 32;
    left = line.met(group, begin, end);
  }

  // From the last to the first.
  Tile next() {
#pragma unroll 1
    while (left == 0) {
      if (--group < begin / 32) return {-1, 0};
      left = line.met(group, begin, end);
    }
    const i32 bit = 31 - ptx::leading_zeros(left);
    left ^= 1u << bit;
    const i32 block = 32 * group + bit;
    u32 kinds = 0;
#pragma unroll
    for (i32 w = 0; w < kParts; ++w) {
      const bool is_full = full[w].begin <= block && block < full[w].end;
      if (!line.is_met(block, w)) kinds |= kHidden << w;
      if (is_full && line.is_whole(block, w)) kinds |= kPlain << w;
    }
    return {block, kinds};
  }
  // The first of a walk; where there is none, one block that is hidden from all.
  Tile first() {
    const Tile tile = next();
    return tile.block >= 0 ? tile : Tile{begin, kHidden * ((1u << kParts) - 1)};
  }
};

// What comes with K.
struct KeyStep {
  i32 block;
  u32 flags;  // kHidden << part, of this block; kPlainNext << part: all rows see all of the next;
              // kLast

  static constexpr u32 kHidden = 1, kPlainNext = 4, kLast = 16;

  constexpr bool is_last() const { return (flags & kLast) != 0; }
  constexpr bool is_hidden(i32 part) const { return (flags & kHidden << part) != 0; }
  constexpr bool goes_on(i32 part, bool plain) const {
    return !is_last() && ((flags & kPlainNext << part) != 0) == plain;
  }
};

template <ForwardSm90Config kConfig>
inline void write_key_step(const ForwardStorage<kConfig>& shared,
                           typename ForwardStorage<kConfig>::KvState at,
                           const typename KeyWalk<kConfig>::Tile& now,
                           const typename KeyWalk<kConfig>::Tile& next) {
  using Walk = KeyWalk<kConfig>;
  const u32 hidden = now.kinds & (Walk::kPlain - 1);
  const u32 after = next.block < 0 ? KeyStep::kLast : next.kinds & ~(Walk::kPlain - 1);
  ptx::store_shared_x2(shared.key_step(at), {{u32(now.block), hidden | after}});
}

// step(Flag<partial>) for the blocks after `listed`, which a step reads.
template <class Step>
inline void walk_listed(const KeyStep& listed, i32 part, const Step& step) {
  while (!listed.is_last()) {
#pragma unroll 1
    while (listed.goes_on(part, false)) step(Flag<true>{});
#pragma unroll 1
    while (listed.goes_on(part, true)) step(Flag<false>{});
  }
}

// By a whole warp, after K has landed: returns the number of the block.
template <ForwardSm90Config kConfig>
inline i32 take_key_step(const ForwardStorage<kConfig>& shared,
                         typename ForwardStorage<kConfig>::KvState at, u32 warpgroup,
                         KeyStep& step) {
  const ptx::U32x2 words = ptx::load_shared_x2(shared.key_step(at));
  ptx::warp_sync();
  step = {i32(words.word[0]), words.word[1]};
  return step.is_hidden(q_tile<kConfig>(warpgroup)) ? kHiddenBlock<kConfig> : step.block;
}

// The blocks of keys of a work tile in the order of the producer: each(call) calls for all of them.
// What is read in shared memory, it reads when it is made.
template <ForwardSm90Config kConfig>
struct KeyOrder {
  KeyBlocks blocks;

  KeyOrder(const ForwardStorage<kConfig>& shared, const ForwardParams&, const QueryBlock&,
           u32 count)
      : blocks(read_key_blocks(shared, count, 0)) {}

  template <class Call>
  void each(const Call& call) {
#pragma unroll 1
    for (i32 j = blocks.all_end - 1; j >= blocks.all_begin; --j) call(j);
  }
};
template <ForwardSm90Config kConfig>
  requires(kConfig.score.has_tile_lists())
struct KeyOrder<kConfig> {
  KeyWalk<kConfig> walk;

  KeyOrder(const ForwardStorage<kConfig>& shared, const ForwardParams& params,
           const QueryBlock& block, u32 count)
      : walk(shared, params, block, count) {}

  template <class Call>
  void each(const Call& call) {
#pragma unroll 1
    for (auto tile = walk.first(); tile.block >= 0; tile = walk.next()) call(tile.block);
  }
};

}  // namespace fulmen
