// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Masks of forward_sm80. Structured masks: the interval of keys of each row, found once, and from
// it which blocks of keys some row and which all rows of a warp see. Documents: a query sees the
// keys with its id; which keys a block of queries must look at (from the first to the last whose id
// lies in the range of its queries' ids), which blocks of keys a warp sees whole or not at all, and
// pairs one by one in the others. Ids of keys are copied to shared memory with K. A user's mask:
// which blocks of keys it leaves, and shows whole, is in lists of tiles. All lanes together, but
// for key_bounds() and start(): all threads of the block.
#pragma once

#include "kernels/attention/mask.cuh"
#include "kernels/common/documents_sm80.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/forward_sm80/row_group.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/tile_lists/config.h"

namespace fulmen {

template <ForwardSm80Config kConfig>
class RowRangesSm80 {
 public:
  // `shared`: 8 bytes for each row of each warp. Rows past the last of the sequence see nothing.
  void find(const IntervalMask& mask, const SequenceShape& shape, i32 warp_row, u32 shared) {
    rows_ = shared + warp_index() * kConfig.warp_rows() * 8;
    const i32 lane = static_cast<i32>(lane_index());
    Interval columns{0, 0};
    if (warp_row + lane < shape.q_len) columns = visible_columns(mask, shape, warp_row + lane);
    const i32 begin = static_cast<i32>(columns.begin);
    const i32 end = static_cast<i32>(columns.end);
    if (lane < kConfig.warp_rows()) {
      ptx::store_shared_x2(address(lane), {static_cast<u32>(begin), static_cast<u32>(end)});
    }
    ptx::warp_sync();  // lanes -> intervals
    const u32 last = static_cast<u32>(clamp(shape.q_len - warp_row, 1, kConfig.warp_rows()) - 1);
    some_begin_ = ptx::shuffle(begin, 0);
    some_end_ = ptx::shuffle(end, last);
    all_begin_ = ptx::shuffle(begin, last);
    all_end_ = ptx::shuffle(end, 0);
  }

  // Whether some row sees a key of the block from column `first` on; whether all see all.
  bool some_visible(i32 first) const {
    return first < some_end_ && some_begin_ < first + kConfig.kv_rows;
  }
  bool is_full(i32 first) const {
    return all_begin_ <= first && first + kConfig.kv_rows <= all_end_;
  }

  // Scores of hidden pairs become -inf; `first`: the warp's own first column.
  void hide(float (&S)[kConfig.row_tiles][kConfig.warp_columns() / 2], i32 first) const {
    if (all_end_ < first + kConfig.warp_columns()) {
      hide_where(S, 4, [=](i32 at, i32 end) { return first + at >= end; });
    }
    if (all_begin_ > first) {
      hide_where(S, 0, [=](i32 at, i32 begin) { return first + at < begin; });
    }
  }

 private:
  u32 address(i32 row) const { return rows_ + static_cast<u32>(row) * 8; }

  template <class IsHidden>
  void hide_where(float (&S)[kConfig.row_tiles][kConfig.warp_columns() / 2], u32 end,
                  const IsHidden& is_hidden) const {
    const i32 quad = static_cast<i32>(lane_index() / 4);
    const i32 own = kConfig.first_column_of(lane_index());
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 bound = static_cast<i32>(ptx::load_shared(address(16 * t + 8 * h + quad) + end));
        hide_in_row(S[t], h, [&](i32 f) { return is_hidden(kConfig.column_of(f), bound - own); });
      }
    }
  }

  u32 rows_;  // shared: first and end of each of this warp's rows
  i32 some_begin_, some_end_, all_begin_, all_end_;
};

// Blocks of keys that a user's mask leaves to the rows of a block; all of them where it is asked
// pair by pair.
template <ForwardSm80Config kConfig>
struct ListedBlocksSm80 {
  static constexpr bool kHas = kConfig.score.mask_tiles;

  TileLine<kConfig.q_rows() / kPartRows, true> line;

  ListedBlocksSm80(const TileLists& lists, i64 index, i64 head, i64 heads_q, i32 first_row) {
    if constexpr (kHas) line = {lists, lists.line_number(index, head, heads_q, first_row / kRows)};
  }

  // The last before `block`, from `begin` on; begin - 1: none.
  i32 before(i32 block, i32 begin) const {
    if constexpr (!kHas) return block - 1;
#pragma unroll 1
    for (i32 group = (block - 1) / 32; block > begin && 32 * group + 31 >= begin; --group) {
      const u32 met = line.met(group, begin, block);
      if (met != 0) return 32 * group + 31 - ptx::leading_zeros(met);
    }
    return begin - 1;
  }

  // Whether the mask leaves the warp some pair of a block; whether it hides none.
  bool some_visible(i32 block) const { return !kHas || line.is_met(block, part()); }
  bool is_full(i32 block) const { return !kHas || line.is_whole(block, part()); }

 private:
  static constexpr i32 kRows = kConfig.q_rows();
  static i32 part() { return static_cast<i32>(RowGroupSm80<kConfig>::first_row()) / kPartRows; }
};

template <ForwardSm80Config kConfig>
class DocumentMaskSm80 {
 public:
  using Scores = float[kConfig.row_tiles][kConfig.warp_columns() / 2];

