// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The laws of SoftmaxState: any order of blocks, any tree of merges, empty parts, NaN, sinks of any
// size; against the sums themselves.
#include "kernels/attention/softmax_state.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "cpu/libm_math.h"

namespace fulmen::test {
namespace {

using Math = cpu::LibmMath<double>;
using State = SoftmaxState<Math>;

constexpr double kInf = Math::kInfinity;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A row in pieces: the state and its unnormalised output over values v = 1, 2, 3, ...
struct Piece {
  State state;
  double output = 0;
};

void add_block(Piece& piece, const std::vector<double>& scores, const std::vector<int>& keys) {
  double block_max = -kInf;
  for (const int key : keys) block_max = max(block_max, scores[static_cast<size_t>(key)]);
  piece.output *= piece.state.update(block_max);
  for (const int key : keys) {
    const double weight = piece.state.weight(scores[static_cast<size_t>(key)]);
    piece.state.row_sum += weight;
    piece.output += weight * (key + 1);
  }
}

Piece merged(Piece a, const Piece& b) {
  const State::MergeFactors factors = a.state.merge(b.state);
  a.output = a.output * factors.mine + b.output * factors.other;
  return a;
}

std::vector<double> random_scores(std::mt19937& random, size_t count, double spread) {
  std::normal_distribution<double> normal(0, spread);
  std::vector<double> scores(count);
  for (double& score : scores) score = normal(random);
  return scores;
}

// log sum exp and softmax-weighted mean of 1, 2, 3, ..., in long double.
std::pair<double, double> direct(const std::vector<double>& scores) {
  const long double top = *std::max_element(scores.begin(), scores.end());
  long double sum = 0;
  long double output = 0;
  for (size_t key = 0; key < scores.size(); ++key) {
    const long double weight = std::exp(static_cast<long double>(scores[key]) - top);
    sum += weight;
    output += weight * static_cast<long double>(key + 1);
  }
  return {static_cast<double>(top + std::log(sum)), static_cast<double>(output / sum)};
}

class Shift : public testing::TestWithParam<double> {};

TEST_P(Shift, EveryOrderOfBlocksGivesTheSameRow) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> scores = random_scores(random, 12, 5);
    for (double& score : scores) score += GetParam();
    const auto [lse, output] = direct(scores);
    std::vector<int> keys(12);
    std::iota(keys.begin(), keys.end(), 0);
    std::shuffle(keys.begin(), keys.end(), random);
    Piece piece;
    for (int begin = 0; begin < 12; begin += 3) {
      add_block(piece, scores, {keys.begin() + begin, keys.begin() + begin + 3});
    }
    EXPECT_NEAR(piece.state.lse(), lse, 1e-14 * max(std::abs(lse), 10.0));
    EXPECT_NEAR(piece.output * piece.state.normalizer(-kInf), output, 1e-13);
  }
}

TEST_P(Shift, EveryTreeOfMergesGivesTheSameRow) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> scores = random_scores(random, 9, 5);
    for (double& score : scores) score += GetParam();
    const auto [lse, output] = direct(scores);
    Piece a, b, c;
    add_block(a, scores, {0, 1, 2});
    add_block(b, scores, {3, 4, 5});
    add_block(c, scores, {6, 7, 8});
    for (const Piece& all :
         {merged(merged(a, b), c), merged(a, merged(b, c)), merged(merged(c, a), b)}) {
      EXPECT_NEAR(all.state.lse(), lse, 1e-14 * max(std::abs(lse), 10.0));
      EXPECT_NEAR(all.output * all.state.normalizer(-kInf), output, 1e-13);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OfScores, Shift, testing::Values(0.0, -1e5, 1e5, -1e8, 1e8));

TEST(SoftmaxState, EmptyRowIsZeroAndMinusInfinity) {
  const State empty;
  EXPECT_EQ(empty.normalizer(-kInf), 0.0);
  EXPECT_EQ(empty.normalizer(3.0), 0.0);
  EXPECT_EQ(empty.lse(), -kInf);
  EXPECT_EQ(empty.weight(-kInf), 0.0);
}

