// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One query of bfloat16 whose keys lie 50 nats apart, so that gradients of most keys are subnormal
// or smaller: the weights they come from are such that the exponential of tensor-core kernels makes
// them 0.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"

namespace fulmen::test {

inline constexpr i64 kFarApartKeys = 228;

inline Request far_apart_request(RandomProblem& random, i64 dim) {
  const auto array = [&](DType dtype, std::initializer_list<i64> shape) {
    Tensor tensor{nullptr, dtype, static_cast<int>(shape.size()), {}, {}};
    std::copy(shape.begin(), shape.end(), tensor.shape);
    i64 elements = 1;
    for (int axis = tensor.rank; axis-- > 0; elements *= tensor.shape[axis]) {
      tensor.strides[axis] = elements;
    }
    char* const data = static_cast<char*>(random.memory(static_cast<size_t>(elements * 4) + 16));
    tensor.data = data + (16 - reinterpret_cast<u64>(data) % 16) % 16;
    return tensor;
  };
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array row : {Array::kQ, Array::kO, Array::kDOut, Array::kDQ}) {
    arrays[row] = array(DType::kBFloat16, {1, 1, 1, dim});
  }
  for (const Array rows : {Array::kK, Array::kV, Array::kDK, Array::kDV}) {
    arrays[rows] = array(DType::kBFloat16, {1, 1, kFarApartKeys, dim});
  }
  arrays[Array::kStats] = array(DType::kFloat32, {1, 1, 1, 2});
  for (const Array factor : {Array::kQ, Array::kK}) {
    random.fill_normal(arrays[factor], std::sqrt(50.0));
  }
  for (const Array other : {Array::kV, Array::kDOut}) random.fill_normal(arrays[other]);
  request.options.scale = kNan;
  cpu::scalar_forward(validate(request, Pointers::kChecked));
  request.operation = Operation::kBackward;
  return request;
}

// Row j of a gradient: the largest number of the oracle's, and what the other is off by.
struct RowError {
  double largest = 0;
  double error = 0;
};
inline RowError error_of_row(const Tensor& actual, const Tensor& expected, i64 j) {
  RowError row;
  for (i64 d = 0; d < expected.shape[3]; ++d) {
    const i64 at[4] = {0, 0, j, d};
    const double x = load_real(RandomProblem::address(actual, at), actual.dtype);
    const double y = load_real(RandomProblem::address(expected, at), expected.dtype);
    row.largest = std::fmax(row.largest, std::fabs(y));
    row.error = std::fmax(row.error, std::isnan(x) ? INFINITY : std::fabs(x - y));
  }
  return row;
}

// run(problem): the backward kernels.
template <class Run>
void expect_subnormal_gradients(i64 dim, const Run& run) {
  RandomProblem random(19);
  const Request expected = far_apart_request(random, dim);
  Request actual = expected;
  for (const Array gradient : {Array::kDQ, Array::kDK, Array::kDV}) {
    actual.arrays[gradient] = random.twin(expected.arrays[gradient]);
  }
  cpu::scalar_backward(validate(expected, Pointers::kChecked));
  run(validate(actual, Pointers::kChecked));
  for (const Array gradient : {Array::kDK, Array::kDV}) {
    int num_subnormal = 0;
    for (i64 j = 0; j < kFarApartKeys; ++j) {
      const RowError row = error_of_row(actual.arrays[gradient], expected.arrays[gradient], j);
      num_subnormal += 0x1p-131 < row.largest && row.largest < 0x1p-126;
      // P and dS are rounded, and the results, by half of 2^-8 each or half of 2^-133.
      EXPECT_LE(row.error, 0x1p-6 * row.largest + 0x1p-132) << name(gradient) << " of key " << j;
    }
    EXPECT_GT(num_subnormal, 0);
  }
}

}  // namespace fulmen::test
