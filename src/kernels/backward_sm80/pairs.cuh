// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a warp's tiles of S = Q K^T and dP = dO V^T to P and dS, rounded, in shared memory, with
// bias, masks, score modifier, ALiBi, a user's score and mask, dropout; dbias, and gradients of
// what a user's score reads. Called by backward_sm80.
#pragma once

#include "kernels/backward_sm80/mask.cuh"
#include "kernels/backward_sm80/softmax.cuh"
#include "kernels/common/array_access.cuh"
#include "kernels/common/fragment_captures.cuh"
#include "kernels/common/pair_tiles_sm80.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

// dbias, which is dS: copied from its tiles in shared memory (config.tiled_dbias), or stored pair
// by pair, or added to float32 sums where several pairs share one element.
template <BackwardSm80Config kConfig>
struct BackwardDbiasSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;

  const BackwardSm80Params& params;

  // The tile of dS of a step, by all threads of the block.
  void copy(const BackwardStorageSm80<kConfig>& storage, const Step& step) const {
    constexpr i32 kVectors = kConfig.kv_rows / 8;
    const ArrayView& dbias = params.attention.dbias;
    const SequenceShape& shape = step.head.sequence.shape;
    const auto tile = storage.ds_tile(step.pair_stage);
    u16* const to = reinterpret_cast<u16*>(dbias.data) +
                    dbias.offset(step.head.index, step.head.head, step.first_row, step.first_key);
#pragma unroll
    for (i32 i = 0; i < kConfig.q_rows * kVectors; i += kConfig.threads()) {
      const i32 at = i + static_cast<i32>(ptx::thread_index());
      const i32 row = at / kVectors, vector = at % kVectors;
      if (row < kConfig.q_rows && step.first_row + row < shape.q_len &&
          step.first_key + 8 * vector < shape.kv_len) {
        const u32 from = tile.address(static_cast<u32>(row), static_cast<u32>(vector));
        ptx::store_global_x4(to + row * dbias.strides[2] + 8 * vector, ptx::load_shared_x4(from));
      }
    }
  }

  // dS of hidden pairs becomes 0, whatever it was.
  static void hide(typename Step::Scores& dS, const typename Step::Scores& P) {
#pragma unroll
    for (i32 t = 0; t < Step::kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < Step::kFloats; ++i) dS[t][i] = is_hidden_weight(P[t][i]) ? 0.f : dS[t][i];
    }
  }

  // Pair by pair, after hide().
  void take(const typename Step::Scores& dS, const Step& step, const Part& part) const {
    const SequenceShape& shape = step.head.sequence.shape;
    const i64 key = step.first_key + part.column + Step::Fragments::column(0);
    const i32 num_keys = static_cast<i32>(shape.kv_len - key);
#pragma unroll
    for (i32 t = 0; t < Step::kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i64 row = step.first_row + part.row + Step::Fragments::row(t, h);
        if (row < shape.q_len) take_row(dS[t], h, step, row, key, num_keys);
      }
    }
  }

 private:
  // Row h of the thread's two, of which `num_keys` count.
  void take_row(const float (&dS)[Step::kFloats], i32 h, const Step& step, i64 row, i64 key,
                i32 num_keys) const {
    const AttentionParams& p = params.attention;
    const i64 index = p.dbias_extents[0] == 1 ? 0 : step.head.index;
    const i64 head = p.dbias_extents[1] == 1 ? 0 : step.head.head;
    if constexpr (kConfig.accumulates_dbias) {
      float* const to =
          params.dbias_accum +
          ((index * p.dbias_extents[1] + head) * p.dbias_extents[2] + row) * p.dbias_extents[3] +
          key;
      each(dS, h, num_keys, [&](i32 at, float x) { ptx::reduce_add(to + at, x); });
    } else {
      const i64 to = p.dbias.offset(index, head, row, key);
      each(dS, h, num_keys,
           [&](i32 at, float x) { store_real_called(p.dbias, to + at * p.dbias.strides[3], x); });
    }
  }

  template <class Take>
  static void each(const float (&dS)[Step::kFloats], i32 h, i32 num_keys, const Take& take_one) {
#pragma unroll
    for (i32 f = 2 * h; f < Step::kFloats; f += 4) {
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        const i32 at = 8 * (f / 4) + e;
        if (at < num_keys) take_one(at, dS[f + e]);
      }
    }
  }
};

