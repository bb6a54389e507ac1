// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Scores and masks of a user's on tiles against the scalar oracle, over drawn problems and drawn
// texts, and what must hold exactly: bits on any number of threads, options that are written as
// texts.

#include <gtest/gtest.h>

#include <functional>

#include "core/expression.h"
#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "drawn_expression.h"
#include "tiled_support.h"

namespace fulmen::test {
namespace {

double allowed_of(const Request& request, Array output) {
  const DType computed = request.arrays[Array::kQ].dtype;
  const bool rounds_weights =
      output == Array::kO && computed == DType::kBFloat16 && cpu::pair_kernels(DType::kBFloat16);
  return 4 * tolerance(computed, rounds_weights ? computed : request.arrays[output].dtype);
}

void expect_close(const Request& actual, const Request& expected, Array output, unsigned seed) {
  if (!actual.arrays[output].present()) return;
  const Difference difference = compare(actual.arrays[output], expected.arrays[output]);
  EXPECT_LE(difference.largest, allowed_of(actual, output) * max(difference.magnitude, 1.0))
      << "seed " << seed << ", " << name(output) << difference.place << " of "
      << expression_text(actual);
}

class TiledExpression : public testing::TestWithParam<unsigned> {};

TEST_P(TiledExpression, AgreesWithTheOracle) {
  for (unsigned part = 0; part < 20; ++part) {
    const unsigned seed = 70000 + GetParam() * 20 + part;
    RandomProblem random(seed);
    const Request expected = with_segments(
        random, with_expression(random, part % 4 == 3 ? random.draw_cache() : random.draw()));
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run_tiled(random, actual, 2);
    for (const Array output : {Array::kO, Array::kLse}) {
      expect_close(actual, expected, output, seed);
    }
  }
}

Request drawn_backward_with_expression(RandomProblem& random) {
  const Request forward = with_segments(random, with_expression(random, random.draw()));
  cpu::scalar_forward(validate(forward, Pointers::kChecked));
  Request backward = to_backward(random, forward, 31);
  add_capture_gradients(random, backward);
  return backward;
}

TEST_P(TiledExpression, AgreesWithTheOracleBackward) {
  for (unsigned part = 0; part < 20; ++part) {
    const unsigned seed = 80000 + GetParam() * 20 + part;
    RandomProblem random(seed);
    const Request expected = drawn_backward_with_expression(random);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    run_tiled(random, actual, 2);
    for (const Array output : outputs_of(Operation::kBackward)) {
      expect_close(actual, expected, output, seed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, TiledExpression, testing::Range(0u, 12u));

TEST(TiledExpression, HasTheSameBitsOnAnyNumberOfThreads) {
  for (unsigned seed = 90000; seed < 90025; ++seed) {
    RandomProblem random(seed);
    const Request alone = drawn_backward_with_expression(random);
    const Request shared = with_fresh_outputs(random, alone);
    run_tiled(random, alone, 1);
    run_tiled(random, shared, 5);
    for (const Array output : outputs_of(Operation::kBackward)) {
      if (!alone.arrays[output].present()) continue;
      EXPECT_EQ(compare(shared.arrays[output], alone.arrays[output]).largest, 0)
          << "seed " << seed << ", " << name(output) << " of " << expression_text(alone);
    }
  }
}

// ---- Options as texts --------------------------------------------------------------------------

struct Rewritten {
  const char* name;
  std::function<void(RandomProblem&, Request&)> option;
  const char* score;
  const char* mask;
  const char* capture;  // what reads the array that the option has; null: none
  Array array = Array::kBias;
};

class OptionAsText : public testing::TestWithParam<Rewritten> {};

// The call with the option, and with the text.
std::pair<Request, Request> both_ways(RandomProblem& random, const Rewritten& rewritten) {
  Request option = random.draw();
  while (option.arrays[Array::kCuQ].present() || option.options.chunk > 0 ||
         option.arrays[Array::kQ].dtype == DType::kBFloat16) {
    option = random.draw();
  }
  option.options.causal = false;
  option.options.prefix = option.options.chunk = 0;
  option.options.window_left = option.options.window_right = kNoLimit;
  option.options.softcap = 0;
  for (const Array array :
       {Array::kMask, Array::kBias, Array::kAlibiSlopes, Array::kQIds, Array::kKvIds}) {
    option.arrays[array] = Tensor{};
  }
  Request text = option;
  rewritten.option(random, option);
  text.options.alignment = option.options.alignment;
  expression::Names names;
  if (rewritten.capture) {
    names.captures.emplace_back(rewritten.capture);
    text.arrays[Array::kCapture0] = option.arrays[rewritten.array];
  }
  text.options.expression = expression::make(rewritten.score, rewritten.mask, std::move(names));
  return {option, with_fresh_outputs(random, text)};
}

TEST_P(OptionAsText, HasTheBitsOfTheOptionInTheOracle) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    RandomProblem random(95000 + seed);
    const auto [option, text] = both_ways(random, GetParam());
    cpu::scalar_forward(validate(option, Pointers::kChecked));
    cpu::scalar_forward(validate(text, Pointers::kChecked));
    for (const Array output : {Array::kO, Array::kLse}) {
      EXPECT_EQ(compare(text.arrays[output], option.arrays[output]).largest, 0)
          << "seed " << seed << ", " << name(output);
    }
    const Request backward = to_backward(random, option, 7);
    Request other = with_fresh_outputs(random, backward);
    for (const Array array : {Array::kBias, Array::kMask, Array::kAlibiSlopes, Array::kQIds,
                              Array::kKvIds, Array::kCapture0}) {
      other.arrays[array] = text.arrays[array];
    }
    other.options = text.options;
    cpu::scalar_backward(validate(backward, Pointers::kChecked));
    cpu::scalar_backward(validate(other, Pointers::kChecked));
    for (const Array output : {Array::kDQ, Array::kDK, Array::kDV}) {
      const Difference difference = compare(other.arrays[output], backward.arrays[output]);
      // A score's derivative is the same number by another formula.
      const double allowed =
          GetParam().mask ? 0 : tolerance(DType::kFloat64, other.arrays[output].dtype);
      EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
          << "seed " << seed << ", " << name(output);
    }
  }
}

TEST_P(OptionAsText, IsTheOptionOnTiles) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    RandomProblem random(96000 + seed);
    const auto [option, text] = both_ways(random, GetParam());
    run_tiled(random, option, 2);
    run_tiled(random, text, 2);
    for (const Array output : {Array::kO, Array::kLse}) expect_close(text, option, output, seed);
  }
}

void draw_slopes(RandomProblem& random, Request& request) {
  const DType sums = accumulator(request.arrays[Array::kQ].dtype);
  request.arrays[Array::kAlibiSlopes] = random.array(sums, {request.arrays[Array::kQ].shape[1]});
  random.fill_normal(request.arrays[Array::kAlibiSlopes], 0.1);
}

void draw_bias(RandomProblem& random, Request& request) {
  const Arrays& arrays = request.arrays;
  const DType sums = accumulator(arrays[Array::kQ].dtype);
  request.arrays[Array::kBias] = random.array(
      sums, {max<i64>(arrays[Array::kQ].shape[2], 1), max<i64>(arrays[Array::kK].shape[2], 1)});
  request.arrays[Array::kBias].shape[0] = arrays[Array::kQ].shape[2];
  request.arrays[Array::kBias].shape[1] = arrays[Array::kK].shape[2];
  random.fill_normal(request.arrays[Array::kBias]);
}

const Rewritten kRewritten[] = {
    {"identity", [](RandomProblem&, Request&) {}, "s", "true", nullptr},
    {"causal", [](RandomProblem&, Request& r) { r.options.causal = true; }, nullptr, "j <= p",
     nullptr},
    {"causal_top_left",
     [](RandomProblem&, Request& r) {
       r.options.causal = true;
       r.options.alignment = Alignment::kTopLeft;
     },
     nullptr, "j <= i", nullptr},
    {"prefix",
     [](RandomProblem&, Request& r) {
       r.options.causal = true;
       r.options.prefix = 11;
     },
     nullptr, "j <= p or j < 11", nullptr},
    {"window",
     [](RandomProblem&, Request& r) {
       r.options.window_left = 9;
       r.options.window_right = 4;
     },
     nullptr, "p - 9 <= j <= p + 4", nullptr},
    {"chunks", [](RandomProblem&, Request& r) { r.options.chunk = 13; }, nullptr,
     "p // 13 == j // 13", nullptr},
    {"softcap", [](RandomProblem&, Request& r) { r.options.softcap = 3; }, "3 * tanh(s / 3)",
     nullptr, nullptr},
    {"alibi", draw_slopes, "s + -slope[h] * abs(p - j)", nullptr, "slope", Array::kAlibiSlopes},
    {"bias", draw_bias, "s + bias[i, j]", nullptr, "bias", Array::kBias},
};

INSTANTIATE_TEST_SUITE_P(All, OptionAsText, testing::ValuesIn(kRewritten),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace fulmen::test
