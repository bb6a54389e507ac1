// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The options of a score on a fragment of S^T, two keys a thread and every column a query: from dot
// products to scores in log2 (a scale of any sign, score modifier, ALiBi, bias, a user's score,
// masks, in the order of attention/score_mod.cuh), the slope of what modifies, and which pairs
// dropout keeps. common/scores_sm90.cuh is the same for fragments of S. Called by backward_sm90
// once a step, before the interval mask.
#pragma once

#include "kernels/backward_sm90/scheduler.cuh"
#include "kernels/common/array_access.cuh"
#include "kernels/common/diagonals.cuh"
#include "kernels/common/documents_sm90.cuh"
#include "kernels/common/expression.cuh"
#include "kernels/common/fast_score_mod.cuh"
#include "kernels/common/scores_sm90.cuh"
#include "kernels/common/segment_dropout.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// A warpgroup's 64 keys of the bias and the mask of a step in shared memory: rows are queries, so
// that they are transposed on the way to registers.
template <BackwardSm90Config kConfig>
struct KeyPairTile {
  static constexpr i32 kQueries = kConfig.q_rows;
  static constexpr i32 kFloats = kQueries / 2;
  static constexpr i32 kMaskWords = kConfig.tiled_mask ? kQueries / 8 : 1;

  u32 tile;
  u32 warpgroup;

  static u32 lane() { return ptx::thread_index() % 32; }
  static u32 warp() { return ptx::thread_index() / 32 % 4; }

  // Of the pairs of S[4 group ..].
  void load_bias(float (&bias)[4], ptx::U32x4& words, i32 group) const {
    if constexpr (kConfig.score.bias == DType::kFloat32) {
      load_float32_bias(bias, group);
    } else {
      // Two groups of eight queries, two of eight keys.
      if (group % 2 == 0) {
        const u32 row = lane() / 16 * 8 + lane() % 8;
        const u32 unit = (warp() * 2 + lane() / 8 % 2) ^ row % 8;
        words = ptx::ldmatrix_x4_trans(tile + warpgroup * kQueries * 128 + row * 128 + unit * 16 +
                                       u32(group * 1024));
      }
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        const ptx::F32x2 x = ptx::unpack<kConfig.score.bias>(words.word[group % 2 * 2 + half]);
        bias[2 * half] = x.word[0];
        bias[2 * half + 1] = x.word[1];
      }
    }
  }

  void load_float32_bias(float (&bias)[4], i32 group) const {
    const u32 chunk = tile + (warpgroup * 2 + warp() / 2) * kQueries * 128;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = lane() % 4 * 2 + i % 2;
      const u32 unit = (warp() % 2 * 4 + i / 2 * 2 + lane() / 16) ^ row;
      const u32 word = unit * 4 + lane() / 4 % 4;
      bias[i] = __builtin_bit_cast(
          float, ptx::load_shared(chunk + row * 128 + word * 4 + u32(group * 1024)));
    }
  }

  // Word g: of eight queries, bytes of query 2 (lane % 4) for the thread's two keys, then of the
  // next query.
  void load_mask(u32 (&words)[kMaskWords]) const {
    const u32 at =
        tile + kConfig.bias_bytes() + lane() * 128 + (((warpgroup * 4 + warp()) ^ lane() % 8) << 4);
#pragma unroll
    for (i32 g = 0; g < kMaskWords; g += 4) {
      const ptx::U32x4 x = ptx::ldmatrix_x4_trans(at + u32(g * 1024));
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        // A lane has keys 2 (lane / 4) and + 1 of sixteen; wanted are lane / 4 and 8 further.
        const u32 from = lane() / 8 * 4 + lane() % 4;
        const u32 first = u32(ptx::shuffle(i32(x.word[w]), from));
        const u32 second = u32(ptx::shuffle(i32(x.word[w]), from + 16));
        words[g + w] = ptx::permute(first, second, lane() / 4 % 2 == 0 ? 0x6240 : 0x7351);
      }
    }
  }
  static bool hides(u32 word, i32 i) { return (word & 0xffu << (i % 2 * 16 + i / 2 * 8)) == 0; }
};

template <BackwardSm90Config kConfig>
struct KeyTerms {
  static constexpr i32 kFloats = kConfig.q_rows / 2;
  using Scores = float[kFloats];
  static constexpr float kPerNat = kConfig.score.per_nat();

  const BackwardParams& params;
  const BackwardTile& work_tile;
  i32 index;  // of the sequence
  i32 head;
  i32 key;    // the thread's first; the second is 8 further
  i32 query;  // of S[0]

  // Of element i.
  constexpr i32 query_of(i32 i) const { return query + fragment_column(i); }
  constexpr i32 key_of(i32 i) const { return key + i / 2 % 2 * 8; }