template <BackwardSm80Config kConfig>
struct BackwardPairsSm80 {
  using HeadType = BackwardHeadOf<kConfig>;
  using Tiles = BackwardStorageSm80<kConfig>;
  using Weights = BackwardSoftmaxSm80<kConfig>;
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;
  using Scores = typename Step::Scores;
  static constexpr i32 kTiles = Step::kTiles;
  static constexpr i32 kFloats = Step::kFloats;

  const BackwardSm80Params& params;
  Tiles storage;
  Weights weights;
  BackwardMaskSm80<kConfig> mask;
  FragmentCaptures<typename WarpScores<kConfig.scores()>::User, kConfig.score.user.captures>
      captures{kConfig.ds_scale()};
  bool met_nonfinite = false;  // a part that is not seen whole met a number that is not finite

  BackwardPairsSm80(const BackwardSm80Params& params_, const Tiles& storage_)
      : params(params_), storage(storage_), weights{params_.attention, storage_}, mask{storage_} {}

  // P and dS of this warp's tiles, into shared memory.
  void compute(const Step& step) {
    each_part(step, true, [&](const Part& part, const PartMask& seen, i32, bool has_moderate_max) {
      compute_both(step, part, seen, has_moderate_max);
    });
  }
  // P alone.
  void compute_p(const Step& step) {
    const bool may_unroll = !kConfig.unrolled || mask.has_moderate_max(step);
    each_part(step, may_unroll,
              [&](const Part& part, const PartMask& seen, i32 number, bool has_moderate_max) {
                Scores P;
                weights.multiply_q_k(P, step, part);
                IgnoreSlopes ignore;
                to_probabilities(P, step, part, seen, has_moderate_max, ignore, [] {});
                Weights::share(P, storage.p_tile(), part);
                storage.arrive_p_ready(number);
              });
  }
  // dS, when the other role has P in shared memory.
  void compute_ds(const Step& step) {
    each_part(step, true, [&](const Part& part, const PartMask& seen, i32 number, bool) {
      Scores dP;
      weights.multiply_dout_v(dP, step, part);
      check(dP, step, part, seen);
      storage.wait_p_ready(number);
      weights.form_ds_of_shared(dP, step, part);
      Weights::share(dP, storage.ds_tile(step.pair_stage), part);
    });
  }

 private:
  using WarpScoresType = WarpScores<kConfig.scores()>;
  static constexpr UserTerms kUser = kConfig.score.user;
  // Of a user's score: its slopes, and what it is given, for gradients of what it reads.
  struct UserSlopes {
    static constexpr bool kWanted = kUser.score && kConfig.needs_ds();
    float of[kWanted ? kTiles : 1][kWanted ? kFloats : 1];
    float before[kUser.captures ? kTiles : 1][kUser.captures ? kFloats : 1];
    void operator()(i32 t, i32 i, float slope, float s) {
      of[t][i] = slope;
      if constexpr (kUser.captures) before[t][i] = s;
    }
  };

  static constexpr i32 kUnroll = kConfig.unrolled ? kConfig.parts() : 1;

  // Parts side by side have no branch between products and arithmetic: that no row's maximum is too
  // large is known before.
  template <class Compute>
  void each_part(const Step& step, bool may_unroll, const Compute& compute_part) const {
    if (may_unroll && step.is_full && !kConfig.hides_pairs()) {
#pragma unroll kUnroll
      for (i32 number = 0; number < kConfig.parts(); ++number) {
        if (!has_part(number)) continue;
        compute_part(part_of(number), PartMask{true, false}, number, kConfig.unrolled);
      }
    } else {
#pragma unroll 1
      for (i32 number = 0; number < kConfig.parts(); ++number) {
        if (!has_part(number)) break;
        const Part part = part_of(number);
        compute_part(part, mask.of(step, part), number, false);
      }
    }
  }
  i32 tile_of(i32 number) const {
    return static_cast<i32>(storage.warp_in_group()) + number * kConfig.group_warps();
  }
  bool has_part(i32 number) const {
    return kConfig.group_tiles() % kConfig.group_warps() == 0 ||
           tile_of(number) < kConfig.group_tiles();
  }
  Part part_of(i32 number) const {
    constexpr i32 kAcross = kConfig.group_columns() / kConfig.s_columns;
    const i32 tile = tile_of(number);
    return {tile / kAcross * kConfig.s_rows,
            static_cast<i32>(storage.group()) * kConfig.group_columns() +
                tile % kAcross * kConfig.s_columns};
  }

