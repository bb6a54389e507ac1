// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a warp's tiles of S^T = K Q^T and dP^T = V dO^T, whose rows are keys, to P and dS in
// registers. Called by backward_keys_sm80.
#pragma once

#include "kernels/backward_sm80/sight.cuh"

namespace fulmen {

template <Sm80BackwardConfig kConfig>
struct BackwardKeyWeightsSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;
  static constexpr i32 kTiles = kConfig.kv_rows / 16;
  static constexpr i32 kFloats = kConfig.s_rows / 2;  // of 16 keys
  using Scores = float[kTiles][kFloats];

  const AttentionParams& p;
  BackwardTilesSm80<kConfig> tiles;
  BackwardSightSm80<kConfig> sight{tiles};

  // Whether every score, or dP, and what rows add to dP is finite.
  bool are_finite(const Scores& S, const Step& step, const Part& part) const {
    FiniteCheck finite;
    finite.meet(S);
    each_row(part, [&](i32 row) { finite.meet(of_row(step, row, kOffset)); });
    return !finite.fails();
  }

  // What the structured masks hide becomes -inf.
  void hide(Scores& S, const Step& step, const Part& part) const {
    const i32 own = part.column + lane() / 4;
    each_query(part, [&](i32 row, i32 f) {
      const Sm80Columns seen = sight.columns(step, row);
      const i32 begin = seen.begin - own, end = seen.end - own;
      each_key(S, f, [&](float& s, i32 at) {
        if (at < begin || at >= end) s = kMinusInfinity;
      });
    });
  }

  // S = P, 0 where hidden. is_moderate: see BackwardSightSm80.
  void weigh(Scores& S, const Step& step, const Part& part, bool is_moderate) const {
    const float unit = static_cast<float>(p.score_map.scale);
    const float unit_log2 = static_cast<float>(p.score_map.scale * 1.4426950408889634);
    if (is_moderate) {
      exponentiate(S, step, part, [&](float s, float row_max, float sum_log2) {
        return ptx::fma(s, unit_log2, -ptx::fma(row_max, kWarpLog2E, sum_log2));
      });
    } else {
      exponentiate(S, step, part, [&](float s, float row_max, float sum_log2) {
        const float below = ptx::max(row_max - ptx::mul(s, unit), 0.f);
        return ptx::fma(-below, kWarpLog2E, -sum_log2);
      });
    }
  }

  // dP = dS; weights(t, k, P): P of 16 keys and 16 queries.
  template <class Weights>
  void form_ds(Scores& dP, const Step& step, const Part& part, const Weights& weights) const {
#pragma unroll
    for (i32 k = 0; k < kConfig.s_rows / 16; ++k) {
      float offsets[2][2];
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 row = part.row + query(8 * k + i / 2 * 4 + i % 2);
        offsets[i / 2][i % 2] = of_row(step, row, kOffset);
      }
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        float P[8];
        weights(t, k, P);
#pragma unroll
        for (i32 i = 0; i < 8; ++i) {
          float& x = dP[t][8 * k + i];
          x = P[i] * (x + offsets[i / 4][i % 2]);
        }
      }
    }
  }

 private:
  static i32 lane() { return static_cast<i32>(lane_index()); }
  // Of a part, the query of float f of 16 keys.
  static i32 query(i32 f) { return 8 * (f / 4) + 2 * (lane() % 4) + f % 2; }

  u32 row_at(const Step& step, i32 row) const {
    return tiles.rows_at(step.stage) + static_cast<u32>(row) * 16;
  }
  static constexpr u32 kOffset = 2;  // of the words of Sm80Row
  float of_row(const Step& step, i32 row, u32 word) const {
    return __builtin_bit_cast(float, ptx::load_shared(row_at(step, row) + 4 * word));
  }

  // The part's rows among the lanes.
  template <class Visit>
  static void each_row(const Part& part, const Visit& visit) {
#pragma unroll
    for (i32 at = 0; at < kConfig.s_rows; at += 32) {
      visit(part.row + min(at + lane(), kConfig.s_rows - 1));
    }
  }
  // The queries of the thread's floats, with the first float of each.
  template <class Visit>
  static void each_query(const Part& part, const Visit& visit) {
#pragma unroll
    for (i32 f = 0; f < kFloats; f += 4) {
#pragma unroll
      for (i32 e = 0; e < 2; ++e) visit(part.row + query(f + e), f + e);
    }
  }
  // The thread's keys of a query, from its first one on.
  template <class Visit>
  static void each_key(Scores& S, i32 f, const Visit& visit) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) visit(S[t][f + 2 * h], 16 * t + 8 * h);
    }
  }

  template <class Exponent>
  void exponentiate(Scores& S, const Step& step, const Part& part, const Exponent& exponent) const {
    each_query(part, [&](i32 row, i32 f) {
      const ptx::F32x2 x = ptx::load_shared_f32x2(row_at(step, row));  // row_max, sum_log2
      each_key(S, f, [&](float& s, i32) { s = ptx::exp2(exponent(s, x.word[0], x.word[1])); });
    });
  }
};

}  // namespace fulmen
