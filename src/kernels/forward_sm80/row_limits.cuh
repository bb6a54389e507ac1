// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the rows of a warp see of the keys, found once: an interval for every row, in shared memory,
// and for the warp which blocks of keys some row, and which all rows, see. Partial blocks then cost
// a comparison an end. Called by forward_sm80; all lanes together.
#pragma once

#include "kernels/attention/mask.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/common/warp_softmax.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

template <Sm80Config kConfig>
class RowLimits {
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
    ptx::warp_sync();  // the limits are there
    const u32 last = static_cast<u32>(clamp(shape.q_len - warp_row, 1, kConfig.warp_rows()) - 1);
    some_begin_ = ptx::shuffle(begin, 0);
    some_end_ = ptx::shuffle(end, last);
    all_begin_ = ptx::shuffle(begin, last);
    all_end_ = ptx::shuffle(end, 0);
  }

  // Whether some row sees a key of the block from column `first` on; whether all see all.
  bool sees(i32 first) const { return first < some_end_ && some_begin_ < first + kConfig.columns; }
  bool is_full(i32 first) const {
    return all_begin_ <= first && first + kConfig.columns <= all_end_;
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
        const i32 limit = static_cast<i32>(ptx::load_shared(address(16 * t + 8 * h + quad) + end));
#pragma unroll
        for (i32 f = 2 * h; f < kConfig.warp_columns() / 2; f += 4) {
          if (is_hidden(kConfig.column_of(f), limit - own)) S[t][f] = kMinusInfinity;
          if (is_hidden(kConfig.column_of(f + 1), limit - own)) S[t][f + 1] = kMinusInfinity;
        }
      }
    }
  }

  u32 rows_;  // shared: first and end of each of this warp's rows
  i32 some_begin_, some_end_, all_begin_, all_end_;
};

}  // namespace fulmen
