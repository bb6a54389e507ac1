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
    if constexpr (kConfig.dv) copy(dV, own.params.maps.dv, item, row);
    scale(dK);
    if constexpr (kConfig.dk) copy(dK, own.params.maps.dk, item, row);
  }

  // The same without the copy engine. Rows of nobody were cleared before.
  void write_rows(Sums& dK, Sums& dV, const BackwardItem& item) const {
    if constexpr (kConfig.dv) write_dv(dV, item);
    if constexpr (kConfig.dk) write_dk(dK, item);
  }
  void write_dv(const Sums& dV, const BackwardItem& item) const {
    write_rows_of(dV, item, own.params.attention.dv, own.params.dim_v);
  }
  void write_dk(Sums& dK, const BackwardItem& item) const {
    scale(dK);
    write_rows_of(dK, item, own.params.attention.dk, own.params.dim_qk);
  }

 private:
  void scale(Sums& dK) const {
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] *= own.params.scale;
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

  void write_rows_of(const Sums& sums, const BackwardItem& item, const ArrayView& array,
                     i32 dim) const {
    const BackwardParams& params = own.params;
    const u32 thread = own.thread;
    const i32 batch = batch_of<kConfig>(params, item.line);
    u16* const out = reinterpret_cast<u16*>(array.data);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = item.kv_block * kConfig.kv_rows() + kConfig.first_key(own.warpgroup) +
                      i32(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
      const i64 at = array.offset(batch, item.line % params.heads_kv, i64{item.kv_begin} + key, 0);
      store_output_row<kConfig.dtype>(sums, half, out + at, key < item.shape.kv_len, dim);
    }
  }
};

}  // namespace fulmen
