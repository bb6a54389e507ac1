// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two warpgroups of mla_sm90 that sum values, O += P V, each half of the dims: O of 64 rows and
// 512 dims does not fit the registers of one.
#pragma once

#include "kernels/mla_sm90/epilogue.cuh"
#include "kernels/mla_sm90/storage.cuh"

namespace fulmen {

template <MlaSm90Config kConfig>
struct MlaValues {
  static constexpr DecodeSm80Config kSchedule = kConfig.schedule;
  using Config = MlaSm90Config;
  static constexpr i32 kFloats = Config::kHalfDims / 2;
  using Tile = RowTile<kSchedule>;

  const MlaSm90Arguments& arguments;
  MlaStorage<kConfig> shared;
  i32 row_tile;
  i32 worker;
  i32 half;    // of the dims
  u32 thread;  // 0 .. 127

  PipelineState<kConfig.stages()> keys{};
  PipelineState<Config::kPBuffers> of_p{};
  u32 ends_phase = 0;

  i32 row_of(i32 h) const { return static_cast<i32>(thread / 32 * 16 + thread % 32 / 4) + 8 * h; }

  void run() {
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      float O[2][kFloats / 2];
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) O[f / 64][f % 64] = 0;
      const i32 num_blocks = shared.load_task(count).num_blocks;
#pragma unroll 1
      for (i32 n = 0; n < num_blocks; ++n) multiply(O);
      if (leave(O, count)) break;
    }
  }

 private:
  void multiply(float (&O)[2][kFloats / 2]) {
    ptx::mbarrier_wait(shared.p_full(of_p.index), of_p.phase);
    if (ptx::load_shared(shared.grew(of_p.index, static_cast<i32>(thread / 32))) != 0) {
      float factors[2];
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        factors[h] =
            __builtin_bit_cast(float, ptx::load_shared(shared.factor(of_p.index, row_of(h))));
      }
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) O[f / 64][f % 64] *= factors[f / 2 % 2];
    }
    const MlaTile P = shared.p(of_p.index);
    const MlaTile V = shared.keys(keys.index, half * Config::kHalfTiles);
    ptx::wgmma_fence();
#pragma unroll
    for (i32 k = 0; k < kConfig.keys() / 16; ++k) {
      constexpr i32 kTile = kConfig.tile_bytes();
      const u32 v = V.columns(k, kTile);
      ptx::wgmma_ss<kSchedule.product_dtype(), true>(O[0], P.rows(k), v, true);
      ptx::wgmma_ss<kSchedule.product_dtype(), true>(O[1], P.rows(k), v + kTile / 8, true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::warp_sync();  // lanes have read factors
    if (lane_index() == 0) {
      ptx::mbarrier_arrive(shared.empty(keys.index, half));
      ptx::mbarrier_arrive(shared.p_empty(of_p.index));
    }
    keys.advance();
    of_p.advance();
  }

  // Row tile number `count` of this block; whether it was the last.
  bool leave(const float (&O)[2][kFloats / 2], u32 count) {
    const MlaTask task = shared.load_task(count);
    const Tile tile = tile_of<kConfig>(arguments, row_tile, task);
    if (task.is_whole) {
      store(O, tile);
      return task.is_last;
    }
    if (!MlaParts<kConfig>::has_rows(tile, row_of(0))) return task.is_last;
    float* const part = MlaParts<kConfig>{arguments, row_tile}.part(worker, task.is_first != 0) +
                        MlaParts<kConfig>::quad(half * (Config::kHalfDims / 8), thread);
#pragma unroll
    for (i32 n = 0; n < Config::kHalfDims / 8; ++n) {
      const float* const o = O[n / 16] + 4 * (n % 16);
      ptx::store_l2_x4(part + n * 512, {{o[0], o[1], o[2], o[3]}});
    }
    return task.is_last;
  }

  void store(const float (&O)[2][kFloats / 2], const Tile& tile) {
    const i32 row[2] = {row_of(0), row_of(1)};
    MlaRowEnd ends[2];
    ptx::mbarrier_wait(shared.ends_full(), ends_phase);
    ends_phase ^= 1;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const ptx::F32x2 x = ptx::load_shared_f32x2(shared.end(row[h]));
      ends[h] = {x.word[0], x.word[1]};
    }
    ptx::warp_sync();  // lanes have read them
    if (lane_index() == 0) ptx::mbarrier_arrive(shared.ends_empty());
    const MlaStore<kConfig> store(tile, row, ends);
    u32 bad = 0;
#pragma unroll
    for (i32 n = 0; n < Config::kHalfDims / 8; ++n) {
      const float* const o = O[n / 16] + 4 * (n % 16);
      bad |= store.store({o[0], o[1], o[2], o[3]}, half * Config::kHalfDims + 8 * n);
    }
    store.recompute_bad(bad, half * Config::kHalfDims, Config::kHalfDims);
  }
};

}  // namespace fulmen
