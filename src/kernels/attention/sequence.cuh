// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which rows belong to which batch entry: dense, padded (lengths) or packed (cumulative offsets).
// Contents of lengths and offsets are clamped, never trusted: an entry that is out of range counts
// as empty. The host reads them for CPU problems, kernels read them on the device; both come here.
#pragma once

#include "kernels/attention/mask.cuh"

namespace fulmen {

// One batch entry: where its rows start in the arrays, how many there are, and how many count.
struct Sequence {
  i64 batch;     // index into the batch axis of the arrays; 0 when packed
  i64 q_begin;   // its first row in q, o, lse and their gradients
  i64 kv_begin;  // its first row in k, v and their gradients
  i64 q_slot;   // rows it owns from q_begin on; rows [q_len, q_slot) of the results are zero-filled
  i64 kv_slot;  // likewise of k, v
  SequenceShape shape;
};

// What the caller's arrays say of one entry along one axis.
struct AxisEntry {
  bool packed;      // begin and end hold two neighbouring offsets
  bool has_length;  // length holds a length
  i64 begin;
  i64 end;
  i64 length;
};

struct AxisRows {
  i64 begin;
  i64 slot;
  i64 length;
};

// The last entry of a packed axis also owns the rows past the last offset.
constexpr AxisRows rows_of(const AxisEntry& entry, i64 extent, bool is_last) {
  AxisRows rows{0, extent, extent};
  if (entry.packed) {
    const bool valid = 0 <= entry.begin && entry.begin <= entry.end && entry.end <= extent;
    if (!valid) return {0, 0, 0};
    rows = {entry.begin, (is_last ? extent : entry.end) - entry.begin, entry.end - entry.begin};
  }
  if (entry.has_length) rows.length = clamp<i64>(entry.length, 0, rows.length);
  return rows;
}

constexpr Sequence sequence_of(i64 batch, const AxisRows& q, const AxisRows& kv,
                               bool bottom_right) {
  const i64 shift = bottom_right ? kv.length - q.length : 0;
  return {
      batch,    q.begin,
      kv.begin, q.slot,
      kv.slot,  {static_cast<i32>(q.length), static_cast<i32>(kv.length), static_cast<i32>(shift)}};
}

}  // namespace fulmen
