// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients of the arrays that a user's score reads, beside others: a warp has dS of 16 rows and a
// block of keys in its registers. What its pairs add to one element, because what is read is the
// same for the head, a row, a key or a diagonal, is summed first: along a row by a thread, along
// keys and diagonals by shuffles after which each lane has a few sums. A lane adds a sum to memory
// when the next one belongs to another element.
#pragma once

#include "kernels/common/expression.cuh"
#include "kernels/common/user_pairs.cuh"

namespace fulmen {

// Sums of kCount values over two lanes: the lower keeps those of the first half, the upper, which
// is_upper, those of the rest. exchange: gives the value of the other lane.
template <i32 kCount, i32 kSize, class Exchange>
inline void halve(float (&x)[kSize], i32& first, bool is_upper, const Exchange& exchange) {
  constexpr i32 kHalf = (kCount + 1) / 2;
#pragma unroll
  for (i32 k = 0; k < kHalf; ++k) {
    const float upper = kHalf + k < kCount ? x[kHalf + k] : 0.f;
    x[k] = (is_upper ? upper : x[k]) + exchange(is_upper ? x[k] : upper);
  }
  if (is_upper) first += kHalf;
}

// Where captures have gradients; else nothing.
template <class Pairs, bool kHas>
struct FragmentCaptures {
  explicit FragmentCaptures(float) {}
  template <class Scores, class Before>
  void add(const Pairs&, const Scores&, const Before&, i32) {}
  void flush() {}
};

template <class Pairs>
struct FragmentCaptures<Pairs, true> {
  using User = typename Pairs::User;
  using Scores = typename Pairs::Scores;
  static constexpr i32 kFloats = Pairs::kFloats;
  static constexpr i32 kBlocks = kFloats / 4;     // of the fragment: 16 rows, 8 keys
  static constexpr i32 kDiagonals = kBlocks + 2;  // of 8 each: of a warp
  static constexpr i32 eighth(i32 count) { return (((count + 1) / 2 + 1) / 2 + 1) / 2; }
  static constexpr i32 kSums = 2 * eighth(kDiagonals);  // of a lane

  float scale;  // of what is summed
  CaptureSum<float> sums[max(User::kNumDerivatives, 1)][kSums];

  explicit FragmentCaptures(float scale_) : scale(scale_) {}

  // G: P (dP - delta) of the fragment, 0 of hidden pairs; before: scores as the user's is given
  // them.
  void add(const Pairs& pairs, const Scores& G, const Scores& before, i32 first_key) {
    add_read<0>(pairs, G, before, first_key);
  }
  void flush() {
#pragma unroll
    for (i32 n = 0; n < User::kNumDerivatives; ++n) {
#pragma unroll
      for (i32 k = 0; k < kSums; ++k) sums[n][k].flush();
    }
  }

 private:
  static u32 lane() { return ptx::thread_index() % 32; }
  static i32 row_of_lane() { return i32(lane() / 4); }   // g, of a fragment
  static i32 pair_of_lane() { return i32(lane() % 4); }  // t: columns 2t and 2t + 1

  template <i32 kRead>
  void add_read(const Pairs& pairs, const Scores& G, const Scores& before, i32 first_key) {
    if constexpr (kRead < User::kNumDerivatives) {
      if (pairs.expression->sums[User::array_of(kRead)] != nullptr)
        take<kRead>(pairs, G, before, first_key);
      add_read<kRead + 1>(pairs, G, before, first_key);
    }
  }

  template <i32 kRead>
  void take(const Pairs& pairs, const Scores& G, const Scores& before, i32 first_key) {
    constexpr Along kAlong = User::along(kRead);
    Scores x;
    for_each_pair<kRead>(pairs, before, first_key, [&](i32 at, double* element, float slope) {
      x[at] = G[at] == 0 ? 0.f : G[at] * slope;
      if constexpr (kAlong == Along::kPair) add_sum<kRead>(0, element, x[at]);
    });
    if constexpr (kAlong == Along::kHead || kAlong == Along::kRow)
      add_rows<kRead>(pairs, x, first_key);
    if constexpr (kAlong == Along::kKey) add_keys<kRead>(pairs, x, first_key);
    if constexpr (kAlong == Along::kDiagonal) add_diagonals<kRead>(pairs, x, first_key);
  }

