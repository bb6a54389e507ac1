// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a warp's tiles of S = Q K^T and dP = dO V^T to P and dS, rounded, in shared memory, with
// every option that has a say over pairs. Called by backward_sm80.
#pragma once

#include "kernels/tile/backward_tiles_sm80.cuh"
#include "kernels/tile/warp_terms.cuh"

namespace fulmen {

template <Sm80BackwardConfig kConfig>
struct BackwardPairsSm80 {
  using HeadType = Head<kConfig.dtype>;
  using Tiles = BackwardTilesSm80<kConfig>;
  using PairTile = typename Tiles::PairTile;
  using Terms = WarpTerms<kConfig.scores()>;
  static constexpr i32 kTiles = kConfig.s_rows / 16;
  static constexpr i32 kFloats = kConfig.s_columns / 2;
  using Scores = float[kTiles][kFloats];
  using Rows = Sm80Row[kTiles][2];
  static constexpr float kHidden = -0.f;  // P of a hidden pair; no exponential is negative

  const AttentionParams& p;
  Tiles tiles;
  bool suspect = false;  // a block that is not full met a score or a dP that is not finite

  // S = P, kHidden where hidden. In nats where config.natural says so, else scaled here.
  void weigh(Scores& S, const Rows& rows, bool careful) const {
    constexpr float kLog2E = kWarpLog2E;
    const float unit = kConfig.natural ? 1.f : static_cast<float>(p.score_map.scale);
    const float unit_log2 =
        kConfig.natural ? kLog2E : static_cast<float>(p.score_map.scale * 1.4426950408889634);
    float largest = 0;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        largest = ptx::max(largest, ptx::max(rows[t][h].row_max, -rows[t][h].row_max));
      }
    }
    if (ptx::any(largest * kLog2E > 1024)) {  // a product with row_max is not exact enough
      exponentiate(S, careful, [&](float s, i32 t, i32 h) {
        const float below = ptx::max(rows[t][h].row_max - ptx::mul(s, unit), 0.f);
        return ptx::fma(-below, kLog2E, -rows[t][h].sum_log2);
      });
      return;
    }
    float lse_log2[kTiles][2];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        lse_log2[t][h] = ptx::fma(rows[t][h].row_max, kLog2E, rows[t][h].sum_log2);
      }
    }
    exponentiate(S, careful,
                 [&](float s, i32 t, i32 h) { return ptx::fma(s, unit_log2, -lse_log2[t][h]); });
  }

  template <class Exponent>
  static void exponentiate(Scores& S, bool careful, const Exponent& exponent) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      if (careful) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) {
          const float s = S[t][i];
          S[t][i] = s == kMinusInfinity ? kHidden : ptx::exp2(exponent(s, t, i / 2 % 2));
        }
      } else {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) S[t][i] = ptx::exp2(exponent(S[t][i], t, i / 2 % 2));
      }
    }
  }

  static bool all_finite(const Scores& S) {
    float sum = 0;  // of x - x: 0, or NaN
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) sum += S[t][i] - S[t][i];
    }
    return sum == 0;
  }

  // A warp's tile of P or dS, rounded, to shared memory.
  static void share(const Scores& S, const PairTile& tile, i32 row, i32 column) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; i += 2) {
        const u32 r = row + Terms::row(t, i / 2 % 2);
        const u32 unit = column / 8 + i / 4;
        ptx::store_shared(tile.address(r, unit) + lane_index() % 4 * 4,
                          ptx::pack<kConfig.dtype>(S[t][i], S[t][i + 1]));
      }
    }
  }

  // dP = dO V^T
  void multiply_dout_v(Scores& dP, i32 stage, i32 row, i32 column) const {
    const auto dO = left_rows(tiles.dout_tile(stage), row);
    const auto V = right_rows(tiles.v_tile());
    clear(dP);
    multiply_tiles<kConfig.dtype, kConfig.d_v / 16>(
        dP, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(dO.at(k, 16 * t)); },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4(V.at(k, column + 16 * n)); });
  }

  // S = Q K^T
  void multiply_q_k(Scores& S, i32 stage, i32 row, i32 column) const {
    const auto Q = left_rows(tiles.q_tile(stage), row);
    const auto K = right_rows(tiles.k_tile());
    clear(S);
    multiply_tiles<kConfig.dtype, kConfig.d_qk / 16>(
        S, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(Q.at(k, 16 * t)); },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4(K.at(k, column + 16 * n)); });
  }

  void read_rows(Rows& rows, i32 row) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const ptx::U32x4 x = ptx::load_shared_x4(tiles.rows_at() + (row + Terms::row(t, h)) * 16);
        rows[t][h] = {__builtin_bit_cast(float, x.word[0]), __builtin_bit_cast(float, x.word[1]),
                      __builtin_bit_cast(float, x.word[2]), __builtin_bit_cast(float, x.word[3])};
      }
    }
  }

  // dS / dS before the cap, from raw dot products.
  void cap_slopes(Scores& slope, const HeadType& head) const {
    const float twice_log2 = 2 * kWarpLog2E * head.map.scale / head.map.softcap;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        const float x = tanh_log2(slope[t][i] * twice_log2);
        slope[t][i] = ptx::fma(-x, x, 1.f);
      }
    }
  }

  // dP = dS
  void form_ds(Scores& dP, const Scores& P, const Rows& rows, bool careful) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        const Sm80Row& row = rows[t][i / 2 % 2];
        const float G =
            kConfig.split_sum ? ptx::fma(row.share, dP[t][i], row.offset) : dP[t][i] + row.offset;
        dP[t][i] = P[t][i] * G;
        if (careful && __builtin_bit_cast(u32, P[t][i]) == __builtin_bit_cast(u32, kHidden)) {
          dP[t][i] = 0;
        }
      }
    }
  }

  void compute(const HeadType& head, i64 block, i64 first_key, bool is_full, i32 stage, i32 tile) {
    constexpr i32 kAcross = kConfig.columns / kConfig.s_columns;
    const i32 row = tile / kAcross * kConfig.s_rows;
    const i32 column = tile % kAcross * kConfig.s_columns;
    const Terms terms{head, block * kConfig.rows + row, tiles.terms_at()};
    const i64 key = first_key + column;
    const bool careful = kConfig.terms || !is_full;
    Rows rows;
    read_rows(rows, row);
    Scores P, slope;
    multiply_q_k(P, stage, row, column);
    if (careful) suspect = suspect || !all_finite(P);
    if constexpr (kConfig.softcap) {
      copy(slope, P);
      cap_slopes(slope, head);
    }
    if (kConfig.natural || careful) terms.apply(P, key, is_full);
    weigh(P, rows, careful);
    u32 kept[kTiles * kFloats / 32 + 1] = {};
    share_p(P, kept, rows, terms, key, row, column);
    if (!kConfig.dq && !kConfig.dk) return;
    Scores dP;
    multiply_dout_v(dP, stage, row, column);
    if (careful) suspect = suspect || !all_finite(dP);
    if constexpr (kConfig.dropout) drop(dP, kept, static_cast<float>(head.dropout.kept_scale()));
    form_ds(dP, P, rows, careful);
    if constexpr (kConfig.softcap) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) dP[t][i] *= slope[t][i];
      }
    }
    share(dP, tiles.ds_tile(), row, column);
  }

  static void copy(Scores& to, const Scores& from) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) to[t][i] = from[t][i];
    }
  }

  // P as dV takes it, to shared memory. Bits of `kept`: what dropout left.
  template <i32 kWords>
  void share_p(const Scores& P, u32 (&kept)[kWords], const Rows& rows, const Terms& terms, i64 key,
               i32 row, i32 column) const {
    Scores taken;
    copy(taken, P);
    if constexpr (kConfig.split_sum) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) taken[t][i] *= rows[t][i / 2 % 2].share;
      }
    }
    if constexpr (kConfig.dropout) {
      Scores marks;
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) marks[t][i] = 1;
      }
      terms.drop(marks, key);
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) {
          const i32 at = t * kFloats + i;
          kept[at / 32] |= marks[t][i] != 0 ? 1u << at % 32 : 0u;
          taken[t][i] = marks[t][i] != 0 ? taken[t][i] : 0.f;
        }
      }
    }
    if constexpr (kConfig.dv) share(taken, tiles.p_tile(), row, column);
  }

  // Of dP dropout leaves what it left of P.
  template <i32 kWords>
  static void drop(Scores& dP, const u32 (&kept)[kWords], float kept_scale) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        const i32 at = t * kFloats + i;
        dP[t][i] = (kept[at / 32] >> at % 32 & 1u) != 0 ? dP[t][i] * kept_scale : 0.f;
      }
    }
  }
};

}  // namespace fulmen
