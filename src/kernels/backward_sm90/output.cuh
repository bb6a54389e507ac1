// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of an item in backward_sm90: dK and dV of a warpgroup's 64 keys, scaled, rounded, to
// global memory.
#pragma once

#include "kernels/backward_sm90/warpgroup.cuh"
#include "kernels/common/store_output.cuh"

namespace fulmen {

template <BackwardConfig kConfig>
struct BackwardOutput {
  using Own = BackwardWarpgroup<kConfig>;
  using Shared = typename Own::Shared;
  using Sums = typename Own::Sums;

  const Own& own;

  // dV or dK, scaled and rounded, to global memory.
  void write_dv(Sums& dV, const BackwardItem& item) const {
    if constexpr (kConfig.shares_halves()) scale(dV, kConfig.sum_scale());
    write(dV, own.params.maps.dv, own.params.attention.dv, own.params.dim_v, item);
  }
  void write_dk(Sums& dK, const BackwardItem& item) const {
    scale(dK, own.params.scale * kConfig.sum_scale());
    write(dK, own.params.maps.dk, own.params.attention.dk, own.params.dim_qk, item);
  }

 private:
  void scale(Sums& sums, float factor) const {
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) sums[i] *= factor;
  }

  // Rows past the end are not written; the copy engine would write over the next sequence.
  void write(const Sums& sums, const TensorMap& map, const ArrayView& array, i32 dim,
             const BackwardItem& item) const {
    const i32 row = item.kv_block * kConfig.kv_rows() + kConfig.first_key(own.warpgroup);
    if (kConfig.is_wide() || (kConfig.sequences && row + 64 > item.shape.kv_len)) {
      write_rows(sums, array, dim, item, row);
    } else {
      copy(sums, map, item, row);
    }
  }

  // All 64 rows, from `row` of the sequence on, by way of the warpgroup's room in shared memory.
  void copy(const Sums& sums, const TensorMap& map, const BackwardItem& item, i32 row) const {
    const u32 out = own.shared.out(own.warpgroup);
    if (own.thread == 0) ptx::tma_store_wait_read();  // what was there has left
    own.meet();
    stage_output_tile<kConfig.dtype>(sums, out, 64 * 128);
    ptx::fence_proxy_async();
    own.meet();
    if (own.thread != 0) return;
    const i32 batch = batch_of<kConfig>(own.params, item.line);
    const i32 head = item.line % own.params.heads_kv;
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      ptx::tma_store(map, out + d * 128, d, item.kv_begin + row, head, batch);
    }
    ptx::tma_store_commit();
  }

  // The same without the copy engine. Rows of nobody were cleared before.
  void write_rows(const Sums& sums, const ArrayView& array, i32 dim, const BackwardItem& item,
                  i32 first) const {
    const BackwardParams& params = own.params;
    const u32 thread = own.thread;
    const i32 batch = batch_of<kConfig>(params, item.line);
    u16* const out = reinterpret_cast<u16*>(array.data);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = first + i32(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
      const i64 at = array.offset(batch, item.line % params.heads_kv, i64{item.kv_begin} + key, 0);
      store_output_row<kConfig.dtype>(sums, half, out + at, key < item.shape.kv_len, dim);
    }
  }
};

}  // namespace fulmen
