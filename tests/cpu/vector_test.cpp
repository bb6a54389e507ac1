// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// exp and tanh of the vector kernels against the C library, in units of the last place.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/isa/exponential.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

template <class Real>
Real exp_of(Real x) {
  return exponential<Real>(broadcast(x))[0];
}

template <class Real>
Real tanh_of(Real x) {
  return hyperbolic_tangent(broadcast(x))[0];
}

// |value - truth| in units of the last place of `truth`; the truth has more digits than Real.
template <class Real>
double ulps(Real value, long double truth) {
  const Real nearest = static_cast<Real>(truth);
  const Real next = std::nextafter(nearest, std::numeric_limits<Real>::infinity());
  return static_cast<double>(std::fabs(static_cast<long double>(value) - truth) /
                             static_cast<long double>(next - nearest));
}

template <class Real>
void expect_exp_within(double allowed, Real lowest) {
  double worst = 0;
  for (int step = 0; step <= 200000; ++step) {
    const Real x = lowest * static_cast<Real>(step) / Real(200000);
    worst = std::max(worst, ulps(exp_of(x), std::exp(static_cast<long double>(x))));
  }
  EXPECT_LE(worst, allowed);
}

TEST(VectorMath, ExpIsWithinAnUlpAndAHalf) {
  expect_exp_within<float>(1.5, -104.0f);
  expect_exp_within<double>(1.5, -745.0);
}

// Weights of two keys with the scores 0 and x, by the instruction set in use: 1 and exp(x).
template <class Real>
void expect_weights_within(double allowed, Real lowest) {
  const Kernels<Real>& table = kernels<Real>();
  const auto lanes = static_cast<size_t>(table.lanes);
  double worst = 0;
  for (int step = 0; step <= 200000; step += static_cast<int>(lanes)) {
    std::vector<Real> scores(2 * lanes), row_max(lanes), row_sum(lanes), rescale(lanes), x(lanes);
    for (size_t lane = 0; lane < lanes; ++lane) {
      x[lane] = lowest * (static_cast<Real>(step) + static_cast<Real>(lane)) / Real(200000);
      scores[lanes + lane] = x[lane];
    }
    table.softmax({.scores = scores.data(),
                   .stride = table.lanes,
                   .keys = 2,
                   .rows = table.lanes,
                   .terms = {{Real(1), Real(0)}, nullptr, nullptr},
                   .row_max = row_max.data(),
                   .row_sum = row_sum.data(),
                   .rescale = rescale.data()});
    for (size_t lane = 0; lane < lanes; ++lane) {
      EXPECT_EQ(scores[lane], 1);
      const auto truth = std::exp(static_cast<long double>(x[lane]));
      worst = std::max(worst, ulps(scores[lanes + lane], truth));
    }
  }
  EXPECT_LE(worst, allowed);
}

TEST(VectorMath, WeightsOfTheTableInUseAreWithinAnUlpAndAHalf) {
  expect_weights_within<float>(1.5, -104.0f);
  expect_weights_within<double>(1.5, -745.0);
}

template <class Real>
void expect_exact_ends() {
  constexpr Real kInf = std::numeric_limits<Real>::infinity();
  EXPECT_EQ(exp_of(Real(0)), 1);
  EXPECT_EQ(exp_of(Real(-0.0)), 1);
  EXPECT_EQ(exp_of(-kInf), 0);
  EXPECT_EQ(exp_of(Real(-1e6)), 0);
  EXPECT_EQ(exp_of(std::numeric_limits<Real>::lowest()), 0);
  EXPECT_TRUE(std::isnan(exp_of(std::numeric_limits<Real>::quiet_NaN())));
  EXPECT_EQ(tanh_of(kInf), 1);
  EXPECT_EQ(tanh_of(-kInf), -1);
  EXPECT_TRUE(std::isnan(tanh_of(std::numeric_limits<Real>::quiet_NaN())));
}

TEST(VectorMath, EndsAreExact) {
  expect_exact_ends<float>();
  expect_exact_ends<double>();
}

TEST(VectorMath, TanhIsWithinThreeUlp) {
  double worst = 0;
  for (int step = 1; step <= 200000; ++step) {
    const float x = 10.0f * static_cast<float>(step) / 200000.0f;
    worst = std::max(worst, ulps(tanh_of(x), std::tanh(static_cast<long double>(x))));
    EXPECT_EQ(tanh_of(-x), -tanh_of(x));
  }
  EXPECT_LE(worst, 3);
}

TEST(VectorMath, LargerIsTheMaximumOfBase) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(larger(broadcast(1.0f), broadcast(2.0f))[0], 2);
  EXPECT_EQ(larger(broadcast(1.0f), broadcast(kNan))[0], 1);
  EXPECT_TRUE(std::isnan(larger(broadcast(kNan), broadcast(1.0f))[0]));
}

}  // namespace
}  // namespace fulmen::cpu
