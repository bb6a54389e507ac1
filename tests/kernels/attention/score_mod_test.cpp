// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Scale, softcap and ALiBi, and the derivative of the cap against finite differences.
#include "kernels/attention/score_mod.cuh"

#include <gtest/gtest.h>

#include <cmath>

#include "cpu/libm_math.h"

namespace fulmen::test {
namespace {

using Math = cpu::LibmMath<double>;

TEST(ScoreMap, WithoutCapScales) {
  const ScoreMap<double> map{-0.25, 0};
  EXPECT_EQ(map.score<Math>(8.0), -2.0);
  EXPECT_EQ(map.slope(-2.0), 1.0);
}

TEST(ScoreMap, CapSaturates) {
  const ScoreMap<double> map{1, 50};
  EXPECT_EQ(map.score<Math>(10000.0), 50.0);
  EXPECT_EQ(map.score<Math>(-10000.0), -50.0);
  EXPECT_EQ(map.slope(50.0), 0.0);
  EXPECT_EQ(map.score<Math>(0.0), 0.0);
  EXPECT_DOUBLE_EQ(map.score<Math>(25.0), 50.0 * std::tanh(0.5));
}

TEST(ScoreMap, SlopeIsTheDerivativeOfTheCap) {
  const ScoreMap<double> map{1, 3};
  const double step = 1e-6;
  for (double x = -6; x <= 6; x += 0.37) {
    const double difference = (map.score<Math>(x + step) - map.score<Math>(x - step)) / (2 * step);
    EXPECT_NEAR(map.slope(map.score<Math>(x)), difference, 1e-9) << x;
  }
}

TEST(AlibiBias, FallsOnBothSides) {
  EXPECT_EQ(alibi_bias(0.5, 7, 7), 0.0);
  EXPECT_EQ(alibi_bias(0.5, 7, 3), -2.0);
  EXPECT_EQ(alibi_bias(0.5, 3, 7), -2.0);
  EXPECT_EQ(alibi_bias(0.5, -4, 2), -3.0);
}

}  // namespace
}  // namespace fulmen::test
