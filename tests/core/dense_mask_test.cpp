// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The definition of the masks against matrices drawn by hand: a row of text is a row of the matrix,
// '#' is visible.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/validate.h"
#include "support/visible.h"

namespace fulmen::test {
namespace {

using Picture = std::vector<std::string>;

Picture draw(const IntervalMask& mask, i32 q_len, i32 kv_len, bool bottom_right = true) {
  const SequenceShape shape{q_len, kv_len, bottom_right ? kv_len - q_len : 0};
  Picture picture;
  for (i32 i = 0; i < q_len; ++i) {
    picture.emplace_back();
    for (i32 j = 0; j < kv_len; ++j) {
      const bool is_seen = is_visible(mask, shape, i, j);
      EXPECT_EQ(visible_columns(mask, shape, i).contains(j), is_seen) << i << ", " << j;
      picture.back() += is_seen ? '#' : '.';
    }
  }
  return picture;
}

TEST(IsVisible, WithoutMaskAll) { EXPECT_EQ(draw({}, 2, 3), (Picture{"###", "###"})); }

TEST(IsVisible, CausalIsLevelAtTheEnd) {
  const IntervalMask causal{.causal = true};
  EXPECT_EQ(draw(causal, 2, 4), (Picture{"###.", "####"}));
  EXPECT_EQ(draw(causal, 4, 2), (Picture{"..", "..", "#.", "##"}));
}

TEST(IsVisible, TopLeftCausalIsLevelAtTheStart) {
  const IntervalMask causal{.causal = true};
  EXPECT_EQ(draw(causal, 2, 4, false), (Picture{"#...", "##.."}));
  EXPECT_EQ(draw(causal, 4, 2, false), (Picture{"#.", "##", "##", "##"}));
}

TEST(IsVisible, WindowIsInclusiveOnBothSides) {
  EXPECT_EQ(draw({.window_left = 1, .window_right = 0}, 3, 3), (Picture{"#..", "##.", ".##"}));
  EXPECT_EQ(draw({.window_left = 0, .window_right = 2}, 3, 3), (Picture{"###", ".##", "..#"}));
  EXPECT_EQ(draw({.window_left = 1, .window_right = 1}, 2, 4), (Picture{".###", "..##"}));
  EXPECT_EQ(draw({.window_right = 0}, 2, 3), (Picture{"##.", "###"}));
}

TEST(IsVisible, PrefixWidensCausal) {
  EXPECT_EQ(draw({.causal = true, .prefix = 2}, 4, 4), (Picture{"##..", "##..", "###.", "####"}));
  EXPECT_EQ(draw({.causal = true, .prefix = 1}, 4, 2), (Picture{"#.", "#.", "#.", "##"}));
}

TEST(IsVisible, WindowNarrowsThePrefix) {
  EXPECT_EQ(draw({.causal = true, .window_left = 1, .prefix = 2}, 4, 4),
            (Picture{"##..", "##..", ".##.", "..##"}));
}

TEST(IsVisible, ChunksCutBothWays) {
  EXPECT_EQ(draw({.chunk = 2}, 4, 4), (Picture{"##..", "##..", "..##", "..##"}));
  EXPECT_EQ(draw({.causal = true, .chunk = 2}, 4, 4), (Picture{"#...", "##..", "..#.", "..##"}));
  // Rows before the first key: positions -2 and -1 are a chunk of their own.
  EXPECT_EQ(draw({.chunk = 2}, 4, 2), (Picture{"..", "..", "##", "##"}));
  EXPECT_EQ(draw({.chunk = 3}, 4, 2), (Picture{"..", "..", "##", "##"}));
  EXPECT_EQ(draw({.chunk = 2}, 4, 3, false), (Picture{"##.", "##.", "..#", "..#"}));
}

}  // namespace
}  // namespace fulmen::test
