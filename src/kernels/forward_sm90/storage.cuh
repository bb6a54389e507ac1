// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of forward_sm90 and backward_dq_sm90: tiles of Q, K, V and O, their mbarriers, and
// the two slots in which the tile scheduler publishes work tiles to the producer and the consumers.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/pipeline_sm90.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// In this order: Q, K, V, bias and mask, O, addresses of rows of pages, messages of a pair, two
// work tiles, barriers.
template <ForwardSm90Config kConfig>
struct ForwardStorage {
  u32 base;

  using QState = PipelineState<kConfig.num_q_slots()>;
  using KvState = PipelineState<kConfig.stages>;
  using FoundState = PipelineState<2>;
  static constexpr i32 kPairStages = max(kConfig.pair_stages, 1);
  using PairState = PipelineState<kPairStages>;
  static constexpr u32 kK = kConfig.num_q_slots() * kConfig.q_bytes();
  static constexpr u32 kV = kK + kConfig.stages * kConfig.k_bytes();
  static constexpr u32 kPairs = kV + kConfig.stages * kConfig.v_bytes();
  static constexpr u32 kO = kPairs + kConfig.pair_stages * kConfig.pair_bytes();
  static constexpr u32 kFound = kO + kConfig.o_bytes();
  static constexpr u32 kMessages = kFound + kConfig.found_bytes();
  static constexpr u32 kWorkTiles = kMessages + kConfig.messages_bytes();
  static constexpr u32 kWorkTileBytes = kConfig.work_tile_bytes();
  static constexpr u32 kBarriers = kWorkTiles + 2 * kWorkTileBytes;
  static constexpr u32 kQBarriers = kBarriers + 48;
  static constexpr u32 kKBarriers = kQBarriers + Pipeline<kConfig.num_q_slots()>::kBarrierBytes;
  static constexpr u32 kVBarriers = kKBarriers + Pipeline<kConfig.stages>::kBarrierBytes;
  static constexpr u32 kLanded = kVBarriers + Pipeline<kConfig.stages>::kBarrierBytes;
  static constexpr u32 kFoundBarriers = kLanded + (kConfig.fills_tails() ? 8 * kConfig.stages : 0);
  static constexpr u32 kPairBarriers =
      kFoundBarriers + (kConfig.gathers ? Pipeline<2>::kBarrierBytes : 0);
  static constexpr u32 kKeySteps = kPairBarriers + 16 * kConfig.pair_stages;
  static constexpr u32 kMessageBarriers = kKeySteps + kConfig.key_step_bytes();
  static constexpr u32 kClaim = kMessageBarriers + (kConfig.paired ? 16 * kConfig.warpgroups : 0);
  static_assert(kMessageBarriers + kConfig.partner_bytes() == u32(kConfig.shared_bytes()));

  // Whether a slot of Q serves one warpgroup in this work tile and another in the next. Then every
  // warpgroup waits for and releases all tiles of Q: one that missed phases of a barrier would take
  // one phase for another.
  static constexpr bool kRotatesQ = kConfig.num_q_slots() % kConfig.q_tiles() != 0;

  constexpr Pipeline<kConfig.num_q_slots()> q() const {
    return {base, u32(kConfig.q_bytes()), base + kQBarriers};
  }
  constexpr Pipeline<kConfig.stages> k() const {
    return {base + kK, u32(kConfig.k_bytes()), base + kKBarriers};
  }
  constexpr Pipeline<kConfig.stages> v() const {
    return {base + kV, u32(kConfig.v_bytes()), base + kVBarriers};
  }
  constexpr Pipeline<kPairStages> pairs() const {
    return {base + kPairs, u32(kConfig.pair_bytes()), base + kPairBarriers};
  }
  constexpr u32 o() const { return base + kO; }
  // Addresses of rows of K, then of V.
  constexpr Pipeline<2> found() const {
    return {base + kFound, u32(16 * kConfig.kv_rows), base + kFoundBarriers};
  }

  // Of a pair: what a warpgroup's partner sends it (partner.cuh), and what the first block claims.
  constexpr u32 message(u32 warpgroup, u32 slot) const {
    return base + kMessages + (2 * warpgroup + slot) * kConfig.message_bytes();
  }
  constexpr u32 message_arrived(u32 warpgroup, u32 slot) const {
    return base + kMessageBarriers + (2 * warpgroup + slot) * 8;
  }
  constexpr Pipeline<1> claim() const { return {base + kClaim, 16, base + kClaim + 16}; }

