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

TEST(TiledForward, HeadsThatAreReadTogetherHaveTheBitsOfHeadsAlone) {
  const auto run = [](RandomProblem& random, const Request& request) {
    run_tiled(random, request, 1);
  };
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const i64 group : {2, 4}) EXPECT_TRUE(has_bits_of_heads_alone(dtype, group, run));
  }
}

}  // namespace
}  // namespace fulmen::test
