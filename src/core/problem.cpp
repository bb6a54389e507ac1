// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which rows belong to which batch entry: dense, padded (lengths) or packed (cumulative offsets).

#include "core/problem.h"

namespace fulmen {
namespace {

// Rows [begin, begin + slot) that entry `index` owns along one packed or dense axis.
struct Slot {
  i64 begin;
  i64 rows;
};

Slot slot_of(const Tensor& offsets, i64 index, i64 num_sequences, i64 extent) {
  if (!offsets.present()) return {0, extent};
  const i64 begin = offsets.index(0, 0, 0, index);
  const i64 end = offsets.index(0, 0, 0, index + 1);
  const bool valid = 0 <= begin && begin <= end && end <= extent;
  if (!valid) return {0, 0};
  // The last entry also owns the rows past the last offset, so that they are zero-filled.
  return {begin, (index + 1 == num_sequences ? extent : end) - begin};
}

i64 length_of(const Tensor& lengths, const Tensor& offsets, i64 index, Slot slot) {
  i64 rows = slot.rows;
  if (offsets.present()) {
    rows = min(rows, offsets.index(0, 0, 0, index + 1) - offsets.index(0, 0, 0, index));
  }
  if (!lengths.present()) return max<i64>(rows, 0);
  const i64 length = lengths.index(0, 0, 0, index);
  return length < 0 ? 0 : max<i64>(min(length, rows), 0);
}

}  // namespace

Sequence Problem::sequence(i64 index) const {
  const Slot q = slot_of(arrays[Array::kCuQ], index, num_sequences, q_rows);
  const Slot kv = slot_of(arrays[Array::kCuKv], index, num_sequences, kv_rows);
  const i64 q_len = length_of(arrays[Array::kQLengths], arrays[Array::kCuQ], index, q);
  const i64 kv_len = length_of(arrays[Array::kKvLengths], arrays[Array::kCuKv], index, kv);
  const i64 shift = alignment == Alignment::kBottomRight ? kv_len - q_len : 0;
  return {packed ? 0 : index,
          q.begin,
          kv.begin,
          q.rows,
          kv.rows,
          {static_cast<i32>(q_len), static_cast<i32>(kv_len), static_cast<i32>(shift)}};
}

}  // namespace fulmen
