// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The producer of mla_sm90: one warp, whose lanes look up the pages of a half of a block of keys
// and hand its boxes to the copy engine, tile by tile as they become free.
#pragma once

#include "kernels/common/caches.cuh"
#include "kernels/decode_sm80/scheduler.cuh"
#include "kernels/mla_sm90/storage.cuh"

namespace fulmen {

// Where one box of keys lies: coordinates of the copy engine.
struct MlaBox {
  i32 row;
  i32 batch;
};

template <MlaSm90Config kConfig>
struct MlaProducer {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  static constexpr i32 kKeys = MlaSm90Config::kKeys;
  static constexpr i32 kBoxes = kSchedule.paged ? 2 : 1;  // of a lane

  const MlaSm90Arguments& arguments;
  MlaStorage shared;
  i32 box_rows;

  static i32 lane() { return static_cast<i32>(lane_index()); }
  // Of this lane, in a half; kKeys or more: there is none.
  i32 first_row(i32 n) const { return (lane() + 32 * n) * box_rows; }

  // Boxes past the last key lie behind the array, where the copy engine finds zeros.
  MlaBox box_of(const KeyCursor<kSchedule>& cursor, i32 key, bool& is_bad) const {
    const AttentionParams& p = arguments.attention;
    const bool is_there = key < cursor.sequence.shape.kv_len;
    if constexpr (!kSchedule.paged) {
      const i32 batch = static_cast<i32>(cursor.kv_batch());
      return {is_there ? cursor.sequence.kv_begin + key : static_cast<i32>(p.kv_rows), batch};
    }
    const i32 no_page = static_cast<i32>(p.num_pages);
    if (!is_there) return {0, no_page};
    const i64 request = p.page_indptr.present() ? 0 : cursor.index;
    const u32 page_rows = static_cast<u32>(p.cache_layout.page_rows);
    const u32 in_cache = static_cast<u32>(cursor.sequence.kv_begin + key);
    const u32 entry = in_cache / page_rows;
    const i64 at = p.page_table.offset(request, 0, 0, i64{cursor.sequence.first_page} + entry);
    const i64 id = AlignedIndex::load(p.page_table, at);
    if (is_bad_page(id, p.num_pages)) {
      is_bad = true;
      return {0, no_page};
    }
    return {static_cast<i32>(in_cache - entry * page_rows), static_cast<i32>(id)};
  }

  // phase: of the barriers of the half, which flips with every block of keys.
  void load_half(const KeyCursor<kSchedule>& cursor, i32 half, u32 phase, u32 count) const {
    MlaBox boxes[kBoxes];
    bool is_bad = false;
#pragma unroll
    for (i32 n = 0; n < kBoxes; ++n) {
      boxes[n] = box_of(cursor, cursor.first_key(half) + min(first_row(n), kKeys), is_bad);
    }
    is_bad = ptx::any(is_bad);
#pragma unroll 1
    for (i32 n = 0; n < MlaSm90Config::kTiles; ++n) {
      const i32 tile = MlaStorage::tile_at(half, n);
      if (lane() == 0) {
        ptx::mbarrier_wait(shared.empty(half, MlaStorage::group_of(tile)), phase ^ 1);
        if (n == 0 && is_bad) record_bad(count);
        ptx::mbarrier_arrive_expect(shared.full(half, tile), MlaSm90Config::kTileBytes);
      }
      ptx::warp_sync();
#pragma unroll
      for (i32 box = 0; box < kBoxes; ++box) {
        const i32 row = first_row(box);
        if (row >= kKeys) continue;
        ptx::tma_load(shared.keys(half, tile).base + row * 128, arguments.kv,
                      shared.full(half, tile), tile * MlaSm90Config::kColumns, boxes[box].row,
                      cursor.kv_head, boxes[box].batch);
      }
    }
  }

  void run(KeyCursor<kSchedule>& cursor, i32 num_blocks) const {
    u32 count = 0;  // of row tiles
    if (lane() == 0) ptx::store_shared(shared.bad(0), 0);
#pragma unroll 1
    for (i32 n = 0; n < num_blocks; ++n) {
      load_half(cursor, 0, n % 2, count);
      load_half(cursor, 1, n % 2, count);
      if (++cursor.block < cursor.blocks.count || n + 1 == num_blocks) continue;
      cursor.next_tile();
      ++count;
      // The consumers have left row tile count - 3: they have read all blocks of count - 2.
      if (lane() == 0) ptx::store_shared(shared.bad(count), 0);
    }
  }

 private:
  void record_bad(u32 count) const {
    ptx::store_shared(shared.bad(count), 1);
    record_bad_page(arguments.attention);
  }
};

}  // namespace fulmen
