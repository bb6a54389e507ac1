// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a user's score is on the diagonals of a warp's pairs: a distance between row and key that
// many pairs share is computed once. A lane computes every 32nd diagonal, and pairs get theirs by
// shuffles.
#pragma once

#include "kernels/common/expression.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Where nothing is the same along diagonals.
struct NoDiagonal {};
template <class User, i32 kColumns, bool kHas>
struct Diagonals {
  static constexpr bool outside = false;

  template <class Pair>
  Diagonals(const ExpressionParams*, const Pair&) {}
  NoDiagonal at(i32, i32) const { return {}; }
  constexpr bool are_same() const { return false; }
  NoDiagonal of_all() const { return {}; }
};

// Of a fragment of 16 lines by kColumns. Diagonal number n lies n - 15 columns behind the first
// pair of the first line.
template <class User, i32 kColumns>
struct Diagonals<User, kColumns, true> {
  using Value = typename User::Diagonal;
  static_assert(sizeof(Value) == 4 * User::kDiagonalWords);
  static constexpr i32 kOfLane = i32(ceil_div(kColumns + 15, 32));

  Value of[kOfLane];
  bool outside = false;  // an index of the lane's is out of range
  bool same = true;  // all have the same bits: far from where a distance is cut off, they often do

  // pair(lines, columns): the pair that lies so far behind the first of the fragment, or the last
  // there is.
  template <class Pair>
  Diagonals(const ExpressionParams* expression, const Pair& pair) {
    const ExpressionParams& e = *expression;
#pragma unroll
    for (i32 k = 0; k < kOfLane; ++k) {
      const i32 away = min(32 * k + i32(ptx::thread_index() % 32), kColumns + 14) - 15;
      const ExpressionPair at = pair(max(-away, 0), max(away, 0));
      bool of_others = false;  // the pair's own row and key say so
      const typename User::Row row = User::row(e, at, of_others);
      const typename User::Column column = User::column(e, row, at, of_others);
      of[k] = User::diagonal(e, row, column, outside);
    }
    using Bits = Words<User::kDiagonalWords>;
    const Bits first = __builtin_bit_cast(Bits, value_of_lane(of[0], 0));
#pragma unroll
    for (i32 k = 0; k < kOfLane; ++k) {
      const Bits own = __builtin_bit_cast(Bits, of[k]);
      for (i32 n = 0; n < User::kDiagonalWords; ++n) same = same && own.word[n] == first.word[n];
    }
    same = !ptx::any(!same);
  }
  bool are_same() const { return same; }
  const Value& of_all() const { return of[0]; }

  // Of float 4 m + 2 r + c of the thread, n = m - r + 1.
  Value at(i32 n, i32 c) const {
    const i32 lane = i32(ptx::thread_index() % 32);
    const i32 number = 8 * n + lane % 4 * 2 + c - lane / 4 + 7;
    const Value here = value_of_lane(of[8 * n / 32], u32(number % 32));
    if (8 * n % 32 != 24 || 8 * n / 32 + 1 >= kOfLane) return here;
    const Value next = value_of_lane(of[min(8 * n / 32 + 1, kOfLane - 1)], u32(number % 32));
    return number / 32 == 8 * n / 32 ? here : next;
  }
};

template <class Value>
inline constexpr bool kIsComputed = true;
template <>
inline constexpr bool kIsComputed<NoDiagonal> = false;

// That of a pair, which is computed where it has not been before.
template <class User, class Value>
inline typename User::Diagonal diagonal_of(const ExpressionParams& e, const typename User::Row& row,
                                           const typename User::Column& column,
                                           const Value& computed, bool& outside) {
  if constexpr (kIsComputed<Value>) {
    return computed;
  } else {
    return User::diagonal(e, row, column, outside);
  }
}

}  // namespace fulmen
