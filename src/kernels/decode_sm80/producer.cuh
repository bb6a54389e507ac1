// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The copies of a split's keys and values into its ring: by cp.async of its own warps, or in boxes
// that warpgroups ask the copy engine for.
#pragma once

#include "kernels/common/products_sm90.cuh"
#include "kernels/decode_sm80/key_rows.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// The boxes of a split, which Hopper's copy engine brings, and the barriers that tell when the
// tiles of its ring have landed. Copies of 16 bytes by the warps themselves would have to have
// landed, all of them, at each fence before tensor cores read some.
template <DecodeSm80Config kConfig>
class BoxCopies {
 public:
  using Tile = OperandTile<kConfig.kv_rows, true>;

  // barriers: in shared memory, one a tile of the ring. All threads of the split together.
  explicit BoxCopies(u32 barriers) : barriers_(barriers) {
    if constexpr (!kConfig.in_warpgroups()) return;
    if (Split<kConfig>::thread() == 0) {
#pragma unroll
      for (i32 tile = 0; tile < 2 * kConfig.stages; ++tile) ptx::mbarrier_init(barrier(tile), 1);
      ptx::fence_mbarrier_init();
    }
    Split<kConfig>::sync();  // thread 0 -> barriers
  }

  // Asks for tile number `tile` of the ring, of `kDims` dims, at the cursor's block: every box by
  // the first lane that has found its first row. Boxes that hold no keys come as zeros, from rows
  // that there are not.
  template <i32 kDims, class Rows>
  void ask(i32 tile, const Tile& to, const TensorMap& map, const KeyCursor<kConfig>& cursor,
           const Rows& rows) const {
    constexpr i32 kNowhere = 1 << 30;
    if (Split<kConfig>::row_warp() != 0) return;
    const i32 lane = static_cast<i32>(lane_index()), row = own_row<kConfig>();
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier(tile), kConfig.kv_rows * kDims * 2);
    if (lane * kConfig.kv_rows / 32 != row) return;
    const KeyRow own = rows.own(cursor);
    const bool has_keys = !rows.is_bad() && cursor.blocks.keys.meets(own_keys(cursor));
#pragma unroll
    for (i32 d = 0; d < kDims; d += kConfig.box_dims()) {
      ptx::tma_load(to.unit(static_cast<u32>(row), static_cast<u32>(d / 8)), map, barrier(tile), d,
                    has_keys ? static_cast<i32>(own.row) : kNowhere, cursor.kv_head,
                    static_cast<i32>(own.batch));
    }
  }

  // All threads of the split: once the tile has landed.
  void wait(i32 tile) {
    ptx::mbarrier_wait(barrier(tile), parities_ >> tile & 1);
    parities_ ^= 1u << tile;
  }

  // Rows of a tile of V that are no keys of a block become zeros: a weight of 0 makes NaN of NaN.
  // All threads of the split together, which have waited for it.
  static void clear_others(const Tile& v, const KeyCursor<kConfig>& cursor) {
    constexpr bool kMayHoldOthers =  // else rows behind the last are behind the array's
        kConfig.score.varlen || kConfig.score.mask_kind != MaskKind::kNone;
    if constexpr (!kMayHoldOthers) return;
    const i32 first = cursor.first_key(Split<kConfig>::of_keys());
    const Keys& keys = cursor.blocks.keys;
    if (keys.begin <= first && first + kConfig.kv_rows <= keys.end) return;
    for (i32 i = Split<kConfig>::thread(); i < kConfig.kv_rows * kConfig.d_v / 8;
         i += kConfig.split_threads()) {
      if (!keys.contains(first + i / 8 % kConfig.kv_rows)) {
        ptx::store_shared_x4(v.base + static_cast<u32>(i) * 16, {{0, 0, 0, 0}});
      }
    }
    ptx::fence_proxy_async();  // zeros -> the product, and the copy that follows
    Split<kConfig>::sync();    // all threads -> zeros
  }

 private:
  u32 barrier(i32 tile) const { return barriers_ + static_cast<u32>(tile) * 8; }

  u32 barriers_;
  u32 parities_ = 0;  // bits: of what is waited for next
};