  // call(number in a fragment, element, d score / d element)
  template <i32 kRead, class Call>
  static void for_each_pair(const Pairs& pairs, const Scores& before, i32 first_key,
                            const Call& call) {
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const typename User::Column column =
            column_at(pairs, key_of_pair(first_key, i, c, pairs.kv_len()));
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          const i32 at = i + 2 * r + c;
          User::template differentiate_read<kRead>(
              *pairs.expression, pairs.row[r], column, before[at],
              [&](double* element, float slope) { call(at, element, slope); });
        }
      }
    }
  }
  static typename User::Column column_at(const Pairs& pairs, i32 key) {
    bool outside = false;
    return pairs.column_at(0, key, outside);
  }

  // Where row r of the thread and a key read.
  template <i32 kRead>
  static double* element(const Pairs& pairs, i32 r, i32 key) {
    double* found = nullptr;
    User::template differentiate_read<kRead>(*pairs.expression, pairs.row[r], column_at(pairs, key),
                                             0.f, [&](double* at, float) { found = at; });
    return found;
  }

  template <i32 kRead>
  void add_sum(i32 k, double* element, float x) {
    if (x != 0) sums[kRead][k].add(element, x * scale);
  }

  template <i32 kRead>
  void add_rows(const Pairs& pairs, const Scores& x, i32 first_key) {
    float of_row[2] = {};
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) of_row[i / 2 % 2] += x[i];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) add_sum<kRead>(r, element<kRead>(pairs, r, first_key), of_row[r]);
  }

  template <i32 kRead>
  void add_keys(const Pairs& pairs, const Scores& x, i32 first_key) {
#pragma unroll
    for (i32 c = 0; c < 2; ++c) {
      float of_key[kBlocks];  // key 8 m + 2 t + c
#pragma unroll
      for (i32 m = 0; m < kBlocks; ++m) of_key[m] = x[4 * m + c] + x[4 * m + 2 + c];
      constexpr i32 kHalf = (kBlocks + 1) / 2, kQuarter = (kHalf + 1) / 2;
      const auto from = [](u32 distance) {
        return [=](float sent) { return ptx::shuffle_xor(sent, distance); };
      };
      i32 first = 0;
      halve<kBlocks>(of_key, first, (lane() & 16) != 0, from(16));
      halve<kHalf>(of_key, first, (lane() & 8) != 0, from(8));
      halve<kQuarter>(of_key, first, (lane() & 4) != 0, from(4));
#pragma unroll
      for (i32 k = 0; k < eighth(kBlocks); ++k) {
        const i32 key = first_key + 8 * (first + k) + 2 * pair_of_lane() + c;
        const i32 at = c * eighth(kBlocks) + k;
        add_sum<kRead>(at, element<kRead>(pairs, 0, key), of_key[k]);
      }
    }
  }

  // Column less row of pair (g + 8 r, 8 m + 2 t + c) is 8 (m - r) + (2 t + c - g). Sets of eight
  // neighbouring diagonals, of which a lane has two, (2 t + c - g) mod 8, of each row. A partner
  // has the same two of a row that differs in one bit, so that its t is another.
  template <i32 kRead>
  void add_diagonals(const Pairs& pairs, const Scores& x, i32 first_key) {
    const i32 g = row_of_lane(), t = pair_of_lane();
    float of_set[2][kDiagonals];  // set n: 8 (n - 2) and the seven behind
#pragma unroll
    for (i32 c = 0; c < 2; ++c) {
      float along[kBlocks + 1];  // m - r + 1
#pragma unroll
      for (i32 n = 0; n <= kBlocks; ++n) {
        along[n] = (n > 0 ? x[4 * max(n - 1, 0) + c] : 0.f) +
                   (n < kBlocks ? x[4 * min(n, kBlocks - 1) + 2 + c] : 0.f);
      }
      const bool is_before = 2 * t + c < g;  // by a set
#pragma unroll
      for (i32 n = 0; n < kDiagonals; ++n) {
        const float same = n > 0 ? along[max(n - 1, 0)] : 0.f;
        const float next = n <= kBlocks ? along[min(n, kBlocks)] : 0.f;
        of_set[c][n] = is_before ? next : same;
      }
    }
    const auto from = [&](i32 distance, i32 steps) {  // of g, of t
      const u32 other = (lane() ^ u32(4 * distance)) / 4 * 4 + u32((t + steps) & 3);
      return [=](float sent) { return value_of_lane(sent, other); };
    };
    const bool odd = (g & 1) != 0;
    constexpr i32 kHalf = (kDiagonals + 1) / 2, kQuarter = (kHalf + 1) / 2;
    float own[2][kQuarter];
    i32 first[2] = {};
#pragma unroll
    for (i32 c = 0; c < 2; ++c) {
      halve<kDiagonals>(of_set[c], first[c], (g & 4) != 0, from(4, 2));
      halve<kHalf>(of_set[c], first[c], (g & 2) != 0, from(2, (g & 2) != 0 ? -1 : 1));
    }
    // The row before or behind has the same diagonals in the other column.
#pragma unroll
    for (i32 k = 0; k < kQuarter; ++k) {
      own[0][k] = odd ? of_set[1][k] : of_set[0][k];
      own[1][k] = odd ? of_set[0][k] : of_set[1][k];
    }
    halve<kQuarter>(own[0], first[0], odd, from(1, 0));
    halve<kQuarter>(own[1], first[1], odd, from(1, odd ? -1 : 1));
    const i32 row = min(pairs.first_row, pairs.last_row()) - pairs.first_row + g;
#pragma unroll
    for (i32 n = 0; n < 2; ++n) {
      const i32 diagonal = (2 * t + (odd ? 1 - n : n) - g) & 7;
#pragma unroll
      for (i32 k = 0; k < eighth(kDiagonals); ++k) {
        const i32 key = first_key + 8 * (first[n] + k - 2) + diagonal + row;
        add_sum<kRead>(n * eighth(kDiagonals) + k, element<kRead>(pairs, 0, key), own[n][k]);
      }
    }
  }
};

}  // namespace fulmen
