// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Few query rows against many keys: K is read once, where it lies and in its own type, as fast as
// memory gives it: what comes next is asked for while the keys at work are multiplied. A vector
// holds a part of the dimensions of several rows of q, and a load repeats that part of a key; the
// parts are summed, and turned, for kWidth keys at once. Then their softmax. See
// few_row_values.h for P V.
#pragma once

#include "cpu/isa/elements.h"
#include "cpu/isa/exponential.h"
#include "cpu/isa/softmax.h"
#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

// An operand as vectors of kDims dimensions, widened where they are read.
template <class Real_, class Element>
struct Widened {
  using Real = Real_;
  using Lane = Real_;
  static constexpr bool kWidens = sizeof(typename Element::Stored) != sizeof(Real);
  static constexpr i64 kDims = kWidth<Real>;
  static constexpr i64 kBytes = kDims * static_cast<i64>(sizeof(typename Element::Stored));
  static Vector<Lane> read(const char* address) {
    typename Element::Stored few[kDims];
    __builtin_memcpy(few, address, sizeof(few));
    return Element::widen(few, Real());
  }

  // Of a row of values, kValueVectors vectors of O at a time.
  static constexpr int kKeys = 1;
  static constexpr int kValueVectors = 1;
  static constexpr i64 kValueBytes = kBytes;
  static void read_values(const char* row, const char*, Vector<Lane>* out) { *out = read(row); }
};

// How rows of q share vectors: a power of 2 in each, in two vectors where there is more than one
// row, so that every number of a key that is loaded serves two multiply-adds.
struct RowGroups {
  i64 rows;  // in a vector
  i64 groups;
};

template <class Lane>
inline RowGroups row_groups(i64 rows) {
  if (rows == 1) return {1, 1};
  i64 half = 1;
  while (2 * half < rows && half < min(kWidth<Lane>, 8)) half *= 2;
  return {half, 2};
}

// Of each of its rows a vector holds kWidth / rows neighbouring lanes, a part; rows that are not
// there are 0.
template <class Lane>
void arrange_rows(const Lane* Q, i64 Q_stride, i64 rows, i64 lanes, Lane* out) {
  const i64 some = row_groups<Lane>(rows).rows;
  const i64 part = kWidth<Lane> / some;
  for (i64 first = 0; first < rows; first += some) {
    for (i64 at = 0; at < lanes; at += part) {
      for (i64 row = first; row < first + some; ++row) {
        for (i64 i = 0; i < part; ++i) *out++ = row < rows ? Q[row * Q_stride + at + i] : Lane();
      }
    }
  }
}

// In: a key per vector, kWidth / kRows lanes a row. Out, in the first kRows: a row per vector, a
// key per lane, each the sum of the lanes that it had. Taking every other lane of two vectors turns
// the lowest bit of the lane into the highest of the vector; the two halves are added, or kept.
template <class Real, int kRows>
[[gnu::always_inline]] inline void sum_parts(Vector<Real> (&keys)[kWidth<Real>]) {
#pragma GCC unroll 4
  for (int half = kWidth<Real> / 2; half >= kRows; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      keys[i] =
          evens<Real>(keys[2 * i], keys[2 * i + 1]) + odds<Real>(keys[2 * i], keys[2 * i + 1]);
    }
  }
