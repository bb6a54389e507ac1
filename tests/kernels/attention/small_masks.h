// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every interval mask of small parameters on every small shape, and its dense matrix as bits, from
// support/visible.h: what the integer logic of src/kernels/attention is compared with.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "support/visible.h"

namespace fulmen::test {

inline constexpr i32 kMaxLength = 9;

struct SmallMask {
  IntervalMask mask;
  SequenceShape shape;
  u32 row[kMaxLength] = {};     // bit j: row i sees key j
  u32 column[kMaxLength] = {};  // bit i: key j is seen by row i

  SmallMask(const IntervalMask& m, const SequenceShape& s) : mask(m), shape(s) {
    for (i32 i = 0; i < shape.q_len; ++i) {
      for (i32 j = 0; j < shape.kv_len; ++j) {
        if (!is_visible(mask, shape, i, j)) continue;
        row[i] |= 1u << j;
        column[j] |= 1u << i;
      }
    }
  }

  std::string text() const {
    return sentence("q_len ", shape.q_len, " kv_len ", shape.kv_len, " shift ", shape.shift,
                    " causal ", mask.causal, " window (", mask.window_left, ", ", mask.window_right,
                    ") prefix ", mask.prefix, " chunk ", mask.chunk);
  }
};

// Bits [begin, end).
inline u32 bits_of(i64 begin, i64 end) {
  return end <= begin ? 0 : ((1u << (end - begin)) - 1u) << begin;
}

template <class Visit>
void for_each_mask_of(const SequenceShape& shape, const Visit& visit) {
  for (const bool causal : {false, true}) {
    for (const i32 left : {-1, 0, 1, 2, 5}) {
      for (const i32 right : {-1, 0, 1, 3}) {
        if (causal && right > 0) continue;  // validate refuses it
        for (const i32 prefix : {0, 1, 3, 12}) {
          if (!causal && prefix > 0) continue;  // likewise
          for (const i32 chunk : {0, 1, 2, 3, 5}) {
            visit(SmallMask({causal, left, right, prefix, chunk}, shape));
          }
        }
      }
    }
  }
}

// Returns at the first failure.
template <class Visit>
void for_each_small_mask(const Visit& visit) {
  for (i32 q_len = 0; q_len <= kMaxLength; ++q_len) {
    for (i32 kv_len = 0; kv_len <= kMaxLength; ++kv_len) {
      for (const i32 shift : {kv_len - q_len, 0}) {
        if (testing::Test::HasFailure()) return;
        for_each_mask_of({q_len, kv_len, shift}, visit);
      }
    }
  }
}

}  // namespace fulmen::test
