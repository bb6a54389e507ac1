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

// Where the boxes of a half lie that a lane has: coordinates of the copy engine, as they come from
// memory. A row of -1: past the last key.
template <i32 kCount>
struct MlaBoxes {
  i32 row[kCount];
  i64 batch[kCount];  // or page
  i32 kv_head;
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

  using Boxes = MlaBoxes<kBoxes>;

  Boxes boxes_of(const KeyCursor<kSchedule>& cursor, i32 half) const {
    const AttentionParams& p = arguments.attention;
    Boxes boxes;
    boxes.kv_head = cursor.kv_head;
#pragma unroll
    for (i32 n = 0; n < kBoxes; ++n) {
      const i32 key = cursor.first_key(half) + min(first_row(n), kKeys);
      const bool is_there = key < cursor.sequence.shape.kv_len;
      if constexpr (!kSchedule.paged) {
        boxes.row[n] = is_there ? cursor.sequence.kv_begin + key : -1;
        boxes.batch[n] = cursor.kv_batch();
        continue;
      }
      boxes.row[n] = -1;
      if (!is_there) continue;
      const i64 request = p.page_indptr.present() ? 0 : cursor.index;
      const u32 page_rows = static_cast<u32>(p.cache_layout.page_rows);
      const u32 in_cache = static_cast<u32>(cursor.sequence.kv_begin + key);
      const u32 entry = in_cache / page_rows;
      boxes.row[n] = static_cast<i32>(in_cache - entry * page_rows);
      boxes.batch[n] = AlignedIndex::load(
          p.page_table,
          p.page_table.offset(request, 0, 0, i64{cursor.sequence.first_page} + entry));
    }
    return boxes;
  }

  // Boxes past the last key, and those whose entry names no page, lie behind the array, where the
  // copy engine finds zeros. Whether there is one of the latter.
  bool check(Boxes& boxes) const {
    const AttentionParams& p = arguments.attention;
    bool is_bad = false;
#pragma unroll
    for (i32 n = 0; n < kBoxes; ++n) {
      const bool is_past = boxes.row[n] < 0;
      if constexpr (!kSchedule.paged) {
        if (is_past) boxes.row[n] = static_cast<i32>(p.kv_rows);
        continue;
      }
      const bool is_page = !is_past && !is_bad_page(boxes.batch[n], p.num_pages);
      is_bad |= !is_past && !is_page;
      if (!is_page) boxes.batch[n] = p.num_pages;
      if (is_past) boxes.row[n] = 0;
    }
    return kSchedule.paged && ptx::any(is_bad);
  }

  // phase: of the barriers of the half, which flips with every block of keys.
  void load_half(Boxes& boxes, i32 half, u32 phase, u32 count) const {
    const bool is_bad = check(boxes);
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
                      shared.full(half, tile), tile * MlaSm90Config::kColumns, boxes.row[box],
                      boxes.kv_head, static_cast<i32>(boxes.batch[box]));
      }
    }
  }

  // Pages of a half are looked up before the copies of the half before it wait for their tiles.
  void run(KeyCursor<kSchedule>& cursor, i32 num_blocks) const {
    u32 count = 0;  // of row tiles
    if (lane() == 0) ptx::store_shared(shared.bad(0), 0);
    Boxes next = boxes_of(cursor, 0);
#pragma unroll 1
    for (i32 n = 0; n < num_blocks; ++n) {
      Boxes boxes = next;
      next = boxes_of(cursor, 1);
      load_half(boxes, 0, n % 2, count);
      boxes = next;
      const bool ends_tile = ++cursor.block == cursor.blocks.count;
      if (n + 1 < num_blocks) {
        if (ends_tile) cursor.next_tile();
        next = boxes_of(cursor, 0);
      }
      load_half(boxes, 1, n % 2, count);
      if (!ends_tile) continue;
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
