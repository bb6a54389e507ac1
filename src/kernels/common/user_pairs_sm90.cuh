// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A user's score and mask on the scores of a thread, two rows of a fragment of forward_sm90 or
// backward_dq_sm90: what the text needs of the rows is kept from block to block, what it needs of a
// key is computed once for both rows, and what is the same along diagonals once for the warp.
#pragma once

#include "kernels/common/diagonals.cuh"
#include "kernels/common/fast_score_mod.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/forward_sm90/config.h"

namespace fulmen {

// Where only scores are wanted. Else: an operator()(i, slope, s) that is given the slope of pair i
// and the score before it.
struct IgnoreSlopes {
  static constexpr bool kWanted = false;
};

// The key of float i + c of a block; past the end the last.
inline i32 key_of_pair(i32 first_key, i32 i, i32 c, i32 kv_len) {
  return min(first_key + i * 2 + i32(ptx::thread_index()) % 4 * 2 + c, kv_len - 1);
}

template <ForwardSm90Config kConfig, bool kHas = kConfig.score.user.any()>
struct UserPairs {
  UserPairs(const AttentionParams&, const SeqlenInfo&, const QueryBlock&, i32,
            const ExpressionParams*) {}
  using Along = NoDiagonal;
  Along along(i32) const { return {}; }
};

template <ForwardSm90Config kConfig>
struct UserPairs<kConfig, true> {
  using Scores = float[kConfig.score_floats()];
  using User = UserExpression<FastMath<typename ElementOf<kConfig.dtype>::Real>>;
  static constexpr UserTerms kUser = kConfig.score.user;
  static constexpr bool kHasBias = kConfig.score.bias != DType::kNone;
  // Where nothing else is asked of pairs.
  static constexpr bool kHasDiagonals = kUser.score && User::kDiagonalWords != 0 && !kHasBias &&
                                        !kConfig.score.mask && !kConfig.score.documents &&
                                        !(kUser.mask && !kConfig.score.mask_tiles);
  using Along = Diagonals<User, kConfig.kv_rows, kHasDiagonals>;

  const ExpressionParams* expression;
  ExpressionPair any;  // what is the same for the head
  i32 shift;           // of a position
  i32 first_row;       // of the thread
  typename User::Row row[2];

  // Rows past the end are the last one.
  UserPairs(const AttentionParams& arrays, const SeqlenInfo& seqlen, const QueryBlock& block,
            i32 first_row_, const ExpressionParams* expression_)
      : expression(expression_), first_row(first_row_) {
    const u32 group = u32(arrays.heads_q) / u32(arrays.heads_kv);
    any = {block.batch,
           block.head,
           i32(u32(block.head) / group),
           seqlen.shape.q_len,
           seqlen.shape.kv_len,
           0,
           0,
           0};
    shift = i32(seqlen.shape.position(0));
    for (i32 r = 0; r < 2; ++r) {
      bool outside = false;
      row[r] = User::row(*expression, pair_at(min(first_row + 8 * r, last_row()), 0), outside);
      report_outside(*expression, outside);
    }
  }

  i32 kv_len() const { return i32(any.kv_len); }
  i32 last_row() const { return max(i32(any.q_len) - 1, 0); }

  ExpressionPair pair_at(i32 i, i32 j) const {
    ExpressionPair pair = any;
    pair.i = i;
    pair.j = j;
    pair.p = i + shift;
    return pair;
  }
  typename User::Column column_at(i32 r, i32 key, bool& outside) const {
    ExpressionPair pair{};
    pair.j = key;
    return User::column(*expression, row[r], pair, outside);
  }

  // Of the warp's rows and a block of keys.
  Along along(i32 first_key) const {
    const i32 first = first_row - i32(ptx::thread_index()) % 32 / 4;
    return {expression, [&](i32 lines, i32 columns) {
              return pair_at(min(first + lines, last_row()),
                             min(first_key + columns, kv_len() - 1));
            }};
  }

  // Scores where nothing else hides a pair.
  template <bool kWhole, class TakeSlope>
  void map(Scores& S, i32 first_key, const Along& diagonals, TakeSlope& take_slope) const {
    bool outside = diagonals.outside;
    if (diagonals.are_same()) {
#pragma unroll
      for (i32 i = 0; i < kConfig.score_floats(); ++i) {
        const i32 key = key_of_pair(first_key, i / 4 * 4, i % 2, kv_len());
        S[i] = score_of<false>(S[i], i / 2 % 2, key, diagonals.of_all(), outside, i, take_slope);
      }
      if constexpr (kWhole) report_outside(*expression, outside);
      return;
    }
    decltype(diagonals.at(0, 0)) before[2] = {diagonals.at(0, 0), diagonals.at(0, 1)};
#pragma unroll
    for (i32 i = 0; i < kConfig.score_floats(); i += 4) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const auto diagonal = diagonals.at(i / 4 + 1, c);
        const i32 key = key_of_pair(first_key, i, c, kv_len());
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          const i32 at = i + 2 * r + c;
          S[at] = score_of<false>(S[at], r, key, r == 0 ? diagonal : before[c], outside, at,
                                  take_slope);
        }
        before[c] = diagonal;
      }
    }
    if constexpr (kWhole) report_outside(*expression, outside);
  }

  // What the user makes of score number `at`, -inf where the mask hides the pair, whatever the
  // score is then, and where the bias has; the slope goes to take_slope.
  template <bool kMask, class Diagonal, class TakeSlope>
  float score_of(float s, i32 r, i32 key, const Diagonal& diagonal, bool& outside, i32 at,
                 TakeSlope& take_slope) const {
    const ExpressionParams& e = *expression;
    bool beyond = false;
    const typename User::Column column = column_at(r, key, beyond);
    const auto along = diagonal_of<User>(e, row[r], column, diagonal, beyond);
    float score = 0;
    if constexpr (TakeSlope::kWanted) {
      const MappedScore<float> mapped = User::mapped(e, row[r], column, along, s, beyond);
      take_slope(at, mapped.slope, s);
      score = mapped.score;
    } else {
      score = User::score(e, row[r], column, along, s, beyond);
    }
    bool shown = !kHasBias || s != -kInfinity<float>;
    if constexpr (kMask) shown = shown && User::shows(e, row[r], column, beyond);
    outside = outside || (shown && beyond);
    return shown ? score : -kInfinity<float>;
  }

  // Where the user has a mask alone. What it shows becomes bits first, which takes no score: among
  // the scores the assembler would serialise the products (C7514).
  template <bool kWhole>
  void hide(Scores& S, i32 first_key) const {
    constexpr i32 kCount = kConfig.score_floats();
    u32 hidden[ceil_div(kCount, 32)] = {};
    bool outside = false;
#pragma unroll
    for (i32 i = 0; i < kCount; i += 4) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        bool beyond = false;
        const typename User::Column column =
            column_at(0, key_of_pair(first_key, i, c, kv_len()), beyond);
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          bool beyond_too = beyond;
          const bool shown = User::shows(*expression, row[r], column, beyond_too);
          const i32 at = i + 2 * r + c;
          hidden[at / 32] |= shown ? 0u : 1u << at % 32;
          outside |= shown && beyond_too && (!kHasBias || S[at] != -kInfinity<float>);
        }
      }
    }
    if constexpr (kWhole) report_outside(*expression, outside);
#pragma unroll
    for (u32& word : hidden) ptx::compute_here(word);
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) {
      if ((hidden[i / 32] >> i % 32 & 1) != 0) S[i] = -kInfinity<float>;
    }
  }
};

}  // namespace fulmen