  // `shared`: ids_bytes() for each stage; `own_shared`: 8 bytes for each
  // row of each warp.
  DocumentMaskSm80(const HeadOf<kConfig>& head, i32 first_row, u32 shared, u32 stage_bytes,
                   u32 own_shared)
      : head_(head),
        first_row_(first_row),
        shared_(shared),
        stage_bytes_(stage_bytes),
        own_(own_shared) {}

  // The part of `keys` outside of which nothing is visible to the block.
  Interval key_bounds(Interval keys) const {
    const i32 num_rows = min(kConfig.q_rows(), head_.sequence.shape.q_len - first_row_);
    return DocumentBoundsSm80<HeadOf<kConfig>, kConfig.threads()>{head_, first_row_, num_rows, own_}
        .find(keys);
  }

  // Finds the numbers of the warp's rows.
  void find() {
    if constexpr (!kConfig.score.documents) return;
    const i32 lane = static_cast<i32>(lane_index());
    const i32 row = static_cast<i32>(RowGroupSm80<kConfig>::index()) * kConfig.warp_rows() + lane;
    const bool counts = lane < kConfig.warp_rows() && first_row_ + row < head_.sequence.shape.q_len;
    const i64 id = counts ? row_id(row) : 0;
    if (lane < kConfig.warp_rows()) store_id(own_id(lane), id);
    id_ = static_cast<i64>(
        static_cast<u64>(static_cast<u32>(ptx::shuffle(static_cast<i32>(id >> 32), 0))) << 32 |
        static_cast<u32>(ptx::shuffle(static_cast<i32>(id), 0)));
    is_one_document_ = !ptx::any(counts && id != id_);
    ptx::warp_sync();  // lanes -> document ids
  }

  // Copies the numbers of the keys from `first` on.
  void start(i32 stage, i32 first) const {
    if constexpr (!kConfig.score.documents) return;
    const ArrayView& ids = head_.p.kv_ids;
    const i32 size = static_cast<i32>(size_bytes(ids.dtype));
#pragma unroll 1
    for (i32 at = static_cast<i32>(ptx::thread_index()); at < kConfig.kv_rows;
         at += kConfig.threads()) {
      const bool present = first + at < head_.sequence.shape.kv_len;
      const i64 offset = key_offset(present ? first + at : 0);
      const u8* const from = ids.data + offset * size;
      const u32 to = tile(stage) + at * 8;
      if (!is_id_aligned(from, size)) {
        store_id(to, present ? load_index(ids, offset) : 0);
      } else if (size == 8) {
        ptx::cp_async_small<8>(to, from, present);
      } else {
        ptx::cp_async_small<4>(to, from, present);
      }
    }
  }

  // Looks at a block that has arrived.
  void classify(i32 stage) {
    if constexpr (!kConfig.score.documents) return;
    bool some = !is_one_document_, all = is_one_document_;
    if (is_one_document_) {
#pragma unroll
      for (i32 at = 0; at < kConfig.kv_rows; at += 32) {
        const i32 column = at + static_cast<i32>(lane_index());
        const bool counts = column < kConfig.kv_rows;
        const bool equal = counts && key_id(stage, column) == id_;
        some = some || ptx::any(equal);
        all = all && !ptx::any(counts && !equal);
      }
    }
    some_visible_ = some;
    is_full_ = all;
  }
  bool some_visible() const { return !kConfig.score.documents || some_visible_; }
  bool is_full() const { return !kConfig.score.documents || is_full_; }

  // Scores of pairs of two documents become -inf.
  void hide(Scores& S, i32 stage) const {
    if constexpr (!kConfig.score.documents) return;
    if (is_full_) return;
    const u32 lane = lane_index();
    const i32 first = static_cast<i32>(RowGroupSm80<kConfig>::warp_n()) * kConfig.warp_columns() +
                      kConfig.first_column_of(lane_index());
    i64 own[kConfig.row_tiles][2];
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        own[t][h] = load_id(own_id(static_cast<i32>(16 * t + 8 * h + lane / 4)));
      }
    }
    hide_other_documents(S, own,
                         [&](i32 f) { return key_id(stage, first + kConfig.column_of(f)); });
  }

 private:
  // Of the warp's row `row`.
  u32 own_id(i32 row) const {
    return own_ + (warp_index() * kConfig.warp_rows() + static_cast<u32>(row)) * 8;
  }
  u32 tile(i32 stage) const { return shared_ + static_cast<u32>(stage) * stage_bytes_; }
  i64 key_offset(i64 key) const { return document_offset(head_, key); }
  i64 row_id(i64 row) const { return document_of_row(head_, first_row_ + row); }

  // cp.async leaves the upper half of 32-bit numbers as it is.
  i64 key_id(i32 stage, i32 column) const {
    const u32 from = tile(stage) + static_cast<u32>(column) * 8;
    if (head_.p.kv_ids.dtype == DType::kInt64) return load_id(from);
    return static_cast<i32>(ptx::load_shared(from));
  }

  const HeadOf<kConfig>& head_;
  i32 first_row_;                 // of the block
  u32 shared_;                    // numbers of the keys of a stage
  u32 stage_bytes_;               // between one stage's and the next's
  u32 own_;                       // numbers of every warp's rows
  i64 id_ = 0;                    // of the warp's first row
  bool is_one_document_ = false;  // all rows of the warp carry it
  bool some_visible_ = true, is_full_ = true;
};

}  // namespace fulmen
