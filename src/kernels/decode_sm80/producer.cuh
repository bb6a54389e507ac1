// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The copies of a split's keys and values into its ring, by cp.async of its own warps.
#pragma once

#include "kernels/decode_sm80/scheduler.cuh"
#include "kernels/ptx/cp_async.cuh"

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

// Of the rows that a split takes at a time, the one whose page, and whose scales, a lane finds.
template <DecodeSm80Config kConfig>
i32 own_row() {
  return static_cast<i32>(lane_index()) % kConfig.kv_rows;
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
    const i32 key = cursor.first_key(Split<kConfig>::of_keys()) + own_row<kConfig>();
    const u32 page_rows = static_cast<u32>(p.cache_layout.page_rows);
    const u32 in_cache = static_cast<u32>(cursor.sequence.kv_begin + key);
    const u32 entry = in_cache / page_rows;
    row_ahead_ = in_cache - entry * page_rows;
    page_ahead_ = 0;
    if (cursor.blocks.keys.contains(key)) {
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

template <DecodeSm80Config kConfig>
class DecodeProducerSm80 {
 public:
  using KTile = SwizzledTile<kConfig.words(kConfig.d_qk), true>;
  using VTile = SwizzledTile<kConfig.words(kConfig.d_v), true>;

  // From the cursor's block on, so many chunks.
  DecodeProducerSm80(const KeyCursor<kConfig>& cursor, u32 ring, i32 num_chunks)
      : cursor_(cursor), ring_(ring), left_(num_chunks) {
    rows_.enter(cursor_);
    if constexpr (kConfig.scaled) put_ones();
  }

  KTile k_tile(i32 stage) const { return {ring_ + stage * kConfig.stage_bytes()}; }
  VTile v_tile(i32 stage) const { return {k_tile(stage).base + kConfig.k_bytes()}; }
  u32 k_scales(i32 stage) const { return k_tile(stage).base + kConfig.scales_at(); }
  u32 v_scales(i32 stage) const { return k_scales(stage) + kConfig.kv_rows * 4; }

  // Begin to copy K, then V of the next block, if there is one, into a stage whose tile was read,
  // and close a group of copies.
  void fetch_k(i32 stage) {
    if (left_ > 0) {
      rows_.locate(cursor_);
      bad_stages_ = rows_.is_bad() ? bad_stages_ | 1u << stage : bad_stages_ & ~(1u << stage);
      copy(k_tile(stage), cursor_.p->dim_qk, cursor_.p->k,
           [&](i32 row) { return rows_.k(cursor_, row); });
      if constexpr (kConfig.scaled) copy_scale(cursor_.p->k_scale, k_scales(stage));
    }
    ptx::cp_async_commit();
  }
  void fetch_v(i32 stage) {
    if (left_ > 0) {
      copy(v_tile(stage), cursor_.p->dim_v, cursor_.p->v,
           [&](i32 row) { return rows_.v(cursor_, row); });
      if constexpr (kConfig.scaled) copy_scale(cursor_.p->v_scale, v_scales(stage));
      ++cursor_.block;
      if (cursor_.blocks.begins_chunk(cursor_.block)) --left_;
      if (left_ > 0) advance();
    }
    ptx::cp_async_commit();
  }
  // Whether the table names pages that do not exist for the keys in a stage: then the request
  // counts as empty.
  bool is_bad(i32 stage) const { return kConfig.paged && (bad_stages_ >> stage & 1) != 0; }

 private:
  // Lanes take neighbouring vectors of a row, some rows at a time.
  template <i32 kDims>
  static constexpr i32 lanes_of_row() {
    i32 lanes = 1;
    while (lanes < 32 && kDims / 8 % (2 * lanes) == 0) lanes *= 2;
    return lanes;
  }
  // Where there are more threads than that takes, some have nothing to copy.
  template <i32 kDims>
  static constexpr i32 rows_at_once() {
    return min(kConfig.split_threads() / lanes_of_row<kDims>(), kConfig.kv_rows);
  }

  void advance() {
    if (kConfig.whole || cursor_.block < cursor_.blocks.count) {
      rows_.advance(cursor_);
    } else {
      cursor_.next_tile();
      rows_.enter(cursor_);
    }
  }

  // Where there are none: until the end.
  void put_ones() const {
    if (Split<kConfig>::thread() >= kConfig.kv_rows) return;
    constexpr u32 kOne = __builtin_bit_cast(u32, 1.f);
#pragma unroll
    for (i32 stage = 0; stage < kConfig.stages; ++stage) {
      const u32 at = static_cast<u32>(Split<kConfig>::thread()) * 4;
      if (!cursor_.p->k_scale.present()) ptx::store_shared(k_scales(stage) + at, kOne);
      if (!cursor_.p->v_scale.present()) ptx::store_shared(v_scales(stage) + at, kOne);
    }
  }
  void copy_scale(const ArrayView& scales, u32 to) const {
    const i32 row = Split<kConfig>::thread();
    if (row >= kConfig.kv_rows || !scales.present()) return;
    const i32 key = cursor_.first_key(Split<kConfig>::of_keys()) + row;
    const bool is_there = !rows_.is_bad() && cursor_.blocks.keys.contains(key);
    const u8* const from = is_there ? rows_.scale(cursor_, scales) : scales.data;
    ptx::cp_async_small<4>(to + static_cast<u32>(row) * 4, from, is_there);
  }

  // address_of(row): of the first number of a row of the tile. All lanes together.
  template <i32 kDims, class AddressOf>
  void copy(const SwizzledTile<kDims, true>& tile, i64 dims, const ArrayView& array,
            const AddressOf& address_of) const {
    constexpr i32 kLanes = lanes_of_row<kDims>();
    constexpr i32 kRows = rows_at_once<kDims>();
    static_assert(kConfig.kv_rows % kRows == 0);
    const i32 row = Split<kConfig>::thread() / kLanes;
    const i32 vector = Split<kConfig>::thread() % kLanes;
    constexpr i32 kVectors = kDims / 8 / kConfig.heads;  // of a head
    static_assert(kConfig.heads == 1 || kLanes == kDims / 8);
    const i32 head = kConfig.heads == 1 ? 0 : vector / kVectors;
    const i32 vectors = static_cast<i32>(dims) / kConfig.vector() - (vector - head * kVectors);
    const i64 step = array.strides[2] * kConfig.kv_bytes();
    const i64 in_row =
        head * array.strides[1] * kConfig.kv_bytes() + (vector - head * kVectors) * 16;
    // Few instructions for a row: one comparison, and one addition where rows are a step apart.
    const Keys& keys = cursor_.blocks.keys;
    const u32 first =
        static_cast<u32>(cursor_.first_key(Split<kConfig>::of_keys()) + row - keys.begin);
    const bool has_rows = row < kRows && !rows_.is_bad() && 0 < vectors;
    const u32 count = static_cast<u32>(has_rows ? keys.end - keys.begin : 0);
    const u8* from = address_of(row) + in_row;
#pragma unroll
    for (i32 r = 0; r < kConfig.kv_rows; r += kRows) {
      if (kConfig.paged) from = address_of(r + row) + in_row;
      const bool is_row = first + static_cast<u32>(r) < count;
#pragma unroll
      for (i32 u = 0; u < kDims / 8; u += kLanes) {
        if (row >= kRows) break;
        ptx::cp_async_16(tile.address(static_cast<u32>(r + row), static_cast<u32>(u + vector)),
                         from + u * 16, is_row && (u == 0 || u < vectors));
      }
      from += kRows * step;
    }
  }

  KeyCursor<kConfig> cursor_;  // of the next copy
  typename KeyRowsKind<kConfig>::Type rows_;
  u32 ring_;
  i32 left_;            // chunks of keys of which something is still to be copied
  u32 bad_stages_ = 0;  // bits
};

}  // namespace fulmen
