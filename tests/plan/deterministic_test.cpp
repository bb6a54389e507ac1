// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Deterministic gradients on a GPU: the kernels that make dq, dk and dv, and with them every order
// of sums, do not follow from which of them are asked for.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/validate.h"
#include "gpu/implementations.h"

namespace fulmen {
namespace {

struct Shape {
  DType dtype;
  i64 rows, dim;
  bool causal = false;
};

Tensor contiguous(DType dtype, std::initializer_list<i64> shape) {
  Tensor tensor{nullptr, dtype, static_cast<int>(shape.size()), {}, {}};
  std::copy(shape.begin(), shape.end(), tensor.shape);
  i64 stride = 1;
  for (int axis = tensor.rank; axis-- > 0; stride *= tensor.shape[axis]) {
    tensor.strides[axis] = stride;
  }
  return tensor;
}

// need: dq, dk, dv by bit.
Problem problem_of(const Shape& shape, unsigned need, bool deterministic) {
  Request request;
  request.operation = Operation::kBackward;
  request.options.backend = Backend::kCuda;
  request.options.causal = shape.causal;
  request.options.deterministic = deterministic;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kO, Array::kDOut, Array::kDQ}) {
    arrays[array] = contiguous(shape.dtype, {2, 4, shape.rows, shape.dim});
  }
  for (const Array array : {Array::kK, Array::kV, Array::kDK, Array::kDV}) {
    arrays[array] = contiguous(shape.dtype, {2, 2, shape.rows, shape.dim});
  }
  arrays[Array::kStats] = contiguous(accumulator(shape.dtype), {2, 4, shape.rows, 2});
  unsigned bit = 1;
  for (const Array gradient : {Array::kDQ, Array::kDK, Array::kDV}) {
    if ((need & bit) == 0) arrays[gradient] = {};
    bit *= 2;
  }
  return validate(request, Pointers::kUnknown);
}

std::string kernels_of(const gpu::GpuPlan& plan) {
  std::string text;
  for (const gpu::KernelLaunch& launch : plan.launches) {
    text += sentence(launch.spec.name, " x ", launch.num_blocks, "\n");
  }
  return text;
}

std::unique_ptr<gpu::GpuPlan> plan_of(Implementation implementation, const Shape& shape,
                                      unsigned need, bool deterministic = true) {
  return gpu::plan_with(gpu::gpu_implementation(implementation),
                        problem_of(shape, need, deterministic), gpu_named("h200"))
      .plan;
}

constexpr Shape kShapes[] = {
    {DType::kBFloat16, 100, 64},        {DType::kBFloat16, 2048, 64, true},
    {DType::kFloat16, 2048, 128},       {DType::kBFloat16, 2048, 128, true},
    {DType::kBFloat16, 300, 192, true}, {DType::kFloat16, 2048, 256},
    {DType::kBFloat16, 300, 320, true},
};

TEST(DeterministicPlan, HasTheSameKernelsWhateverIsAskedFor) {
  for (const Implementation implementation : {Implementation::kSm80, Implementation::kSm90}) {
    for (const Shape& shape : kShapes) {
      SCOPED_TRACE(sentence(name(implementation), " ", shape.rows, " rows, ", shape.dim, " dims"));
      const auto all = plan_of(implementation, shape, 7);
      ASSERT_NE(all, nullptr);
      for (unsigned need = 1; need < 7; ++need) {
        const auto some = plan_of(implementation, shape, need);
        ASSERT_NE(some, nullptr);
        EXPECT_EQ(kernels_of(*some), kernels_of(*all)) << need;
        EXPECT_EQ(some->zeroed_bytes, all->zeroed_bytes);
        EXPECT_EQ(some->alignment_bytes, all->alignment_bytes);
        const size_t rows = static_cast<size_t>(2 * (need == 6 ? 4 : 2) * shape.rows);
        EXPECT_GE(some->workspace_bytes,
                  all->workspace_bytes + rows * static_cast<size_t>(shape.dim) * 2);
      }
    }
  }
}

TEST(DeterministicPlan, OtherCallsMakeNoMoreThanTheyAreAskedFor) {
  for (const Shape& shape : kShapes) {
    const auto all = plan_of(Implementation::kSm90, shape, 7, false);
    const auto dq = plan_of(Implementation::kSm90, shape, 1, false);
    EXPECT_NE(kernels_of(*dq), kernels_of(*all));
    EXPECT_LE(dq->workspace_bytes, all->workspace_bytes);
  }
}

}  // namespace
}  // namespace fulmen
