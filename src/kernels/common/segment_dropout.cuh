// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Dropout beside segments on tensor cores: a draw decides eight keys of the sequence that lie side
// by side. Eight keys of a call mostly are eight such keys; where bounds of segments make them
// others, draws are by pairs.
#pragma once

#include "kernels/attention/dropout.cuh"
#include "kernels/common/expression.cuh"

namespace fulmen {

inline constexpr i64 kMixedGroup = -1;

// The group of eight keys of the sequence that keys first .. first + 7 of a call are, in its order;
// kMixedGroup: they are none. Keys that no segment has may be any.
inline i64 drawn_group(const SegmentsView& segments, i64 sequence, i64 first) {
  if (!segments.present()) return first / 8;
  i64 group = 0;
  bool is_known = false;
#pragma unroll 1
  for (i64 n = 0; n < segments.count; ++n) {
    const Segment segment = segment_at(segments, sequence, n);
    if (max(segment.first, first) >= min(segment.first + segment.count, first + 8)) continue;
    const i64 position = segment.position + first - segment.first;  // that key `first` would have
    const bool is_other = is_known && position / 8 != group;
    if (position < 0 || position % 8 != 0 || is_other) return kMixedGroup;
    group = position / 8;
    is_known = true;
  }
  return group;
}

// A row, or a key, as dropout counts it.
inline u32 drawn_number(const SegmentsView& segments, i64 sequence, i32 row) {
  return u32(segments.present() ? position_by(segments, sequence, row) : row);
}

// Whether a pair is dropped, by a draw of its own.
inline bool drops_pair(const Dropout& dropout, u32 batch_head, u32 row, u32 key) {
  const Philox4x32 x = dropout.draw(key / 8, row, batch_head);
  const u32 low = (key & 2) != 0 ? x.word[1] : x.word[0];
  const u32 high = (key & 2) != 0 ? x.word[3] : x.word[2];
  const u32 word = (key & 4) != 0 ? high : low;
  return ((key & 1) != 0 ? word >> 16 : word & 0xffffu) < dropout.threshold;
}

// A fragment of S with two rows of a thread, and what draws for its pairs.
struct PairDraws {
  const Dropout& dropout;
  u32 batch_head;
  const SegmentsView& kv_segments;
  i64 sequence;
};

// S = dropped where a pair is, by a draw for each, as bits first: there is one draw in the text.
// rows: as drawn_number has them; own_key: of S[0].
template <i32 kFloats>
inline void drop_by_pairs(float (&S)[kFloats], const PairDraws& draws, const u32 (&rows)[2],
                          i32 own_key, float dropped_weight) {
#pragma unroll
  for (i32 first = 0; first < kFloats; first += 32) {
    u32 dropped = 0;
#pragma unroll 1
    for (i32 i = 0; i < 32; ++i) {
      const i32 key = own_key + (first + i) / 4 * 8 + i % 2;
      const u32 number = drawn_number(draws.kv_segments, draws.sequence, key);
      const u32 row = i / 2 % 2 == 0 ? rows[0] : rows[1];
      dropped |= u32{drops_pair(draws.dropout, draws.batch_head, row, number)} << i;
    }
#pragma unroll
    for (i32 i = 0; i < min(32, kFloats - first); ++i) {
      if ((dropped >> i & 1) != 0) S[first + i] = dropped_weight;
    }
  }
}

}  // namespace fulmen
