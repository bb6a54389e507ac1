// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The planner of forward_sm90: one warp that finds the next block of queries, works out which
// blocks of keys every warpgroup visits, and sends blocks round again whose results left the range
// of float32.
#pragma once

#include "kernels/common/document_ranges.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/sequence_order.cuh"
#include "kernels/forward_sm90/shared.cuh"

namespace fulmen {

template <AttentionConfig kConfig>
struct ForwardPlanner {
  using Shared = ForwardShared<kConfig>;
  static constexpr i32 kUnclaimed = -1;

  const ForwardParams& params;
  Shared shared;
  u32 lane;
  i32 claimed = kUnclaimed;  // index of the block after this one

  // Writes the mail. Lane w plans for warpgroup w, the lanes after them for the whole thread block.
  void assign(u32 count, const Assignment& next) const {
    const bool for_warpgroup = lane < u32(kConfig.warpgroups);
    const i32 row = next.block.q_block * kConfig.q_rows();
    const Place place = place_of<kConfig>(params, next.block);
    BlockRange range = visited_blocks<kConfig>(
        params.mask, place.shape,
        for_warpgroup ? row + kConfig.tile_rows() * q_tile<kConfig>(lane) : row,
        for_warpgroup ? kConfig.tile_rows() : kConfig.q_rows());
    if constexpr (kConfig.skips_documents) {  // block -1, the end, has no rows and no ids
      if (row >= 0) range = narrowed<kConfig>(range, params, next.block, place, lane);
    }
    const Interval all{ptx::shuffle(i32(range.visit.begin), kConfig.warpgroups),
                       ptx::shuffle(i32(range.visit.end), kConfig.warpgroups)};
    ptx::warp_sync();  // all have read `next`, which may lie in the mail written now
    if (for_warpgroup) {
      const KeyBlocks blocks = key_blocks<kConfig>(all, range);
      const u32 mail = shared.key_blocks(count, lane);
      ptx::store_shared_x4(mail, {{u32(blocks.begin), u32(blocks.full_begin), u32(blocks.full_end),
                                   u32(blocks.end)}});
      ptx::store_shared(mail + 16, blocks.all_begin);
      ptx::store_shared(mail + 20, blocks.all_end);
    }
    if (lane == 0) {
      write_place(shared, count, place);
      ptx::store_shared(shared.failed(count), 0);
      ptx::store_shared_x4(shared.mail(count), {{u32(next.block.q_block), u32(next.block.head),
                                                 u32(next.block.batch), u32(next.careful)}});
    }
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(shared.assigned(count));
  }

  // Waits until assignment number `count` is finished; whether it must be repeated.
  bool must_repeat(u32 count) const {
    ptx::mbarrier_wait(shared.done(count), Shared::parity(count));
    const bool failed = ptx::load_shared(shared.failed(count)) != 0;
    ptx::warp_sync();
    if (lane == 0) ptx::store_shared(shared.failed(count), 0);
    return failed;
  }

  // As record_faults, which is a call: the assembler fails on calls beside setmaxnreg.
  void record_invalid_entries() const {
    const AttentionParams& p = params.attention;
    if (p.faults == nullptr) return;
    u32 found = 0;
    if (ptx::block_index() == 0 && p.rng != nullptr && p.rng[1] >> 32 != 0) found = kFaultRng;
#pragma unroll 1
    for (i32 i = ptx::block_index() * 32 + lane; kConfig.sequences && i < params.batch;
         i += ptx::num_blocks() * 32) {
      found |=
          axis_faults(axis_entry(p.cu_q, p.q_lengths, i), p.q_rows, kFaultQOffsets, kFaultQLengths);
      found |= axis_faults(axis_entry(p.cu_kv, p.kv_lengths, i), p.kv_rows, kFaultKvOffsets,
                           kFaultKvLengths);
    }
    if (found != 0) ptx::set_bits(p.faults, found);
  }

  void run() {
    if constexpr (kConfig.sequences || kConfig.dropout) record_invalid_entries();
    SequenceOrder<kConfig> order(params, lane);
    const i32 size = order.size();
    Assignment now{{-1, 0, 0}, false};
    if (!kConfig.sequences || i32(ptx::block_index()) < size) {
      now.block = order.at(ptx::block_index());
    }
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      assign(count, now);
      if (now.block.q_block < 0) return;
      // Claims as late as possible, so that longest-first balances: an early claim ties two long
      // blocks to one multiprocessor (measured: 5 % at causal 4k). Looking up documents takes as
      // long as several blocks of keys, so that it comes first there.
      if constexpr (!kConfig.skips_documents) {
        ptx::mbarrier_wait(shared.nearly_loaded(), count % 2);
      }
      if (claimed == kUnclaimed) {
        u32 index = u32(size);  // no counter: there are no more blocks than multiprocessors
        if (lane == 0 && params.next_block != nullptr) {
          index = ptx::atomic_inc(params.next_block, size - 1);
        }
        claimed = min<i32>(size, ptx::broadcast(index) + ptx::num_blocks());
      }
      // Assignment count - 1 is over by now, or nearly: its verdict decides what comes next.
      if (count > 0 && must_repeat(count - 1)) {
        now = {read_assignment(shared, count - 1).block, true};
      } else if (claimed < size) {
        now = {order.at(claimed), false};
        claimed = kUnclaimed;
      } else if (must_repeat(count)) {
        now = {read_assignment(shared, count).block, true};
      } else {
        now.block.q_block = -1;
      }
    }
  }
};

}  // namespace fulmen
