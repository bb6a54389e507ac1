// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From dot products in a wgmma fragment to scores in log2, of a user's in nats, for problems in
// which that is more than one positive factor (kConfig.maps_scores()): a scale of 0 or below, score
// modifier, ALiBi, bias, in the order of attention/score_mod.cuh, a user's; then masks, documents
// and dropout. Runs before the interval mask, since -inf times a factor would be visible again.
// Arrays have any strides, so their elements come one by one from global memory, through the
// caches; dropout is arithmetic alone.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/common/documents_sm90.cuh"
#include "kernels/common/expression.cuh"
#include "kernels/common/fast_score_mod.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/common/pair_tiles_sm90.cuh"
#include "kernels/common/segment_dropout.cuh"
#include "kernels/common/user_pairs.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// A finite bias stays finite: beyond the largest float in log2, it becomes that.
inline float bias_log2(float added) {
  const float scaled = added * kLog2E<float>;
  if (scaled < -kLargestFloat) return -kLargestFloat;
  return scaled > kLargestFloat && added <= kLargestFloat ? kLargestFloat : scaled;
}

// A score in log2, or in nats, with a bias. kExactly: -inf hides even what is not finite, and
// finite ones stay so. Else both leave NaN, or a row that saw nothing, which is computed again: two
// instructions for eight.
template <bool kExactly, bool kNats>
inline float add_bias(float s, float added) {
  if constexpr (!kExactly) return s + (kNats ? added : ptx::mul(added, kLog2E<float>));
  return added == -kInfinity<float> ? added : s + (kNats ? added : bias_log2(added));
}

// What is the same along diagonals is found where nothing else is asked of pairs.
template <ForwardSm90Config kConfig>
using UserPairsSm90 = UserPairs<kConfig.dtype, kConfig.score.user, kConfig.own_keys(),
                                kConfig.score.bias == DType::kNone && !kConfig.score.mask &&
                                    !kConfig.score.documents && !kConfig.score.asks_user_mask()>;

template <ForwardSm90Config kConfig>
struct PairTerms {
  using Scores = float[kConfig.score_floats()];
  static constexpr float kDropped = -0.f;
  static constexpr UserTerms kUser = kConfig.score.user;

  const AttentionParams& arrays;
  i32 kv_len;
  i64 kv_begin;
  u32 batch_head;    // dropout's counter
  u32 drawn_row[2];  // as dropout counts them
  i32 row[2];        // of the thread, in the sequence
  i64 bias[2];       // offsets of the two rows
  i64 mask[2];
  i64 q_id[2];
  i64 kv_ids;  // offset of the sequence's first
  Dropout dropout;
  UserPairsSm90<kConfig> user;

  // Rows and keys past the end read the last one; their results are not used.
  PairTerms(const AttentionParams& arrays_, const SeqlenInfo& seqlen, const QueryBlock& block,
            i32 first_row, const ExpressionParams* expression)
      : arrays(arrays_),
        kv_len(seqlen.shape.kv_len),
        kv_begin(seqlen.kv_begin),
        user(expression, first_pair(seqlen, block), first_row) {
    const i32 q_len = seqlen.shape.q_len;
    for (i32 r = 0; r < 2; ++r) {
      row[r] = first_row + 8 * r;
      const i32 i = max(min(row[r], q_len - 1), 0);
      if constexpr (has_bias()) bias[r] = arrays.bias.offset(block.batch, block.head, i, 0);
      if constexpr (kConfig.score.mask) {
        mask[r] = arrays.mask.offset(block.batch, block.head, i, 0);
      }
      if constexpr (kConfig.score.documents) {
        const i64 at = arrays.q_ids.offset(seqlen.batch, 0, 0, seqlen.q_begin + i);
        q_id[r] = q_len > 0 ? load_id(arrays.q_ids, at) : 0;
      }
    }
    if constexpr (kConfig.score.documents) {
      kv_ids = arrays.kv_ids.offset(seqlen.batch, 0, 0, seqlen.kv_begin);
    }
    if constexpr (kConfig.score.dropout) {
      batch_head = u32(block.batch * i32(arrays.heads_q) + block.head);
      for (i32 r = 0; r < 2; ++r) {
        drawn_row[r] = u32(row[r]);
        if constexpr (kUser.mask) {
          drawn_row[r] = drawn_number(expression->q_segments, block.batch, row[r]);
        }
      }
      dropout = arrays.dropout;
      if (arrays.rng != nullptr) {
        dropout.seed = u64(arrays.rng[0]);
        dropout.offset = u32(arrays.rng[1]);
      }
    }
  }

