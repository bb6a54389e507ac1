// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Judging the outputs of a kernel by those of the oracle.
#pragma once

#include <gtest/gtest.h>

#include "../../cpu/random_problem.h"

namespace fulmen::test {

inline void expect_close(const Request& actual, const Request& expected,
                         const std::vector<Array>& outputs, unsigned seed) {
  for (const Array output : outputs) {
    const Tensor& stored = actual.arrays[output];
    if (!stored.present()) continue;
    const Difference difference = compare(stored, expected.arrays[output]);
    const double allowed = tolerance(expected.arrays[Array::kQ].dtype, stored.dtype);
    EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
        << "seed " << seed << ", " << name(output) << difference.place;
  }
}

// The same of o and lse, where P is rounded to the dtype of q on its way to o.
inline void expect_rounded(const Request& actual, const Request& expected, unsigned seed) {
  const DType dtype = expected.arrays[Array::kQ].dtype;
  const Tensor& o = actual.arrays[Array::kO];
  const Difference difference = compare(o, expected.arrays[Array::kO]);
  const double allowed = tolerance(dtype, o.dtype) + tolerance(dtype, dtype);
  EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
      << "seed " << seed << ", o" << difference.place;
  expect_close(actual, expected, {Array::kLse}, seed);
}

}  // namespace fulmen::test
