// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The producer of mla_sm90: four warps, which walk along the row tiles that this block has keys of,
// look up pages and hand boxes of keys to the copy engine, each its piece of every block of keys:
// a box costs the warp that asks for it 60 cycles or more. The first tells the others what row
// tiles there are.
#pragma once

#include "kernels/common/caches.cuh"
#include "kernels/decode_sm80/scheduler.cuh"
#include "kernels/mla_sm90/storage.cuh"

namespace fulmen {

// Where the box of a block of keys lies that a lane has: coordinates of the copy engine, as they
// come from memory. A row of -1: past the last key.
struct MlaBox {
  i32 row;
  i64 batch;  // or page
};

template <MlaSm90Config kConfig>
struct MlaProducer {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  using Config = MlaSm90Config;
  static constexpr i32 kKeys = kConfig.keys();

  const MlaSm90Arguments& arguments;
  MlaStorage<kConfig> shared;
  i32 box_rows;
  MlaShares<kConfig.several> shares;
  i32 worker;
  i32 piece;  // which of a block this warp copies; the first also tells what there is

  static i32 lane() { return static_cast<i32>(lane_index()); }
  // Of this lane's box, in a block of keys; kKeys or more: it has none.
  i32 first_row() const { return lane() * box_rows; }

  MlaBox box_of(const KeyCursor<kSchedule>& cursor) const {
    const AttentionParams& p = arguments.attention;
    const i32 key = cursor.first_key(0) + min(first_row(), kKeys);
    const bool is_there = key < cursor.sequence.shape.kv_len;
    if constexpr (!kSchedule.paged) {
      return {is_there ? cursor.sequence.kv_begin + key : -1, cursor.kv_batch()};
    }
    if (!is_there) return {-1, 0};
    const i64 request = p.page_indptr.present() ? 0 : cursor.index;
    const u32 page_rows = static_cast<u32>(p.cache_layout.page_rows);
    const u32 in_cache = static_cast<u32>(cursor.sequence.kv_begin + key);
    const u32 entry = in_cache / page_rows;
    const i64 at = p.page_table.offset(request, 0, 0, i64{cursor.sequence.first_page} + entry);
    return {static_cast<i32>(in_cache - entry * page_rows), AlignedIndex::load(p.page_table, at)};
  }

  // Boxes past the last key, and those whose entry names no page, lie behind the array, where the
  // copy engine finds zeros. Whether there is one of the latter.
  bool check(MlaBox& box) const {
    const AttentionParams& p = arguments.attention;
    const bool is_past = box.row < 0;
    if constexpr (!kSchedule.paged) {
      if (is_past) box.row = static_cast<i32>(p.kv_rows);
      return false;
    }
    const bool is_page = !is_past && !is_bad_page(box.batch, p.num_pages);
    if (!is_page) box.batch = p.num_pages;
    if (is_past) box.row = 0;
    return ptx::any(!is_past && !is_page);
  }

  void load_tile(const MlaBox& box, i32 kv_head, i32 tile, u32 to, u32 full) const {
    const i32 row = first_row();
    if (row >= kKeys) return;
    const i32 column = tile * Config::kColumns, batch = static_cast<i32>(box.batch);
    ptx::tma_load(to + row * 128, arguments.kv, full, column, box.row, kv_head, batch);
  }

  void load_piece(const MlaBox& box, i32 kv_head, const PipelineState<kConfig.stages()>& at) const {
    const u32 full = shared.full(at.index, piece);
    const i32 begin = piece * Config::kPieceTiles;
    const i32 end = begin + Config::kPieceTiles + (piece == Config::kPieces - 1);
    if (lane() == 0) {
      ptx::mbarrier_wait(shared.empty(at.index, begin / Config::kHalfTiles), at.phase ^ 1);
      ptx::mbarrier_arrive_expect(full, static_cast<u32>((end - begin) * kConfig.tile_bytes()));
    }
    ptx::warp_sync();
#pragma unroll 1
    for (i32 tile = begin; tile < end; ++tile) {
      load_tile(box, kv_head, tile, shared.keys(at.index, tile).base, full);
    }
  }

  // What this block has of the cursor's row tile, `left` blocks from the end of its share; the row
  // tile's first chunk is tile_begin.
  void begin_task(const KeyCursor<kSchedule>& cursor, i32 tile_begin, i32 left, u32 count) const {
    const i32 first = shares.owner(tile_begin);
    const i32 last = shares.owner(tile_begin + cursor.blocks.num_chunks() - 1);
    const i32 of_tile = cursor.blocks.count - cursor.block;
    const DecodeSequence& s = cursor.sequence;
    if (piece == 0 && lane() == 0) {
      shared.store_task(
          count, {cursor.kv_head, cursor.index, cursor.first_key(0), min(of_tile, left), s.batch,
                  s.q_begin, s.kv_begin, s.first_page, s.shape, first == last, worker == first,
                  of_tile >= left, cursor.blocks.keys});
    }
  }

  // Pages of a block are looked up before the copies of the block before it wait for their tiles.
  void run(KeyCursor<kSchedule>& cursor, i32 tile_begin) const {
    u32 count = 0;  // of row tiles
    PipelineState<kConfig.stages()> at;
    i32 left = shares.begin(worker + 1) - shares.begin(worker);
    begin_task(cursor, tile_begin, left, count);
    MlaBox next = box_of(cursor);
    i32 kv_head = cursor.kv_head;
#pragma unroll 1
    for (; left > 0; --left) {
      MlaBox box = next;
      const u32 own = count;
      const i32 own_head = kv_head;
      if (left > 1) {
        if (++cursor.block == cursor.blocks.count) {
          tile_begin += cursor.blocks.num_chunks();
          cursor.next_tile();
          begin_task(cursor, tile_begin, left - 1, ++count);
          kv_head = cursor.kv_head;
        }
        next = box_of(cursor);
      }
      if (check(box) && piece == 0 && lane() == 0) {
        ptx::store_shared(shared.bad(own), 1);
        record_bad_page(arguments.attention);
      }
      load_piece(box, own_head, at);
      at.advance();
    }
  }
};

}  // namespace fulmen
