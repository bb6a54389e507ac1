// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What kernels are compiled with of a user's expression: of which size its integers are, what makes
// another text and what does not, and which kernels have it.
#include "gpu/expression_text.h"

#include <gtest/gtest.h>

#include "core/arrays.h"
#include "core/expression.h"
#include "core/validate.h"
#include "gpu/expression_ranges.h"
#include "gpu/implementations.h"
#include "gpu/jit/compiler.h"

namespace fulmen::gpu {
namespace {

struct Written {
  const char* score = nullptr;
  const char* mask = nullptr;
  std::vector<std::string> captures{};
  std::vector<std::string> scalars{};
};

Tensor array_of(DType dtype, const std::vector<i64>& shape) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int>(shape.size());
  i64 stride = 1;
  for (int axis = tensor.rank; axis-- > 0;) {
    const auto at = static_cast<size_t>(axis);
    tensor.shape[axis] = shape[at];
    tensor.strides[axis] = stride;
    stride *= shape[at];
  }
  return tensor;
}

Problem problem_of(const Written& written, i64 rows = 64,
                   Operation operation = Operation::kForward) {
  Request request;
  request.operation = operation;
  Arrays& arrays = request.arrays;
  const auto like_q = [&] { return array_of(DType::kFloat16, {2, 4, rows, 64}); };
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) arrays[array] = like_q();
  arrays[Array::kLse] = array_of(DType::kFloat32, {2, 4, rows});
  if (operation == Operation::kBackward) arrays[Array::kDOut] = arrays[Array::kDQ] = like_q();
  for (size_t n = 0; n < written.captures.size(); ++n) {
    arrays[capture(static_cast<int>(n))] = array_of(DType::kFloat32, {4, rows});
  }
  request.options.scalar0 = written.scalars.empty() ? 0 : 2;
  request.options.expression =
      expression::make(written.score, written.mask, {written.captures, written.scalars});
  return validate(request, Pointers::kUnknown);
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ExpressionText, IsTheSameForOtherShapesAndScalars) {
  const Written written{"s + $a * row[h, j]", nullptr, {"row"}, {"a"}};
  Problem problem = problem_of(written);
  const std::string text = expression_text(problem);
  EXPECT_EQ(expression_text(problem_of(written, 80)), text);
  problem.scalars[0] = 7;
  EXPECT_EQ(expression_text(problem), text);
  EXPECT_NE(expression_text(problem_of({"s - $a * row[h, j]", nullptr, {"row"}, {"a"}})), text);
  problem.q_rows = i64{1} << 31;  // offsets and differences of positions need 64 bits
  EXPECT_NE(expression_text(problem), text);
  EXPECT_EQ(expression_text(Problem{}), "");
}

TEST(ExpressionText, ComputesIn32BitsWhatFits) {
  EXPECT_FALSE(has(expression_text(problem_of({nullptr, "(p - j) % 3 == 0"})), "i64"));
  EXPECT_TRUE(has(expression_text(problem_of({nullptr, "i * j < 9"})), "i64"));
  EXPECT_TRUE(has(expression_text(problem_of({nullptr, "i * j * i * j < 9"})), "wrapped("));
  // Divided without a sign where there is none.
  EXPECT_TRUE(has(expression_text(problem_of({nullptr, "i // 8 == 2"})), "static_cast<u32>"));
  EXPECT_TRUE(has(expression_text(problem_of({nullptr, "p // 8 == 2"})), "floor_quotient<i32>"));
}

TEST(ExpressionText, WritesNumbersExactly) {
  const std::string text = expression_text(problem_of({"s * 0.1 + log(0.0)"}));
  EXPECT_TRUE(has(text, "static_cast<Real>(0x1.999999999999ap-4)"));
  EXPECT_TRUE(has(text, "kInfinity<Real>"));
}

// Over a box, from what a mask reads of rows and of keys.
TEST(ExpressionText, BoundsAMaskOverBoxes) {
  const auto decides = [](const char* mask) {
    std::vector<std::string> captures;
    if (has(mask, "doc")) captures.push_back("doc");
    const std::string text = expression_text(problem_of({nullptr, mask, captures, {}}));
    EXPECT_TRUE(has(text, "shows_between")) << mask;
    return !has(text, "kEither");
  };
  EXPECT_TRUE(decides("j <= p or j < 7"));
  EXPECT_TRUE(decides("not (p - j >= 4) and i // 8 == j // 8"));
  EXPECT_TRUE(decides("doc[h, i] <= doc[h, j]"));
  EXPECT_FALSE(decides("doc[h, clamp(j - i, 0, 9)] > 0"));  // a read by a pair
  EXPECT_FALSE(decides("i * j * i * j < 9"));               // it wraps
  EXPECT_FALSE(has(expression_text(problem_of({"s + i - j"})), "shows_between"));
}

TEST(ExpressionRanges, HoldWhatStepsCanBe) {
  const auto widest = [](const char* mask) {
    const Problem problem = problem_of({nullptr, mask});
    Range all{0, 0};
    for (const Range& range : integer_ranges(problem)) {
      if (range.is_all()) continue;  // also of steps that are no integers
      all = {min(all.least, range.least), max(all.most, range.most)};
    }
    return all;
  };
  EXPECT_TRUE(widest("abs(j - p) < 4").fits32());
  EXPECT_TRUE(widest("clamp(i * j, -9, 9) == 0").most > i64{1} << 40);
  EXPECT_LT(widest("i % (p - 1) == 1").least, 0);
}

// The kernels of a plan that look at pairs have the text and its parameters, and no others.
TEST(ExpressionPlan, OnlyKernelsThatLookAtPairsHaveIt) {
  Problem problem = problem_of({"s + row[h, j]", nullptr, {"row"}, {}}, 64, Operation::kBackward);
  problem.arrays[capture_gradient(0)] = problem.arrays[capture(0)];
  problem.implementation = Implementation::kSimt;
  const PlanOrRefusal made =
      plan_with(gpu_implementation(Implementation::kSimt), problem, gpu_named("h100"));
  ASSERT_NE(made.plan, nullptr) << made.refusal;
  std::string with, without;
  for (const KernelLaunch& launch : made.plan->launches) {
    (launch.spec.expression.empty() ? without : with) += launch.spec.function + " ";
    EXPECT_EQ(launch.spec.reads_expression, !launch.spec.expression.empty());
    EXPECT_EQ(has(wrapper_text(launch.spec), "struct UserExpression"),
              launch.spec.reads_expression);
  }
  EXPECT_EQ(without, "fulmen::backward_simt_rows fulmen::store_captures ");
  EXPECT_EQ(with, "fulmen::backward_simt_dq fulmen::backward_simt_captures ");
  EXPECT_EQ(made.plan->zeroed_bytes, size_t{4 * 64 * 8});
  EXPECT_EQ(made.plan->alignment_bytes, 4);
  problem.deterministic = true;
  EXPECT_TRUE(
      has(plan_with(gpu_implementation(Implementation::kSimt), problem, gpu_named("h100")).refusal,
          "no order of its own"));
}

}  // namespace
}  // namespace fulmen::gpu