TEST(SoftmaxState, HiddenBlockChangesNothing) {
  State state;
  EXPECT_EQ(state.update(-kInf), 1.0);
  EXPECT_EQ(state.row_max, -kInf);
  state.update(2.0);
  state.row_sum += 1.5;
  EXPECT_EQ(state.update(-kInf), 1.0);
  EXPECT_EQ(state.row_sum, 1.5);
  EXPECT_EQ(state.weight(-kInf), 0.0);
}

TEST(SoftmaxState, MergeWithEmptyChangesNothing) {
  const State row{-1e5, 1.25};
  State left = row;
  EXPECT_EQ(left.merge(State{}).mine, 1.0);
  EXPECT_EQ(left.row_max, row.row_max);
  EXPECT_EQ(left.row_sum, row.row_sum);
  State right;
  EXPECT_EQ(right.merge(row).other, 1.0);
  EXPECT_EQ(right.row_max, row.row_max);
  EXPECT_EQ(right.row_sum, row.row_sum);
  State none;
  none.merge(State{});
  EXPECT_EQ(none.lse(), -kInf);
  EXPECT_EQ(none.normalizer(-kInf), 0.0);
}

TEST(SoftmaxState, NanIsNeverAnEmptyRow) {
  for (const std::vector<double>& scores :
       {std::vector<double>{kNan, 1}, {1, kNan}, {kNan, kNan}, {-kInf, kNan}}) {
    Piece piece;
    add_block(piece, scores, {0});
    add_block(piece, scores, {1});
    EXPECT_FALSE(std::isnan(piece.state.row_max));
    EXPECT_TRUE(std::isnan(piece.state.lse()));
    EXPECT_TRUE(std::isnan(piece.state.normalizer(-kInf)));
    EXPECT_TRUE(std::isnan(piece.state.normalizer(2.0)));
    EXPECT_TRUE(std::isnan(merged(Piece{}, piece).state.lse()));
    Piece other;
    add_block(other, {4.0}, {0});
    EXPECT_TRUE(std::isnan(merged(other, piece).state.lse()));
  }
}

TEST(SoftmaxState, PlusInfinityGivesNan) {
  Piece piece;
  add_block(piece, {1, kInf}, {0, 1});
  EXPECT_TRUE(std::isnan(piece.state.lse()));
  EXPECT_TRUE(std::isnan(piece.state.normalizer(-kInf)));
}

TEST(SoftmaxState, SinkJoinsTheDenominatorOnly) {
  const State state{2.0, 1.75};
  const double keys = 1.75 * std::exp(2.0);
  for (const double sink : {-3.0, 0.0, 2.0, 5.0}) {
    const double total = keys + std::exp(sink);
    EXPECT_DOUBLE_EQ(state.normalizer(sink), std::exp(2.0) / total);
    EXPECT_DOUBLE_EQ(state.sink_share(sink), std::exp(sink) / total);
    EXPECT_DOUBLE_EQ(state.sink_share(sink) + state.row_sum * state.normalizer(sink), 1.0);
  }
  EXPECT_EQ(state.normalizer(-kInf), 1 / 1.75);
  EXPECT_EQ(state.sink_share(-kInf), 0.0);
}

TEST(SoftmaxState, HugeSinksDoNotOverflow) {
  const State low{-1e6, 1.5};
  EXPECT_EQ(low.normalizer(1e300), 0.0);
  EXPECT_EQ(low.sink_share(1e300), 1.0);
  EXPECT_EQ(low.normalizer(-1e300), 1 / 1.5);
  EXPECT_EQ(low.sink_share(-1e300), 0.0);
  const State high{1e300, 1.5};
  EXPECT_EQ(high.normalizer(1e6), 1 / 1.5);
  EXPECT_EQ(high.sink_share(1e6), 0.0);
}

TEST(SoftmaxState, OneKeyIsExact) {
  for (const double score : {0.0, -1e6, 1e8, 1e300}) {
    Piece piece;
    add_block(piece, {score}, {0});
    EXPECT_EQ(piece.state.lse(), score);
    EXPECT_EQ(piece.output * piece.state.normalizer(-kInf), 1.0);
  }
}

}  // namespace
}  // namespace fulmen::test
