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
  using Rows = Sm80Row[2];                // of 16 rows, the thread's two
  static constexpr float kHidden = -0.f;  // P of a hidden pair; no exponential is negative

  // What a tile of S belongs to. Careful steps: some pairs may be hidden.
  struct Step {
    const HeadType& head;
    i32 first_row, first_key;
    bool is_full;
    i32 stage, pair_stage;
  };
  struct Part {
    i32 row, column;  // in the block
  };

  const AttentionParams& p;
  Tiles tiles;
  bool suspect = false;  // a block that is not full met a score or a dP that is not finite

  // P and dS of this warp's tiles, into shared memory.
  template <bool kCareful>
  void compute(const Step& step) {
    each_part([&](const Part& part) { compute_both<kCareful>(step, part); });
  }
  // P alone.
  template <bool kCareful>
  void compute_weights(const Step& step) {
    each_part([&](const Part& part) {
      Scores P;
      multiply_q_k(P, step, part);
      if constexpr (kCareful) suspect = suspect || !all_finite(P);
      const Terms terms{step.head, step.first_row + part.row, tiles.terms_at()};
      terms.apply_but_intervals(P, step.first_key + part.column);
      if constexpr (kCareful) hide(P, step, part);
      weigh<kCareful>(P, step, part);
      share(P, tiles.p_tile(), part);
    });
  }
  // dS, when other warps have P in shared memory.
  template <bool kCareful>
  void compute_ds(const Step& step) {
    bool awaited = false;
    each_part([&](const Part& part) {
      Scores dP;
      multiply_dout_v(dP, step, part);
      if constexpr (kCareful) suspect = suspect || !all_finite(dP);
      if (!awaited) tiles.await_weights();
      awaited = true;
      form_ds_of_shared<kCareful>(dP, step, part);
      share(dP, tiles.ds_tile(step.pair_stage), part);
    });
  }

 private:
  template <class Compute>
  void each_part(const Compute& compute) const {
    constexpr i32 kAcross = kConfig.team_columns() / kConfig.s_columns;
#pragma unroll 1
    for (i32 tile = tiles.member(); tile < kConfig.team_tiles(); tile += kConfig.team_warps()) {
      compute(Part{tile / kAcross * kConfig.s_rows,
                   static_cast<i32>(tiles.team()) * kConfig.team_columns() +
                       tile % kAcross * kConfig.s_columns});
    }
  }

  template <bool kCareful>
  void compute_both(const Step& step, const Part& part) {
    const Terms terms{step.head, step.first_row + part.row, tiles.terms_at()};
    const i64 key = step.first_key + part.column;
    Scores P, slope;
    multiply_q_k(P, step, part);
    if constexpr (kCareful) suspect = suspect || !all_finite(P);
    if constexpr (kConfig.softcap) {
      copy(slope, P);
      cap_slopes(slope, step.head);
    }
    terms.apply_but_intervals(P, key);
    if constexpr (kCareful) hide(P, step, part);
    weigh<kCareful>(P, step, part);
    u32 kept[kTiles * kFloats / 32 + 1] = {};
    share_p(P, kept, terms, key, step, part);
    if constexpr (!kConfig.dq && !kConfig.dk) return;
    Scores dP;
    multiply_dout_v(dP, step, part);
    if constexpr (kCareful) suspect = suspect || !all_finite(dP);
    if constexpr (kConfig.dropout) {
      drop(dP, kept, static_cast<float>(step.head.dropout.kept_scale()));
    }
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      Rows rows;
      read_rows(rows, step, part, t);
      form_ds<kCareful>(dP[t], P[t], rows);
    }
    if constexpr (kConfig.softcap) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) dP[t][i] *= slope[t][i];
      }
    }
    share(dP, tiles.ds_tile(step.pair_stage), part);
  }

  // S = Q K^T
  void multiply_q_k(Scores& S, const Step& step, const Part& part) const {
    multiply<kConfig.d_qk>(S, tiles.q_tile(step.stage), tiles.k_tile(), part);
  }
  // dP = dO V^T
  void multiply_dout_v(Scores& dP, const Step& step, const Part& part) const {
    multiply<kConfig.d_v>(dP, tiles.dout_tile(step.stage), tiles.v_tile(), part);
  }
  template <i32 kDims>
  static void multiply(Scores& S, const SwizzledTile<kDims, kConfig.swizzle>& queries,
                       const SwizzledTile<kDims, kConfig.swizzle>& keys, const Part& part) {
    const auto left = left_rows(queries, part.row);
    auto right = right_rows(keys);
    right.start = right.at(0, part.column);
    clear(S);
    multiply_tiles<kConfig.dtype, kDims / 16>(
        S, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(left.at(k, 16 * t)); },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
  }

  // What the structured masks hide becomes -inf.
  void hide(Scores& S, const Step& step, const Part& part) const {
    if (step.is_full) return;
    const i32 own = step.first_key + part.column + Terms::column(0);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const u32 from = tiles.columns_at(step.stage) + (part.row + Terms::row(t, h)) * 8;
        const i32 begin = static_cast<i32>(ptx::load_shared(from)) - own;
        const i32 end = static_cast<i32>(ptx::load_shared(from + 4)) - own;
#pragma unroll
        for (i32 f = 2 * h; f < kFloats; f += 4) {
#pragma unroll
          for (i32 e = 0; e < 2; ++e) {
            const i32 at = 8 * (f / 4) + e;
            if (at < begin || at >= end) S[t][f + e] = kMinusInfinity;
          }
        }
      }
    }
  }

  void read_rows(Rows& rows, const Step& step, const Part& part, i32 t) const {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const ptx::U32x4 x =
          ptx::load_shared_x4(tiles.rows_at(step.stage) + (part.row + Terms::row(t, h)) * 16);
      rows[h] = {__builtin_bit_cast(float, x.word[0]), __builtin_bit_cast(float, x.word[1]),
                 __builtin_bit_cast(float, x.word[2]), __builtin_bit_cast(float, x.word[3])};
    }
  }

  // S = P, kHidden where hidden. In nats where config.natural says so, else scaled here.
  template <bool kCareful>
  void weigh(Scores& S, const Step& step, const Part& part) const {
    constexpr float kLog2E = kWarpLog2E;
    const float unit = kConfig.natural ? 1.f : static_cast<float>(p.score_map.scale);
    const float unit_log2 =
        kConfig.natural ? kLog2E : static_cast<float>(p.score_map.scale * 1.4426950408889634);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      Rows rows;
      read_rows(rows, step, part, t);
      const float largest = ptx::max(ptx::max(rows[0].row_max, -rows[0].row_max),
                                     ptx::max(rows[1].row_max, -rows[1].row_max));
      if (ptx::any(largest * kLog2E > 1024)) {  // a product with row_max is not exact enough
        exponentiate<kCareful>(S[t], [&](float s, i32 h) {
          const float below = ptx::max(rows[h].row_max - ptx::mul(s, unit), 0.f);
          return ptx::fma(-below, kLog2E, -rows[h].sum_log2);
        });
        continue;
      }
      const float lse_log2[2] = {ptx::fma(rows[0].row_max, kLog2E, rows[0].sum_log2),
                                 ptx::fma(rows[1].row_max, kLog2E, rows[1].sum_log2)};
      exponentiate<kCareful>(S[t],
                             [&](float s, i32 h) { return ptx::fma(s, unit_log2, -lse_log2[h]); });
    }
  }

  template <bool kCareful, class Exponent>
  static void exponentiate(float (&S)[kFloats], const Exponent& exponent) {
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) {
      const bool is_hidden = kCareful && S[i] == kMinusInfinity;
      S[i] = is_hidden ? kHidden : ptx::exp2(exponent(S[i], i / 2 % 2));
    }
  }

  // dP = dS
  template <bool kCareful>
  static void form_ds(float (&dP)[kFloats], const float (&P)[kFloats], const Rows& rows) {
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) {
      const Sm80Row& row = rows[i / 2 % 2];
      const float G =
          kConfig.split_sum ? ptx::fma(row.share, dP[i], row.offset) : dP[i] + row.offset;
      dP[i] = P[i] * G;
      if (kCareful && __builtin_bit_cast(u32, P[i]) == __builtin_bit_cast(u32, kHidden)) dP[i] = 0;
    }
  }

  // The same with P as it is in shared memory, rounded.
  template <bool kCareful>
  void form_ds_of_shared(Scores& dP, const Step& step, const Part& part) const {
    const auto from = way_to(tiles.p_tile(), part);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      Rows rows;
      read_rows(rows, step, part, t);
      float P[kFloats];
#pragma unroll
      for (i32 i = 0; i < kFloats; i += 8) {
        const ptx::U32x4 x = ptx::ldmatrix_x4(from.at(i / 8, 16 * t));
#pragma unroll
        for (i32 w = 0; w < 4; ++w) {
          using Element = typename HeadType::Element;
          P[i + 2 * w] = widen(Element{static_cast<u16>(x.word[w])});
          P[i + 2 * w + 1] = widen(Element{static_cast<u16>(x.word[w] >> 16)});
        }
      }
      form_ds<kCareful>(dP[t], P, rows);
    }
  }

  // A lane's way through a part of P or dS, 16 x 16 numbers at a time.
  static auto way_to(const PairTile& tile, const Part& part) {
    return PartRow<kConfig.columns, kConfig.swizzle, kConfig.s_columns / 16>(
        left_rows(tile, part.row), part.column / 16);
  }

  // A warp's tile of P or dS, rounded, to shared memory.
  static void share(const Scores& S, const PairTile& tile, const Part& part) {
    const auto to = way_to(tile, part);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; i += 8) {
        ptx::U32x4 x;
#pragma unroll
        for (i32 w = 0; w < 4; ++w) {
          x.word[w] = ptx::pack<kConfig.dtype>(S[t][i + 2 * w], S[t][i + 2 * w + 1]);
        }
        if constexpr (kConfig.wide_stores) {
          ptx::stmatrix_x4(to.at(i / 8, 16 * t), x);
        } else {
#pragma unroll
          for (i32 w = 0; w < 4; ++w) {
            const u32 row = part.row + Terms::row(t, w % 2);
            const u32 unit = part.column / 8 + i / 4 + w / 2;
            ptx::store_shared(tile.address(row, unit) + lane_index() % 4 * 4, x.word[w]);
          }
        }
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

  static void copy(Scores& to, const Scores& from) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) to[t][i] = from[t][i];
    }
  }

  // P as dV takes it, to shared memory. Bits of `kept`: what dropout left.
  template <i32 kWords>
  void share_p(const Scores& P, u32 (&kept)[kWords], const Terms& terms, i64 key, const Step& step,
               const Part& part) const {
    Scores taken;
    copy(taken, P);
    if constexpr (kConfig.split_sum) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        Rows rows;
        read_rows(rows, step, part, t);
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) taken[t][i] *= rows[i / 2 % 2].share;
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
    if constexpr (kConfig.dv) share(taken, tiles.p_tile(), part);
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
