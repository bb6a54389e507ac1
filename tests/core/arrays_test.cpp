// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the places of arrays say of a problem: tiles want 16 bytes, numbers read one by one do not.
#include "core/arrays.h"

#include <gtest/gtest.h>

namespace fulmen::test {
namespace {

alignas(kMaxPointerAlignment) char memory[4 * kMaxPointerAlignment] = {};

// Of kQ at the beginning and `array` behind it, at a distance.
i64 alignment_with(Array array, DType dtype, i64 distance) {
  Problem problem;
  const auto at = [](i64 offset, DType type) {
    return Tensor{memory + offset, type, kMaxRank, {1, 1, 1, 2}, {0, 0, 0, 1}};
  };
  problem.arrays[Array::kQ] = at(0, DType::kFloat32);
  problem.arrays[array] = at(kMaxPointerAlignment + distance, dtype);
  check_pointers(problem, Call::kForward);
  return problem.pointer_alignment;
}

TEST(PointerAlignment, SlicesOfLengthsLeaveTilesAligned) {
  EXPECT_EQ(alignment_with(Array::kKvLengths, DType::kInt32, 4), kMaxPointerAlignment);
  EXPECT_EQ(alignment_with(Array::kCuQ, DType::kInt64, 8), kMaxPointerAlignment);
  EXPECT_EQ(alignment_with(Array::kSinks, DType::kFloat32, 4), kMaxPointerAlignment);
}

TEST(PointerAlignment, TilesAndCrookedNumbersCount) {
  EXPECT_EQ(alignment_with(Array::kK, DType::kFloat32, 8), 8);
  EXPECT_EQ(alignment_with(Array::kBias, DType::kFloat32, 4), 4);
  EXPECT_EQ(alignment_with(Array::kKvLengths, DType::kInt32, 2), 2);
}

}  // namespace
}  // namespace fulmen::test
