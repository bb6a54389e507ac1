// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a warp's tiles of S = Q K^T and dP = dO V^T to P and dS, rounded, in shared memory, with
// every option that has a say over pairs. Called by backward_sm80.
#pragma once

#include "kernels/tile/backward_bias_sm80.cuh"
#include "kernels/tile/backward_weights_sm80.cuh"
#include "kernels/tile/pair_tiles.cuh"
#include "kernels/tile/warp_dropout.cuh"

namespace fulmen {

template <Sm80BackwardConfig kConfig>
struct BackwardPairsSm80 {
  using HeadType = Head<kConfig.dtype>;
  using Tiles = BackwardTilesSm80<kConfig>;
  using Weights = BackwardWeightsSm80<kConfig>;
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;
  using Scores = typename Step::Scores;
  static constexpr i32 kTiles = Step::kTiles;
  static constexpr i32 kFloats = Step::kFloats;

  const Sm80BackwardParams& params;
  Tiles tiles;
  Weights weights;
  BackwardSightSm80<kConfig> sight;
  bool suspect = false;  // a part that is not seen whole met a number that is not finite

  BackwardPairsSm80(const Sm80BackwardParams& params_, const Tiles& tiles_)
      : params(params_), tiles(tiles_), weights{params_.attention, tiles_}, sight{tiles_} {}

  // P and dS of this warp's tiles, into shared memory.
  void compute(const Step& step) {
    each_part(step, [&](const Part& part, const PartSight& seen, auto careful) {
      compute_both<careful.kValue>(step, part, seen);
    });
  }
  // P alone.
  void compute_weights(const Step& step) {
    each_part(step, [&](const Part& part, const PartSight& seen, auto careful) {
      Scores P;
      weights.multiply_q_k(P, step, part);
      weigh<careful.kValue>(P, step, part, seen, [] {});
      Weights::share(P, tiles.p_tile(), part);
    });
  }
  // dS, when other warps have P in shared memory.
  void compute_ds(const Step& step) {
    bool awaited = false;
    each_part(step, [&](const Part& part, const PartSight& seen, auto careful) {
      Scores dP;
      weights.multiply_dout_v(dP, step, part);
      if constexpr (careful.kValue) check(dP, step, part, seen);
      if (!awaited) tiles.await_weights();
      awaited = true;
      weights.form_ds_of_shared(dP, step, part);
      Weights::share(dP, tiles.ds_tile(step.pair_stage), part);
    });
  }

 private:
  template <bool kCareful>
  struct Careful {
    static constexpr bool kValue = kCareful;
  };

  // The parts of this warp, with the text that their steps need.
  template <class Compute>
  void each_part(const Step& step, const Compute& compute_part) const {
    if (step.is_full && !kConfig.hides_pairs()) {
      walk_parts(
          [&](const Part& part) { compute_part(part, PartSight{true, false}, Careful<false>{}); });
    } else {
      walk_parts(
          [&](const Part& part) { compute_part(part, sight.of(step, part), Careful<true>{}); });
    }
  }
  template <class Visit>
  void walk_parts(const Visit& visit) const {
    constexpr i32 kAcross = kConfig.team_columns() / kConfig.s_columns;
#pragma unroll 1
    for (i32 tile = tiles.member(); tile < kConfig.team_tiles(); tile += kConfig.team_warps()) {
      visit(Part{tile / kAcross * kConfig.s_rows,
                 static_cast<i32>(tiles.team()) * kConfig.team_columns() +
                     tile % kAcross * kConfig.s_columns});
    }
  }

  // A hidden pair has P = dS = 0, and 0 times NaN is NaN.
  void check(const Scores& S, const Step& step, const Part& part, const PartSight& seen) {
    if (seen.all && !kConfig.hides_pairs()) return;
    FiniteCheck finite;
    finite.meet(S);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      typename Weights::Rows rows;
      weights.read_rows(rows, step, part, t);
      finite.meet(rows[0].offset);
      finite.meet(rows[1].offset);
    }
    suspect = suspect || finite.fails();
  }

  // S = P; look_at_scores() is called when scores are capped and nothing is hidden yet.
  template <bool kCareful, class Look>
  void weigh(Scores& S, const Step& step, const Part& part, const PartSight& seen,
             const Look& look_at_scores) {
    if constexpr (kCareful) check(S, step, part, seen);
    WarpScores<kConfig.scores()>{step.head, step.first_row + part.row}.map(
        S, step.first_key + part.column);
    look_at_scores();
    PairTiles<kConfig.pairs()>::template apply<true>(S, tiles.pairs_at(step.stage), part.row,
                                                     part.column);
    if constexpr (kCareful) sight.hide(S, step, part, seen);
    weights.weigh(S, step, part);
  }

  template <bool kCareful>
  void compute_both(const Step& step, const Part& part, const PartSight& seen) {
    Scores P, slope;
    weights.multiply_q_k(P, step, part);
    if constexpr (kConfig.softcap && kConfig.alibi) cap_slopes(slope, P, step.head);
    weigh<kCareful>(P, step, part, seen, [&] {
      if constexpr (kConfig.softcap && !kConfig.alibi) slopes_of_capped(slope, P, step.head);
    });
    u32 kept[kTiles * kFloats / 32 + 1] = {};
    share_p(P, kept, step, part);
    if constexpr (!kConfig.needs_ds()) return;
    Scores dP;
    weights.multiply_dout_v(dP, step, part);
    if constexpr (kCareful) check(dP, step, part, seen);
    if constexpr (kConfig.dropout) {
      drop(dP, kept, static_cast<float>(step.head.dropout.kept_scale()));
    }
    weights.form_ds(dP, P, step, part);
    if constexpr (kConfig.dbias) {
      const BackwardBiasSm80<kConfig> bias{params};
      bias.hide(dP, P);
      if constexpr (!kConfig.tiled_dbias) bias.take(dP, step, part);
    }
    if constexpr (kConfig.softcap) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) dP[t][i] *= slope[t][i];
      }
    }
    Weights::share(dP, tiles.ds_tile(step.pair_stage), part);
  }

  // dS / dS before the cap, from raw dot products.
  static void cap_slopes(Scores& slope, const Scores& S, const HeadType& head) {
    const float twice_log2 = 2 * kWarpLog2E * head.map.scale / head.map.softcap;
    slopes_of_tanh(slope, S, [=](float s) { return tanh_log2(s * twice_log2); });
  }
  // The same from scores after the cap, in nats.
  static void slopes_of_capped(Scores& slope, const Scores& S, const HeadType& head) {
    static_assert(kConfig.natural || !kConfig.softcap);
    const float inverse = 1 / head.map.softcap;
    slopes_of_tanh(slope, S, [=](float s) { return s * inverse; });
  }
  template <class Tanh>
  static void slopes_of_tanh(Scores& slope, const Scores& S, const Tanh& tanh) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        const float x = tanh(S[t][i]);
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
  void share_p(const Scores& P, u32 (&kept)[kWords], const Step& step, const Part& part) const {
    Scores taken;
    copy(taken, P);
    if constexpr (kConfig.split_sum) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        typename Weights::Rows rows;
        weights.read_rows(rows, step, part, t);
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
      WarpDropout<kConfig.scores()>{step.head, step.first_row + part.row}.drop(
          marks, step.first_key + part.column);
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
    if constexpr (kConfig.dv) Weights::share(taken, tiles.p_tile(), part);
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
