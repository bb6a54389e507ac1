// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of an item in backward_sm90: dK and dV of a warpgroup's 64 keys, scaled, rounded, to
// global memory.
#pragma once

#include "kernels/backward_sm90/consumer.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/ptx/grid.cuh"

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

template <BackwardConfig kConfig>
struct BackwardParts {
  using Own = BackwardWarpgroup<kConfig>;
  using Sums = typename Own::Sums;
  static constexpr i32 kSumFloats = 64 * kConfig.dims;

  const Own& own;

  // Whether this warpgroup's sums are now those of the whole item.
  bool gather(Sums& dK, Sums& dV, const BackwardItem& item) const {
    const i32 number = split_number<kConfig>(own.params, item);
    if (number < 0) return true;
    const i32 others = own.params.num_parts - 1;
    u32* const done = own.params.parts_done + 2 * number + own.warpgroup;
    if (item.part < others) {
      leave(dK, place(number * others + item.part, 0));
      leave(dV, place(number * others + item.part, 1));
      own.meet();
      if (own.thread == 0) ptx::announce(done);
      return false;
    }
    if (own.thread == 0) ptx::await(done, others);
    own.meet();
#pragma unroll 1
    for (i32 part = 0; part < others; ++part) {
      add(dK, place(number * others + part, 0));
      add(dV, place(number * others + part, 1));
    }
    return true;
  }

 private:
  float* place(i32 part, i32 which) const {
    const i64 at = (i64{part} * 2 + own.warpgroup) * 2 + which;
    return own.params.part_sums + at * kSumFloats + own.thread * 4;
  }
  void leave(const Sums& sums, float* to) const {
#pragma unroll
    for (i32 j = 0; j < kConfig.dims / 8; ++j) {
      ptx::store_l2_x4(to + j * 512,
                       {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]});
    }
  }
  void add(Sums& sums, const float* from) const {
#pragma unroll
    for (i32 j = 0; j < kConfig.dims / 8; ++j) {
      const ptx::F32x4 x = ptx::load_l2_x4(from + j * 512);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) sums[4 * j + e] += x.word[e];
    }
  }
};

}  // namespace fulmen
