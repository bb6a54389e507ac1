// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// S = Q K^T and O += P V of a warp of forward_sm80, by mma.sync on tiles in shared memory: of 16
// bits, of float32 by tf32, of e4m3.
#pragma once

#include "kernels/common/warp_mma_float32_sm80.cuh"
#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/forward_sm80/row_group.cuh"
#include "kernels/ptx/math.cuh"

namespace fulmen {

// The matrix products of a warp, on tiles in shared memory.
template <ForwardSm80Config kConfig>
struct ForwardProductsSm80 {
  static constexpr bool kIsFloat32 = kConfig.dtype == DType::kFloat32;
  static constexpr i32 kTiles = kConfig.row_tiles;
  using Group = RowGroupSm80<kConfig>;
  using QTile = SwizzledTile<kConfig.words(kConfig.d_qk), kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.words(kConfig.d_v), kConfig.swizzle>;
  using Scores = float[kTiles][kConfig.warp_columns() / 2];
  using Output = float[kTiles][kConfig.warp_dims() / 2];

  QTile q;
  Group group;
  Output O;
  // Of 32 bytes of a row each.
  static constexpr i32 kSteps = kConfig.words(kConfig.d_qk) / 16;
  ptx::U32x4 q_registers[kConfig.q_in_registers ? kSteps : 1][kTiles];

  ForwardProductsSm80(QTile q_tile, Group group_) : q(q_tile), group(group_) {}

  void rescale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.warp_dims() / 2; ++i) O[t][i] *= factor[t][i / 2 % 2];
    }
  }

  // Q has arrived.
  void load_q_registers() {
    const auto rows = left_rows(q, Group::first_row());
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t)
        q_registers[step][t] = ptx::ldmatrix_x4(rows.at(step, 16 * t));
    }
  }

  // S = Q K^T
  void multiply_q_k(Scores& S, const QTile& k) const {
    const auto rows = left_rows(q, Group::first_row());
    const auto keys = right_rows(k, Group::warp_n() * kConfig.warp_columns());
    const auto left = [&](i32 step, i32 t) {
      if constexpr (kConfig.q_in_registers) return q_registers[step][t];
      return ptx::ldmatrix_x4(rows.at(step, 16 * t));
    };
    if constexpr (kIsFloat32) {
      multiply_rows_float32<kConfig, kConfig.d_qk>(S, left, keys);
    } else {
      multiply_rows<kConfig, kConfig.words(kConfig.d_qk)>(S, left, keys);
    }
  }

  // O += P V
  void multiply_p_v(const Scores& S, const VTile& v) {
    if constexpr (kIsFloat32) {
      multiply_columns_float32<kConfig>(O, S, v);
    } else if constexpr (kConfig.has_8_bits()) {
      multiply_8_bits_p_v(S, v);
    } else {
      multiply_rounded_p_v(S, v);
    }
  }

  // Once, at the end.
  void finish() {
    if constexpr (kConfig.has_8_bits()) order_dims(O);
  }

 private:
  void multiply_8_bits_p_v(const Scores& S, const VTile& v) {
    u32 P[kTiles][kConfig.kv_rows / 8];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.kv_rows / 8; ++i) {  // a row of 16 keys
        const float* const s = S[t] + i / 2 * 8 + i % 2 * 2;
        P[t][i] = ptx::pack_e4m3(s[0], s[1], s[4], s[5]);
      }
    }
    multiply_columns_e4m3<kConfig, kConfig.kv_rows>(
        O,
        [&](i32 k, i32 t) {
          return ptx::U32x4{{P[t][4 * k], P[t][4 * k + 1], P[t][4 * k + 2], P[t][4 * k + 3]}};
        },
        v);
  }

  void multiply_rounded_p_v(const Scores& S, const VTile& v) {
    u32 P[kTiles][kConfig.warp_columns() / 4];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.warp_columns() / 4; ++i) {
        P[t][i] = ptx::pack<kConfig.dtype>(S[t][2 * i], S[t][2 * i + 1]);
      }
    }
    const auto values = right_columns(v, Group::warp_n());
    const auto multiply = [&](const auto& left) {
      multiply_columns<kConfig, kConfig.kv_rows, Group::kWarpsN>(O, left, values);
    };
    if constexpr (Group::kIsOneWarp) {
      multiply([&](i32 k, i32 t) {
        return ptx::U32x4{{P[t][4 * k], P[t][4 * k + 1], P[t][4 * k + 2], P[t][4 * k + 3]}};
      });
    } else {
      group.store_p(P);
      const auto rows = left_rows(group.p_tile(), Group::first_row());
      multiply([&](i32 k, i32 t) { return ptx::ldmatrix_x4(rows.at(k, 16 * t)); });
    }
  }
};

}  // namespace fulmen