  // Work tile number `count` lies in slot count % 2. scheduler -> producer, consumers: `published`,
  // it is written. producer -> scheduler: `nearly_loaded`, time to claim the next one. consumers ->
  // scheduler: `done`, it is computed, and `failed`, warps of which a row left the range of
  // float32. producer -> consumers, with the keys: `bad_page`, an entry of the page table names no
  // page.
  constexpr u32 work_tile(u32 count) const {
    return base + kWorkTiles + count % 2 * kWorkTileBytes;
  }
  constexpr u32 failed(u32 count) const { return work_tile(count) + 16; }
  constexpr u32 bad_page(u32 count) const { return work_tile(count) + 20; }
  constexpr u32 key_blocks(u32 count, u32 warpgroup) const {
    return work_tile(count) + 32 + 32 * warpgroup;
  }
  constexpr u32 seqlen_info(u32 count) const { return key_blocks(count, kConfig.warpgroups); }
  constexpr u32 published(u32 count) const { return base + kBarriers + count % 2 * 8; }
  constexpr u32 done(u32 count) const { return base + kBarriers + 16 + count % 2 * 8; }
  static constexpr u32 parity(u32 count) { return count / 2 % 2; }  // of the two above
  constexpr u32 nearly_loaded() const { return base + kBarriers + 32; }

  // With lists of tiles, two words that come with K: which block it is (listed_keys.cuh). Every
  // warp reads them, and releases K.
  constexpr u32 key_step(KvState at) const { return base + kKeySteps + 8 * at.index; }

  // TMA -> tail zero-fill: a tile of V has landed that ends past the sequence.
  constexpr u32 landed(KvState at) const { return base + kLanded + 8 * at.index; }

  void init() const {
    q().init(kRotatesQ ? kConfig.warpgroups : kConfig.warpgroups / kConfig.q_tiles());
    k().init(kConfig.warpgroups * (kConfig.score.has_tile_lists() ? 4 : 1));
    v().init(kConfig.warpgroups);
    for (u32 slot = 0; slot < 2; ++slot) {
      ptx::mbarrier_init(published(slot), 1);
      ptx::mbarrier_init(done(slot), 4 * kConfig.warpgroups + (kConfig.fills_tails() ? 1 : 0));
    }
    for (u32 stage = 0; kConfig.fills_tails() && stage < u32(kConfig.stages); ++stage) {
      ptx::mbarrier_init(landed({stage, 0}), 1);
    }
    ptx::mbarrier_init(nearly_loaded(), 1);
    if constexpr (kConfig.gathers) found().init(2);
    if constexpr (kConfig.paired) {
      claim().init(1);
      for (u32 i = 0; i < 2 * u32(kConfig.warpgroups); ++i) {
        ptx::mbarrier_init(message_arrived(i / 2, i % 2), 5);  // who expects it, four warps
      }
    }
    if constexpr (kConfig.pair_tiles()) pairs().init(4 * kConfig.warpgroups);
    ptx::fence_mbarrier_init();
  }
};

// Of a pair of thread blocks, which of the two this is.
template <ForwardSm90Config kConfig>
inline i32 pair_rank() {
  if constexpr (kConfig.paired) return i32(ptx::cluster_rank());
  return 0;
}

// Which 64 rows of a block of queries are a warpgroup's.
template <ForwardSm90Config kConfig>
constexpr i32 q_tile(u32 warpgroup) {
  return kConfig.split_dims ? 0 : i32(warpgroup);
}

// A block of queries to compute; q_block < 0: the grid is done.
struct WorkTile {
  QueryBlock block;
  u32 failed;  // a bit for each warp whose rows failed in the first attempt; 0: this is the first
};

// Blocks of keys that rows [begin, begin + count) see; one (all hidden) where they see none.
template <ForwardSm90Config kConfig>
constexpr BlockRange visible_key_blocks(const IntervalMask& mask, const SequenceShape& shape,
                                        i64 begin, i64 count) {
  const i64 end = min<i64>(begin + count, shape.q_len);
  if (begin >= end) return {{0, 1}, {0, 0}};
  BlockRange range =
      visible_column_blocks(effective_mask<kConfig>(mask), shape, {begin, end}, kConfig.kv_rows);
  range.visible.end = max(range.visible.end, range.visible.begin + 1);
  return range;
}

