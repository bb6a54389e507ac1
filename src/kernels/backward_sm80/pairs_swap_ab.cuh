// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// P and dS of a warp that owns keys alone (swap A B): S^T = K Q^T and dP^T = V dO^T, whose
// fragments become left operands of dV and dK without leaving registers. Through shared memory P
// goes to the warp that makes dS of it, fragment by fragment, and dS^T to the warps that make dQ of
// it. Called by backward_sm80 where roles are split.
#pragma once

#include "kernels/backward_sm80/mask.cuh"
#include "kernels/common/fragments.cuh"

namespace fulmen {

template <BackwardSm80Config kConfig>
struct BackwardSoftmaxSwapAbSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;
  static constexpr i32 kTiles = kConfig.dkv_rows / 16;
  static constexpr i32 kFloats = kConfig.s_rows / 2;  // of 16 keys
  using Scores = float[kTiles][kFloats];

  const AttentionParams& p;
  BackwardStorageSm80<kConfig> storage;
  BackwardMaskSm80<kConfig> mask{storage};

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
      const KeyRangeSm80 seen = mask.columns(step, row);
      const i32 begin = seen.begin - own, end = seen.end - own;
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        hide_in_column(S[t], f, [&](i32 h) {
          const i32 at = 16 * t + 8 * h;
          return at < begin || at >= end;
        });
      }
    });
  }

  // S = P, 0 where hidden. has_moderate_max: see BackwardMaskSm80.
  void to_probabilities(Scores& S, const Step& step, const Part& part,
                        bool has_moderate_max) const {
    const float scale_nats = static_cast<float>(p.score_map.scale);
    const float scale_log2 = static_cast<float>(p.score_map.scale * kLog2E<double>);
    if (has_moderate_max) {
      exponentiate(S, step, part, [&](float s, float row_max, float sum_log2) {
        return ptx::fma(s, scale_log2, -ptx::fma(row_max, kLog2E<float>, sum_log2));
      });
    } else {
      exponentiate(S, step, part, [&](float s, float row_max, float sum_log2) {
        const float below = ptx::max(row_max - ptx::mul(s, scale_nats), 0.f);
        return ptx::fma(-below, kLog2E<float>, -sum_log2);
      });
    }
  }

  // dP = dS; weights(t, k, P): P of 16 keys and 16 queries.
  template <class Weights>
  void form_ds(Scores& dP, const Step& step, const Part& part, const Weights& weights) const {
    constexpr float kToDs = kConfig.p_to_ds();
#pragma unroll
    for (i32 k = 0; k < kConfig.s_rows / 16; ++k) {
      float offsets[2][2];
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 row = part.row + query(8 * k + i / 2 * 4 + i % 2);
        offsets[i / 2][i % 2] = of_row(step, row, kOffset) * kToDs;
      }
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        float P[8];
        weights(t, k, P);
#pragma unroll
        for (i32 i = 0; i < 8; ++i) {
          float& x = dP[t][8 * k + i];
          const float offset = offsets[i / 4][i % 2];
          x = P[i] * (kToDs == 1 ? x + offset : ptx::fma(kToDs, x, offset));
        }
      }
    }
  }

 private:
  static i32 lane() { return static_cast<i32>(lane_index()); }
  // Of a part, the query of float f of 16 keys.
  static i32 query(i32 f) { return 8 * (f / 4) + 2 * (lane() % 4) + f % 2; }

  u32 row_at(const Step& step, i32 row) const {
    return storage.rows_at(step.stage) + static_cast<u32>(row) * 16;
  }
  static constexpr u32 kOffset = 2;  // of the words of RowStatsSm80
  float of_row(const Step& step, i32 row, u32 word) const {
    return __builtin_bit_cast(float, ptx::load_shared(row_at(step, row) + 4 * word));
  }

  // The part's rows among the lanes.
  template <class Each>
  static void each_row(const Part& part, const Each& each) {
#pragma unroll
    for (i32 at = 0; at < kConfig.s_rows; at += 32) {
      each(part.row + min(at + lane(), kConfig.s_rows - 1));
    }
  }
  // The queries of the thread's floats, with the first float of each.
  template <class Each>
  static void each_query(const Part& part, const Each& each) {
#pragma unroll
    for (i32 f = 0; f < kFloats; f += 4) {
#pragma unroll
      for (i32 e = 0; e < 2; ++e) each(part.row + query(f + e), f + e);
    }
  }
  // The thread's keys of a query, from its first one on.
  template <class Each>
  static void each_key(Scores& S, i32 f, const Each& each) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) each(S[t][f + 2 * h], 16 * t + 8 * h);
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

template <BackwardSm80Config kConfig>
struct BackwardPairsSwapAbSm80 {
  using Tiles = BackwardStorageSm80<kConfig>;
  using Products = typename Tiles::Products;
  using Weights = BackwardSoftmaxSwapAbSm80<kConfig>;
  using Step = typename Weights::Step;
  using Part = typename Weights::Part;
  using Scores = typename Weights::Scores;
  static constexpr i32 kTiles = Weights::kTiles;
  static constexpr i32 kSteps = kConfig.s_rows / 16;  // of queries
  using Fragments = ptx::U32x4[kTiles][kSteps];       // of scores, rounded

  Tiles storage;
  Weights weights;
  ptx::U32x4 keys[kTiles][kConfig.d_qk / 16];  // this warp's rows of K, or of V
  bool met_nonfinite = false;  // a part that is not seen whole met what is not finite

  BackwardPairsSwapAbSm80(const BackwardSm80Params& params, const Tiles& storage_)
      : storage(storage_), weights{params.attention, storage_} {}

