// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tile scheduler of forward_sm90 and backward_dq_sm90: a persistent grid takes blocks of
// queries from a counter, those with the most keys first. One warp of each thread block claims the
// next one, finds which blocks of keys each warpgroup computes, publishes both as a work tile, and
// publishes a work tile again, for the fallback, whose result left the range of float32.
#pragma once

#include "kernels/base.cuh"
#include "kernels/common/documents_sm90.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

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

template <ForwardSm90Config kConfig>
class TileOrder {
 public:
  TileOrder(const ForwardParams& params, u32 lane) : params_(params), lane_(lane) {
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
    const Sequence of = load_sequence(params_.attention, sequence);
    if (kConfig.mixed && has_few_rows(params_.attention, of.shape.q_len)) return 0;
    return u32(ceil_div(of.q_slot, kConfig.q_rows()));
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

  // Position: blocks q_block_ of this group have numbers begin_ .. end_ - 1 in it.
  i32 group_ = -1;
  i32 q_block_ = 0;
  i32 begin_ = 0;
  i32 end_ = 0;
};

// Of sequences that are alike: in closed form.
template <ForwardSm90Config kConfig>
  requires(!kConfig.score.varlen)
class TileOrder<kConfig> {
 public:
  TileOrder(const ForwardParams& params, u32)
      : order_{params.num_q_blocks, params.heads_q / kConfig.heads_per_tile, params.batch,
               params.heads_per_group, kConfig.longest_first && kConfig.score.may_be_causal()} {}

  i32 size() const { return order_.size(); }
  QueryBlock at(i32 index) const {
    QueryBlock block = order_.at(index);
    block.head *= kConfig.heads_per_tile;
    return block;
  }

 private:
  BlockOrder order_;
};

// What documents leave of `range`, the blocks of keys of warpgroup w in lane w and of all of them
// in the lanes after: the blocks from the first to the last that share a document with a row, and
// of the full ones those that are of one document with all rows of the warpgroup, up to the first
// that is not. All lanes of a warp.
template <ForwardSm90Config kConfig>
inline BlockRange narrow_to_documents(BlockRange range, const ForwardParams& params,
                                      const QueryBlock& block, const SeqlenInfo& seqlen, u32 lane) {
  const AttentionParams& p = params.attention;
  const IdRange* keys =
      params.key_ranges + first_key_range(p, kConfig.kv_rows, block.batch, seqlen.kv_begin);
  IdRange ids[kConfig.q_tiles()], all_ids;
#pragma unroll
  for (i32 w = 0; w < kConfig.q_tiles(); ++w) {
    const i32 row = block.q_block * kConfig.q_rows() + w * kConfig.tile_rows();
    const i32 end = min(row + kConfig.tile_rows(), seqlen.shape.q_len);
    ids[w] = ids_of_rows(p.q_ids, seqlen.batch, seqlen.q_begin + row, seqlen.q_begin + end, lane);
    all_ids.add(ids[w].least);
    all_ids.add(ids[w].largest);
  }
  if (seqlen.shape.q_len <= block.q_block * kConfig.q_rows()) return range;  // no rows, no ids
  Interval all{ptx::shuffle(i32(range.visible.begin), kConfig.warpgroups),
               ptx::shuffle(i32(range.visible.end), kConfig.warpgroups)};
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
    range.visible = all;
  } else {
    range.visible.begin = min(max(range.visible.begin, all.begin), all.end - 1);
    range.visible.end = clamp(range.visible.end, range.visible.begin + 1, all.end);
  }
  return range;
}

template <ForwardSm90Config kConfig>
struct ForwardScheduler {
  using Shared = ForwardStorage<kConfig>;
  static constexpr i32 kUnclaimed = -1;

  const ForwardParams& params;
  Shared shared;
  u32 lane;
  i32 claimed = kUnclaimed;  // index of the block after this one
  PipelineState<1> claim_at;

  // Thread blocks that share a work tile count as one.
  static i32 number() { return ptx::block_index() / kConfig.blocks_of_tile(); }
  static i32 count_all() { return ptx::num_blocks() / kConfig.blocks_of_tile(); }

  // The next index of the grid's counter, in lane 0; without one there are no more blocks than
  // multiprocessors. Of a pair the first block claims, and sends it to the second.
  u32 claim(i32 size) {
    const auto next = [&] {
      return params.next_block != nullptr ? ptx::atomic_inc(params.next_block, size - 1)
                                          : u32(size);
    };
    if constexpr (!kConfig.paired) return next();
    const auto claim = shared.claim();
    u32 index;
    if (ptx::cluster_rank() == 0) {
      index = next();
      ptx::mbarrier_wait_cluster(claim.empty(claim_at), claim_at.phase ^ 1);
      ptx::store_async(ptx::map_shared(claim.address(claim_at), 1), index,
                       ptx::map_shared(claim.full(claim_at), 1));
    } else {
      ptx::mbarrier_arrive_expect(claim.full(claim_at), sizeof(u32));
      ptx::mbarrier_wait_copies(claim.full(claim_at), claim_at.phase);
      index = ptx::load_shared(claim.address(claim_at));
      ptx::mbarrier_arrive_cluster(ptx::map_shared(claim.empty(claim_at), 0));
    }
    claim_at.advance();
    return index;
  }