  // A hidden pair has P = dS = 0, and 0 times NaN is NaN.
  void check(const Scores& S, const Step& step, const Part& part, const PartMask& seen) {
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
    met_nonfinite = met_nonfinite || finite.fails();
  }

  static WarpScoresType scores_of(const Step& step, const Part& part) {
    return {step.head, step.first_row + part.row};
  }

  // S = P; look_at_scores() is called when scores are capped and nothing is hidden yet; slopes of a
  // user's score go to take_slope. has_moderate_max: known to be.
  template <class TakeSlope, class Look>
  void to_probabilities(Scores& S, const Step& step, const Part& part, const PartMask& seen,
                        bool has_moderate_max, TakeSlope& take_slope, const Look& look_at_scores) {
    check(S, step, part, seen);
    const WarpScoresType scores = scores_of(step, part);
    const i64 first_key = step.first_key + part.column;
    scores.map(S, first_key);
    look_at_scores();
    PairTiles<kConfig.pairs()>::template apply<true>(S, storage.pairs_at(step.stage), part.row,
                                                     part.column);
    // The forward pass has told of indices out of range.
    constexpr bool kHidden = kConfig.score.hides_before_user();
    if (kUser.score || kConfig.score.asks_user_mask() || !seen.all) {
      scores.template ask_user<kHidden, kUser.mask, false>(S, first_key, take_slope);
    }
    mask.hide(S, step, part, seen);
    weights.to_probabilities(S, step, part, has_moderate_max || mask.has_moderate_max(step));
  }

  void compute_both(const Step& step, const Part& part, const PartMask& seen,
                    bool has_moderate_max) {
    Scores P, slope;
    weights.multiply_q_k(P, step, part);
    if constexpr (kConfig.score.score_mod && kConfig.score.alibi) cap_slopes(slope, P, step.head);
    UserSlopes user_slopes;
    to_probabilities(P, step, part, seen, has_moderate_max, user_slopes, [&] {
      if constexpr (kConfig.score.score_mod && !kConfig.score.alibi)
        slopes_of_capped(slope, P, step.head);
    });
    u32 kept[kTiles * kFloats / 32 + 1] = {};
    share_p(P, kept, step, part);
    if constexpr (!kConfig.needs_ds()) return;
    Scores dP;
    weights.multiply_dout_v(dP, step, part);
    check(dP, step, part, seen);
    if constexpr (kConfig.score.dropout) {
      drop(dP, kept, static_cast<float>(step.head.dropout.kept_scale()));
    }
    weights.form_ds(dP, P, step, part);
    pass_user(dP, P, user_slopes, step, part);
    if constexpr (kConfig.dbias) {
      const BackwardDbiasSm80<kConfig> bias{params};
      bias.hide(dP, P);
      if constexpr (!kConfig.tiled_dbias) bias.take(dP, step, part);
    }
    if constexpr (kConfig.score.score_mod) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) dP[t][i] *= slope[t][i];
      }
    }
    Weights::share(dP, storage.ds_tile(step.pair_stage), part);
  }

  // From dS of the user's score to that of the score before, 0 of hidden pairs whatever its slope
  // is; and what the pairs add to gradients of what it reads.
  void pass_user(Scores& dS, const Scores& P, const UserSlopes& slopes, const Step& step,
                 const Part& part) {
    if constexpr (!kUser.score) return;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      if constexpr (kUser.captures) {
#pragma unroll
        for (i32 i = 0; i < kFloats; ++i) dS[t][i] = P[t][i] == 0 ? 0.f : dS[t][i];
        captures.add(scores_of(step, part).user_pairs(t), dS[t], slopes.before[t],
                     step.first_key + part.column);
      }
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        dS[t][i] = P[t][i] == 0 ? 0.f : dS[t][i] * slopes.of[t][i];
      }
    }
  }

  // dS / dS before the cap, from raw dot products.
  static void cap_slopes(Scores& slope, const Scores& S, const HeadType& head) {
    const float twice_log2 = 2 * kLog2E<float> * head.map.scale / head.map.outer();
    slopes_of_tanh(slope, S, [=](float s) { return tanh_log2(s * twice_log2); });
  }
  // The same from scores after the cap, in nats.
  static void slopes_of_capped(Scores& slope, const Scores& S, const HeadType& head) {
    static_assert(kConfig.scales_scores() || !kConfig.score.score_mod);
    const float inverse = 1 / head.map.outer();
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
    if constexpr (kConfig.score.dropout) {
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
    if constexpr (kConfig.dv) Weights::share(taken, storage.p_tile(), part);
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
