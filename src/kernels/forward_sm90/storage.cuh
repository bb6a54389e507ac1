// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the three roles of forward_sm90 share: the layout of shared memory with its barriers, and
// the mail by which the planner tells the loader and the consumers what to do next.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/pipeline_sm90.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Shared memory: Q, K, V, O, then the mailbox and the barriers.
template <AttentionConfig kConfig>
struct ForwardShared {
  u32 base;

  using QCursor = Cursor<kConfig.num_q_slots()>;
  using KvCursor = Cursor<kConfig.stages>;
  static constexpr u32 kK = kConfig.num_q_slots() * kConfig.q_bytes();
  static constexpr u32 kV = kK + kConfig.stages * kConfig.k_bytes();
  static constexpr u32 kO = kV + kConfig.stages * kConfig.v_bytes();
  static constexpr u32 kMail = kO + kConfig.o_bytes();
  static constexpr u32 kMailBytes = kConfig.mail_bytes();
  static constexpr u32 kBarriers = kMail + 2 * kMailBytes;
  static constexpr u32 kQBarriers = kBarriers + 48;
  static constexpr u32 kKBarriers = kQBarriers + Ring<kConfig.num_q_slots()>::kBarrierBytes;
  static constexpr u32 kVBarriers = kKBarriers + Ring<kConfig.stages>::kBarrierBytes;
  static constexpr u32 kLanded = kVBarriers + Ring<kConfig.stages>::kBarrierBytes;
  static_assert(kLanded + (kConfig.sequences ? 8 * kConfig.stages : 0) ==
                u32(kConfig.shared_bytes()));

  // Whether a slot of Q serves one warpgroup in this block of queries and another in the next. Then
  // all of them wait for, and give back, all tiles: a warpgroup that missed phases of a barrier
  // would take one for another.
  static constexpr bool kMovesTiles = kConfig.num_q_slots() % kConfig.q_tiles() != 0;

  constexpr Ring<kConfig.num_q_slots()> q() const {
    return {base, u32(kConfig.q_bytes()), base + kQBarriers};
  }
  constexpr Ring<kConfig.stages> k() const {
    return {base + kK, u32(kConfig.k_bytes()), base + kKBarriers};
  }
  constexpr Ring<kConfig.stages> v() const {
    return {base + kV, u32(kConfig.v_bytes()), base + kVBarriers};
  }
  constexpr u32 o() const { return base + kO; }

  // The mailbox has two slots, used in turn. planner -> loader, consumers: `assigned`, the mail is
  // written. loader -> planner: `nearly_loaded`, time to find the next block. consumers -> planner:
  // `done`, this part is finished and `failed` set if a row left the range of float32.
  constexpr u32 mail(u32 count) const { return base + kMail + count % 2 * kMailBytes; }
  constexpr u32 failed(u32 count) const { return mail(count) + 16; }
  constexpr u32 key_blocks(u32 count, u32 warpgroup) const {
    return mail(count) + 32 + 32 * warpgroup;
  }
  constexpr u32 place(u32 count) const { return key_blocks(count, kConfig.warpgroups); }
  constexpr u32 assigned(u32 count) const { return base + kBarriers + count % 2 * 8; }
  constexpr u32 done(u32 count) const { return base + kBarriers + 16 + count % 2 * 8; }
  static constexpr u32 parity(u32 count) { return count / 2 % 2; }  // of the two above
  constexpr u32 nearly_loaded() const { return base + kBarriers + 32; }

  // loader -> sweeper: a tile of V has landed whose last rows must be cleared before it is full.
  constexpr u32 landed(KvCursor at) const { return base + kLanded + 8 * at.buffer; }

  void init() const {
    q().init(kMovesTiles ? kConfig.warpgroups : kConfig.warpgroups / kConfig.q_tiles());
    k().init(kConfig.warpgroups);
    v().init(kConfig.warpgroups);
    for (u32 slot = 0; slot < 2; ++slot) {
      ptx::mbarrier_init(assigned(slot), 1);
      ptx::mbarrier_init(done(slot), 4 * kConfig.warpgroups + (kConfig.sequences ? 1 : 0));
    }
    for (u32 stage = 0; kConfig.sequences && stage < u32(kConfig.stages); ++stage) {
      ptx::mbarrier_init(landed({stage, 0}), 1);
    }
    ptx::mbarrier_init(nearly_loaded(), 1);
    ptx::fence_mbarrier_init();
  }
};

