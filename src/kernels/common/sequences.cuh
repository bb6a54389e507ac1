// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lengths and offsets in device memory, as kernels read them; what they mean is in sequence.cuh.
#pragma once

#include "kernels/attention/sequence.cuh"
#include "kernels/common/array_access.cuh"

namespace fulmen {

template <class Index = AnyIndex>
AxisEntry axis_entry(const ArrayView& offsets, const ArrayView& lengths, i64 index) {
  AxisEntry entry{offsets.present(), lengths.present(), 0, 0, 0};
  if (entry.packed) {
    entry.begin = Index::load(offsets, index * offsets.strides[3]);
    entry.end = Index::load(offsets, (index + 1) * offsets.strides[3]);
  }
  if (entry.has_length) entry.length = Index::load(lengths, index * lengths.strides[3]);
  return entry;
}

inline Sequence load_sequence(const AttentionParams& p, i64 index) {
  const bool is_last = index + 1 == p.num_sequences;
  return sequence_of(
      p.packed.q ? 0 : index, rows_of(axis_entry(p.cu_q, p.q_lengths, index), p.q_rows, is_last),
      rows_of(axis_entry(p.cu_kv, p.kv_lengths, index), p.kv_rows, is_last), p.bottom_right);
}

// The same where there are neither lengths nor offsets.
inline Sequence dense_sequence(const AttentionParams& p, i64 index) {
  return sequence_of(index, {0, p.q_rows, p.q_rows}, {0, p.kv_rows, p.kv_rows}, p.bottom_right);
}

// Of calls that mix requests of few query rows with others: those whose rows of a group of heads
// are few have a kernel of their own, decode_sm80, and forward_sm90 has the others.
inline constexpr i32 kFewRows = 16;
inline bool has_few_rows(const AttentionParams& p, i64 q_len) {
  return q_len * p.group_size() <= kFewRows;
}

// The sequence that owns a row of a packed array: the last one that begins at or before it. With
// offsets out of order the answer is some sequence, and the caller must check that it owns the row.
inline i64 find_sequence(const AttentionParams& p, const ArrayView& offsets, i64 row) {
  i64 low = 0;
  i64 high = p.num_sequences - 1;
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (load_index(offsets, middle * offsets.strides[3]) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace fulmen
