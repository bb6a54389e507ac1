// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two products of forward_sm80 for one warp, S = Q K^T and O += P V, with what they keep from
// block to block: O, and Q where it fits the registers. Where warps share rows, a warp's S has its
// columns of the block, its O its dims.
#pragma once

#include "kernels/common/float32_products.cuh"
#include "kernels/common/warp_team.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct ForwardProducts {
  static constexpr bool kIsFloat32 = kConfig.dtype == DType::kFloat32;
  static constexpr i32 kTiles = kConfig.row_tiles;
  using Team = WarpTeam<kConfig>;
  using QTile = SwizzledTile<kConfig.words(kConfig.d_qk), kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.words(kConfig.d_v), kConfig.swizzle>;
  using Scores = float[kTiles][kConfig.warp_columns() / 2];
  using Output = float[kTiles][kConfig.warp_dims() / 2];

  QTile q;
  Team team;
  Output O;
  ptx::U32x4 kept_q[kConfig.keeps_q ? kConfig.d_qk / 16 : 1][kTiles];

  ForwardProducts(QTile q_tile, Team team_) : q(q_tile), team(team_) {}

  void rescale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.warp_dims() / 2; ++i) O[t][i] *= factor[t][i / 2 % 2];
    }
  }

  // Q has arrived.
  void keep_q() {
    const auto rows = left_rows(q, Team::first_row());
#pragma unroll
    for (i32 step = 0; step < kConfig.d_qk / 16; ++step) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) kept_q[step][t] = ptx::ldmatrix_x4(rows.at(step, 16 * t));
    }
  }

  // S = Q K^T
  void multiply_q_k(Scores& S, const QTile& k) const {
    const auto rows = left_rows(q, Team::first_row());
    const auto keys = right_rows(k, Team::member() * kConfig.warp_columns());
    const auto left = [&](i32 step, i32 t) {
      if constexpr (kConfig.keeps_q) return kept_q[step][t];
      return ptx::ldmatrix_x4(rows.at(step, 16 * t));
    };
    if constexpr (kIsFloat32) {
      multiply_rows_float32<kConfig, kConfig.d_qk>(S, left, keys);
    } else {
      multiply_rows<kConfig, kConfig.d_qk>(S, left, keys);
    }
  }

  // O += P V
  void multiply_p_v(const Scores& S, const VTile& v) {
    if constexpr (kIsFloat32) {
      multiply_columns_float32<kConfig>(O, S, v);
    } else {
      multiply_rounded_p_v(S, v);
    }
  }

 private:
  void multiply_rounded_p_v(const Scores& S, const VTile& v) {
    u32 P[kTiles][kConfig.warp_columns() / 4];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.warp_columns() / 4; ++i) {
        P[t][i] = ptx::pack<kConfig.dtype>(S[t][2 * i], S[t][2 * i + 1]);
      }
    }
    const auto values = right_columns(v, Team::member());
    const auto multiply = [&](const auto& left) {
      multiply_columns<kConfig, kConfig.columns, Team::kMembers>(O, left, values);
    };
    if constexpr (Team::kIsOne) {
      multiply([&](i32 k, i32 t) {
        return ptx::U32x4{{P[t][4 * k], P[t][4 * k + 1], P[t][4 * k + 2], P[t][4 * k + 3]}};
      });
    } else {
      team.put(P);
      const auto rows = left_rows(team.p_tile(), Team::first_row());
      multiply([&](i32 k, i32 t) { return ptx::ldmatrix_x4(rows.at(k, 16 * t)); });
    }
  }
};

}  // namespace fulmen
