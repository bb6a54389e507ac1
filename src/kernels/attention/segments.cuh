// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows and keys that are parts of a longer sequence: a segment says where some that follow each
// other stand in it. Called by the CPU and by kernels; contents are never trusted: numbers are cut
// to 32 bits, and a position out of range counts as the nearest inside.
#pragma once

#include "kernels/attention/sequence.cuh"

namespace fulmen {

inline constexpr i64 kMaxSegments = 64;
inline constexpr i64 kNoPosition = -1;  // of a row or key that no segment has

// Rows first .. first + count - 1 stand at position, position + 1, ..
struct Segment {
  i64 first;
  i64 count;
  i64 position;

  constexpr bool has(i64 row) const { return first <= row && row < first + count; }
  constexpr i64 position_of(i64 row) const {
    return clamp<i64>(position + row - first, 0, kMaxPosition);
  }
};

// Whether one lies outside the rows of its sequence or beyond the last position. One without rows
// lies nowhere.
constexpr bool is_bad_segment(const Segment& segment, i64 rows) {
  if (segment.count == 0) return false;
  return segment.first < 0 || segment.count < 0 || segment.first + segment.count > rows ||
         segment.position < 0 || segment.position + segment.count - 1 > kMaxPosition;
}
constexpr bool share_rows(const Segment& a, const Segment& b) {
  return max(a.first, b.first) < min(a.first + a.count, b.first + b.count);
}

// The position of a row by the first of the segments that has it. word(n, c): number c of segment
// n.
template <class Word>
constexpr Segment segment_of(i64 n, const Word& word) {
  return {clamped_position(word(n, 0)), clamped_position(word(n, 1)), clamped_position(word(n, 2))};
}
template <class Word>
constexpr i64 segment_position(i64 row, i64 num_segments, const Word& word) {
  for (i64 n = 0; n < num_segments; ++n) {
    const Segment segment = segment_of(n, word);
    if (segment.has(row)) return segment.position_of(row);
  }
  return kNoPosition;
}

}  // namespace fulmen