  using Slopes = float[kConfig.score.has_slopes() ? kFloats : 1];

  // Leaves d score / d (scale dot) in `slopes` where scores are modified. plain: what was asked of
  // the pairs as a whole, documents and a user's mask, hides none. exactly: as add_bias.
  void map(Scores& S, Slopes& slopes, bool plain, bool exactly,
           const KeyPairTile<kConfig>& tile) const {
    float alibi = 0;
    if constexpr (kConfig.score.alibi) {
      const ArrayView& array = params.attention.alibi_slopes;
      alibi = load_real<float>(array, array.offset(index, head, 0, 0)) * kPerNat;
    }
    const float scale = kConfig.score.has_nats() ? params.scale : params.scale_log2;
#pragma unroll
    for (i32 i = 0; kConfig.scales_scores() && i < kFloats; ++i) {
      float s = S[i] * scale;
      if constexpr (kConfig.score.score_mod) {
        s = modified_log2(params.score_mod, S[i], slopes[i]) * (kPerNat / kLog2E<float>);
      }
      if constexpr (kConfig.score.alibi) {
        const float away =
            static_cast<float>(work_tile.shape.position(query_of(i)) - i64{key_of(i)});
        s = ptx::fma(-alibi, away < 0 ? -away : away, s);
      }
      S[i] = s;
    }
    if constexpr (kConfig.score.bias != DType::kNone) {
      if (exactly) {
        add_bias_of_pairs<true>(S, tile);
      } else {
        add_bias_of_pairs<false>(S, tile);
      }
    }
    if constexpr (kConfig.score.mask) hide_masked(S, tile);
    const bool hides = !(kConfig.score.mask_tiles && plain);
    if constexpr (kConfig.score.user.score) {
      ask_user(S, slopes, hides);
    } else if constexpr (kConfig.score.user.mask) {
      if (hides) ask_user(S, slopes, true);
    }
    if (kConfig.score.documents && !plain) hide_documents(S);
  }

