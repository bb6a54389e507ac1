// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What two query rows of a wgmma fragment bring to their pairs in the backward pass, as
// backward_prepare_sm90 has left it: the softmax and delta. From scores and dP to dS.
#pragma once

#include "kernels/backward_sm90/config.h"
#include "kernels/backward_sm90/huge_scores.cuh"
#include "kernels/backward_sm90/key_terms.cuh"
#include "kernels/common/score_map.cuh"

namespace fulmen {

template <AttentionConfig kConfig>
struct QueryTerms {
  using Scores = float[kConfig.kv_rows / 2];
  // d score / d (scale dot(q, k)) of every pair, where the cap makes that differ from 1.
  struct Slopes {
    float of[kConfig.softcap ? kConfig.kv_rows / 2 : 1];
  };

  const ForwardParams& params;
  float lse[2] = {};      // in log2; of huge rows log2(row_sum)
  float row_max[2] = {};  // of huge rows
  bool has_huge = false;  // in this warp
  float delta[2] = {};

  QueryTerms(const BackwardDqParams& of, const QueryBlock& block, const Place& place, i32 row)
      : params(of.forward) {
    const bool packed = kConfig.sequences && params.attention.packed;
    const i64 line = (packed ? 0 : i64(block.batch)) * params.heads_q + block.head;
    const i64 first = line * of.rows_of_head + padded_row(packed, block.batch, place.q_begin);
    for (i32 r = 0; r < 2; ++r) {
      const i64 at = first + min(row + 8 * r, place.shape.q_len - 1);
      if (place.shape.q_len <= 0) continue;
      delta[r] = of.delta[at];
      lse[r] = of.rows[kConfig.stats ? kept_row(at) : at];
      if constexpr (kConfig.stats) row_max[r] = of.rows[kept_row(at) + kKeptBlock];
    }
    if constexpr (kConfig.stats) has_huge = ptx::any(row_max[0] != 0 || row_max[1] != 0);
  }

  Slopes slopes(const Scores& dots) const {
    Slopes slopes{};
    if constexpr (kConfig.softcap) {
#pragma unroll
      for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) {
        const float t = tanh_log2(dots[i] * params.softcap_in);
        slopes.of[i] = 1 - t * t;
      }
    }
    return slopes;
  }

  // Scores relative to row_max in huge rows, as lse is.
  void lower_huge(Scores& S) const {
    if (!kConfig.stats || !has_huge) return;
    const HugeScores huge(kConfig.maps_scores() ? kLn2 : params.scale);
#pragma unroll
    for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) S[i] = huge.lowered(S[i], row_max[i / 2 % 2]);
  }

  // P = exp(score - lse), from dot products or, where options map them, from scores in log2.
  void exponentiate(Scores& S) const {
#pragma unroll
    for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) {
      const float factor = kConfig.maps_scores() ? 1.f : params.scale_log2;
      S[i] = ptx::exp2_in_place(ptx::fma(S[i], factor, -lse[i / 2 % 2]));
    }
  }

  // dP of the pairs that dropout keeps, times what they were divided by; 0 of the others.
  void drop(Scores& dP, const FragmentScores<kConfig>& scores, i32 first_key) const {
    if constexpr (kConfig.dropout) {
#pragma unroll
      for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) dP[i] *= params.kept_scale;
      scores.pairs.drop(dP, first_key);
    }
  }

  // S = P (dP - delta), and through the cap.
  void form_ds(Scores& S, const Scores& dP, const Slopes& slopes) const {
#pragma unroll
    for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) {
      S[i] *= dP[i] - delta[i / 2 % 2];
      if constexpr (kConfig.softcap) S[i] *= slopes.of[i];
    }
  }
};

}  // namespace fulmen