  // K and V have arrived.
  void load_registers() {
    const auto rows = left_rows(storage.computes_p() ? storage.k_tile() : storage.v_tile(),
                                storage.group() * kConfig.dkv_rows);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 k = 0; k < kConfig.d_qk / 16; ++k) keys[t][k] = ptx::ldmatrix_x4(rows.at(k, 16 * t));
    }
  }

  // P of this warp's keys and dV += P^T dO.
  template <class Sums>
  void add_dv(Sums& dV, const Step& step) {
    const bool may_unroll = kConfig.unrolled && weights.mask.has_moderate_max(step);
    each_part(step, may_unroll,
              [&](const Part& part, const PartMask& seen, i32 number, bool has_moderate_max) {
                Scores S;
                multiply(S, storage.q_tile(step.stage), part);
                check(S, step, part, seen);
                if (!seen.all) weights.hide(S, step, part);
                weights.to_probabilities(S, step, part,
                                         has_moderate_max || weights.mask.has_moderate_max(step));
                Fragments P;
                round(P, S);
                store_p_fragments(P, number);
                add(dV, P, storage.dout_tile(step.stage), part);
              });
  }

  // dS of this warp's keys, when the other one has P, and dK += dS^T Q.
  template <class Sums>
  void add_dk(Sums& dK, const Step& step) {
    each_part(step, kConfig.unrolled,
              [&](const Part& part, const PartMask& seen, i32 number, bool) {
                Scores dP;
                multiply(dP, storage.dout_tile(step.stage), part);
                check(dP, step, part, seen);
                storage.wait_p_ready(number);
                weights.form_ds(dP, step, part, [&](i32 t, i32 k, float (&P)[8]) {
                  Products::numbers(ptx::load_shared_x4(p_fragment_at(number, t, k)), P);
                });
                Fragments dS;
                round(dS, dP);
                share(dS, step, part);
                add(dK, dS, storage.q_tile(step.stage), part);
              });
  }

 private:
  // As in BackwardPairsSm80.
  template <class Compute>
  void each_part(const Step& step, bool may_unroll, const Compute& compute_part) const {
    const auto part_of = [&](i32 number) {
      return Part{number * kConfig.s_rows, static_cast<i32>(storage.group()) * kConfig.dkv_rows};
    };
    if (may_unroll && step.is_full) {
#pragma unroll
      for (i32 number = 0; number < kConfig.parts(); ++number) {
        compute_part(part_of(number), PartMask{true, false}, number, true);
      }
    } else {
#pragma unroll 1
      for (i32 number = 0; number < kConfig.parts(); ++number) {
        compute_part(part_of(number), weights.mask.of(step, part_of(number)), number, false);
      }
    }
  }

  template <i32 kWords>
  void multiply(Scores& S, const SwizzledTile<kWords, kConfig.swizzle>& queries,
                const Part& part) const {
    const auto right = right_rows(queries, part.row);
    Products::template set_scores<kConfig.d_qk>(
        S, [&](i32 k, i32 t) { return keys[t][k]; },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
  }

  // sums += pairs tile, whose rows are queries.
  template <i32 kSumFloats, i32 kWords>
  void add(float (&sums)[kTiles][kSumFloats], const Fragments& pairs,
           const SwizzledTile<kWords, kConfig.swizzle>& queries, const Part& part) const {
    const auto right = right_columns(queries);
    Products::template multiply<kConfig.s_rows>(
        sums, [&](i32 k, i32 t) { return pairs[t][k]; },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4_trans(right.at(n, part.row + 16 * k)); });
  }

  static void round(Fragments& to, const Scores& S) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 k = 0; k < kSteps; ++k) to[t][k] = Products::words(&S[t][8 * k]);
    }
  }

  // A hidden pair has P = dS = 0, and 0 times NaN is NaN.
  void check(const Scores& S, const Step& step, const Part& part, const PartMask& seen) {
    met_nonfinite = met_nonfinite || (!seen.all && !weights.are_finite(S, step, part));
  }

  // Where a lane puts a fragment of P for the other role.
  u32 p_fragment_at(i32 number, i32 t, i32 k) const {
    const u32 part = storage.group() * kConfig.parts() + static_cast<u32>(number);
    const u32 fragment = (part * kTiles + static_cast<u32>(t)) * kSteps + static_cast<u32>(k);
    return storage.p_fragments() + fragment * 512 + lane_index() * 16;
  }
  void store_p_fragments(const Fragments& P, i32 number) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 k = 0; k < kSteps; ++k) ptx::store_shared_x4(p_fragment_at(number, t, k), P[t][k]);
    }
    storage.arrive_p_ready(number);
  }

  // dS^T, to shared memory.
  void share(const Fragments& dS, const Step& step, const Part& part) const {
    const auto tile = storage.ds_of_keys(step.pair_stage);
    const auto to = left_rows(tile, part.column);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 k = 0; k < kSteps; ++k) {
        const u32 pair = static_cast<u32>(part.row / 16 + k);
        if constexpr (kConfig.hopper) {
          ptx::stmatrix_x4(to.at(pair, 16 * t), dS[t][k]);
        } else {
#pragma unroll
          for (i32 w = 0; w < 4; ++w) {
            const u32 key = static_cast<u32>(part.column + 16 * t + w % 2 * 8) + lane_index() / 4;
            ptx::store_shared(tile.address(key, 2 * pair + w / 2) + lane_index() % 4 * 4,
                              dS[t][k].word[w]);
          }
        }
      }
    }
  }
};

}  // namespace fulmen
