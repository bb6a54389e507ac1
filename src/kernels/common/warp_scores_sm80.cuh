// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What happens to a warp's scores in mma fragments that depends on nothing but their values and
// their positions in the sequence, so not on tiles: scale, score modifier, ALiBi, a user's score
// and mask; and dropout of its probabilities. Used by forward_sm80 and backward_sm80.
#pragma once

#include "kernels/common/fast_score_mod.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/user_pairs.cuh"
#include "kernels/common/warp_mma_sm80.cuh"

namespace fulmen {

template <ForwardSm80Config kConfig>
struct WarpScores {
  using User =  // of 16 rows
      UserPairs<kConfig.dtype, kConfig.score.user, kConfig.warp_columns()>;
  static constexpr i32 kColumns = kConfig.warp_columns();
  static constexpr i32 kTiles = kConfig.row_tiles;

  const HeadOf<kConfig>& head;
  i64 warp_row;  // first row of this warp in its sequence

  static i32 row(i32 t, i32 h) { return 16 * t + 8 * h + static_cast<i32>(lane_index() / 4); }
  static i32 column(i32 i) { return kConfig.first_column_of(lane_index()) + kConfig.column_of(i); }

  // Scale where config.scales_scores(), score modifier, ALiBi; as ForwardSoftmaxSm80 takes scores.
  template <i32 kFloats>
  void map(float (&S)[kTiles][kFloats], i64 first_column) const {
    if constexpr (kConfig.score.score_mod) {
      cap(S);
    } else if constexpr (kConfig.scales_scores()) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 f = 0; f < kFloats; ++f) S[t][f] *= head.map.scale;
      }
    }
    if constexpr (kConfig.score.alibi) add_alibi(S, first_column);
  }

  // What is wrong with segments, where no kernel of lists of tiles looks at them. By a grid.
  static void record_faults(const AttentionParams& p) {
    if constexpr (kConfig.score.asks_user_mask()) {
      record_segment_faults<typename User::User>(p, expression_of(p), kConfig.threads());
    }
  }

  // Rows of tile t, as a user's expression takes them.
  User user_pairs(i32 t) const {
    return {&expression_of(head.p), head.pair(0, 0), static_cast<i32>(warp_row) + row(t, 0)};
  }

  // What the user makes of the scores, and his mask of the pairs. As UserPairs::map;
  // take_slope(t, i, slope, score before) unless it is IgnoreSlopes.
  template <bool kHidden, bool kMask, bool kTells, i32 kFloats, class TakeSlope>
  void ask_user(float (&S)[kTiles][kFloats], i64 first_column, TakeSlope& take_slope) const {
    const i32 first_key = static_cast<i32>(first_column);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      if constexpr (kConfig.score.user.score) {
        const User pairs = user_pairs(t);
        TileSlopes<TakeSlope> of_tile{take_slope, t};
        pairs.template map<kHidden, kMask, kTells>(S[t], first_key, pairs.along(first_key),
                                                   of_tile);
      } else if constexpr (kMask) {
        user_pairs(t).template hide<kHidden, kTells>(S[t], first_key);
      }
    }
  }

  // The same without slopes, when all that else hides a pair has; or where arrays alone may have.
  template <i32 kFloats>
  void ask_user(float (&S)[kTiles][kFloats], i64 first_column) const {
    IgnoreSlopes ignore;
    ask_user<true, kConfig.score.user.mask, true>(S, first_column, ignore);
  }
  template <i32 kFloats>
  void ask_user_of_full_block(float (&S)[kTiles][kFloats], i64 first_column) const {
    constexpr bool kHidden = kConfig.score.hides_before_user();
    IgnoreSlopes ignore;
    ask_user<kHidden, kConfig.score.asks_user_mask(), true>(S, first_column, ignore);
  }

  // Whether ALiBi is affine in the block of keys from `block_column` on, the same for a group: no
  // key is after a query, or none before.
  bool is_one_sided(i64 block_column) const {
    if constexpr (!kConfig.maps_in_exponent() || !kConfig.score.alibi) return true;
    const i32 first = position(block_column);
    return first >= kConfig.kv_rows - 1 || is_after(first);
  }

  // Whether the score modifier is a polynomial of all scores of the warp.
  template <i32 kFloats>
  bool is_smooth(const float (&S)[kTiles][kFloats]) const {
    if constexpr (!kConfig.maps_in_exponent() || !kConfig.score.score_mod) return true;
    return is_below(S, 0.25f * head.map.outer() * ptx::reciprocal(head.map.scale));
  }

  // Score modifier or ALiBi in the exponent of a block that all rows see whole, one-sided and
  // smooth: S becomes weights.
  template <i32 kFloats, class Softmax>
  void exponentiate_mapped(float (&S)[kTiles][kFloats], const Softmax& softmax,
                           float (&block_sum)[kTiles][2], i64 first_column) const {
    if constexpr (kConfig.score.score_mod) {
      const float inner = head.map.scale * ptx::reciprocal(head.map.outer());
      softmax.exponentiate(S, block_sum, true, CappedExponent{{inner, softmax.scale_log2}});
    } else {
      const i32 first = position(first_column);
      const float slope =
          is_before(first) ? head.alibi * kLog2E<float> : -head.alibi * kLog2E<float>;
      softmax.exponentiate(S, block_sum, true, SlopedExponent{softmax.scale_log2, slope, first});
    }
  }

 private:
  template <class TakeSlope>
  struct TileSlopes {
    static constexpr bool kWanted = TakeSlope::kWanted;
    TakeSlope& take;
    i32 t;
    void operator()(i32 i, float slope, float s) const { take(t, i, slope, s); }
  };

  // As ScaledExponent.
  struct CappedExponent {
    TanhSlope slope;
    float offset(float offset, i32, i32) const { return offset; }
    float operator()(float s, float offset, i32) const { return ptx::fma(s, slope(s), offset); }
  };
  struct SlopedExponent {
    float scale_log2, slope;
    i32 first;
    float offset(float offset, i32 t, i32 h) const {
      return ptx::fma(-slope, static_cast<float>(first + row(t, h) - column(0)), offset);
    }
    float operator()(float s, float offset, i32 f) const {
      return ptx::fma(slope, static_cast<float>(kConfig.column_of(f)),
                      ptx::fma(s, scale_log2, offset));
    }
  };

  // Of tanh.
  float inner_factor() const { return head.map.scale / head.map.outer(); }
  float outer_factor() const { return head.map.outer() / nats_per_score(); }

  // Whether all scores of this warp are at most `most`: true only where the sums of eight squares
  // say so, which are cheaper than a maximum. Never where `most` is so small that coefficients of
  // the polynomials, powers of its inverse, are infinite.
  template <i32 kFloats>
  static bool is_below(const float (&S)[kTiles][kFloats], float most) {
    const float bound = most * most;
    if (!(bound >= 0x1p-40f)) return false;
    float largest = 0;
    float total = 0;  // NaN where a score is
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 f = 0; f < kFloats; f += 8) {
        float squares = 0;
#pragma unroll
        for (i32 e = 0; e < 8; ++e) squares = ptx::fma(S[t][f + e], S[t][f + e], squares);
        total += squares;
        largest = ptx::max(largest, squares);
      }
    }
    return !ptx::any(!(largest <= min(bound, 0x1p120f)) || total != total);
  }

  // How many nats a score of 1 is.
  float nats_per_score() const { return kConfig.scales_scores() ? 1.f : head.map.scale; }

  // Where all scores of the warp stay below half the cap, tanh is a polynomial.
  template <i32 kFloats>
  void cap(float (&S)[kTiles][kFloats]) const {
    const float inner = inner_factor();
    const float outer = outer_factor();
    if (kConfig.dtype == DType::kFloat32 || !is_below(S, 0.5f / inner)) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
        for (i32 f = 0; f < kFloats; ++f) {
          S[t][f] = outer * cap_tanh(S[t][f] * inner);
        }
      }
      return;
    }
    const TanhNearZero tanh(inner, outer);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) S[t][f] = tanh(S[t][f]);
    }
  }

  static float cap_tanh(float x) {
    if constexpr (kConfig.dtype == DType::kFloat32) return AccurateMath<float>::tanh(x);
    return tanh_log2(x * (2 * kLog2E<float>));
  }

  // Of the warp's first row, beyond column `first_column`.
  i32 position(i64 first_column) const {
    return static_cast<i32>(head.sequence.shape.position(warp_row) - first_column);
  }
  // Whether no key of a block is after a query, or none before.
  static bool is_before(i32 first) { return first >= kColumns - 1; }
  static bool is_after(i32 first) { return first <= 1 - kConfig.warp_rows(); }

  template <i32 kFloats>
  void add_alibi(float (&S)[kTiles][kFloats], i64 first_column) const {
    const float slope = head.alibi / nats_per_score();
    const i32 first = position(first_column);
    if (is_before(first)) {
      add_distances(S, first, [=](float x, float s) { return ptx::fma(-slope, x, s); });
    } else if (is_after(first)) {
      add_distances(S, first, [=](float x, float s) { return ptx::fma(slope, x, s); });
    } else {
      add_distances(S, first, [=](float x, float s) { return ptx::fma(-slope, ptx::abs(x), s); });
    }
  }

  // S = term(position - kv_row, S)
  template <i32 kFloats, class Term>
  static void add_distances(float (&S)[kTiles][kFloats], i32 first, const Term& term) {
    const float own = static_cast<float>(first + row(0, 0) - column(0));
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) {
        const i32 further = 16 * t + 8 * (f / 2 % 2) - kConfig.column_of(f);
        S[t][f] = term(own + static_cast<float>(further), S[t][f]);
      }
    }
  }
};

