// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Intervals against the dense definition, exhaustively over small shapes; and at the largest sizes,
// where 32-bit arithmetic would wrap.
#include "kernels/attention/mask.cuh"

#include "kernels/attention/small_masks.h"

namespace fulmen::test {
namespace {

TEST(VisibleColumns, AreExactlyTheDenseRows) {
  for_each_small_mask([](const SmallMask& small) {
    for (i32 i = 0; i < small.shape.q_len; ++i) {
      const Interval seen = visible_columns(small.mask, small.shape, i);
      const bool inside =
          0 <= seen.begin && seen.begin <= seen.end && seen.end <= small.shape.kv_len;
      if (!inside || bits_of(seen.begin, seen.end) != small.row[i]) {
        ADD_FAILURE() << small.text() << ": row " << i << " gives [" << seen.begin << ", "
                      << seen.end << ")";
      }
    }
  });
}

TEST(VisibleRows, AreExactlyTheDenseColumns) {
  for_each_small_mask([](const SmallMask& small) {
    for (i32 j = 0; j < small.shape.kv_len; ++j) {
      const Interval seen = visible_rows(small.mask, small.shape, j);
      const bool inside =
          0 <= seen.begin && seen.begin <= seen.end && seen.end <= small.shape.q_len;
      if (!inside || bits_of(seen.begin, seen.end) != small.column[j]) {
        ADD_FAILURE() << small.text() << ": key " << j << " gives [" << seen.begin << ", "
                      << seen.end << ")";
      }
    }
  });
}

// What block_range.cuh rests on.
TEST(VisibleColumns, EndsNeverDecreaseFromRowToRow) {
  for_each_small_mask([](const SmallMask& small) {
    for (i32 i = 1; i < small.shape.q_len; ++i) {
      const Interval above = visible_columns(small.mask, small.shape, i - 1);
      const Interval here = visible_columns(small.mask, small.shape, i);
      if (here.begin < above.begin || here.end < above.end) {
        ADD_FAILURE() << small.text() << ": row " << i;
      }
    }
  });
}

TEST(VisibleRows, EndsNeverDecreaseFromKeyToKey) {
  for_each_small_mask([](const SmallMask& small) {
    for (i32 j = 1; j < small.shape.kv_len; ++j) {
      const Interval before = visible_rows(small.mask, small.shape, j - 1);
      const Interval here = visible_rows(small.mask, small.shape, j);
      if (here.begin < before.begin || here.end < before.end) {
        ADD_FAILURE() << small.text() << ": key " << j;
      }
    }
  });
}

constexpr i32 kHuge = 2147483647;

TEST(VisibleColumns, LargestLengthsDoNotWrap) {
  const SequenceShape square{kHuge, kHuge, 0};
  EXPECT_EQ(visible_columns({.causal = true}, square, kHuge - 1).end, kHuge);
  const IntervalMask window{.window_left = kHuge, .window_right = kHuge};
  EXPECT_EQ(visible_columns(window, square, kHuge - 1).begin, 0);
  EXPECT_EQ(visible_columns(window, square, kHuge - 1).end, kHuge);
  const SequenceShape tall{kHuge, 0, -kHuge};
  EXPECT_EQ(visible_columns({.causal = true}, tall, 0).size(), 0);
  const SequenceShape wide{1, kHuge, kHuge - 1};
  EXPECT_EQ(visible_columns({.causal = true, .window_left = 1}, wide, 0).begin, kHuge - 2);
  EXPECT_EQ(visible_columns({.chunk = kHuge}, wide, 0).size(), kHuge);
}

TEST(VisibleRows, LargestLengthsDoNotWrap) {
  const SequenceShape square{kHuge, kHuge, 0};
  const IntervalMask window{.window_left = kHuge, .window_right = kHuge};
  EXPECT_EQ(visible_rows(window, square, kHuge - 1).size(), kHuge);
  EXPECT_EQ(visible_rows({.causal = true}, square, kHuge - 1).begin, kHuge - 1);
  const SequenceShape tall{kHuge, 1, 1 - kHuge};
  EXPECT_EQ(visible_rows({.causal = true}, tall, 0).begin, kHuge - 1);
}

}  // namespace
}  // namespace fulmen::test
