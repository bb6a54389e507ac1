// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Keys of mla_sm90 that lie each where a table says, as those of sparse attention do: slots in any
// order, -1 for none. Each of four warps gathers a quarter of every block of keys, 16 bytes a lane,
// and writes as the copy engine would. Keys that are not there become 0, and a word beside the
// block tells the scores which.
#pragma once

#include "kernels/common/caches.cuh"
#include "kernels/decode_sm80/scheduler.cuh"
#include "kernels/mla_sm90/storage.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace fulmen {

// Where the key of a lane lies, as it comes from memory. A row of -1: past the last key.
struct MlaKeyAt {
  i64 batch;  // or page, or slot
  i32 row;    // of batch or page
};

// A lane's key, if it is there. Word: those of all lanes that are not (MlaStorage::missing).
struct MlaFound {
  const u8* page;  // or batch
  i32 row;
  bool is_there;
  u32 word;
};

// What a lane has. All lanes together.
inline u64 of_lane(u64 x, i32 lane) {
  const u32 own = static_cast<u32>(lane);
  const u32 low = static_cast<u32>(ptx::shuffle(static_cast<i32>(x), own));
  const u32 high = static_cast<u32>(ptx::shuffle(static_cast<i32>(x >> 32), own));
  return u64{high} << 32 | low;
}

// kKeys: of a warp, the first of which lanes have one each.
template <MlaSm90Config kConfig, i32 kKeys = kConfig.warp_keys()>
struct MlaKeyFinder {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;

  const MlaSm90Arguments& arguments;

  static i32 lane() { return static_cast<i32>(lane_index()); }

  // key: the lane's, of those of the sequence.
  MlaKeyAt look_up(const KeyCursor<kSchedule>& cursor, i32 key) const {
    const AttentionParams& p = arguments.attention;
    if (lane() >= kKeys || key >= cursor.sequence.shape.kv_len) return {0, -1};
    const u32 in_cache = static_cast<u32>(cursor.sequence.kv_begin + key);
    if constexpr (!kSchedule.paged) return {cursor.kv_batch(), static_cast<i32>(in_cache)};
    const i64 request = p.page_indptr.present() ? 0 : cursor.index;
    const u32 page_rows = static_cast<u32>(p.cache_layout.page_rows);  // 1 where there are slots
    const u32 entry = page_rows == 1 ? in_cache : in_cache / page_rows;
    const i64 at = p.page_table.offset(request, 0, 0, i64{cursor.sequence.first_page} + entry);
    return {AlignedIndex::load(p.page_table, at), static_cast<i32>(in_cache - entry * page_rows)};
  }

  MlaFound find(const MlaKeyAt& entry, i32 kv_head) const {
    const AttentionParams& p = arguments.attention;
    const bool is_key = entry.row >= 0;
    i64 page = entry.batch;
    i32 row = entry.row;
    bool is_hidden = !is_key, is_bad = false;
    if constexpr (kSchedule.paged) {
      if (const u32 rows = p.cache_layout.slot_rows; rows != 0) {
        is_hidden |= page == kNoSlot;
        is_bad = !is_hidden && is_bad_page(page, p.num_pages * rows);
        const u32 slot = static_cast<u32>(page);  // below 2^32
        page = slot / rows;
        row = static_cast<i32>(slot % rows);
      } else {
        is_bad = is_key && is_bad_page(page, p.num_pages);
      }
    }
    const bool is_there = !is_hidden && !is_bad;
    u32 word = ptx::ballot(!is_there) & ((1u << kKeys) - 1);
    if (ptx::any(is_bad)) {
      word |= 1u << 31;
      if (lane() == 0) record_bad_page(p);
    }
    constexpr i64 kBytes = kConfig.record != 0 ? 1 : 2;
    const i64 offset = p.k.offset(page, kv_head, 0, 0) * kBytes;
    return {p.k.data + (is_there ? offset : 0), row, is_there, word};
  }
};

// Keys of 16 bits. A block is handed over when the next was asked for, if there is a place for
// that: copies of both are on their way together. Else as soon as it has landed.
template <MlaSm90Config kConfig>
struct MlaRows {
  using Config = MlaSm90Config;
  using Stage = PipelineState<kConfig.stages()>;

  MlaKeyFinder<kConfig> finder;
  MlaStorage<kConfig> shared;
  i32 warp;
  Stage before{};
  bool is_asked = false;  // for the block before

  static i32 lane() { return static_cast<i32>(lane_index()); }
  MlaKeyAt look_up(const KeyCursor<kConfig.schedule>& cursor) const {
    return finder.look_up(cursor, cursor.first_key(0) + mla_key(warp, lane()));
  }

  void load(const MlaKeyAt& entry, i32 kv_head, const Stage& at) {
    const MlaFound found = finder.find(entry, kv_head);
    const u64 key =
        found.is_there
            ? reinterpret_cast<u64>(found.page) +
                  static_cast<u64>(found.row * finder.arguments.attention.k.strides[2]) * 2
            : 0;
    if (is_asked && !is_empty(at)) hand_over<0>();
    for (i32 half = 0; half < 2; ++half) {
      ptx::mbarrier_wait(shared.empty(at.index, half), at.phase ^ 1);
    }
    if (lane() == 0) ptx::store_shared(shared.missing(at.index, warp), found.word);
    copy(key, at);
    ptx::cp_async_commit();
    if (is_asked) hand_over<1>();
    before = at;
    is_asked = true;
  }
  void finish() {
    if (is_asked) hand_over<0>();
  }

 private:
  bool is_empty(const Stage& at) const {
    return !ptx::any(!ptx::mbarrier_test(shared.empty(at.index, 1), at.phase ^ 1));
  }

  // key: the address of this lane's, 0: there is none. Eight lanes have 128 bytes of a key.
  void copy(u64 key, const Stage& at) const {
    const i32 unit = lane() % 8;
#pragma unroll
    for (i32 first = 0; first < kConfig.warp_keys(); first += 4) {
      const i32 own = first + lane() / 8;
      const u64 from = of_lane(key, own);
      const bool is_there = from != 0;
      const u8* const row =
          is_there ? reinterpret_cast<const u8*>(from) : finder.arguments.attention.k.data;
      const u32 to = shared.keys(at.index, 0)
                         .unit(static_cast<u32>(mla_key(warp, own)), static_cast<u32>(unit));
#pragma unroll
      for (i32 tile = 0; tile < kConfig.key_tiles(); ++tile) {
        ptx::cp_async_16(to + tile * kConfig.tile_bytes(), row + tile * 128 + unit * 16, is_there);
      }
    }
  }

  template <i32 kPending>
  void hand_over() {
    ptx::cp_async_wait<kPending>();
    ptx::warp_sync();  // all keys of the warp are there
    if (lane() == 0) ptx::mbarrier_arrive(shared.full(before.index, 0));
    is_asked = false;
  }
};

}  // namespace fulmen