template <ForwardSm80Config kConfig>
struct WarpDropout {
  const HeadOf<kConfig>& head;
  i64 warp_row;  // first row of this warp in its sequence

  // Decides 8 columns with one draw: those of lane q of a quad, or, where they lie spread over the
  // quad, of every fourth fragment, and the quad hands the words round. Dropped weights become 0;
  // the caller scales the kept.
  template <i32 kFloats>
  void drop(float (&S)[kConfig.row_tiles][kFloats], i64 first_column) const {
    const u32 q = lane_index() % 4;
    const u32 batch_head = static_cast<u32>(head.index * head.p.heads_q + head.head);
#pragma unroll
    for (i32 n = 0; n < kFloats / 4; n += 4) {
      const u32 group = static_cast<u32>(first_column / 8) + static_cast<u32>(n) + q;
      Philox4x32 drawn[2 * kConfig.row_tiles];  // of row (t, h): number 2 t + h
#pragma unroll
      for (i32 at = 0; at < 2 * kConfig.row_tiles; ++at) {
        const u32 i = static_cast<u32>(warp_row + WarpScores<kConfig>::row(at / 2, at % 2));
        drawn[at] = Philox4x32{{group, i, batch_head, head.dropout.offset}};
      }
      philox4x32_10(drawn, head.dropout.seed);
#pragma unroll
      for (i32 at = 0; at < 2 * kConfig.row_tiles; ++at) {
        drop_where(&S[at / 2][2 * (at % 2)], kFloats, n, drawn[at]);
      }
    }
  }

 private:
  // Fragments n to n + 3 of one row, whose first two floats are row[0] and row[1].
  void drop_where(float* row, i32 num_floats, i32 n, const Philox4x32& drawn) const {
    ptx::U32x4 words{{drawn.word[0], drawn.word[1], drawn.word[2], drawn.word[3]}};
    if constexpr (!kConfig.interleaved) transpose_quad(words);
    // Numbers of 16 bits, compared as the upper halves of words. Where all are dropped, what is
    // kept here is multiplied by 0.
    const u32 bound = head.dropout.threshold == 65536 ? ~0u : head.dropout.threshold << 16;
#pragma unroll
    for (i32 m = 0; m < 4; ++m) {
      if (4 * (n + m) >= num_floats) break;
      float* const pair = row + 4 * (n + m);
      if (words.word[m] << 16 < bound) pair[0] = 0;
      if (words.word[m] < bound) pair[1] = 0;
    }
  }
};

}  // namespace fulmen
