// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What backward_dq_sm90 knows of the two rows of a thread, and the steps from their scores and dP
// to dS.
#pragma once

#include "kernels/backward_sm90/config_beside.h"
#include "kernels/backward_sm90/scores.cuh"
#include "kernels/common/scores_sm90.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

template <ForwardSm90Config kConfig>
struct QueryTerms {
  using Scores = float[kConfig.kv_rows / 2];
  // d score / d (scale dot(q, k)) of every pair, where that differs from 1.
  struct Slopes {
    static constexpr bool kWanted = kConfig.score.user.score;
    float of[kConfig.score.has_slopes() ? kConfig.kv_rows / 2 : 1];
    float before[kConfig.score.user.captures ? kConfig.kv_rows / 2 : 1];  // scores, for captures

    void operator()(i32 i, float slope, float s) {  // a user's
      of[i] = kConfig.score.score_mod ? of[i] * slope : slope;
      if constexpr (kConfig.score.user.captures) before[i] = s;
    }
  };

  const ForwardParams& params;
  float lse[2] = {};              // in log2; of large rows log2(row_sum); past the end inf:
                                  // by the lse of another row P would have no bound
  float row_max[2] = {};          // of large rows
  bool has_large_scores = false;  // in this warp
  float delta[2] = {};

  QueryTerms(const BackwardDqParams& of, const QueryBlock& block, const SeqlenInfo& seqlen, i32 row)
      : params(of.forward) {
    const bool packed = kConfig.score.varlen && params.attention.packed.q;
    const i64 batch_head = (packed ? 0 : i64(block.batch)) * params.heads_q + block.head;
    const i64 first =
        batch_head * of.padded_rows_per_head + padded_row(packed, block.batch, seqlen.q_begin);
    for (i32 r = 0; r < 2; ++r) {
      const i64 at = first + min(row + 8 * r, seqlen.shape.q_len - 1);
      if (seqlen.shape.q_len <= 0) continue;
      delta[r] = of.delta[at];
      const float saved = of.lse_log2[kConfig.score.stats ? lse_index(at) : at];
      lse[r] = row + 8 * r < seqlen.shape.q_len ? saved : kInfinity<float>;
      if constexpr (kConfig.score.stats) row_max[r] = of.lse_log2[lse_index(at) + kLseBlock];
    }
    if constexpr (kConfig.score.stats)
      has_large_scores = ptx::any(row_max[0] != 0 || row_max[1] != 0);
  }

  Slopes slopes(const Scores& dots) const {
    Slopes slopes{};
    if constexpr (kConfig.score.score_mod) {
#pragma unroll
      for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) {
        slopes.of[i] = slope_of(params.score_mod, dots[i]);
      }
    }
    return slopes;
  }

  // Scores relative to row_max in large rows, as lse is.
  void shift_large_scores(Scores& S) const {
    if (!kConfig.score.stats || !has_large_scores) return;
    const LargeScores large(kConfig.scales_scores() ? 1 / kConfig.score.per_nat() : params.scale);
#pragma unroll
    for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) S[i] = large.shifted(S[i], row_max[i / 2 % 2]);
  }

  // P = exp(score - lse), from dot products or, where options map them, from scores in log2.
  void exponentiate(Scores& S) const {
#pragma unroll
    for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) {
      const float factor =
          kConfig.scales_scores() ? kLog2E<float> / kConfig.score.per_nat() : params.scale_log2;
      S[i] = ptx::exp2_volatile(ptx::fma(S[i], factor, -lse[i / 2 % 2]));
    }
  }

  // dP of the pairs that dropout keeps, times what they were divided by; 0 of the others.
  void drop(Scores& dP, const FragmentScores<kConfig>& scores, i32 first_key) const {
    if constexpr (kConfig.score.dropout) {
#pragma unroll
      for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) dP[i] *= params.kept_scale;
      scores.pairs.drop(dP, first_key);
    }
  }

  // S = P (dP - delta), and through the score modifier. For captures dP becomes what S was before.
  void form_ds(Scores& S, Scores& dP, const Slopes& slopes) const {
#pragma unroll
    for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) {
      const float P = S[i];
      S[i] *= dP[i] - delta[i / 2 % 2];
      if constexpr (kConfig.score.user.captures) dP[i] = P == 0 ? 0.f : S[i];
      if constexpr (kConfig.score.has_slopes()) S[i] *= slopes.of[i];
      // What the user's slope is of a hidden pair does not matter.
      if constexpr (kConfig.score.user.score) S[i] = P == 0 ? 0.f : S[i];
    }
  }
};

}  // namespace fulmen
