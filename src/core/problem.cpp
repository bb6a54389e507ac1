// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Reading lengths and offsets from host memory; what they mean is in sequence.cuh.

#include "core/problem.h"

namespace fulmen {
namespace {

AxisEntry entry_of(const Tensor& offsets, const Tensor& lengths, i64 index) {
  AxisEntry entry{offsets.present(), lengths.present(), 0, 0, 0};
  if (entry.packed) {
    entry.begin = offsets.index(0, 0, 0, index);
    entry.end = offsets.index(0, 0, 0, index + 1);
  }
  if (entry.has_length) entry.length = lengths.index(0, 0, 0, index);
  return entry;
}

}  // namespace

Sequence Problem::sequence(i64 index) const {
  const bool is_last = index + 1 == num_sequences;
  const AxisEntry q = entry_of(arrays[Array::kCuQ], arrays[Array::kQLengths], index);
  const AxisEntry kv = entry_of(arrays[Array::kCuKv], arrays[Array::kKvLengths], index);
  return sequence_of(packed ? 0 : index, rows_of(q, q_rows, is_last), rows_of(kv, kv_rows, is_last),
                     alignment == Alignment::kBottomRight);
}

}  // namespace fulmen
