// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of an item in backward_sm90: dK and dV of a warpgroup's 64 keys, scaled, rounded, to
// global memory.
#pragma once

#include "kernels/tile/backward_warpgroup.cuh"
#include "kernels/tile/store_output.cuh"

namespace fulmen {

template <BackwardConfig kConfig>
struct BackwardOutput {
  using Own = BackwardWarpgroup<kConfig>;
  using Shared = typename Own::Shared;
  using Sums = typename Own::Sums;

  const Own& own;

  // dV and dK, rounded, to global memory; rows past the end are not written. The copy engine would
  // write over the next sequence.
  void write(Sums& dK, Sums& dV, const BackwardItem& item) const {
    if constexpr (kConfig.is_wide()) return write_rows(dK, dV, item);
    const i32 row = item.kv_block * kConfig.kv_rows() + 64 * i32(own.warpgroup);
    if (kConfig.sequences && row + 64 > item.shape.kv_len) return write_rows(dK, dV, item);
    write_tiles(dK, dV, item, row);
  }

  // The same without the copy engine. Rows of nobody were cleared before.
  void write_rows(Sums& dK, Sums& dV, const BackwardItem& item) const {
    if constexpr (kConfig.dv) write_dv(dV, item);
    if constexpr (kConfig.dk) write_dk(dK, item);
  }
  void write_dv(const Sums& dV, const BackwardItem& item) const {
    const BackwardParams& params = own.params;
    write_rows_of(dV, item, params.dv, params.dv_stride_batch, params.dv_stride_head,
                  params.dv_stride_row, params.dim_v);
  }
  void write_dk(Sums& dK, const BackwardItem& item) const {
    const BackwardParams& params = own.params;
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] *= params.scale;
    write_rows_of(dK, item, params.dk, params.dk_stride_batch, params.dk_stride_head,
                  params.dk_stride_row, params.dim_qk);
  }

 private:
  // All 64 rows, from `row` of the sequence on, by the copy engine.
  void write_tiles(Sums& dK, Sums& dV, const BackwardItem& item, i32 row) const {
    const BackwardParams& params = own.params;
    const Shared& shared = own.shared;
    const u32 warpgroup = own.warpgroup, thread = own.thread;
    if (thread == 0) ptx::tma_store_wait_read();  // the previous ones have left
    ptx::bar_sync(Own::kOutBarrier + warpgroup, 128);
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] *= params.scale;
    if constexpr (kConfig.dv) {
      stage_output_tile<kConfig.dtype>(dV, shared.dv_out(warpgroup), 64 * 128);
    }
    if constexpr (kConfig.dk) {
      stage_output_tile<kConfig.dtype>(dK, shared.dk_out(warpgroup), 64 * 128);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(Own::kOutBarrier + warpgroup, 128);
    if (thread == 0) {
      const i32 batch = batch_of<kConfig>(params, item.line);
      const i32 head = item.line % params.heads_kv;
      row += item.kv_begin;
      for (i32 d = 0; d < kConfig.dims; d += 64) {
        if constexpr (kConfig.dv) {
          ptx::tma_store(params.maps.dv, shared.dv_out(warpgroup) + d * 128, d, row, head, batch);
        }
        if constexpr (kConfig.dk) {
          ptx::tma_store(params.maps.dk, shared.dk_out(warpgroup) + d * 128, d, row, head, batch);
        }
      }
      ptx::tma_store_commit();
    }
  }

  void write_rows_of(const Sums& sums, const BackwardItem& item, u16* array, i64 stride_batch,
                     i64 stride_head, i64 stride_row, i32 dim) const {
    const BackwardParams& params = own.params;
    const u32 thread = own.thread;
    u16* const out = array + batch_of<kConfig>(params, item.line) * stride_batch +
                     item.line % params.heads_kv * stride_head;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = item.kv_block * kConfig.kv_rows() + kConfig.first_key(own.warpgroup) +
                      i32(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
      store_output_row<kConfig.dtype>(sums, half, out + (i64{item.kv_begin} + key) * stride_row,
                                      key < item.shape.kv_len, dim);
    }
  }
};

}  // namespace fulmen