  // Writes work tile number `count`. Lane w finds the key blocks of warpgroup w, the lanes after
  // them those of the whole thread block.
  void publish(u32 count, const WorkTile& next) const {
    const bool for_warpgroup = lane < u32(kConfig.warpgroups);
    const i32 row = next.block.q_block * kConfig.q_rows();
    const SeqlenInfo seqlen = seqlen_info_of<kConfig>(params, next.block);
    BlockRange range = visible_key_blocks<kConfig>(
        params.mask, seqlen.shape,
        for_warpgroup ? row + kConfig.tile_rows() * q_tile<kConfig>(lane) : row,
        for_warpgroup ? kConfig.tile_rows() : kConfig.q_rows());
    if constexpr (kConfig.skips_documents) {  // block -1, the end, has no rows and no ids
      if (row >= 0) range = narrow_to_documents<kConfig>(range, params, next.block, seqlen, lane);
    }
    const Interval all{ptx::shuffle(i32(range.visible.begin), kConfig.warpgroups),
                       ptx::shuffle(i32(range.visible.end), kConfig.warpgroups)};
    ptx::warp_sync();  // all have read `next`, which may lie in the slot written now
    if (for_warpgroup) {
      const KeyBlocks blocks = key_blocks<kConfig>(all, range);
      const u32 slot = shared.key_blocks(count, lane);
      ptx::store_shared_x4(slot, {{u32(blocks.begin), u32(blocks.full_begin), u32(blocks.full_end),
                                   u32(blocks.end)}});
      ptx::store_shared(slot + 16, blocks.all_begin);
      ptx::store_shared(slot + 20, blocks.all_end);
    }
    if (lane == 0) {
      write_seqlen_info(shared, count, seqlen);
      ptx::store_shared(shared.failed(count), 0);
      if constexpr (kConfig.paged) ptx::store_shared(shared.bad_page(count), 0);
      ptx::store_shared_x4(shared.work_tile(count), {{u32(next.block.q_block), u32(next.block.head),
                                                      u32(next.block.batch), next.failed}});
    }
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(shared.published(count));
  }

  // Waits until work tile number `count` is done; the warps for which the fallback must compute it.
  u32 failed_warps(u32 count) const {
    ptx::mbarrier_wait(shared.done(count), Shared::parity(count));
    const u32 failed = ptx::load_shared(shared.failed(count));
    ptx::warp_sync();
    if (lane == 0) ptx::store_shared(shared.failed(count), 0);
    return failed;
  }

  // Whether there is anything to compute, which a kernel before may have to say.
  bool is_asked() const {
    if constexpr (kConfig.conditional) return *params.condition != 0;
    return true;
  }

  // As record_faults, which is a call: the assembler fails on calls in a kernel with setmaxnreg.
  void record_invalid_entries() const {
    const AttentionParams& p = params.attention;
    if (p.faults == nullptr) return;
    u32 found = 0;
    if (ptx::block_index() == 0 && p.rng != nullptr && p.rng[1] >> 32 != 0) found = kFaultRng;
#pragma unroll 1
    for (i32 i = ptx::block_index() * 32 + lane; kConfig.score.varlen && i < params.batch;
         i += ptx::num_blocks() * 32) {
      if constexpr (kConfig.caches) {
        found |= load_cache_sequence(p, i).faults;
        continue;
      }
      found |=
          axis_faults(axis_entry(p.cu_q, p.q_lengths, i), p.q_rows, kFaultQOffsets, kFaultQLengths);
      found |= axis_faults(axis_entry(p.cu_kv, p.kv_lengths, i), p.kv_rows, kFaultKvOffsets,
                           kFaultKvLengths);
    }
    report(p.faults, found);
  }

  void run() {
    if constexpr (kConfig.score.varlen || kConfig.score.dropout) record_invalid_entries();
    TileOrder<kConfig> order(params, lane);
    const i32 size = order.size();
    WorkTile now{{-1, 0, 0}, 0};
    if (is_asked() && (!kConfig.score.varlen || number() < size)) now.block = order.at(number());
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      publish(count, now);
      if (now.block.q_block < 0) return;
      // Claims as late as possible, so that longest-first balances: an early claim ties two long
      // blocks to one multiprocessor (measured: 5 % at causal 4k). Looking up documents takes as
      // long as several blocks of keys, so that it comes first there.
      if constexpr (!kConfig.skips_documents) {
        ptx::mbarrier_wait(shared.nearly_loaded(), count % 2);
      }
      if (claimed == kUnclaimed) {
        const u32 index = lane == 0 ? claim(size) : 0;
        claimed = min<i32>(size, ptx::broadcast(index) + count_all());
      }
      // WorkTile count - 1 is over by now, or nearly: its verdict decides what comes next.
      if (const u32 failed = count > 0 ? failed_warps(count - 1) : 0; failed != 0) {
        now = {read_work_tile(shared, count - 1).block, failed};
      } else if (claimed < size) {
        now = {order.at(claimed), 0};
        claimed = kUnclaimed;
      } else if (const u32 failed = failed_warps(count); failed != 0) {
        now = {read_work_tile(shared, count).block, failed};
      } else {
        now.block.q_block = -1;
      }
    }
  }
};

}  // namespace fulmen
