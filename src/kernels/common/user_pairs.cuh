// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A user's score and mask on the scores of a thread, two rows of a fragment of the tensor cores:
// what the text needs of the rows is kept from block to block, what it needs of a key is computed
// once for both rows, and what is the same along diagonals once for the warp.
#pragma once

#include "kernels/common/accurate_math.cuh"
#include "kernels/common/diagonals.cuh"
#include "kernels/common/fast_score_mod.cuh"

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

// Float32 by approximate instructions beside inputs of 16 bits alone.
template <DType kDType>
struct MathOnTensorCores {
  using Type = FastMath<float>;
};
template <>
struct MathOnTensorCores<DType::kFloat32> {
  using Type = AccurateMath<float>;
};

// kColumns: of the fragment; kAlong: what is the same along diagonals is found first.
template <DType kDType, UserTerms kUser, i32 kColumns, bool kAlong = true, bool kHas = kUser.any()>
struct UserPairs {
  UserPairs(const ExpressionParams*, const ExpressionPair&, i32) {}
  using Along = NoDiagonal;
  Along along(i32) const { return {}; }
};

template <DType kDType, UserTerms kUser, i32 kColumns, bool kAlong>
struct UserPairs<kDType, kUser, kColumns, kAlong, true> {
  static constexpr i32 kFloats = kColumns / 2;
  using Scores = float[kFloats];
  using User = UserExpression<typename MathOnTensorCores<kDType>::Type>;
  using Along = Diagonals<User, kColumns, kAlong && kUser.score && User::kDiagonalWords != 0>;

  const ExpressionParams* expression;
  ExpressionPair any;  // what is the same for the head
  i32 first_row;       // of the thread
  typename User::Row row[2];

  // head: its pair of row 0. Rows past the end are the last one.
  UserPairs(const ExpressionParams* expression_, const ExpressionPair& head, i32 first_row_)
      : expression(expression_), any(head), first_row(first_row_) {
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
    pair.p = i + i32(any.p);
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

  // All scores become the user's. kHidden: those that are -inf stay so; kMask: his mask is asked;
  // kTells: an index out of range is recorded, since pairs that are neither are visible.
  template <bool kHidden, bool kMask, bool kTells, class TakeSlope>
  void map(Scores& S, i32 first_key, const Along& diagonals, TakeSlope& take_slope) const {
    bool outside = diagonals.outside;
    if (diagonals.are_same()) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) {
        const i32 key = key_of_pair(first_key, i / 4 * 4, i % 2, kv_len());
        S[i] = score_of<kHidden, kMask>(S[i], i / 2 % 2, key, diagonals.of_all(), outside, i,
                                        take_slope);
      }
      if constexpr (kTells) report_outside(*expression, outside);
      return;
    }
    decltype(diagonals.at(0, 0)) before[2] = {diagonals.at(0, 0), diagonals.at(0, 1)};
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const auto diagonal = diagonals.at(i / 4 + 1, c);
        const i32 key = key_of_pair(first_key, i, c, kv_len());
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          const i32 at = i + 2 * r + c;
          S[at] = score_of<kHidden, kMask>(S[at], r, key, r == 0 ? diagonal : before[c], outside,
                                           at, take_slope);
        }
        before[c] = diagonal;
      }
    }
    if constexpr (kTells) report_outside(*expression, outside);
  }

  // What the user makes of score number `at`, -inf where the mask hides the pair, whatever the
  // score is then, and where something has before; the slope goes to take_slope.
  template <bool kHidden, bool kMask, class Diagonal, class TakeSlope>
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
    bool shown = !kHidden || s != -kInfinity<float>;
    if constexpr (kMask) shown = shown && User::shows(e, row[r], column, beyond);
    outside = outside || (shown && beyond);
    return shown ? score : -kInfinity<float>;
  }

  // Where the user has a mask alone. What it shows becomes bits first, which takes no score: among
  // the scores the assembler would serialise the products (C7514).
  template <bool kHidden, bool kTells>
  void hide(Scores& S, i32 first_key) const {
    u32 hidden[ceil_div(kFloats, 32)] = {};
    bool outside = false;
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
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
          outside |= shown && beyond_too && (!kHidden || S[at] != -kInfinity<float>);
        }
      }
    }
    if constexpr (kTells) report_outside(*expression, outside);
#pragma unroll
    for (u32& word : hidden) ptx::compute_here(word);
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) {
      if ((hidden[i / 32] >> i % 32 & 1) != 0) S[i] = -kInfinity<float>;
    }
  }
};

}  // namespace fulmen
