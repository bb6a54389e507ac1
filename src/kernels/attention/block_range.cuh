// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which blocks of keys a block of query rows must read, and which of those are full, that is,
// visible to every row of the block, so that they need no mask arithmetic; and the same read the
// other way for the backward pass, where a block of keys reads blocks of query rows.
// Rests on mask.cuh: interval ends never decrease from one row to the next, so the first and the
// last row of a block decide. The tests compare every small shape with the dense mask.
#pragma once

#include "kernels/attention/mask.cuh"

namespace fulmen {

// Numbers of blocks: visible [visible.begin, visible.end); blocks in `full` (a part of it) have
// every entry visible; all others of `visible` are partial. Blocks outside `visible` are empty.
struct BlockRange {
  Interval visible;
  Interval full;

  constexpr bool is_full(i64 block) const { return full.contains(block); }
};

// `some`: indices that at least one line of the block sees; `all`: those that every line sees.
constexpr BlockRange blocks_of(Interval some, Interval all, i64 block_size, i64 length) {
  if (some.size() <= 0) return {{0, 0}, {0, 0}};
  const Interval visible{some.begin / block_size, ceil_div(some.end, block_size)};
  // A block cut off by the end of the sequence is full only where a kernel may read past it; none
  // may, so it counts as partial.
  const i64 full_end = min(min(all.end, length) / block_size, visible.end);
  const i64 full_begin = max(ceil_div(all.begin, block_size), visible.begin);
  return {visible, {full_begin, max(full_begin, full_end)}};
}

// Query rows [rows.begin, rows.end) of one block, not empty, within q_len.
constexpr BlockRange visible_column_blocks(const IntervalMask& mask, const SequenceShape& shape,
                                           Interval rows, i64 block_cols) {
  const Interval first = visible_columns(mask, shape, rows.begin);
  const Interval last = visible_columns(mask, shape, rows.end - 1);
  return blocks_of({first.begin, last.end}, {last.begin, first.end}, block_cols, shape.kv_len);
}

// Keys [columns.begin, columns.end) of one block, not empty, within kv_len.
constexpr BlockRange visible_row_blocks(const IntervalMask& mask, const SequenceShape& shape,
                                        Interval columns, i64 block_rows) {
  const Interval first = visible_rows(mask, shape, columns.begin);
  const Interval last = visible_rows(mask, shape, columns.end - 1);
  return blocks_of({first.begin, last.end}, {last.begin, first.end}, block_rows, shape.q_len);
}

}  // namespace fulmen