  // The user's score, and mask; likewise of the last row and key past the end.
  void ask_user(Scores& S, Slopes& slopes, bool hides) const {
    using User = UserExpression<FastMath<typename ElementOf<kConfig.dtype>::Real>>;
    const ExpressionParams& e = expression_of(params);
    const SequenceShape& shape = work_tile.shape;
    ExpressionPair at{index, head, work_tile.batch_kv_head % params.heads_kv, shape.q_len,
                      shape.kv_len};
    bool outside = false;  // the forward pass has said so
    const auto pair = [&](i32 i, i32 j) {
      at.i = min(i, shape.q_len - 1);
      at.p = shape.position(at.i);
      at.j = min(j, shape.kv_len - 1);
      return at;
    };
    const i32 lane = i32(ptx::thread_index()) % 32;
    const Diagonals<User, kConfig.q_rows, User::kDiagonalWords != 0 && kConfig.score.user.score>
        diagonals(&e, [&](i32 keys, i32 queries) {
          return pair(query - lane % 4 * 2 + queries, key - lane / 4 + keys);
        });
    decltype(diagonals.at(0, 0)) before[2] = {diagonals.at(0, 0), diagonals.at(0, 1)};
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const auto diagonal = diagonals.at(i / 4 + 1, c);
#pragma unroll
        for (i32 f = i + c; f < i + 4; f += 2) {
          const ExpressionPair of = pair(query_of(i + c), key_of(f));
          const typename User::Row row = User::row(e, of, outside);
          const typename User::Column column = User::column(e, row, of, outside);
          if constexpr (kConfig.score.user.score) {
            const auto& along =
                diagonal_of<User>(e, row, column, f < i + 2 ? diagonal : before[c], outside);
            const auto mapped = User::mapped(e, row, column, along, S[f], outside);
            if (kConfig.score.bias == DType::kNone || S[f] != -kInfinity<float>) {
              S[f] = mapped.score;
            }
            slopes[f] = kConfig.score.score_mod ? slopes[f] * mapped.slope : mapped.slope;
          }
          if constexpr (kConfig.score.user.mask) {
            if (hides && !User::shows(e, row, column, outside)) S[f] = -kInfinity<float>;
          }
        }
        before[c] = diagonal;
      }
    }
  }

  // Of an array over pairs. Rows and keys past the end read the last one; their results are not
  // used.
  i64 offset_of(const ArrayView& array, i32 i) const {
    const i64 row = min(query_of(i), work_tile.shape.q_len - 1);
    const i64 column = min(key_of(i), work_tile.shape.kv_len - 1);
    return array.offset(index, head, row, column);
  }

  template <bool kExactly>
  void add_bias_of_pairs(Scores& S, const KeyPairTile<kConfig>& tile) const {
    ArrayView array = params.attention.bias;
    array.dtype = kConfig.score.bias;
    ptx::U32x4 words{};
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
      float bias[4];
      if constexpr (kConfig.tiled_bias) tile.load_bias(bias, words, i / 4);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        if constexpr (!kConfig.tiled_bias) {
          bias[e] = load_real<float>(array, offset_of(array, i + e));
        }
        S[i + e] = add_bias<kExactly, kConfig.score.has_nats()>(S[i + e], bias[e]);
      }
    }
  }

  void hide_masked(Scores& S, const KeyPairTile<kConfig>& tile) const {
    const ArrayView& array = params.attention.mask;
    u32 words[KeyPairTile<kConfig>::kMaskWords];
    if constexpr (kConfig.tiled_mask) tile.load_mask(words);
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) {
      const bool hides = kConfig.tiled_mask
                             ? tile.hides(words[kConfig.tiled_mask ? i / 4 : 0], i % 4)
                             : array.data[offset_of(array, i)] == 0;
      if (hides) S[i] = -kInfinity<float>;
    }
  }

  void hide_documents(Scores& S) const {
    const AttentionParams& p = params.attention;
    const i32 batch = batch_of<kConfig>(params, work_tile.batch_kv_head);
    i64 key_id[2];
    for (i32 half = 0; half < 2; ++half) {
      const i64 j = work_tile.kv_begin + min(key + 8 * half, work_tile.shape.kv_len - 1);
      key_id[half] = load_id(p.kv_ids, p.kv_ids.offset(batch, 0, 0, j));
    }
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i64 row = work_tile.q_begin + min(query_of(i + c), work_tile.shape.q_len - 1);
        const i64 id = load_id(p.q_ids, p.q_ids.offset(batch, 0, 0, row));
        hide_in_column(S, i + c, [&](i32 half) { return id != key_id[half]; });
      }
    }
  }

  // Bit i: dropout keeps pair i. A draw decides eight keys of a query: those of one half of the
  // warp's keys, one for each of eight lanes, which share the queries' draws among them.
  u32 kept() const {
    static_assert(kFloats == 32);
    Dropout dropout = params.attention.dropout;
    if (params.attention.rng != nullptr) {
      dropout.seed = static_cast<u64>(params.attention.rng[0]);
      dropout.offset = static_cast<u32>(params.attention.rng[1]);
    }
    const u32 batch_head = u32(index * params.heads_q + head);
    const u32 lane = ptx::thread_index() % 32;
    u32 groups[2];
    bool is_mixed = false;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      groups[half] = u32(key - i32(lane / 4)) / 8 + half;
      if constexpr (kConfig.score.user.mask) {
        const SegmentsView& segments = expression_of(params).kv_segments;
        const i64 own = drawn_group(segments, index, i64{8} * groups[half]);
        is_mixed |= own == kMixedGroup;
        groups[half] = u32(own);
      }
    }
    if (kConfig.score.user.mask && ptx::any(is_mixed)) return kept_by_pairs(dropout, batch_head);
    u32 drawn = 0;  // of the four pairs 4 (lane / 4) + n: bit 8 n + key % 8
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
      const u32 of_query = drawn_query(query_of(i32(lane / 4 * 4 + n)));
      const Philox4x32 x = dropout.draw(groups[n / 2], of_query, batch_head);
#pragma unroll
      for (u32 k = 0; k < 8; ++k) drawn |= (dropout.keeps(x, k) ? 1u : 0u) << (8 * n + k);
    }
    u32 kept = 0;
#pragma unroll
    for (u32 owner = 0; owner < 8; ++owner) {
      const u32 theirs = u32(ptx::shuffle(i32(drawn), owner * 4 + lane % 4));
#pragma unroll
      for (u32 n = 0; n < 4; ++n) kept |= (theirs >> (8 * n + lane / 4) & 1u) << (4 * owner + n);
    }
    return kept;
  }

  u32 drawn_query(i32 query) const {
    if constexpr (kConfig.score.user.mask) {
      return drawn_number(expression_of(params).q_segments, index, query);
    }
    return u32(query);
  }

  // The same by a draw for each pair.
  u32 kept_by_pairs(const Dropout& dropout, u32 batch_head) const {
    u32 kept = 0;
    if constexpr (kConfig.score.user.mask) {
#pragma unroll 1
      for (i32 i = 0; i < kFloats; ++i) {
        const u32 number = drawn_number(expression_of(params).kv_segments, index, key_of(i));
        const bool drops = drops_pair(dropout, batch_head, drawn_query(query_of(i)), number);
        kept |= (drops ? 0u : 1u) << i;
      }
    }
    return kept;
  }
};

}  // namespace fulmen
