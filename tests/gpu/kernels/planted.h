// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A problem in which some keys and values are NaN or infinite, each hidden from most rows of its
// own tile and seen by a few: what is hidden may not show, what is seen must.
#pragma once

#include "../../cpu/random_problem.h"

namespace fulmen::test {

inline Request planted_request(RandomProblem& random, DType dtype) {
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    arrays[array] = random.array(dtype, {2, 2, 70, 24});
    random.fill_normal(arrays[array]);
  }
  arrays[Array::kStats] = random.array(accumulator(dtype), {2, 2, 70, 2});
  arrays[Array::kLse] = random.array(accumulator(dtype), {2, 2, 70});
  request.options.scale = kNan;
  request.options.causal = true;
  request.options.window_left = 4;
  const auto plant = [&](Array array, i64 row, double value) {
    const Tensor& tensor = arrays[array];
    for (i64 head = 0; head < 2; ++head) {
      const i64 at[4] = {1, head, row, 3};
      store_real(RandomProblem::address(tensor, at), dtype, value);
    }
  };
  plant(Array::kV, 20, kNan);
  plant(Array::kV, 37, std::numeric_limits<double>::infinity());
  plant(Array::kK, 50, kNan);
  return request;
}

}  // namespace fulmen::test
