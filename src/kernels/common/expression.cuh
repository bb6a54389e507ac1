// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A user's expression in a kernel. Its text is generated (gpu/expression_text.h) and stands behind
// the kernel's own: a definition of UserExpression, which evaluates a score, a mask and derivatives
// for one pair, in the steps of core/program.h. Here is what kernels know of it and what its text
// calls.
#pragma once

#include "kernels/attention/between.cuh"
#include "kernels/attention/integers.cuh"
#include "kernels/attention/segments.cuh"
#include "kernels/common/array_access.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/expression.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

// A pair, and what holds for all pairs of its head, under the names of the language.
struct ExpressionPair {
  i64 b, h, hk, q_len, kv_len;
  i64 i, j, p;
};

// A score and its derivative with respect to s.
template <class Real>
struct MappedScore {
  Real score;
  Real slope;
};

// Defined by the generated text. Row holds what is the same for all keys of a row, Column for all
// rows of a key, so that a kernel computes it once.
//   static Row row(e, pair, outside)                     of a pair: b, h, hk, lengths, i, p
//   static Column column(e, row, pair, outside)          j, and what is the same for the head
//   static Diagonal diagonal(e, row, column, outside)    what the key less the row tells, of
//                                                        kDiagonalWords words of 32 bits
//   static Real score(e, row, column, diagonal, s, outside)
//   static MappedScore<Real> mapped(e, row, column, diagonal, s, outside)
//   static bool shows(e, row, column, outside)
//   static constexpr bool kReadsSegments                 positions of rows and keys come from them
// Where there is a mask, also what it can be over a box of pairs, of values of rows, or keys, from
// their least to their most:
//   static RowBounds bounds_of(row)                      ColumnBounds bounds_of(column)
//   static void each(a, b, call)                         call(x of a, x of b) for each value of two
//   static Integers shows_between(rows, columns)
// Of the reads of arrays whose gradients may be asked for, 0 .. kNumDerivatives - 1:
//   static Along along(n)                                what the element that is read depends on
//   static i32 array_of(n)
//   static void differentiate_read<n>(e, row, column, s, add)    add(element of the sums,
//                                                        d score / d element)
//   static void differentiate(e, row, column, s, add)    add(n, and the same) for each whose
//                                                        gradient is asked for
// outside: set where an index is out of range.
template <class Math>
struct UserExpression;

// Both for one pair.
template <class User>
struct UserPair {
  const ExpressionParams& e;
  bool outside = false;
  typename User::Row row;
  typename User::Column column;

  UserPair(const ExpressionParams& e_, const ExpressionPair& pair)
      : e(e_), row(User::row(e, pair, outside)), column(User::column(e, row, pair, outside)) {}

  typename User::Diagonal diagonal() { return User::diagonal(e, row, column, outside); }
};

inline void report_outside(const ExpressionParams& e, bool outside) {
  if (outside) report(e.faults, kFaultCaptures);
}

inline Segment segment_at(const SegmentsView& segments, i64 sequence, i64 n) {
  return segment_of(n, [&](i64 at, i64 word) {
    return load_aligned_index(segments.words, segments.words.offset(sequence, 0, at, word));
  });
}

// The position of a row, or of a key, of a sequence.
inline i32 position_by(const SegmentsView& segments, i64 sequence, i64 row) {
  return static_cast<i32>(segment_position(row, segments.count, [&](i64 n, i64 word) {
    return load_aligned_index(segments.words, segments.words.offset(sequence, 0, n, word));
  }));
}

