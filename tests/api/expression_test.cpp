// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen.h section 6, scores and masks of the caller's: calls and plans with them, and refusals.
#include <gmock/gmock.h>

#include <limits>

#include "api/test_call.h"

namespace fulmen::test {
namespace {

using testing::HasSubstr;
using T = fulmen_tensors;

constexpr const char* kCaptures[] = {"slope"};
constexpr const char* kScalars[] = {"x"};

uint64_t made(const char* score, const char* mask = nullptr, size_t num_captures = 0,
              size_t num_scalars = 0) {
  uint64_t number = 0;
  EXPECT_EQ(fulmen_expression_create(score, mask, kCaptures, num_captures, kScalars, num_scalars,
                                     &number),
            FULMEN_OK)
      << fulmen_last_error();
  return number;
}

TEST(ExpressionCall, IsTheOptionThatItWrites) {
  TestCall option, text;
  option.input(&T::alibi_slopes, FULMEN_FLOAT32, {4});
  text.input(&T::capture0, FULMEN_FLOAT32, {4});
  option.problem.causal = 1;
  text.problem.expression = made("s + -slope[h] * abs(p - j)", "j <= p", 1);
  option.problem.implementation = text.problem.implementation = FULMEN_SCALAR;
  ASSERT_EQ(option.forward(), FULMEN_OK) << fulmen_last_error();
  ASSERT_EQ(text.forward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(text.bytes(&T::o), option.bytes(&T::o));
  EXPECT_EQ(text.bytes(&T::lse), option.bytes(&T::lse));
}

TEST(ExpressionCall, TakesTheScalarsOfEachCall) {
  TestCall call;
  call.problem.expression = made("s * $x", nullptr, 0, 1);
  std::string before;
  for (const double value : {0.5, 2.0, 0.5}) {
    call.problem.scalar0 = value;
    ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
    const std::string now = call.bytes(&T::o);
    EXPECT_NE(now, before);
    before = now;
  }
  call.problem.scalar0 = std::numeric_limits<double>::infinity();
  EXPECT_EQ(call.forward(), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("scalar0 is inf; allowed is any finite number"));
  EXPECT_EQ(call.bytes(&T::o), before);
}

TEST(ExpressionCall, GivesTheGradientOfACaptureAlone) {
  TestCall call;
  call.add_backward();
  call.input(&T::capture0, FULMEN_FLOAT32, {4});
  call.output(&T::dcapture0, FULMEN_FLOAT32, {4});
  call.problem.expression = made("s * slope[h]", nullptr, 1);
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  ASSERT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
  const std::string beside = call.bytes(&T::dcapture0);
  for (const Member member : {&T::dq, &T::dk, &T::dv}) call.remove(member);
  ASSERT_EQ(call.backward(), FULMEN_OK) << fulmen_last_error();
  EXPECT_EQ(call.bytes(&T::dcapture0), beside);
}

TEST(ExpressionCall, PlansHoldItAfterItsEnd) {
  TestCall call;
  call.problem.expression = made("s * 0.5", "j <= p");
  fulmen_plan* plan = nullptr;
  ASSERT_EQ(fulmen_plan_create(&call.problem, &call.tensors, FULMEN_OPERATION_FORWARD, &plan),
            FULMEN_OK)
      << fulmen_last_error();
  ASSERT_EQ(call.forward(), FULMEN_OK);
  const std::string wanted = call.bytes(&T::o);
  fulmen_expression_destroy(call.problem.expression);
  std::vector<char> workspace(fulmen_plan_workspace_bytes(plan));
  EXPECT_EQ(fulmen_forward(plan, &call.tensors, workspace.data(), workspace.size(), nullptr),
            FULMEN_OK);
  EXPECT_EQ(call.bytes(&T::o), wanted);
  fulmen_plan_destroy(plan);
  call.problem.causal = 1;  // another plan, which looks for the expression
  EXPECT_EQ(call.forward(), FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("the number of none that this process has made"));
}

TEST(ExpressionCall, MasksAreOfDenseMaskToo) {
  TestCall call;
  call.problem.expression = made(nullptr, "j != i and h < 2");
  bool seen[2][4][3][5];
  const int64_t shape[] = {2, 4, 3, 5};
  fulmen_tensor visible;
  fulmen_tensor_init(&visible, seen, FULMEN_BOOL, 4, shape);
  ASSERT_EQ(fulmen_dense_mask(&call.problem, &call.tensors, &visible), FULMEN_OK)
      << fulmen_last_error();
  for (int h = 0; h < 4; ++h) {
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 5; ++j) EXPECT_EQ(seen[1][h][i][j], j != i && h < 2);
    }
  }
}

struct Refused {
  const char* said;
  void (*change)(TestCall&);
};

TEST(ExpressionCall, IsRefusedWithOneSentenceAndNothingWritten) {
  const Refused all[] = {
      {"expression is 12345, the number of none",
       [](TestCall& c) { c.problem.expression = 12345; }},
      {"capture0 is given without an expression", [](TestCall& c) { c.problem.expression = 0; }},
      {"capture0 ('slope') is missing", [](TestCall& c) { c.remove(&T::capture0); }},
      {"capture1 is given, but the expression names fewer",
       [](TestCall& c) { c.input(&T::capture1, FULMEN_FLOAT32, {4}); }},
      {"scalar0 is 1, but the expression has 0 scalars",
       [](TestCall& c) { c.problem.scalar0 = 1; }},
      {"reads it with 1 indices",
       [](TestCall& c) { c.input(&T::capture0, FULMEN_FLOAT32, {4, 4}); }},
      {"with no element to read", [](TestCall& c) { c.tensors.capture0.shape[0] = 0; }},
      {"allowed is float64, float32, float16, bfloat16, int32, int64 or bool",
       [](TestCall& c) { c.tensors.capture0.dtype = FULMEN_INT8; }},
      {"o overlaps capture0", [](TestCall& c) { c.tensors.capture0.data = c.tensors.o.data; }},
  };
  for (const Refused& refused : all) {
    TestCall call;
    call.input(&T::capture0, FULMEN_FLOAT32, {4});
    call.problem.expression = made("s * slope[h]", nullptr, 1);
    refused.change(call);
    EXPECT_NE(call.forward(), FULMEN_OK);
    EXPECT_THAT(fulmen_last_error(), HasSubstr(refused.said));
    EXPECT_TRUE(call.outputs_untouched());
  }
}

TEST(ExpressionCreate, RefusesWhatIsNoExpression) {
  uint64_t number = 7;
  EXPECT_EQ(fulmen_expression_create("s", nullptr, nullptr, 0, nullptr, 0, nullptr),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("expression is null"));
  EXPECT_EQ(fulmen_expression_create(nullptr, nullptr, nullptr, 0, nullptr, 0, &number),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("score and mask are both null"));
  EXPECT_EQ(number, 0u);
  EXPECT_EQ(fulmen_expression_create("s", nullptr, nullptr, 1, nullptr, 0, &number),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("captures is null"));
  EXPECT_EQ(fulmen_expression_create("s", nullptr, kCaptures, 99, nullptr, 0, &number),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("num_captures is 99"));
  const char* const none[] = {nullptr};
  EXPECT_EQ(fulmen_expression_create("s", nullptr, nullptr, 0, none, 1, &number),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("scalars[0] is null"));
  EXPECT_EQ(fulmen_expression_create("s +", nullptr, nullptr, 0, nullptr, 0, &number),
            FULMEN_ERROR_ARGUMENT);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("at column 4"));
  fulmen_expression_destroy(0);
}

TEST(ExpressionCall, GradientsOfIntegersAreRefused) {
  TestCall call;
  call.add_backward();
  call.indices(&T::capture0, {1, 2, 3, 4});
  call.problem.expression = made("s * slope[h]", nullptr, 1);
  ASSERT_EQ(call.forward(), FULMEN_OK) << fulmen_last_error();
  fulmen_tensor& gradient = call.output(&T::dcapture0, FULMEN_INT64, {4});
  EXPECT_EQ(call.backward(), FULMEN_ERROR_DTYPE);
  EXPECT_THAT(fulmen_last_error(), HasSubstr("gradients are of floating-point arrays"));
  gradient.dtype = FULMEN_FLOAT64;
  EXPECT_EQ(call.backward(), FULMEN_ERROR_DTYPE);
}

}  // namespace
}  // namespace fulmen::test