#pragma GCC unroll 4
  for (int step = 1; step < kRows; step *= 2) {
    Vector<Real> next[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows / 2; ++i) {
      next[i] = evens<Real>(keys[2 * i], keys[2 * i + 1]);
      next[i + kRows / 2] = odds<Real>(keys[2 * i], keys[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) keys[i] = next[i];
  }
}

constexpr i64 kLine = 64;  // bytes that memory gives at once

inline void fetch_line(const char* address) { __builtin_prefetch(address); }

// Numbers that several rows of q share are widened once, so many dimensions at a time.
constexpr i64 kWidenedDims = 128;

// kWidth keys against kGroups vectors of kRows rows of q.
template <class Operand, int kRows, int kGroups>
struct KeysAtOnce {
  using Real = typename Operand::Real;
  using Lane = typename Operand::Lane;
  static constexpr int kKeys = kWidth<Real>;
  static constexpr int kSteps = kVectorBytes == 64 ? 4 : 2;  // for which a pointer is fetched once
  static constexpr int kPart = kKeys / kRows;  // lanes of a key that a vector repeats for each row
  static constexpr bool kWidensFirst = Operand::kWidens && kGroups > 1;
  static constexpr i64 kPartBytes =
      Operand::kWidens && !kWidensFirst ? Operand::kBytes : kPart * static_cast<i64>(sizeof(Lane));

  static Vector<Lane> part(const char* address) {
    if constexpr (Operand::kWidens && !kWidensFirst) return Operand::read(address);
    return repeated<kPart, Lane>(address);
  }

  // sums[g][j] += Q[g][v] key[j][v] for kVectors of v and kKeys / kGroups of j.
  template <int kVectors>
  [[gnu::always_inline]] inline void multiply(const Lane* Q, i64 group_lanes, const char* const* in,
                                              i64 at, int first) {
    Vector<Lane> q[kGroups][kVectors];
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) q[g][v] = load(Q + g * group_lanes + v * kKeys);
    }
#pragma GCC unroll 16
    for (int j = first; j < first + kKeys / kGroups; ++j) {
      const char* const key = in[j] + at;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Vector<Lane> k = part(key + v * kPartBytes);
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) sums[g][j] = multiply_add(k, q[g][v], sums[g][j]);
      }
      if constexpr (!kWidensFirst) fetch<kVectors * kPartBytes>(j, at + ahead_offset);
    }
  }

  // As many lines as are multiplied: of key j, or of some keys where a line serves several steps.
  template <i64 kBytes>
  [[gnu::always_inline]] inline void fetch(int j, i64 at) const {
    if constexpr (kBytes >= kLine) {
#pragma GCC unroll 8
      for (i64 more = 0; more < kBytes; more += kLine) fetch_line(ahead[j] + at + more);
    } else {
      constexpr int kShared = kLine / kBytes;
      if (j % kShared == at / kBytes % kShared) fetch_line(ahead[j] + at);
    }
  }

  // in: kKeys rows of the operand, which begins `offset` bytes behind; vectors: of each group.
  [[gnu::always_inline]] inline void add(const Lane* Q, i64 group_lanes, const char* const* in,
                                         i64 offset, i64 vectors) {
#pragma GCC unroll 2
    for (int first = 0; first < kKeys; first += kKeys / kGroups) {
      i64 v = 0;
      for (; v + kSteps <= vectors; v += kSteps) {
        multiply<kSteps>(Q + v * kKeys, group_lanes, in, offset + v * kPartBytes, first);
      }
      for (; v < vectors; ++v) {
        multiply<1>(Q + v * kKeys, group_lanes, in, offset + v * kPartBytes, first);
      }
    }
  }

  void dot(const Lane* Q, const char* const* in, i64 offset, i64 lanes) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) sums[g][j] = Vector<Real>{};
    }
    if constexpr (kWidensFirst) {
      alignas(kVectorBytes) Lane wide[kKeys][kWidenedDims];
      const char* rows[kKeys];
      for (int j = 0; j < kKeys; ++j) rows[j] = reinterpret_cast<const char*>(wide[j]);
      for (i64 done = 0; done < lanes; done += kWidenedDims) {
        const i64 some = min(kWidenedDims, lanes - done);
        for (int j = 0; j < kKeys; ++j) {
          widen(in[j] + offset, ahead[j] + offset + ahead_offset, done, some, wide[j]);
        }
        add(Q + done * kRows, lanes * kRows, rows, 0, some / kPart);
      }
    } else {
      add(Q, lanes * kRows, in, offset, lanes / kPart);
    }
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) sum_parts<Real, kRows>(sums[g]);
  }

  static void widen(const char* row, const char* row_ahead, i64 first, i64 count, Lane* out) {
    for (i64 d = 0; d < count; d += kKeys) {
      const i64 at = (first + d) / kKeys * Operand::kBytes;
      store(out + d, Operand::read(row + at));
      if (at % kLine == 0) fetch_line(row_ahead + at);
    }
  }

  const char* const* ahead;  // kKeys rows that are asked for,
  i64 ahead_offset;          // so many bytes further on than those that are multiplied
  Vector<Real> sums[kGroups][kKeys];
};

template <class Operand, int kRows, int kGroups>
void dot_rows_together(const typename Operand::Lane* Q, i64 rows, const KeyList& keys, i64 lanes,
                       typename Operand::Real* scores, i64 stride) {
  using Keys = KeysAtOnce<Operand, kRows, kGroups>;
  constexpr i64 kKeys = Keys::kKeys;
  const auto list = reinterpret_cast<const char* const*>(keys.rows);
  const auto ahead = reinterpret_cast<const char* const*>(keys.ahead);
  for (i64 key = 0; key < keys.count; key += kKeys) {
    const i64 present = min(kKeys, keys.count - key);
    const bool asks = key + present <= keys.num_ahead;
    const char* const* in = list + key;
    Keys some;
    some.ahead = asks ? ahead + key : in;
    some.ahead_offset = asks ? keys.ahead_offset - keys.offset : 0;
    const char* last[2][kKeys];
    if (present < kKeys) {  // the last key again, into the padding
      for (i64 j = 0; j < kKeys; ++j) {
        last[0][j] = in[min(j, present - 1)];
        last[1][j] = some.ahead[min(j, present - 1)];
      }
      in = last[0];
      some.ahead = last[1];
    }
    some.dot(Q, in, keys.offset, lanes);
#pragma GCC unroll 16
    for (int row = 0; row < kGroups * kRows; ++row) {
      if (row < rows) store(scores + row * stride + key, some.sums[row / kRows][row % kRows]);
    }
  }
}

