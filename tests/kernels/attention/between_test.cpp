// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Interval arithmetic against every value of small intervals: what it says holds for all of them,
// and of booleans it says no less than is known from both ends.
#include "kernels/attention/between.cuh"

#include <gtest/gtest.h>

#include <vector>

namespace fulmen {
namespace {

constexpr i64 kFirst = -5, kLast = 5;
constexpr Integers kAnything{-100, 100};

std::vector<Integers> small_intervals() {
  std::vector<Integers> all;
  for (i64 least = kFirst; least <= kLast; ++least) {
    for (i64 most = least; most <= kLast; ++most) all.push_back({least, most});
  }
  return all;
}

// The least and the most of op(x, y) over both intervals.
template <class Op>
Integers enumerated(const Integers& a, const Integers& b, const Op& op) {
  Integers all = between<i64>(op(a.least, b.least));
  for (i64 x = a.least; x <= a.most; ++x) {
    for (i64 y = b.least; y <= b.most; ++y) all = joined(all, between<i64>(op(x, y)));
  }
  return all;
}

template <class Rule, class Op>
void expect_exact(const char* name, const Rule& rule, const Op& op) {
  for (const Integers& a : small_intervals()) {
    for (const Integers& b : small_intervals()) {
      const Integers found = rule(a, b), wanted = enumerated(a, b, op);
      ASSERT_TRUE(found.least == wanted.least && found.most == wanted.most)
          << name << " of [" << a.least << ", " << a.most << "] and [" << b.least << ", " << b.most
          << "]: [" << found.least << ", " << found.most << "]";
    }
  }
}

template <class Rule, class Op>
void expect_held(const char* name, const Rule& rule, const Op& op) {
  for (const Integers& a : small_intervals()) {
    for (const Integers& b : small_intervals()) {
      const Integers found = rule(a, b), wanted = enumerated(a, b, op);
      ASSERT_TRUE(found.least <= wanted.least && wanted.most <= found.most)
          << name << " of [" << a.least << ", " << a.most << "] and [" << b.least << ", " << b.most
          << "]";
    }
  }
}

TEST(Between, IntegersAreExact) {
  expect_exact("sum", sum, [](i64 x, i64 y) { return x + y; });
  expect_exact("difference", difference, [](i64 x, i64 y) { return x - y; });
  expect_exact("product", product, [](i64 x, i64 y) { return x * y; });
  expect_exact("smaller", smaller, [](i64 x, i64 y) { return x < y ? x : y; });
  expect_exact("larger", larger, [](i64 x, i64 y) { return x < y ? y : x; });
  const auto magnitude_of = [](const Integers& a, const Integers&) { return magnitude(a); };
  expect_exact("magnitude", magnitude_of, [](i64 x, i64) { return x < 0 ? -x : x; });
  const auto negated_of = [](const Integers& a, const Integers&) { return negated(a); };
  expect_exact("negated", negated_of, [](i64 x, i64) { return -x; });
}

TEST(Between, DivisionsHold) {
  const auto quotients = [](const Integers& a, const Integers& b) {
    return quotient(a, b, kAnything);
  };
  expect_held("quotient", quotients, floor_quotient<i64>);
  const auto remainders = [](const Integers& a, const Integers& b) {
    return remainder(a, b, kAnything);
  };
  expect_held("remainder", remainders, floor_remainder<i64>);
  const Integers within = remainder({9, 11}, {4, 4}, kAnything);  // of one period
  EXPECT_TRUE(within.least == 1 && within.most == 3);
  const Integers blocks = quotient({64, 127}, {64, 64}, kAnything);
  EXPECT_TRUE(blocks.least == 1 && blocks.most == 1);
}

TEST(Between, ComparisonsAreDecidedByTheEnds) {
  expect_exact("less", is_less<i64>, [](i64 x, i64 y) { return i64{x < y}; });
  expect_exact("at most", is_at_most<i64>, [](i64 x, i64 y) { return i64{x <= y}; });
  expect_exact("equal", is_equal<i64>, [](i64 x, i64 y) { return i64{x == y}; });
  expect_exact("not equal", is_not_equal<i64>, [](i64 x, i64 y) { return i64{x != y}; });
}

TEST(Between, ClampsAndChoices) {
  const Integers inside = clamped_between({-9, 9}, {-2, -1}, {3, 4});
  EXPECT_TRUE(inside.least == -2 && inside.most == 4);
  const Integers crossed = clamped_between({0, 1}, {5, 9}, {2, 3});  // low is above high
  EXPECT_TRUE(crossed.least <= 2 && crossed.most >= 9);
  const Integers either = chosen<i64>(kEither, {1, 2}, {7, 8});
  EXPECT_TRUE(either.least == 1 && either.most == 8);
  const Integers second = chosen<i64>({0, 0}, {1, 2}, {7, 8});
  EXPECT_TRUE(second.least == 7 && second.most == 8);
}

// No comparison with what may be NaN is certain.
TEST(Between, NanDecidesNothing) {
  const float nan = kInfinity<float> - kInfinity<float>;
  const Between<float> unknown = between(nan), low = between(-kInfinity<float>);
  EXPECT_EQ(is_less(unknown, between(1.f)).least, 0);
  EXPECT_EQ(is_at_most(low, unknown).least, 0);
  EXPECT_EQ(is_at_most(unknown, between(kInfinity<float>)).least, 0);
  EXPECT_EQ(is_not_equal(unknown, between(1.f)).least, 0);
}

}  // namespace
}  // namespace fulmen
