// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// may_overlap against a count of bytes, on random small views; the views of real programs; and the
// bound of the search.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "core/arrays.h"

namespace fulmen::test {
namespace {

Tensor view(char* base, DType dtype, std::vector<i64> shape, std::vector<i64> strides) {
  Tensor tensor{base, dtype, static_cast<int>(shape.size()), {}, {}};
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = strides[axis];
  }
  return tensor;
}

// Calls visit(address of the first byte) for every index.
template <class Visit>
void for_each_element(const Tensor& tensor, const Visit& visit) {
  i64 extent[kMaxRank] = {1, 1, 1, 1};
  for (int axis = 0; axis < tensor.rank; ++axis) extent[axis] = tensor.shape[axis];
  for (i64 a = 0; a < extent[0]; ++a) {
    for (i64 b = 0; b < extent[1]; ++b) {
      for (i64 c = 0; c < extent[2]; ++c) {
        for (i64 d = 0; d < extent[3]; ++d) visit(tensor.address(a, b, c, d));
      }
    }
  }
}

std::set<const char*> bytes_of(const Tensor& tensor) {
  std::set<const char*> bytes;
  for_each_element(tensor, [&](const char* at) {
    for (i64 byte = 0; byte < size_bytes(tensor.dtype); ++byte) bytes.insert(at + byte);
  });
  return bytes;
}

class RandomViews {
 public:
  i64 number(i64 low, i64 high) { return std::uniform_int_distribution<i64>(low, high)(random_); }

  Tensor next(char* memory) {
    constexpr DType kDTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBool};
    std::vector<i64> shape, strides;
    const i64 rank = number(1, 4);
    for (i64 axis = 0; axis < rank; ++axis) {
      shape.push_back(number(0, 9) == 0 ? 0 : number(1, 4));
      strides.push_back(number(0, 12));
    }
    return view(memory + number(0, 90), kDTypes[number(0, 3)], shape, strides);
  }

 private:
  std::mt19937 random_{11};
};

TEST(MayOverlap, AgreesWithTheBytes) {
  std::vector<char> memory(4096);
  RandomViews random;
  int overlaps = 0;
  constexpr int kTrials = 20000;
  for (int trial = 0; trial < kTrials; ++trial) {
    const Tensor a = random.next(memory.data());
    const Tensor b = random.next(memory.data());
    const std::set<const char*> a_bytes = bytes_of(a);
    bool expected = false;
    for (const char* byte : bytes_of(b)) expected = expected || a_bytes.count(byte) > 0;
    overlaps += expected ? 1 : 0;
    ASSERT_EQ(may_overlap(a, b), expected) << trial;
    ASSERT_EQ(may_overlap(b, a), expected) << trial;
  }
  EXPECT_GT(overlaps, kTrials / 10);
  EXPECT_LT(overlaps, kTrials * 9 / 10);
}

TEST(MayOverlapItself, AgreesWithTheElements) {
  std::vector<char> memory(4096);
  RandomViews random;
  int overlaps = 0;
  constexpr int kTrials = 20000;
  for (int trial = 0; trial < kTrials; ++trial) {
    const Tensor tensor = random.next(memory.data());
    std::set<const char*> seen;
    bool expected = false;
    for_each_element(tensor, [&](const char* at) { expected |= !seen.insert(at).second; });
    overlaps += expected ? 1 : 0;
    ASSERT_EQ(may_overlap_itself(tensor), expected) << trial;
  }
  EXPECT_GT(overlaps, kTrials / 10);
  EXPECT_LT(overlaps, kTrials * 9 / 10);
}

// The parts of one (batch, row, 3, head, dim) array, as (batch, head, row, dim).
TEST(MayOverlap, InterleavedProjectionsAreApart) {
  constexpr i64 kBatch = 3, kRows = 1000, kHeads = 12, kDim = 64;
  constexpr i64 kToken = 3 * kHeads * kDim;
  std::vector<char> memory(static_cast<size_t>(kBatch * kRows * kToken * 4));
  const auto part = [&](i64 index) {
    return view(memory.data() + index * kHeads * kDim * 4, DType::kFloat32,
                {kBatch, kHeads, kRows, kDim}, {kRows * kToken, kDim, kToken, 1});
  };
  EXPECT_FALSE(may_overlap(part(0), part(1)));
  EXPECT_FALSE(may_overlap(part(0), part(2)));
  EXPECT_FALSE(may_overlap(part(2), part(1)));
  EXPECT_TRUE(may_overlap(part(1), part(1)));
  Tensor shifted = part(1);
  shifted.data = static_cast<char*>(shifted.data) - 4;  // its first column is q's last
  EXPECT_TRUE(may_overlap(part(0), shifted));
}

TEST(MayOverlap, OddAndEvenRowsAreApart) {
  std::vector<char> memory(8 * 64 * 16);
  const Tensor even = view(memory.data(), DType::kFloat64, {64, 8}, {16, 1});
  const Tensor odd = view(memory.data() + 64, DType::kFloat64, {64, 8}, {16, 1});
  EXPECT_FALSE(may_overlap(even, odd));
  const Tensor straddling = view(memory.data() + 63, DType::kFloat64, {64, 8}, {16, 1});
  EXPECT_TRUE(may_overlap(even, straddling));
}

TEST(MayOverlap, EmptyArraysShareNothing) {
  char memory[64];
  const Tensor all = view(memory, DType::kFloat32, {16}, {1});
  EXPECT_FALSE(may_overlap(all, view(memory, DType::kFloat32, {0, 16}, {16, 1})));
  EXPECT_FALSE(may_overlap(view(nullptr, DType::kFloat32, {0}, {1}), all));
}

// Strides whose sums nearly meet for every choice: a subset-sum that the search must give up on, by
// saying that there may be an overlap. What matters is that it ends.
TEST(MayOverlap, UndecidedMeansMaybe) {
  const std::vector<i64> shape{30000, 30000, 30000, 30000};
  const Tensor a = view(nullptr, DType::kBool, shape, {1000003, 1000033, 1000037, 1000039});
  const Tensor b = view(reinterpret_cast<char*>(u64{60000000007}), DType::kBool, shape,
                        {1000081, 1000099, 1000117, 1000121});
  EXPECT_TRUE(may_overlap(a, b));
}

TEST(SpanBytes, CountsFromFirstToLastByte) {
  EXPECT_EQ(span_bytes(view(nullptr, DType::kFloat32, {2, 3}, {10, 1})), 52);
  EXPECT_EQ(span_bytes(view(nullptr, DType::kFloat16, {5}, {0})), 2);
  EXPECT_EQ(span_bytes(view(nullptr, DType::kFloat64, {5, 0}, {1, 1})), 0);
}

}  // namespace
}  // namespace fulmen::test