  // What is known of a block of keys before its products are.
  struct KeyBlock {
    i32 first_key;
    typename UserPairsSm90<kConfig>::Along along;
  };
  KeyBlock keys(i32 first_key) const { return {first_key, user.along(first_key)}; }

  // Adds the bias, asks the user's expression and hides pairs, on scores in log2. kPlain: what was
  // asked of the block as a whole, documents and a user's mask, hides none. kWhole: no interval
  // mask cuts the block, so that an index out of range is a visible pair's. kExactly: as add_bias.
  // take_slope: as IgnoreSlopes.
  template <bool kPlain, bool kWhole, bool kExactly, class TakeSlope>
  void apply(Scores& S, const KeyBlock& keys, const PairTile<kConfig>& tile,
             TakeSlope& take_slope) const {
    const i32 first_key = keys.first_key;
    constexpr bool kDocuments = kConfig.score.documents && !(kPlain && kConfig.skips_documents);
    constexpr bool kMask = kUser.mask && !(kPlain && kConfig.score.mask_tiles);
    constexpr bool kAsks = kUser.score;  // else a mask is asked apart
    constexpr bool kKeepsRange = kExactly || !kConfig.tiled_bias;
    if constexpr (!has_bias() && !kConfig.score.mask && !kDocuments && !kAsks && !kMask) return;
    if (kv_len == 0) return;  // nothing to read
    if constexpr (kAsks && !has_bias() && !kConfig.score.mask && !kDocuments && !kMask) {
      return user.template map<false, false, kWhole>(S, first_key, keys.along, take_slope);
    }
    bool outside = false;
#pragma unroll
    for (i32 i = 0; i < kConfig.score_floats(); i += 4) {
      ptx::F32x2 tile_bias[2];
      u32 tile_mask[2];
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        if constexpr (kConfig.tiled_bias) tile_bias[r] = tile.bias_of(i / 4, r);
        if constexpr (kConfig.tiled_mask) tile_mask[r] = tile.mask_of(i / 4, r);
      }
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i64 key = key_of_pair(first_key, i, c, kv_len);
        i64 kv_id = 0;
        if constexpr (kDocuments) {
          kv_id = load_id(arrays.kv_ids, kv_ids + key * arrays.kv_ids.strides[3]);
        }
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          float& s = S[i + 2 * r + c];
          if constexpr (has_bias()) {
            const float added = kConfig.tiled_bias
                                    ? tile_bias[r].word[c]
                                    : load_bias(bias[r] + key * arrays.bias.strides[3]);
            s = add_bias<kKeepsRange, kConfig.score.has_nats()>(s, added);
          }
          if constexpr (kAsks) {
            s = user.template score_of<has_bias(), kMask>(s, r, static_cast<i32>(key), NoDiagonal{},
                                                          outside, i + 2 * r + c, take_slope);
          }
          if constexpr (kConfig.score.mask) {
            const bool hides = kConfig.tiled_mask
                                   ? PairTile<kConfig>::hides(tile_mask[r], c)
                                   : arrays.mask.data[mask[r] + key * arrays.mask.strides[3]] == 0;
            if (hides) s = -kInfinity<float>;
          }
          if constexpr (kDocuments) {
            if (kv_id != q_id[r]) s = -kInfinity<float>;
          }
        }
      }
    }
    if constexpr (kAsks && kWhole) report_outside(*user.expression, outside);
    if constexpr (kMask && !kAsks) user.template hide<has_bias(), kWhole>(S, first_key);
  }

  // Sets dropped probabilities to kDropped, -0. A draw decides eight keys of a row, two of them
  // this thread's: each lane of a quad draws for every fourth group of eight and they exchange.
  void drop(Scores& S, i32 first_key) const {
    if constexpr (kConfig.score.dropout) {
      const u32 lane = ptx::thread_index() % 4;
      constexpr i32 kDraws = i32(ceil_div(kConfig.kv_rows / 8, 4));
      u32 groups[kDraws];
      bool is_mixed = false;
#pragma unroll
      for (i32 n = 0; n < kDraws; ++n) {
        groups[n] = u32(first_key / 8 + 4 * n) + lane;
        if constexpr (kUser.mask) {
          const i64 own = drawn_group(kv_segments(), user.any.b, i64{8} * groups[n]);
          is_mixed |= own == kMixedGroup;
          groups[n] = u32(own);
        }
      }
      if constexpr (kUser.mask) {
        if (ptx::any(is_mixed)) {
          return drop_by_pairs(S, PairDraws{dropout, batch_head, kv_segments(), user.any.b},
                               drawn_row, first_key + i32(lane) * 2, kDropped);
        }
      }
#pragma unroll
      for (i32 group = 0; group < kConfig.kv_rows / 8; group += 4) {
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          const Philox4x32 drawn = dropout.draw(groups[group / 4], drawn_row[r], batch_head);
          ptx::U32x4 x{{drawn.word[0], drawn.word[1], drawn.word[2], drawn.word[3]}};
          transpose_quad(x);
#pragma unroll
          for (i32 g = 0; g < min(kConfig.kv_rows / 8 - group, 4); ++g) {
            float* p = &S[4 * (group + g) + 2 * r];
            if ((x.word[g] & 0xffffu) < dropout.threshold) p[0] = kDropped;
            if (x.word[g] >> 16 < dropout.threshold) p[1] = kDropped;
          }
        }
      }
    }
  }

 private:
  const SegmentsView& kv_segments() const { return user.expression->kv_segments; }
  static constexpr bool has_bias() { return kConfig.score.bias != DType::kNone; }

  // Of the head, of row 0.
  ExpressionPair first_pair(const SeqlenInfo& seqlen, const QueryBlock& block) const {
    const u32 group = u32(arrays.heads_q) / u32(arrays.heads_kv);
    const SequenceShape& shape = seqlen.shape;
    return {block.batch, block.head,       i32(u32(block.head) / group),
            shape.q_len, shape.kv_len,     0,
            0,           shape.position(0)};
  }

  // Pointers are multiples of 16 bytes and strides count elements, so elements are aligned.
  float load_bias(i64 at) const {
    if constexpr (kConfig.score.bias == DType::kFloat32) {
      return reinterpret_cast<const float*>(arrays.bias.data)[at];
    } else if constexpr (kConfig.score.bias == DType::kFloat16) {
      return to_float(reinterpret_cast<const f16*>(arrays.bias.data)[at]);
    } else {
      return to_float(reinterpret_cast<const bf16*>(arrays.bias.data)[at]);
    }
  }
};

