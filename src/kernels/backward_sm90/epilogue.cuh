// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The epilogue of backward_sm90: dK and dV of a warpgroup's 64 keys, scaled, converted, to global
// memory. Work loads of equal length would leave the last wave of a grid mostly idle, so those of
// the last wave are split into parts of their queries, for as many thread blocks: all parts but the
// last write their float32 sums of dK and dV to global memory, in the order of fragments, and the
// last adds them to its wg. Must hold: parts are claimed in order.
#pragma once

#include "kernels/backward_sm90/consumer.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

template <BackwardSm90Config kConfig>
struct BackwardEpilogue {
  using Warpgroup = BackwardWarpgroup<kConfig>;
  using Shared = typename Warpgroup::Shared;
  using Sums = typename Warpgroup::Sums;

  const Warpgroup& wg;

  // dV or dK, scaled and rounded, to global memory.
  void write_dv(Sums& dV, const BackwardTile& work_tile) const {
    if constexpr (kConfig.sum_scale() != 1) scale(dV, kConfig.sum_scale());
    write(dV, wg.params.maps.dv, wg.params.attention.dv, wg.params.dim_v, work_tile);
  }
  void write_dk(Sums& dK, const BackwardTile& work_tile) const {
    scale(dK, wg.params.scale * kConfig.sum_scale());
    write(dK, wg.params.maps.dk, wg.params.attention.dk, wg.params.dim_qk, work_tile);
  }

 private:
  void scale(Sums& sums, float factor) const {
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) sums[i] *= factor;
  }

  // Rows past the end are not written; TMA would write over the next sequence.
  void write(const Sums& sums, const TensorMap& map, const ArrayView& array, i32 dim,
             const BackwardTile& work_tile) const {
    const i32 row = work_tile.kv_block * kConfig.kv_rows() + first_key<kConfig>(wg.warpgroup);
    if (kConfig.out_bytes() == 0 || (kConfig.score.varlen && row + 64 > work_tile.shape.kv_len)) {
      write_rows(sums, array, dim, work_tile, row);
    } else {
      copy(sums, map, work_tile, row);
    }
  }

  // All 64 rows, from `row` of the sequence on, through shared memory and TMA.
  void copy(const Sums& sums, const TensorMap& map, const BackwardTile& work_tile, i32 row) const {
    const u32 out = wg.shared.out(wg.warpgroup);
    if (wg.thread == 0) ptx::tma_store_wait_read();  // the store before has read it
    wg.sync_warpgroup();
    stage_output_tile<kConfig.dtype>(sums, out, 64 * 128);
    ptx::fence_proxy_async();
    wg.sync_warpgroup();
    if (wg.thread != 0) return;
    const i32 batch = batch_of<kConfig>(wg.params, work_tile.batch_kv_head);
    const i32 head = work_tile.batch_kv_head % wg.params.heads_kv;
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      ptx::tma_store(map, out + d * 128, d, work_tile.kv_begin + row, head, batch);
    }
    ptx::tma_store_commit();
  }

  // The same from registers. Rows that belong to no sequence were cleared by the preprocess kernel.
  void write_rows(const Sums& sums, const ArrayView& array, i32 dim, const BackwardTile& work_tile,
                  i32 first) const {
    if (kConfig.dims > 256 && !array.present()) return;
    const BackwardParams& params = wg.params;
    const i32 batch = batch_of<kConfig>(params, work_tile.batch_kv_head);
    u16* const out = reinterpret_cast<u16*>(array.data);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = first + wg.first_row() + 8 * half;
      const i64 at = array.offset(batch, work_tile.batch_kv_head % params.heads_kv,
                                  i64{work_tile.kv_begin} + key, 0);
      store_output_row<kConfig.dtype>(sums, half, out + at, key < work_tile.shape.kv_len, dim);
    }
  }
};

template <BackwardSm90Config kConfig>
struct BackwardParts {
  using Warpgroup = BackwardWarpgroup<kConfig>;
  using Sums = typename Warpgroup::Sums;
  static constexpr i32 kSumFloats = 64 * kConfig.dims;

  const Warpgroup& wg;

  // Whether this warpgroup's sums are now those of the whole work tile.
  bool gather(Sums& dK, Sums& dV, const BackwardTile& work_tile) const {
    const i32 number = split_number<kConfig>(wg.params, work_tile);
    if (number < 0) return true;
    const i32 others = wg.params.num_parts - 1;
    u32* const done = wg.params.parts_done + 2 * number + wg.warpgroup;
    if (work_tile.part < others) {
      write_sums(dK, part_sums(number * others + work_tile.part, 0));
      write_sums(dV, part_sums(number * others + work_tile.part, 1));
      wg.sync_warpgroup();
      if (wg.thread == 0) ptx::announce(done);
      return false;
    }
    if (wg.thread == 0) ptx::await(done, others);
    wg.sync_warpgroup();
#pragma unroll 1
    for (i32 part = 0; part < others; ++part) {
      add_sums(dK, part_sums(number * others + part, 0));
      add_sums(dV, part_sums(number * others + part, 1));
    }
    return true;
  }

 private:
  float* part_sums(i32 part, i32 which) const {
    const i64 at = (i64{part} * 2 + wg.warpgroup) * 2 + which;
    return wg.params.part_sums + at * kSumFloats + wg.thread * 4;
  }
  void write_sums(const Sums& sums, float* to) const {
#pragma unroll
    for (i32 j = 0; j < kConfig.dims / 8; ++j) {
      ptx::store_l2_x4(to + j * 512,
                       {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]});
    }
  }
  void add_sums(Sums& sums, const float* from) const {
#pragma unroll
    for (i32 j = 0; j < kConfig.dims / 8; ++j) {
      const ptx::F32x4 x = ptx::load_l2_x4(from + j * 512);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) sums[4 * j + e] += x.word[e];
    }
  }
};

}  // namespace fulmen
