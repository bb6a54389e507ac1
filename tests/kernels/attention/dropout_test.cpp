// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Philox against the known answers that its authors publish (kat_vectors of Random123), and the
// rule by which its bits become decisions.
#include "kernels/attention/dropout.cuh"

#include <gtest/gtest.h>

namespace fulmen::test {
namespace {

void expect_words(const Philox4x32& drawn, u32 a, u32 b, u32 c, u32 d) {
  EXPECT_EQ(drawn.word[0], a);
  EXPECT_EQ(drawn.word[1], b);
  EXPECT_EQ(drawn.word[2], c);
  EXPECT_EQ(drawn.word[3], d);
}

TEST(Philox, KnownAnswers) {
  expect_words(philox4x32_10({{0, 0, 0, 0}}, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  const u32 ones = 0xffffffff;
  expect_words(philox4x32_10({{ones, ones, ones, ones}}, ~u64{0}), 0x408f276d, 0x41c83b0e,
               0xa20bc7c6, 0x6d5451fd);
  // Digits of pi: counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0.
  expect_words(
      philox4x32_10({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822u),
      0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1);
}

TEST(Dropout, DrawsFromGroupRowHeadOffsetAndSeed) {
  const Dropout dropout{1, 0x299f31d0a4093822u, 0x03707344};
  expect_words(dropout.draw(0x243f6a88, 0x85a308d3, 0x13198a2e), 0xd16cfe09, 0x94fdcceb, 0x5001e420,
               0x24126ea1);
}

TEST(Dropout, LanesAreHalvesOfWordsLowFirst) {
  const Philox4x32 drawn{{0x00020001, 0x00040003, 0x00060005, 0x00080007}};  // lane + 1
  for (u32 lane = 0; lane < 8; ++lane) {
    const Dropout keeps_it{lane + 1, 0, 0};
    const Dropout drops_it{lane + 2, 0, 0};
    EXPECT_TRUE(keeps_it.keeps(drawn, lane)) << lane;
    EXPECT_FALSE(drops_it.keeps(drawn, lane)) << lane;
  }
}

TEST(Dropout, ThresholdRoundsToNearest) {
  EXPECT_EQ(dropout_threshold(0.0), 0u);
  EXPECT_EQ(dropout_threshold(1.0), 65536u);
  EXPECT_EQ(dropout_threshold(0.5), 32768u);
  EXPECT_EQ(dropout_threshold(0.1), 6554u);  // 6553.6
  EXPECT_EQ(dropout_threshold(0.49 / 65536.0), 0u);
  EXPECT_EQ(dropout_threshold(0.51 / 65536.0), 1u);
}

TEST(Dropout, KeptScaleUndoesTheExactRate) {
  EXPECT_EQ((Dropout{0, 0, 0}.kept_scale()), 1.0);
  EXPECT_EQ((Dropout{32768, 0, 0}.kept_scale()), 2.0);
  EXPECT_EQ((Dropout{65536, 0, 0}.kept_scale()), 0.0);
  EXPECT_FALSE((Dropout{0, 0, 0}.enabled()));
}

TEST(Dropout, CertainDropKeepsNothing) {
  const Philox4x32 highest{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}};
  for (u32 lane = 0; lane < 8; ++lane) {
    EXPECT_FALSE((Dropout{65536, 0, 0}.keeps(highest, lane)));
    EXPECT_TRUE((Dropout{65535, 0, 0}.keeps(highest, lane)));
  }
}

// 80,000 draws at p = 0.3: the share dropped lies within 5 standard deviations of 19661 / 65536.
TEST(Dropout, DropsItsShare) {
  const Dropout dropout{dropout_threshold(0.3), 42, 7};
  int dropped = 0;
  constexpr int kGroups = 10000;
  for (u32 group = 0; group < kGroups; ++group) {
    const Philox4x32 drawn = dropout.draw(group, 3, 5);
    for (u32 lane = 0; lane < 8; ++lane) dropped += dropout.keeps(drawn, lane) ? 0 : 1;
  }
  EXPECT_NEAR(dropped / (8.0 * kGroups), 0.3, 5 * 0.00162);
}

}  // namespace
}  // namespace fulmen::test