template <ForwardSm90Config kConfig>
struct FragmentScores {
  const ForwardParams& params;
  float slope = 0;         // of the head, in what scores are in
  float position[2] = {};  // of the thread's two rows among the keys, less its first column

  PairTerms<kConfig> pairs;
  static constexpr float kPerNat = kConfig.score.per_nat();

  // first_row: of this thread in the sequence.
  FragmentScores(const ForwardParams& params_, const SeqlenInfo& seqlen, const QueryBlock& block,
                 i32 first_row, const ExpressionParams* expression = nullptr)
      : params(params_), pairs(params_.attention, seqlen, block, first_row, expression) {
    if constexpr (kConfig.score.alibi) {
      const ArrayView& slopes = params.attention.alibi_slopes;
      slope = load_real<float>(slopes, slopes.offset(block.batch, block.head, 0, 0)) * kPerNat;
      const i32 column = ptx::thread_index() % 4 * 2;
      for (i32 r = 0; r < 2; ++r) {
        position[r] = static_cast<float>(seqlen.shape.position(first_row + 8 * r) - column);
      }
    }
  }

  using KeyBlock = typename PairTerms<kConfig>::KeyBlock;
  KeyBlock keys(i32 first_key) const { return pairs.keys(first_key); }

  // tile: of the block's pairs. kPlain, kWhole, kExactly: as of the terms of pairs.
  static constexpr bool kUncut =
      kConfig.score.mask_kind == MaskKind::kNone && !kConfig.score.blocks;
  template <bool kPlain = false, bool kWhole = kUncut, bool kExactly = false>
  void apply(float (&S)[kConfig.score_floats()], const KeyBlock& keys,
             const PairTile<kConfig>& tile) const {
    IgnoreSlopes ignore;
    apply<kPlain, kWhole, kExactly>(S, keys, tile, ignore);
  }
  void apply_exactly(float (&S)[kConfig.score_floats()], i32 first_key,
                     const PairTile<kConfig>& tile) const {
    apply<false, kUncut, true>(S, keys(first_key), tile);
  }
  template <bool kPlain, class TakeSlope>
  void apply(float (&S)[kConfig.score_floats()], const KeyBlock& keys,
             const PairTile<kConfig>& tile, bool exactly, TakeSlope& take_slope) const {
    if (exactly) {
      apply<kPlain, false, true>(S, keys, tile, take_slope);
    } else {
      apply<kPlain, false, false>(S, keys, tile, take_slope);
    }
  }
  template <bool kPlain, bool kWhole, bool kExactly, class TakeSlope>
  void apply(float (&S)[kConfig.score_floats()], const KeyBlock& keys,
             const PairTile<kConfig>& tile, TakeSlope& take_slope) const {
    if constexpr (!kConfig.maps_scores()) return;
    const float scale = kConfig.score.has_nats() ? params.scale : params.scale_log2;
    const float distance[2] = {position[0] - static_cast<float>(keys.first_key),
                               position[1] - static_cast<float>(keys.first_key)};
#pragma unroll
    for (i32 i = 0; kConfig.scales_scores() && i < kConfig.score_floats(); ++i) {
      float s = S[i];
      if constexpr (kConfig.score.score_mod) {
        s = modified_log2(params.score_mod, s) * (kPerNat / kLog2E<float>);
      } else {
        s *= scale;
      }
      if constexpr (kConfig.score.alibi) {
        const float away = distance[i / 2 % 2] - static_cast<float>(i / 4 * 8 + i % 2);
        s = ptx::fma(-slope, away < 0 ? -away : away, s);
      }
      S[i] = s;
    }
    pairs.template apply<kPlain, kWhole, kExactly>(S, keys, tile, take_slope);
  }
};

// S = -inf at the keys outside a row's interval; first_key: of the thread. kEnds: whether intervals
// can end in the block.
template <ForwardSm90Config kConfig, bool kEnds = true>
inline void hide_keys(float (&S)[kConfig.score_floats()], const Interval (&visible)[2],
                      i32 first_key) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    hide_outside<kConfig.score.mask_kind == MaskKind::kBoth, kEnds>(
        S, r, i32(visible[r].begin) - first_key, i32(visible[r].end) - first_key);
  }
}

struct LargeScores {
  float unit;  // of a score, in nats
  float per_unit;

  explicit LargeScores(float unit_) : unit(unit_), per_unit(1 / unit_) {}

  // s of a large row relative to row_max: rounded as that was, and cut off at 0.
  float shifted(float s, float row_max) const {
    const float below = ptx::max(row_max - ptx::mul(s, unit), 0.f);
    return row_max != 0 ? -below * per_unit : s;
  }
};

}  // namespace fulmen
