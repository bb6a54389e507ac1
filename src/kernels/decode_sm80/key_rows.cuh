// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where rows of K and V are that a split takes: in arrays of sequences, or in pools of pages.
#pragma once

#include "kernels/decode_sm80/scheduler.cuh"

namespace fulmen {

// Which of the splits of a block, and who is in it.
template <DecodeSm80Config kConfig>
struct Split {
  static i32 number() { return static_cast<i32>(warp_index()) / kConfig.row_warps; }
  // Of those of all blocks of the cluster.
  static i32 of_keys() { return cluster_rank<kConfig>() * kConfig.splits + number(); }
  static i32 row_warp() { return static_cast<i32>(warp_index()) % kConfig.row_warps; }
  static i32 thread() { return static_cast<i32>(ptx::thread_index()) % kConfig.split_threads(); }
  static void sync() {
    if constexpr (kConfig.row_warps == 1) {
      ptx::warp_sync();
    } else {
      ptx::bar_sync(1 + static_cast<u32>(number()), kConfig.split_threads());
    }
  }
};

// Of the rows that a split takes at a time, the one whose page, and whose scales, a lane finds: of
// boxes the first.
template <DecodeSm80Config kConfig>
i32 own_row() {
  const i32 lane = static_cast<i32>(lane_index());
  if constexpr (kConfig.in_warpgroups()) {
    return lane * kConfig.kv_rows / 32 / kConfig.box_rows * kConfig.box_rows;
  } else {
    return lane % kConfig.kv_rows;
  }
}
// And the keys that it finds them for.
template <DecodeSm80Config kConfig>
Keys own_keys(const KeyCursor<kConfig>& cursor) {
  const i32 first = cursor.first_key(Split<kConfig>::of_keys()) + own_row<kConfig>();
  return {first, first + max(1, kConfig.box_rows)};
}

// Where the rows of K and V are that a thread copies, one behind the other in k and v.
template <DecodeSm80Config kConfig>
class ContiguousRows {
 public:
  void enter(const KeyCursor<kConfig>& cursor) {
    const AttentionParams& p = *cursor.p;
    const i64 row = i64{cursor.sequence.kv_begin} + cursor.first_key(Split<kConfig>::of_keys());
    k_ = p.k.data + p.k.offset(cursor.kv_batch(), cursor.first_head(), row, 0) * kBytes;
    v_ = p.v.data + p.v.offset(cursor.kv_batch(), cursor.first_head(), row, 0) * kBytes;
    first_ = row;
  }
  void advance(const KeyCursor<kConfig>& cursor) {
    k_ += kConfig.block_keys() * kBytes * cursor.p->k.strides[2];
    v_ += kConfig.block_keys() * kBytes * cursor.p->v.strides[2];
    first_ += kConfig.block_keys();
  }
  void locate(const KeyCursor<kConfig>&) {}
  bool is_bad() const { return false; }
  KeyRow own(const KeyCursor<kConfig>& cursor) const {
    return {cursor.kv_batch(), first_ + own_row<kConfig>()};
  }

  const u8* k(const KeyCursor<kConfig>& cursor, i32 row) const {
    return k_ + row * kBytes * cursor.p->k.strides[2];
  }
  const u8* v(const KeyCursor<kConfig>& cursor, i32 row) const {
    return v_ + row * kBytes * cursor.p->v.strides[2];
  }
  // The scale of this lane's row.
  const u8* scale(const KeyCursor<kConfig>& cursor, const ArrayView& scales) const {
    return scales.data +
           scales.offset(cursor.kv_batch(), cursor.kv_head, first_ + own_row<kConfig>(), 0) * 4;
  }

 private:
  static constexpr i32 kBytes = kConfig.kv_bytes();

  const u8* k_ = nullptr;  // of row 0
  const u8* v_ = nullptr;
  i64 first_ = 0;  // row 0 itself
};

// In pools of pages: a lane knows where one row is. The id of its page is read a block ahead.
template <DecodeSm80Config kConfig>
class PagedRows {
 public:
  void enter(const KeyCursor<kConfig>& cursor) {
    const AttentionParams& p = *cursor.p;
    const i64 request = p.page_indptr.present() ? 0 : cursor.index;
    first_entry_ = p.page_table.offset(request, 0, 0, cursor.sequence.first_page);
    k_head_ = p.k.data + p.k.offset(0, cursor.first_head(), 0, 0) * kBytes;
    v_head_ = p.v.data + p.v.offset(0, cursor.first_head(), 0, 0) * kBytes;
    advance(cursor);
  }
  void advance(const KeyCursor<kConfig>& cursor) {
    const AttentionParams& p = *cursor.p;
    const Keys keys = own_keys(cursor);
    const u32 page_rows = static_cast<u32>(p.cache_layout.page_rows);
    const u32 in_cache = static_cast<u32>(cursor.sequence.kv_begin + keys.begin);
    const u32 entry = in_cache / page_rows;
    row_ahead_ = in_cache - entry * page_rows;
    page_ahead_ = 0;
    if (cursor.blocks.keys.meets(keys)) {
      page_ahead_ =
          AlignedIndex::load(p.page_table, first_entry_ + i64{entry} * p.page_table.strides[3]);
    }
  }
  // What was read ahead is the next block's.
  void locate(const KeyCursor<kConfig>& cursor) {
    const AttentionParams& p = *cursor.p;
    is_bad_ = ptx::any(is_bad_page(page_ahead_, p.num_pages));
    if (is_bad_ && lane_index() == 0) record_bad_page(p);
    at_ = {is_bad_ ? 0 : page_ahead_, i64{row_ahead_}};
    k_ = p.k.offset(at_.batch, 0, at_.row, 0) * kBytes;
    v_ = p.v.offset(at_.batch, 0, at_.row, 0) * kBytes;
  }
  bool is_bad() const { return is_bad_; }
  const KeyRow& own(const KeyCursor<kConfig>&) const { return at_; }

  const u8* k(const KeyCursor<kConfig>&, i32 row) const { return k_head_ + of_row(k_, row); }
  const u8* v(const KeyCursor<kConfig>&, i32 row) const { return v_head_ + of_row(v_, row); }
  const u8* scale(const KeyCursor<kConfig>& cursor, const ArrayView& scales) const {
    return scales.data + scales.offset(at_.batch, cursor.kv_head, at_.row, 0) * 4;
  }

 private:
  static constexpr i32 kBytes = kConfig.kv_bytes();

  static i64 of_row(i64 offset, i32 row) {
    const u32 lane = static_cast<u32>(row);
    const u32 low = static_cast<u32>(ptx::shuffle(static_cast<i32>(offset), lane));
    return i64{ptx::shuffle(static_cast<i32>(offset >> 32), lane)} << 32 | low;
  }

  i64 first_entry_ = 0;  // of the request, in the page table
  const u8* k_head_ = nullptr;
  const u8* v_head_ = nullptr;
  i64 page_ahead_ = 0;
  u32 row_ahead_ = 0;  // of that page
  KeyRow at_{};        // of the block that is copied
  i64 k_ = 0;          // bytes from k_head_ to this lane's row
  i64 v_ = 0;
  bool is_bad_ = false;
};

template <DecodeSm80Config kConfig, bool kPaged = kConfig.paged>
struct KeyRowsKind {
  using Type = ContiguousRows<kConfig>;
};
template <DecodeSm80Config kConfig>
struct KeyRowsKind<kConfig, true> {
  using Type = PagedRows<kConfig>;
};

}  // namespace fulmen
