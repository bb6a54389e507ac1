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

  // dV and dK, rounded, to global memory; rows past the end are not written.
  void write(Sums& dK, Sums& dV, const BackwardMail& mail) const {
    const BackwardParams& params = own.params;
    const Shared& shared = own.shared;
    const u32 warpgroup = own.warpgroup, thread = own.thread;
    if constexpr (kConfig.sequences || kConfig.is_wide()) return write_rows(dK, dV, mail);
    const BackwardItem& item = mail.item;
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
      const i32 batch = item.line / params.heads_kv;
      const i32 head = item.line - batch * params.heads_kv;
      const i32 row = item.kv_block * kConfig.kv_rows() + 64 * warpgroup;
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

  // The same without the copy engine, which would write over the next sequence. Rows of nobody were
  // cleared before.
  void write_rows(Sums& dK, Sums& dV, const BackwardMail& mail) const {
    if constexpr (kConfig.dv) write_dv(dV, mail);
    if constexpr (kConfig.dk) write_dk(dK, mail);
  }
  void write_dv(const Sums& dV, const BackwardMail& mail) const {
    const BackwardParams& params = own.params;
    write_rows_of(dV, mail, params.dv, params.dv_stride_batch, params.dv_stride_head,
                  params.dv_stride_row, params.dim_v);
  }
  void write_dk(Sums& dK, const BackwardMail& mail) const {
    const BackwardParams& params = own.params;
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] *= params.scale;
    write_rows_of(dK, mail, params.dk, params.dk_stride_batch, params.dk_stride_head,
                  params.dk_stride_row, params.dim_qk);
  }

 private:
  void write_rows_of(const Sums& sums, const BackwardMail& mail, u16* array, i64 stride_batch,
                     i64 stride_head, i64 stride_row, i32 dim) const {
    const BackwardParams& params = own.params;
    const u32 thread = own.thread;
    const i32 index = mail.item.line / params.heads_kv;
    const i32 head = mail.item.line - index * params.heads_kv;
    const Sequence sequence = backward_sequence<kConfig>(params, index);
    u16* const out = array + sequence.batch * stride_batch + head * stride_head;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = mail.item.kv_block * kConfig.kv_rows() + kConfig.first_key(own.warpgroup) +
                      i32(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
      store_output_row<kConfig.dtype>(sums, half, out + (sequence.kv_begin + key) * stride_row,
                                      key < mail.shape.kv_len, dim);
    }
  }
};

}  // namespace fulmen