// Segments out of range, or that share a row. By all threads of a grid, which look at one sequence
// each.
inline __attribute__((noinline)) void look_at_segments(const AttentionParams& p,
                                                       const ExpressionParams& e, i32 num_threads) {
  if (e.faults == nullptr) return;
  const i64 thread = static_cast<i64>(ptx::block_index()) * num_threads + ptx::thread_index();
  const i64 all_threads = static_cast<i64>(ptx::num_blocks()) * num_threads;
  bool is_bad = false;
  const auto look_at = [&](const SegmentsView& segments, const ArrayView& offsets, i64 rows,
                           i64 index) {
    const AxisEntry own = axis_entry(offsets, ArrayView{}, index);
    if (own.packed) rows = own.end - own.begin;
    for (i64 n = 0; n < segments.count; ++n) {
      const Segment segment = segment_at(segments, index, n);
      is_bad |= is_bad_segment(segment, rows);
      for (i64 other = 0; other < n; ++other) {
        is_bad |= share_rows(segment, segment_at(segments, index, other));
      }
    }
  };
  for (i64 i = thread; i < p.num_sequences; i += all_threads) {
    look_at(e.q_segments, p.cu_q, p.q_rows, i);
    look_at(e.kv_segments, p.cu_kv, p.kv_rows, i);
  }
  if (is_bad) report(e.faults, kFaultSegments);
}

// The same where the expression reads segments: a call takes more registers than most masks.
template <class User>
void record_segment_faults(const AttentionParams& p, const ExpressionParams& e, i32 num_threads) {
  if constexpr (User::kReadsSegments) look_at_segments(p, e, num_threads);
}

// ---- What the text calls -----------------------------------------------------------------------

// NaN stays NaN.
template <class T>
constexpr T least_of(T a, T b) {
  return b < a || b != b ? b : a;
}
template <class T>
constexpr T most_of(T a, T b) {
  return a < b || b != b ? b : a;
}
template <class T>
constexpr T bounded(T x, T low, T high) {
  return x < low ? low : high < x ? high : x;
}

// Where an index of a read finds its element along an axis, the nearest inside. Offset: wide enough
// for every offset in the array.
template <class Offset, class Index>
Offset inside(const ExpressionParams& e, i32 capture, i32 axis, Index index, bool& outside) {
  const Index last = static_cast<Index>(e.extents[capture][axis] - 1);
  const Index nearest = bounded<Index>(index, 0, last);
  outside = outside || nearest != index;
  return static_cast<Offset>(nearest);
}

template <class Offset>
Offset stride(const ExpressionParams& e, i32 capture, i32 axis) {
  return static_cast<Offset>(e.captures[capture].strides[axis]);
}
template <class Offset>
Offset extent(const ExpressionParams& e, i32 capture, i32 axis) {
  return static_cast<Offset>(e.extents[capture][axis]);
}

template <class T, class Offset>
T element(const ExpressionParams& e, i32 capture, Offset offset) {
  return ptx::load_constant(reinterpret_cast<const T*>(e.captures[capture].data) + offset);
}
template <class T, class Real, class Offset>
Real real_element(const ExpressionParams& e, i32 capture, Offset offset) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<Real>(widen(T{element<u16>(e, capture, offset)}));
  } else {
    return static_cast<Real>(element<T>(e, capture, offset));
  }
}

// ---- Gradients of what is read -----------------------------------------------------------------

// What the element that pairs read depends on.
enum class Along : u8 {
  kHead,
  kRow,
  kKey,
  kDiagonal,  // the key less the row
  kPair,
};

// The sum of one thread for one element: what is added to it one behind the other is added to
// memory once.
template <class Real>
struct CaptureSum {
  double* at = nullptr;
  Real sum = 0;

  void add(double* element, Real value) {
    if (at != element) flush();
    at = element;
    sum += value;
  }
  void flush() {
    if (at != nullptr) ptx::add_to(at, static_cast<double>(sum));
    sum = 0;
  }
};

// Those of one thread, one for each read.
template <class Real, i32 kCount>
struct CaptureSums {
  CaptureSum<Real> of[kCount == 0 ? 1 : kCount];

  void add(i32 n, double* element, Real value) { of[n].add(element, value); }
  void flush() {
    for (i32 n = 0; n < kCount; ++n) of[n].flush();
  }
};

}  // namespace fulmen
