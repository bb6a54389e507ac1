// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tiled forward pass against the scalar oracle, over drawn problems; and what must hold
// exactly.

#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "tiled_support.h"

namespace fulmen::test {
namespace {

class TiledForward : public testing::TestWithParam<unsigned> {};

void expect_agreement(RandomProblem& random, const Request& expected, unsigned seed) {
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run_tiled(random, actual, 2);
  for (const Array output : {Array::kO, Array::kLse}) {
    const Tensor& stored = actual.arrays[output];
    const Difference difference = compare(stored, expected.arrays[output]);
    // Where bf16 is multiplied as it is, weights are rounded to it, whatever o is stored in.
    const DType computed = expected.arrays[Array::kQ].dtype;
    const bool rounds_weights =
        output == Array::kO && computed == DType::kBFloat16 && cpu::pair_kernels(DType::kBFloat16);
    const double allowed = tolerance(computed, rounds_weights ? computed : stored.dtype);
    EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
        << "seed " << seed << ", " << name(output);
  }
}

TEST_P(TiledForward, AgreesWithTheOracle) {
  for (unsigned part = 0; part < 50; ++part) {
    const unsigned seed = GetParam() * 50 + part;
    RandomProblem random(seed);
    expect_agreement(random, random.draw(), seed);
  }
}

TEST_P(TiledForward, AgreesWithTheOracleOverCaches) {
  for (unsigned part = 0; part < 50; ++part) {
    const unsigned seed = 5000 + GetParam() * 50 + part;
    RandomProblem random(seed);
    expect_agreement(random, random.draw_cache(), seed);
  }
}

TEST_P(TiledForward, AgreesWithTheOracleOfQuantisedKeys) {
  for (unsigned part = 0; part < 20; ++part) {
    const unsigned seed = 9000 + GetParam() * 20 + part;
    RandomProblem random(seed);
    const Request wide = part % 2 == 0 ? random.draw() : random.draw_cache();
    if (wide.arrays[Array::kQ].dtype == DType::kFloat64) continue;
    const DType dtype = random.one_of({DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8});
    expect_agreement(random, quantised(random, wide, dtype), seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, TiledForward, testing::Range(0u, 12u));

TEST(TiledForward, HasTheSameBitsOnAnyNumberOfThreads) {
  for (unsigned seed = 1000; seed < 1040; ++seed) {
    RandomProblem random(seed);
    const Request alone = random.draw();
    const Request shared = with_fresh_outputs(random, alone);
    run_tiled(random, alone, 1);
    run_tiled(random, shared, 5);
    for (const Array output : outputs_of(Operation::kForward)) {
      EXPECT_EQ(compare(shared.arrays[output], alone.arrays[output]).largest, 0) << "seed " << seed;
    }
  }
}

// (1, heads, rows, dim) with heads inside a row.
Tensor heads_inside(RandomProblem& random, DType dtype, i64 heads, i64 rows, i64 dim) {
  Tensor tensor = random.contiguous(dtype, {1, rows, heads, dim});
  random.fill_normal(tensor);
  std::swap(tensor.shape[1], tensor.shape[2]);
  std::swap(tensor.strides[1], tensor.strides[2]);
  return tensor;
}

Tensor heads_from(Tensor tensor, i64 first, i64 count) {
  tensor.data = tensor.address(0, first, 0, 0);
  tensor.shape[1] = count;
  return tensor;
}

// Of one with an infinity and one with a number below the normal ones, too.
TEST(TiledForward, HeadsThatAreReadTogetherHaveTheBitsOfHeadsAlone) {
  constexpr i64 kHeads = 5, kGroup = 2, kKeys = 2100, kDim = 64;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    Request all;
    all.arrays[Array::kQ] = heads_inside(random, dtype, kHeads * kGroup, 1, kDim);
    all.arrays[Array::kK] = heads_inside(random, dtype, kHeads, kKeys, kDim);
    all.arrays[Array::kV] = heads_inside(random, dtype, kHeads, kKeys, kDim);
    all.arrays[Array::kO] = random.contiguous(dtype, {1, kHeads * kGroup, 1, kDim});
    all.arrays[Array::kK].set_real(0, 1, 1500, 3, 0x1p-130);
    all.arrays[Array::kV].set_real(0, 3, 40, 5, HUGE_VAL);
    run_tiled(random, all, 1);
    const Tensor expected = random.contiguous(dtype, {1, kHeads * kGroup, 1, kDim});
    for (i64 head = 0; head < kHeads; ++head) {
      Request alone = all;
      alone.arrays[Array::kO] = expected;
      for (const Array array : {Array::kQ, Array::kO}) {
        alone.arrays[array] = heads_from(alone.arrays[array], head * kGroup, kGroup);
      }
      for (const Array array : {Array::kK, Array::kV}) {
        alone.arrays[array] = heads_from(alone.arrays[array], head, 1);
      }
      run_tiled(random, alone, 1);
    }
    const size_t bytes = static_cast<size_t>(kHeads * kGroup * kDim * size_bytes(dtype));
    EXPECT_EQ(std::memcmp(all.arrays[Array::kO].data, expected.data, bytes), 0);
  }
}

}  // namespace
}  // namespace fulmen::test
