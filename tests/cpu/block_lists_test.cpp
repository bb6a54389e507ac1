// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lists of blocks on the CPU: the oracle against the boolean mask that they mean, tiles against the
// oracle, and what nobody lists is not read.

#include <gtest/gtest.h>

#include <limits>

#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "drawn_expression.h"
#include "tiled_support.h"

namespace fulmen::test {
namespace {

class BlockLists : public testing::TestWithParam<unsigned> {};

double allowed_for_lists(const Request& request, Array output) {
  const DType computed = request.arrays[Array::kQ].dtype;
  const bool rounds_weights =
      output == Array::kO && computed == DType::kBFloat16 && cpu::pair_kernels(DType::kBFloat16);
  return 4 * tolerance(computed, rounds_weights ? computed : request.arrays[output].dtype);
}

void expect_tiles_agree(RandomProblem& random, const Request& expected, unsigned seed) {
  const Operation operation = expected.operation;
  const Request actual = with_fresh_outputs(random, expected);
  const Problem problem = validate(expected, Pointers::kChecked);
  operation == Operation::kForward ? cpu::scalar_forward(problem) : cpu::scalar_backward(problem);
  run_tiled(random, actual, 2);
  for (const Array output : outputs_of(operation)) {
    if (!actual.arrays[output].present() || output == Array::kStats) continue;
    const Difference difference = compare(actual.arrays[output], expected.arrays[output]);
    EXPECT_LE(difference.largest,
              allowed_for_lists(actual, output) * max(difference.magnitude, 1.0))
        << "seed " << seed << ", " << name(output) << difference.place;
  }
}

TEST_P(BlockLists, TilesAgreeWithTheOracle) {
  for (unsigned part = 0; part < 10; ++part) {
    const unsigned seed = 110000 + GetParam() * 10 + part;
    RandomProblem random(seed);
    Request request = seed % 3 == 2 ? random.draw_cache() : random.draw();
    if (seed % 4 == 3) request = with_expression(random, request);
    expect_tiles_agree(random, with_blocks(random, request), seed);
  }
}

TEST_P(BlockLists, TilesAgreeWithTheOracleBackward) {
  for (unsigned part = 0; part < 10; ++part) {
    const unsigned seed = 120000 + GetParam() * 10 + part;
    RandomProblem random(seed);
    Request request = random.draw();
    if (seed % 4 == 3) request = with_expression(random, request);
    const Request forward = with_blocks(random, request);
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    Request backward = to_backward(random, forward, 31);
    if (seed % 4 == 3) add_capture_gradients(random, backward);
    expect_tiles_agree(random, backward, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, BlockLists, testing::Range(0u, 12u));

// The boolean mask that the lists of a call mean.
Tensor mask_of_lists(RandomProblem& random, const Problem& problem) {
  const Tensor mask = random.contiguous(
      DType::kBool, {problem.num_sequences, problem.heads_q, problem.max_q, problem.max_kv});
  const Tensor& lists = problem.arrays[Array::kBlocks];
  RandomProblem::for_each(mask, [&](const i64* at) {
    bool is_listed = false;
    const i64 list = at[1] * lists.shape[1] / problem.heads_q;
    for (i64 entry = 0; entry < lists.shape[3]; ++entry) {
      is_listed |=
          lists.index(at[0], list, at[2] / problem.block_q, entry) == at[3] / problem.block_kv;
    }
    store_bytes<u8>(RandomProblem::address(mask, at), is_listed);
  });
  return mask;
}

TEST(BlockListsOfTheOracle, AreABooleanMask) {
  for (unsigned seed = 130000; seed < 130030; ++seed) {
    RandomProblem random(seed);
    Request request = random.draw();
    while (request.arrays[Array::kMask].present() || request.arrays[Array::kCuQ].present()) {
      request = random.draw();
    }
    const Request lists = with_blocks(random, request);
    Request mask = with_fresh_outputs(random, request);
    const Problem problem = validate(lists, Pointers::kChecked);
    mask.arrays[Array::kMask] = mask_of_lists(random, problem);
    cpu::scalar_forward(problem);
    cpu::scalar_forward(validate(mask, Pointers::kChecked));
    for (const Array output : {Array::kO, Array::kLse}) {
      EXPECT_EQ(compare(lists.arrays[output], mask.arrays[output]).largest, 0) << "seed " << seed;
    }
  }
}

// Keys of a block that no list names are NaN, and nothing shows of it.
TEST(BlockListsOfTiles, ReadNothingElse) {
  for (unsigned seed = 140000; seed < 140020; ++seed) {
    RandomProblem random(seed);
    Request request = random.draw();
    while (request.arrays[Array::kCuQ].present() || request.arrays[Array::kK].shape[2] < 130) {
      request = random.draw();
    }
    request = with_blocks(random, request);
    const Tensor& lists = request.arrays[Array::kBlocks];
    const i64 hidden = 1;
    RandomProblem::for_each(lists, [&](const i64* at) {
      char* const to = RandomProblem::address(lists, at);
      const i64 id = load_index(to, lists.dtype) == hidden ? 0 : load_index(to, lists.dtype);
      lists.dtype == DType::kInt32 ? store_bytes(to, static_cast<i32>(id)) : store_bytes(to, id);
    });
    const Request clean = with_fresh_outputs(random, request);
    run_tiled(random, clean, 2);
    for (const Array array : {Array::kK, Array::kV}) {
      const Tensor& tensor = request.arrays[array];
      RandomProblem::for_each(tensor, [&](const i64* at) {
        if (at[2] / request.options.block_kv != hidden) return;
        store_real(RandomProblem::address(tensor, at), tensor.dtype,
                   std::numeric_limits<double>::quiet_NaN());
      });
    }
    run_tiled(random, request, 2);
    for (const Array output : {Array::kO, Array::kLse}) {
      // A hidden NaN may have its neighbours multiplied in float32, with sums in another order.
      const Difference difference = compare(request.arrays[output], clean.arrays[output]);
      const double allowed =
          tolerance(request.arrays[Array::kQ].dtype, request.arrays[output].dtype);
      EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0)) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace fulmen::test