// The blocks of keys of one warpgroup, from the last to the first: [end, all_end) only other
// warpgroups see; [full_end, end) need the mask; [full_begin, full_end) are visible to every row;
// [begin, full_begin) need the mask; [all_begin, begin) only others see.
struct KeyBlocks {
  i32 all_begin, begin, full_begin, full_end, end, all_end;
};

// all: the blocks of the whole thread block; own: those that rows of this warpgroup see.
template <ForwardSm90Config kConfig>
constexpr KeyBlocks key_blocks(const Interval& all, const BlockRange& own) {
  const i64 begin = max(own.visible.begin, all.begin);
  const i64 end = clamp(own.visible.end, begin + 1, all.end);
  Interval full{clamp(own.full.begin, begin, end), clamp(own.full.end, begin, end)};
  if (!kConfig.skip_full_masks || full.size() <= 0) full = {begin, begin};
  return {i32(all.begin), i32(begin), i32(full.begin), i32(full.end), i32(end), i32(all.end)};
}

template <ForwardSm90Config kConfig>
inline WorkTile read_work_tile(const ForwardStorage<kConfig>& shared, u32 count) {
  const ptx::U32x4 tile = ptx::load_shared_x4(shared.work_tile(count));
  return {
      {ptx::broadcast(tile.word[0]), ptx::broadcast(tile.word[1]), ptx::broadcast(tile.word[2])},
      u32(ptx::broadcast(tile.word[3]))};
}

// Without config.score.varlen all are alike, and nothing is written.
template <ForwardSm90Config kConfig>
inline void write_seqlen_info(const ForwardStorage<kConfig>& shared, u32 count,
                              const SeqlenInfo& seqlen) {
  if constexpr (kConfig.score.varlen) {
    const u32 slot = shared.seqlen_info(count);
    ptx::store_shared_x4(
        slot, {{u32(seqlen.batch), u32(seqlen.q_begin), u32(seqlen.kv_begin), u32(seqlen.q_slot)}});
    ptx::store_shared_x4(
        slot + 16, {{u32(seqlen.shape.q_len), u32(seqlen.shape.kv_len), u32(seqlen.shape.shift),
                     kConfig.caches ? u32(seqlen.kv_batch) : 0}});
  }
}

template <ForwardSm90Config kConfig>
inline SeqlenInfo read_seqlen_info(const ForwardStorage<kConfig>& shared,
                                   const ForwardParams& params, const QueryBlock& block,
                                   u32 count) {
  if constexpr (kConfig.score.varlen) {
    const ptx::U32x4 rows = ptx::load_shared_x4(shared.seqlen_info(count));
    const ptx::U32x4 shape = ptx::load_shared_x4(shared.seqlen_info(count) + 16);
    return {i32(rows.word[0]),
            i32(rows.word[1]),
            i32(rows.word[2]),
            i32(rows.word[3]),
            {i32(shape.word[0]), i32(shape.word[1]), i32(shape.word[2])},
            kConfig.caches ? i32(shape.word[3]) : i32(rows.word[0])};
  }
  return seqlen_info_of<kConfig>(params, block);
}

template <ForwardSm90Config kConfig>
inline KeyBlocks read_key_blocks(const ForwardStorage<kConfig>& shared, u32 count, u32 warpgroup) {
  const u32 slot = shared.key_blocks(count, warpgroup);
  const ptx::U32x4 own = ptx::load_shared_x4(slot);
  return {ptx::broadcast(ptx::load_shared(slot + 16)),
          ptx::broadcast(own.word[0]),
          ptx::broadcast(own.word[1]),
          ptx::broadcast(own.word[2]),
          ptx::broadcast(own.word[3]),
          ptx::broadcast(ptx::load_shared(slot + 20))};
}

// Calls for each work tile, with the blocks of keys of the whole thread block and the sequence. By
// all lanes of a warp, which have read the tile then.
template <ForwardSm90Config kConfig, class Call>
void each_work_tile(const ForwardStorage<kConfig>& shared, const ForwardParams& params,
                    const Call& call) {
#pragma unroll 1
  for (u32 count = 0;; ++count) {
    ptx::mbarrier_wait(shared.published(count), shared.parity(count));
    const QueryBlock block = read_work_tile(shared, count).block;
    if (block.q_block < 0) return;
    const KeyBlocks blocks = read_key_blocks(shared, count, 0);
    const SeqlenInfo seqlen = read_seqlen_info(shared, params, block, count);
    ptx::warp_sync();
    call(block, blocks, seqlen, count);
  }
}

}  // namespace fulmen