// kRows: of a vector, at most; a power of 2.
template <class Operand, int kRows = min(kWidth<typename Operand::Real>, 8)>
void dot_rows_of(const typename Operand::Lane* Q, i64 rows, const KeyList& keys, i64 dims,
                 typename Operand::Real* scores, i64 stride) {
  const i64 lanes = dims / (Operand::kDims / kWidth<typename Operand::Lane>);
  if (rows == 1) return dot_rows_together<Operand, 1, 1>(Q, rows, keys, lanes, scores, stride);
  if constexpr (kRows > 1) {
    if (rows <= kRows) {
      return dot_rows_of<Operand, kRows / 2>(Q, rows, keys, dims, scores, stride);
    }
  }
  constexpr i64 kTogether = 2 * kRows;
  for (; rows > 0; rows -= kTogether, Q += kTogether * lanes, scores += kTogether * stride) {
    dot_rows_together<Operand, kRows, 2>(Q, rows, keys, lanes, scores, stride);
  }
}

template <class Real>
void dot_rows(const Real* Q, i64 rows, const KeyList& keys, i64 dims, Real* scores, i64 stride) {
  with_element<Real>(keys.dtype, [&]<class Element>(Element) {
    dot_rows_of<Widened<Real, Element>>(Q, rows, keys, dims, scores, stride);
  });
}

template <class Real>
[[gnu::always_inline]] inline Real largest_of(Vector<Real> lanes) {
  Real largest = lanes[0];
  for (int lane = 1; lane < kWidth<Real>; ++lane) {
    largest = lanes[lane] > largest ? lanes[lane] : largest;
  }
  return largest;
}

// Apart, so that only a last vector goes through memory.
template <class AnyVector>
[[gnu::noinline]] void hide_from(i64 lane, AnyVector* scores) {
  AnyVector hidden = *scores;
  for (; lane < static_cast<i64>(sizeof(hidden) / sizeof(hidden[0])); ++lane) {
    hidden[lane] = -__builtin_inff();
  }
  *scores = hidden;
}

// s = softcap(scale dot) + addend, keys past the last -inf;  returns max over the keys.
template <class Real>
Real finish_scores(Real* s, i64 keys, const ScoreMap<Real>& map, const Real* addend) {
  constexpr i64 kStep = kWidth<Real>;
  Vector<Real> largest = broadcast(-kInfinity<Real>);
  for (i64 j = 0; j < keys; j += kStep) {
    Vector<Real> score = modified(load(s + j) * map.scale, map.softcap);
    if (addend) score = with_addend<Real>(score, load(addend + j));
    if (keys - j < kStep) hide_from(keys - j, &score);
    store(s + j, score);
    largest = larger(largest, score);
  }
  return largest_of<Real>(largest);
}

// A key per lane: m = max s, P = exp(s - m) keep, l = sum of exp(s - m), of every row.
template <class Weights, class Real>
void weigh_rows(const FewRowsBlock<Real>& block) {
  constexpr i64 kStep = kWidth<Real>;
  for (i64 row = 0; row < block.rows; ++row) {
    const i64 at = row * block.stride;
    Real* const s = block.scores + at;
    const Real* const addend = block.terms.addend ? block.terms.addend + at : nullptr;
    const Real row_max = finish_scores(s, block.keys, block.terms.map, addend);
    const Real shift = row_max == -kInfinity<Real> ? Real(0) : row_max;
    const Weights weight_of(broadcast(Real(1)), broadcast(shift));
    Vector<Real> sum{};
    for (i64 j = 0; j < block.keys; j += kStep) {
      Vector<Real> weight = weight_of.of(load(s + j));
      sum += weight;
      if (block.terms.keep) {
        weight *= load(block.terms.keep + at + j);
        for (i64 lane = block.keys - j; lane < kStep; ++lane) weight[lane] = 0;
      }
      Weights::store_lanes(s, j, weight);
    }
    Real total = 0;
    for (int lane = 0; lane < kStep; ++lane) total += sum[lane];
    block.row_max[row] = row_max;
    block.row_sum[row] = total;
  }
}

}  // namespace
}  // namespace fulmen::cpu
