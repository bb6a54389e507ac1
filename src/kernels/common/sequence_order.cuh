// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// In which order the query blocks of sequences are handed out whose lengths only the device knows.
// Groups of heads come one after the other, as in block_order.cuh; inside a group the blocks that
// stand furthest back in their sequence come first, whatever the sequence, so that the longest work
// is begun first and no index is spent on a block that does not exist. One warp walks the order
// together: indices must not decrease from one call to the next.
#pragma once

#include "kernels/common/block_order.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

template <AttentionConfig kConfig>
class SequenceOrder {
 public:
  SequenceOrder(const ForwardParams& params, u32 lane) : params_(params), lane_(lane) {
    u32 total = 0, most = 0;
#pragma unroll 1
    for (i32 s = lane; s < params.batch; s += 32) {
      const u32 count = num_blocks(s);
      total += count;
      most = max(most, count);
    }
#pragma unroll
    for (u32 distance = 16; distance >= 1; distance /= 2) {
      total += ptx::shuffle_xor(total, distance);
      most = max(most, ptx::shuffle_xor(most, distance));
    }
    blocks_per_head_ = i32(total);
    top_ = i32(most);
    first_ = num_blocks(i32(lane));
  }

  i32 size() const { return blocks_per_head_ * num_heads(); }

  // Block number `index` of 0 .. size() - 1; `batch` is the sequence.
  QueryBlock at(i32 index) {
    const i32 per_group = min(params_.heads_per_group, num_heads());
    const i32 group = index / (per_group * blocks_per_head_);
    const i32 within = index - group * per_group * blocks_per_head_;
    const i32 heads = min(per_group, num_heads() - group * per_group);  // the last is smaller
    if (group != group_) {
      group_ = group;
      q_block_ = top_;
      begin_ = end_ = 0;
    }
    while (within >= end_) {
      begin_ = end_;
      --q_block_;
      end_ += heads * count_sequences();
    }
    const i32 sequence = (within - begin_) / heads;
    const i32 head = group * per_group + (within - begin_) % heads;
    return {q_block_, head * kConfig.heads_per_tile, nth_owner(sequence)};
  }

 private:
  i32 num_heads() const { return params_.heads_q / kConfig.heads_per_tile; }  // or sets of them

  // Blocks of the rows that a sequence owns, those past its length included.
  u32 num_blocks(i32 sequence) const {
    if (sequence >= params_.batch) return 0;
    return u32(ceil_div(load_sequence(params_.attention, sequence).q_slot, kConfig.q_rows()));
  }

  // Which of sequences first .. first + 31 have block q_block_.
  u32 owners(i32 first) const {
    const u32 count = first == 0 ? first_ : num_blocks(first + i32(lane_));
    return ptx::ballot(count > u32(q_block_));
  }

  i32 count_sequences() const {
    i32 count = 0;
#pragma unroll 1
    for (i32 first = 0; first < params_.batch; first += 32) count += ptx::count_ones(owners(first));
    return count;
  }

  // The sequence with `before` others before it that have block q_block_.
  i32 nth_owner(i32 before) const {
#pragma unroll 1
    for (i32 first = 0;; first += 32) {
      u32 mask = owners(first);
      const i32 count = ptx::count_ones(mask);
      if (before < count) {
        for (; before > 0; --before) mask &= mask - 1;
        return first + ptx::count_ones((mask & (0 - mask)) - 1);  // the lowest bit that is left
      }
      before -= count;
    }
  }

  const ForwardParams& params_;
  u32 lane_;
  i32 blocks_per_head_;  // of all sequences together
  i32 top_;              // blocks of the longest
  u32 first_;            // blocks of sequence number `lane`

  // Where the walk stands: blocks q_block_ of this group have numbers begin_ .. end_ - 1 in it.
  i32 group_ = -1;
  i32 q_block_ = 0;
  i32 begin_ = 0;
  i32 end_ = 0;
};

// Blocks of equal sequences need no walk.
template <AttentionConfig kConfig>
  requires(!kConfig.sequences)
class SequenceOrder<kConfig> {
 public:
  SequenceOrder(const ForwardParams& params, u32)
      : order_{params.num_q_blocks, params.heads_q / kConfig.heads_per_tile, params.batch,
               params.heads_per_group, kConfig.longest_first && kConfig.mask != MaskKind::kLength} {
  }

  i32 size() const { return order_.size(); }
  QueryBlock at(i32 index) const {
    QueryBlock block = order_.at(index);
    block.head *= kConfig.heads_per_tile;
    return block;
  }

 private:
  BlockOrder order_;
};

}  // namespace fulmen
