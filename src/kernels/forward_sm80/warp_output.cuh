// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The way of a warp's, or a team's, rows of O from mma fragments to global memory: through shared
// memory in 16-byte units, a row by neighbouring lanes, or number by number where the array has no
// such units. Called by forward_sm80 when all its products are done; rows that do not count become
// 0.
#pragma once

#include "kernels/common/head.cuh"
#include "kernels/common/warp_scores.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct WarpOutput {
  using Tile = SwizzledTile<kConfig.d_v, kConfig.swizzle>;
  using Output = float[kConfig.row_tiles][kConfig.warp_dims() / 2];
  using Team = WarpTeam<kConfig>;

  const Head<kConfig.dtype>& head;
  i32 warp_row;   // the warp's first
  i32 first_dim;  // of V and O
  u32 shared;     // Q's tile, K and V behind it
  Team team;

  // All lanes together; all warps where rows of O are wider than those of Q.
  void store(const Output& O) const {
    if constexpr (!kConfig.units) {
#pragma unroll
      for (i32 t = 0; t < kConfig.row_tiles; ++t) store_numbers(O[t], t);
    } else {
      if constexpr (kConfig.d_v > kConfig.d_qk) {
        ptx::block_sync();  // all are done with Q, K and V, where O goes
      } else {
        ptx::warp_sync();  // the warp is done with its rows of Q, where O goes
        team.meet();       // and so is the team
      }
      stage(O);
      ptx::warp_sync();  // O is there
      team.meet();       // and that of the team
      send();
    }
  }

 private:
  Tile tile() const {
    const i32 dims = max(kConfig.d_qk, kConfig.d_v);
    return {shared + Team::first_row() * dims * 2};
  }

  void stage(const Output& O) const {
    const u32 lane = lane_index();
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
#pragma unroll
        for (i32 n = 0; n < kConfig.warp_dims() / 8; ++n) {
          const float* const x = &O[t][4 * n + 2 * h];
          const u32 to = tile().address(16 * t + 8 * h + lane / 4, Team::unit(n));
          ptx::store_shared(to + lane % 4 * 4, ptx::pack<kConfig.dtype>(x[0], x[1]));
        }
      }
    }
  }

  // Members of a team take turns.
  void send() const {
    constexpr i32 kGroup = Tile::kGroup;
    constexpr i32 kRowsAtOnce = 32 / kGroup;
    constexpr i32 kStep = Team::kMembers * kRowsAtOnce;
    const AttentionParams& p = head.p;
    const i32 row =
        static_cast<i32>(Team::member()) * kRowsAtOnce + static_cast<i32>(lane_index()) / kGroup;
    const i32 unit = static_cast<i32>(lane_index()) % kGroup;
    u16* to =
        reinterpret_cast<u16*>(p.o.data) + head.q_row(p.o, warp_row + row) + first_dim + unit * 8;
    const i32 rows = static_cast<i32>(head.sequence.q_slot) - warp_row - row;
    const i32 counted = head.sequence.shape.q_len - warp_row - row;
    const i32 num_units = (static_cast<i32>(p.dim_v) - first_dim) / 8 - unit;
#pragma unroll 1
    for (i32 r = 0; r < min(rows, kConfig.warp_rows() - row); r += kStep) {
#pragma unroll
      for (i32 u = 0; u < kConfig.d_v / 8; u += kGroup) {
        const ptx::U32x4 x = ptx::load_shared_x4(tile().address(r + row, u + unit));
        if (u < num_units) ptx::store_global_x4(to + u * 8, r < counted ? x : ptx::U32x4{});
      }
      to += kStep * p.o.strides[2];
    }
  }

  // Rows of tile t, in a loop that is not unrolled and therefore reads them from memory.
  void store_numbers(const float (&row)[kConfig.warp_dims() / 2], i32 t) const {
    const AttentionParams& p = head.p;
    const i64 i = warp_row + WarpScores<kConfig>::row(t, 0);
    const i64 offset = head.q_row(p.o, i) + first_dim * p.o.strides[3];
    float numbers[kConfig.warp_dims() / 2];
#pragma unroll
    for (i32 at = 0; at < kConfig.warp_dims() / 2; ++at) numbers[at] = row[at];
#pragma unroll 1
    for (i32 at = 0; at < kConfig.warp_dims() / 2; ++at) {
      const i32 further = 8 * (at / 2 % 2);
      const i64 d = 8 * Team::unit(at / 4) + 2 * static_cast<i32>(lane_index() % 4) + at % 2;
      if (i + further >= head.sequence.q_slot || first_dim + d >= p.dim_v) continue;
      store_real(p.o, offset + further * p.o.strides[2] + d * p.o.strides[3],
                 i + further < head.sequence.shape.q_len ? numbers[at] : 0.f);
    }
  }
};

}  // namespace fulmen
