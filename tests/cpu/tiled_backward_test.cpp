// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tiled backward pass against the scalar oracle, over drawn problems; and what must hold
// exactly.

#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "tiled_support.h"

namespace fulmen::test {
namespace {

constexpr unsigned kAll = 31;

// A drawn problem with its forward pass done by the oracle.
Request drawn_backward(RandomProblem& random, unsigned need) {
  const Request forward = random.draw();
  cpu::scalar_forward(validate(forward, Pointers::kChecked));
  return to_backward(random, forward, need);
}

void expect_gradients_agree(RandomProblem& random, const Request& expected, unsigned seed) {
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_backward(validate(expected, Pointers::kChecked));
  run_tiled(random, actual, 2);
  for (const Array output : outputs_of(Operation::kBackward)) {
    const Tensor& stored = actual.arrays[output];
    if (!stored.present()) continue;
    const Difference difference = compare(stored, expected.arrays[output]);
    const double allowed = tolerance(expected.arrays[Array::kQ].dtype, stored.dtype);
    EXPECT_LE(difference.largest, 2 * allowed * max(difference.magnitude, 1.0))
        << "seed " << seed << ", " << name(output);
  }
}

class TiledBackward : public testing::TestWithParam<unsigned> {};

TEST_P(TiledBackward, AgreesWithTheOracle) {
  for (unsigned part = 0; part < 50; ++part) {
    const unsigned seed = GetParam() * 50 + part;
    RandomProblem random(seed);
    const Request expected = drawn_backward(random, kAll);
    expect_gradients_agree(random, expected, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, TiledBackward, testing::Range(0u, 12u));

// Enough heads for blocks of 256 keys, of which masks leave a block of rows a part: (1, 6, 70, 24)
// against (1, 6, 600, 24).
TEST(TiledBackward, WeighsOfWideBlocksThePartThatRowsSee) {
  for (unsigned seed = 0; seed < 10; ++seed) {
    RandomProblem random(seed);
    const DType dtype = seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    Request forward;
    for (const Array array : {Array::kQ, Array::kK, Array::kV}) {
      forward.arrays[array] = random.contiguous(dtype, {1, 6, array == Array::kQ ? 70 : 600, 24});
      random.fill_normal(forward.arrays[array]);
    }
    forward.arrays[Array::kO] = random.contiguous(dtype, {1, 6, 70, 24});
    forward.arrays[Array::kLse] = random.contiguous(DType::kFloat32, {1, 6, 70});
    forward.arrays[Array::kStats] = random.contiguous(DType::kFloat32, {1, 6, 70, 2});
    forward.options.causal = seed < 6;
    forward.options.alignment = seed < 4 ? Alignment::kBottomRight : Alignment::kTopLeft;
    if (seed % 4 > 1) forward.options.window_left = 40;
    if (seed >= 6) forward.options.window_right = 45;
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const Request backward = to_backward(random, forward, 7);
    const Plan plan = choose(validate(backward, Pointers::kChecked), cpu::cpu_device());
    EXPECT_EQ(plan.tile.columns, 256);
    expect_gradients_agree(random, backward, seed);
  }
}

TEST(TiledBackward, HasTheSameBitsOnAnyNumberOfThreads) {
  for (unsigned seed = 2000; seed < 2040; ++seed) {
    RandomProblem random(seed);
    const Request alone = drawn_backward(random, kAll);
    const Request shared = with_fresh_outputs(random, alone);
    run_tiled(random, alone, 1);
    run_tiled(random, shared, 5);
    for (const Array output : outputs_of(Operation::kBackward)) {
      if (!alone.arrays[output].present()) continue;
      EXPECT_EQ(compare(shared.arrays[output], alone.arrays[output]).largest, 0)
          << "seed " << seed << ", " << name(output);
    }
  }
}

TEST(TiledBackward, GivesEachGradientAloneWithTheSameBits) {
  for (unsigned seed = 3000; seed < 3030; ++seed) {
    RandomProblem random(seed);
    const Request together = drawn_backward(random, kAll);
    run_tiled(random, together, 2);
    for (const Array output : outputs_of(Operation::kBackward)) {
      if (!together.arrays[output].present()) continue;
      Request alone = together;
      for (const Array other : outputs_of(Operation::kBackward)) alone.arrays[other] = Tensor{};
      alone.arrays[output] = random.twin(together.arrays[output]);
      run_tiled(random, alone, 2);
      EXPECT_EQ(compare(alone.arrays[output], together.arrays[output]).largest, 0)
          << "seed " << seed << ", " << name(output);
    }
  }
}

// Whose upper and lower halves would both be ordinary numbers of 16 bits.
TEST(TiledBackward, ReadsOnesOfFloat32BesideKeysOf16Bits) {
  int runs = 0;
  for (unsigned seed = 4000; seed < 4200; ++seed) {
    RandomProblem random(seed);
    const Request forward = random.draw();
    const DType stored = forward.arrays[Array::kO].dtype;
    if (stored == forward.arrays[Array::kQ].dtype || stored != DType::kFloat32) continue;
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const Request expected = to_backward(random, forward, kAll);
    const Tensor& dO = expected.arrays[Array::kDOut];
    RandomProblem::for_each(dO, [&](const i64* at) {
      store_real(RandomProblem::address(dO, at), dO.dtype, at[2] % 2 == 0 ? 1.0 : -1.0);
    });
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    run_tiled(random, actual, 2);
    ++runs;
    for (const Array output : {Array::kDQ, Array::kDK, Array::kDV}) {
      const Difference difference = compare(actual.arrays[output], expected.arrays[output]);
      const double allowed =
          tolerance(expected.arrays[Array::kQ].dtype, actual.arrays[output].dtype);
      EXPECT_LE(difference.largest, 2 * allowed * max(difference.magnitude, 1.0))
          << "seed " << seed << ", " << name(output);
    }
  }
  EXPECT_GT(runs, 10);
}

}  // namespace
}  // namespace fulmen::test