// Rows of K or V in shared memory, as warps read them, or warpgroups.
template <DecodeSm80Config kConfig, i32 kDims, bool kBoxes = kConfig.in_warpgroups()>
struct KeyTileKind {
  using Type = SwizzledTile<kConfig.words(kDims), true>;
};
template <DecodeSm80Config kConfig, i32 kDims>
struct KeyTileKind<kConfig, kDims, true> {
  using Type = typename BoxCopies<kConfig>::Tile;
};

template <DecodeSm80Config kConfig>
class DecodeProducerSm80 {
 public:
  static constexpr bool kBoxes = kConfig.in_warpgroups();
  using KTile = typename KeyTileKind<kConfig, kConfig.d_qk>::Type;
  using VTile = typename KeyTileKind<kConfig, kConfig.d_v>::Type;

  // From the cursor's block on, so many chunks.
  DecodeProducerSm80(const DecodeSm80Params& params, const KeyCursor<kConfig>& cursor, u32 shared,
                     i32 num_chunks)
      : params_(params),
        cursor_(cursor),
        ring_(shared + Split<kConfig>::number() * kConfig.ring_bytes()),
        boxes_(shared + kConfig.landed_at() + Split<kConfig>::number() * kConfig.stages * 16),
        left_(num_chunks) {
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
      if constexpr (kBoxes) {
        boxes_.template ask<kConfig.d_qk>(2 * stage, k_tile(stage), params_.k_map, cursor_, rows_);
      } else {
        copy(k_tile(stage), cursor_.p->dim_qk, cursor_.p->k,
             [&](i32 row) { return rows_.k(cursor_, row); });
      }
      if constexpr (kConfig.scaled) copy_scale(cursor_.p->k_scale, k_scales(stage));
    }
    if constexpr (!kBoxes) ptx::cp_async_commit();
  }
  void fetch_v(i32 stage) {
    if (left_ > 0) {
      if constexpr (kBoxes) {
        boxes_.template ask<kConfig.d_v>(2 * stage + 1, v_tile(stage), params_.v_map, cursor_,
                                         rows_);
      } else {
        copy(v_tile(stage), cursor_.p->dim_v, cursor_.p->v,
             [&](i32 row) { return rows_.v(cursor_, row); });
      }
      if constexpr (kConfig.scaled) copy_scale(cursor_.p->v_scale, v_scales(stage));
      ++cursor_.block;
      if (cursor_.blocks.begins_chunk(cursor_.block)) --left_;
      if (left_ > 0) advance();
    }
    if constexpr (!kBoxes) ptx::cp_async_commit();
  }

  // All threads of the split wait for K, then V of a stage, which `cursor` is at: of the tiles that
  // are under way those that were asked for first.
  void wait_for_k(i32 stage) {
    if constexpr (kBoxes) {
      boxes_.wait(2 * stage);
    } else {
      wait_for_oldest();
    }
  }
  void wait_for_v(i32 stage, const KeyCursor<kConfig>& cursor) {
    if constexpr (kBoxes) {
      boxes_.wait(2 * stage + 1);
      boxes_.clear_others(v_tile(stage), cursor);
    } else {
      wait_for_oldest();
    }
  }
  // Whether the table names pages that do not exist for the keys in a stage: then the request
  // counts as empty.
  bool is_bad(i32 stage) const { return kConfig.paged && (bad_stages_ >> stage & 1) != 0; }

 private:
  static void wait_for_oldest() {
    ptx::cp_async_wait<2 * kConfig.stages - 1>();
    Split<kConfig>::sync();
  }

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

  const DecodeSm80Params& params_;
  KeyCursor<kConfig> cursor_;  // of the next copy
  typename KeyRowsKind<kConfig>::Type rows_;
  u32 ring_;
  BoxCopies<kConfig> boxes_;
  i32 left_;            // chunks of keys of which something is still to be copied
  u32 bad_stages_ = 0;  // bits
};

}  // namespace fulmen