// Which 64 rows of a block of queries are a warpgroup's.
template <AttentionConfig kConfig>
constexpr i32 q_tile(u32 warpgroup) {
  return kConfig.split_dims ? 0 : i32(warpgroup);
}

// A block of queries to compute; q_block < 0: there is nothing more to do.
struct Assignment {
  QueryBlock block;
  bool careful;  // the second attempt: the maximum of every block of keys is taken
};

// Blocks of keys that rows [begin, begin + count) visit; one (all hidden) where they see nothing.
template <AttentionConfig kConfig>
constexpr BlockRange visited_blocks(const IntervalMask& mask, const SequenceShape& shape, i64 begin,
                                    i64 count) {
  const i64 end = min<i64>(begin + count, shape.q_len);
  if (begin >= end) return {{0, 1}, {0, 0}};
  BlockRange range =
      visible_column_blocks(effective_mask<kConfig>(mask), shape, {begin, end}, kConfig.kv_rows);
  range.visible.end = max(range.visible.end, range.visible.begin + 1);
  return range;
}

// How the rows of a warpgroup see a block of keys.
enum class Sight : u8 {
  kAll,    // every row all of it
  kEnds,   // the keys of some rows end in it, and may begin in it, too
  kBegins  // the keys of some rows begin in it, and all rows saw blocks after it whole
};

// What one warpgroup does with the blocks of keys, from the last to the first: skips what only
// others see, masks the partial ones, and takes the full ones as they are.
struct KeyBlocks {
  i32 all_begin, begin, full_begin, full_end, end, all_end;
};

// all: what the whole thread block visits; own: what the rows of this warpgroup see.
template <AttentionConfig kConfig>
constexpr KeyBlocks key_blocks(const Interval& all, const BlockRange& own) {
  const i64 begin = max(own.visible.begin, all.begin);
  const i64 end = clamp(own.visible.end, begin + 1, all.end);
  Interval full{clamp(own.full.begin, begin, end), clamp(own.full.end, begin, end)};
  if (!kConfig.skip_full_masks || full.size() <= 0) full = {begin, begin};
  return {i32(all.begin), i32(begin), i32(full.begin), i32(full.end), i32(end), i32(all.end)};
}

template <AttentionConfig kConfig>
inline Assignment read_assignment(const ForwardShared<kConfig>& shared, u32 count) {
  const ptx::U32x4 mail = ptx::load_shared_x4(shared.mail(count));
  return {
      {ptx::broadcast(mail.word[0]), ptx::broadcast(mail.word[1]), ptx::broadcast(mail.word[2])},
      ptx::broadcast(mail.word[3]) != 0};
}

// Where equal sequences leave nothing to look up, the mail holds no place.
template <AttentionConfig kConfig>
inline void write_place(const ForwardShared<kConfig>& shared, u32 count, const Place& place) {
  if constexpr (kConfig.sequences) {
    const u32 mail = shared.place(count);
    ptx::store_shared_x4(
        mail, {{u32(place.batch), u32(place.q_begin), u32(place.kv_begin), u32(place.q_slot)}});
    ptx::store_shared_x4(
        mail + 16, {{u32(place.shape.q_len), u32(place.shape.kv_len), u32(place.shape.shift), 0}});
  }
}

template <AttentionConfig kConfig>
inline Place read_place(const ForwardShared<kConfig>& shared, const ForwardParams& params,
                        const QueryBlock& block, u32 count) {
  if constexpr (kConfig.sequences) {
    const ptx::U32x4 rows = ptx::load_shared_x4(shared.place(count));
    const ptx::U32x4 shape = ptx::load_shared_x4(shared.place(count) + 16);
    return {i32(rows.word[0]),
            i32(rows.word[1]),
            i32(rows.word[2]),
            i32(rows.word[3]),
            {i32(shape.word[0]), i32(shape.word[1]), i32(shape.word[2])}};
  }
  return place_of<kConfig>(params, block);
}

template <AttentionConfig kConfig>
inline KeyBlocks read_key_blocks(const ForwardShared<kConfig>& shared, u32 count, u32 warpgroup) {
  const u32 mail = shared.key_blocks(count, warpgroup);
  const ptx::U32x4 own = ptx::load_shared_x4(mail);
  return {ptx::broadcast(ptx::load_shared(mail + 16)),
          ptx::broadcast(own.word[0]),
          ptx::broadcast(own.word[1]),
          ptx::broadcast(own.word[2]),
          ptx::broadcast(own.word[3]),
          ptx::broadcast(ptx::load_shared(mail + 20))};
}

}  // namespace fulmen
