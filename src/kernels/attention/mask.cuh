// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the structured masks let a row see, as integers: causal, window, prefix and chunks together
// always leave one interval of keys per row, and one interval of rows per key. Both ends of both
// intervals never decrease from a row (key) to the next; block_range.cuh builds on that.
// Masks that are not intervals (boolean, documents, a bias of -inf) act entry by entry on top.
// Called by every backend; compared with a definition entry by entry in the tests.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

inline constexpr i32 kNoLimit = -1;

// The same for all batch entries of a problem.
struct IntervalMask {
  bool causal = false;          // j <= position
  i32 window_left = kNoLimit;   // j >= position - window_left
  i32 window_right = kNoLimit;  // j <= position + window_right
  i32 prefix = 0;               // with causal: keys below it are visible to all rows
  i32 chunk = 0;                // 0: none; else position / chunk == j / chunk, rounded down

  // Whether it hides nothing but what causal hides.
  constexpr bool is_at_most_causal() const {
    return window_left == kNoLimit && window_right == kNoLimit && prefix == 0 && chunk == 0;
  }

  // What of it bounds rows on the right; a mask without left bounds is this one.
  constexpr IntervalMask right_bounds() const {
    IntervalMask bounds;
    bounds.causal = causal;
    bounds.window_right = window_right;
    bounds.prefix = prefix;
    return bounds;
  }
};

// One batch entry: its true lengths, and where query row 0 stands among the keys.
struct SequenceShape {
  i32 q_len;
  i32 kv_len;
  i32 shift;  // kv_len - q_len (bottom-right) or 0 (top-left)

  constexpr i64 position(i64 q_row) const { return q_row + shift; }
};

// Indices [begin, end); empty when begin == end.
struct Interval {
  i64 begin;
  i64 end;

  constexpr i64 size() const { return end - begin; }
  constexpr bool contains(i64 index) const { return begin <= index && index < end; }
};

constexpr Interval clamped(i64 begin, i64 end, i64 length) {
  begin = clamp<i64>(begin, 0, length);
  return {begin, max(begin, min(end, length))};
}

// The keys, of kv_len, that a query row at `position` sees.
constexpr Interval visible_columns_at(const IntervalMask& mask, i64 kv_len, i64 position) {
  i64 begin = 0;
  i64 end = kv_len;
  if (mask.causal) end = min(end, max<i64>(position + 1, mask.prefix));
  if (mask.window_left != kNoLimit) begin = max(begin, position - mask.window_left);
  if (mask.window_right != kNoLimit) end = min(end, position + mask.window_right + 1);
  if (mask.chunk > 0) {
    const i64 chunk_begin = floor_div(position, mask.chunk) * mask.chunk;
    begin = max(begin, chunk_begin);
    end = min(end, chunk_begin + mask.chunk);
  }
  return clamped(begin, end, kv_len);
}

// The keys that query row `q_row` (0 <= q_row < q_len) sees.
constexpr Interval visible_columns(const IntervalMask& mask, const SequenceShape& shape,
                                   i64 q_row) {
  return visible_columns_at(mask, shape.kv_len, shape.position(q_row));
}

// Whether a query row at `position` sees key j, which stands at `key_position`: the same mask, pair
// by pair, where keys do not stand at their own number.
constexpr bool sees_at(const IntervalMask& mask, i64 position, i64 key_position, i64 j) {
  if (mask.causal && key_position > position && j >= mask.prefix) return false;
  if (mask.window_left != kNoLimit && key_position < position - mask.window_left) return false;
  if (mask.window_right != kNoLimit && key_position > position + mask.window_right) return false;
  return mask.chunk == 0 || floor_div(position, mask.chunk) == floor_div(key_position, mask.chunk);
}

// The query rows that see key `kv_row` (0 <= kv_row < kv_len): the same mask, read by column.
constexpr Interval visible_rows(const IntervalMask& mask, const SequenceShape& shape, i64 kv_row) {
  i64 first = shape.position(0);  // as positions, both ends inclusive
  i64 last = shape.position(shape.q_len) - 1;
  if (mask.causal && kv_row >= mask.prefix) first = max(first, kv_row);
  if (mask.window_right != kNoLimit) first = max(first, kv_row - mask.window_right);
  if (mask.window_left != kNoLimit) last = min(last, kv_row + mask.window_left);
  if (mask.chunk > 0) {
    const i64 chunk_begin = floor_div(kv_row, mask.chunk) * mask.chunk;
    first = max(first, chunk_begin);
    last = min(last, chunk_begin + mask.chunk - 1);
  }
  return clamped(first - shape.shift, last + 1 - shape.shift, shape.q_len);
}

}  // namespace fulmen
