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
      const i32 row = item.kv_block * kConfig.kKvRows + 64 * warpgroup;
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
    const BackwardParams& params = own.params;
    const u32 warpgroup = own.warpgroup, thread = own.thread;
    const i32 index = mail.item.line / params.heads_kv;
    const i32 head = mail.item.line - index * params.heads_kv;
    const Sequence sequence = backward_sequence<kConfig>(params, index);
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] *= params.scale;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = mail.item.kv_block * kConfig.kKvRows + 64 * warpgroup +
                      i32(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
      const bool inside = key < mail.shape.kv_len;
      const i64 row = sequence.kv_begin + key;
      if constexpr (kConfig.dv) {
        u16* out = params.dv + sequence.batch * params.dv_stride_batch +
                   head * params.dv_stride_head + row * params.dv_stride_row;
        store_output_row<kConfig.dtype>(dV, half, out, inside, params.dim_v);
      }
      if constexpr (kConfig.dk) {
        u16* out = params.dk + sequence.batch * params.dk_stride_batch +
                   head * params.dk_stride_head + row * params.dk_stride_row;
        store_output_row<kConfig.dtype>(dK, half, out, inside, params.dim_qk);
      }
    }
  }
};

}  // namespace fulmen
