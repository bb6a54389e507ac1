// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Requests whose o, lse and stats hold a part of their rows already, which a call merges with.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "random_problem.h"

namespace fulmen::test {

// Of every third row a part that saw nothing, whose o is NaN.
inline Request with_parts(RandomProblem& random, const Request& given) {
  Request request = given;
  request.options.accumulate = true;
  const Tensor &o = given.arrays[Array::kO], &stats = given.arrays[Array::kStats];
  const auto store = [](const Tensor& tensor, const i64* at, double x) {
    store_real(RandomProblem::address(tensor, at), tensor.dtype, x);
  };
  const auto is_empty = [&](const i64* at) { return at[o.rank - 2] % 3 == 1; };
  RandomProblem::for_each(
      o, [&](const i64* at) { store(o, at, is_empty(at) ? kNan : random.normal()); });
  RandomProblem::for_each(given.arrays[Array::kLse], [&](const i64* at) {
    const double row_sum = is_empty(at) ? 0 : random.one_of({1.0, 10.0});
    const double row_max =
        is_empty(at) ? -std::numeric_limits<double>::infinity() : random.normal();
    i64 place[kMaxRank];
    std::copy_n(at, kMaxRank, place);
    store(given.arrays[Array::kLse], at, row_max + std::log(row_sum));
    place[o.rank - 1] = 0;
    store(stats, place, row_max);
    place[o.rank - 1] = 1;
    store(stats, place, row_sum);
  });
  return request;
}

// The same arrays elsewhere, with the same in them: for a second implementation to merge with.
inline Request with_parts_elsewhere(RandomProblem& random, const Request& given) {
  Request request = given;
  for (const Array array : {Array::kO, Array::kLse, Array::kStats}) {
    const Tensor &from = given.arrays[array], &to = request.arrays[array] = random.twin(from);
    RandomProblem::for_each(from, [&](const i64* at) {
      store_real(RandomProblem::address(to, at), to.dtype,
                 load_real(RandomProblem::address(from, at), from.dtype));
    });
  }
  return request;
}

}  // namespace fulmen::test
