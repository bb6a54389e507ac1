// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm80's own text on the host, against the scalar oracle: drawn problems with every option,
// stride and alignment, lengths of every residue, keys and values that are NaN where no query sees
// them.
#include "kernels/forward_sm80/forward_sm80.cuh"

#include <gtest/gtest.h>

#include <tuple>

#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/schedules.h"
#include "emulator/sm80/forward_kernels.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/kernels/expect_close.h"
#include "gpu/kernels/planted.h"
#include "gpu/params.h"

namespace fulmen::test {
namespace {

void run(const Request& request, unsigned seed) {
  const Problem problem = validate(request, Pointers::kChecked);
  const AttentionParams p = gpu::attention_params(problem);
  const bool aligned = gpu::has_aligned_rows(problem, Array::kO);
  problem.dtype == DType::kFloat16 ? launch_dtype<DType::kFloat16>(p, aligned, seed)
                                   : launch_dtype<DType::kBFloat16>(p, aligned, seed);
}

template <class T>
T load_as(const char* address) {
  T x;
  std::memcpy(&x, address, sizeof(T));
  return x;
}

bool has_16_bits(const Request& request) {
  return size_bytes(request.arrays[Array::kQ].dtype) == 2;
}

// And nothing is written beside the outputs.
void expect_rounded_alone(const RandomProblem& random, const Request& actual,
                          const Request& expected, unsigned seed) {
  expect_rounded(actual, expected, seed);
  for (const Array output : {Array::kO, Array::kLse, Array::kStats}) {
    EXPECT_TRUE(random.is_intact_around(actual.arrays[output]))
        << "seed " << seed << ", " << name(output);
  }
}

class ForwardSm80 : public testing::TestWithParam<unsigned> {};

TEST_P(ForwardSm80, AgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + num_drawn(50); ++seed) {
    RandomProblem random(seed);
    Request expected = random.draw();
    if (!has_16_bits(expected) || !has_kernel(expected)) continue;
    if (seed % 2 == 0) expected.arrays[Array::kStats] = Tensor{};
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(seed % 4 < 2 ? with_rng_array(random, actual) : actual, seed);
    expect_rounded_alone(random, actual, expected, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, ForwardSm80, testing::Range(0u, 200u, 50u));

// Every length around a tile, on both axes, causal at both alignments.
TEST(ForwardSm80Residues, EveryLengthAroundATile) {
  for (i64 rows = 0; rows <= 66; ++rows) {
    RandomProblem random(static_cast<unsigned>(rows));
    Request expected;
    Arrays& arrays = expected.arrays;
    const DType dtype = rows % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    const i64 keys = (rows * 7 + 3) % 67;
    arrays[Array::kQ] = random.array(dtype, {1, 2, rows, 64});
    arrays[Array::kK] = random.array(dtype, {1, 1, keys, 64});
    arrays[Array::kV] = random.array(dtype, {1, 1, keys, 40});
    arrays[Array::kO] = random.array(dtype, {1, 2, rows, 40});
    arrays[Array::kLse] = random.array(DType::kFloat32, {1, 2, rows});
    for (const Array array : {Array::kQ, Array::kK, Array::kV}) random.fill_normal(arrays[array]);
    expected.options.scale = kNan;
    expected.options.causal = rows % 3 != 0;
    if (rows % 5 == 0) expected.options.alignment = Alignment::kTopLeft;
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, static_cast<unsigned>(rows));
    expect_rounded_alone(random, actual, expected, static_cast<unsigned>(rows));
  }
}

// Rows that see nothing of the first block, all of the second and some of the third: they have no
// shift to keep when the second comes.
TEST(ForwardSm80Window, RowsMayBeginInAFullBlock) {
  for (const i64 left : {60, 100, 130}) {
    RandomProblem random(static_cast<unsigned>(left));
    Request expected;
    Arrays& arrays = expected.arrays;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
      arrays[array] = random.array(DType::kBFloat16, {1, 1, 320, 40});
      if (array != Array::kO) random.fill_normal(arrays[array]);
    }
    arrays[Array::kLse] = random.array(DType::kFloat32, {1, 1, 320});
    expected.options.scale = kNan;
    expected.options.causal = true;
    expected.options.window_left = left;
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, static_cast<unsigned>(left));
    expect_rounded_alone(random, actual, expected, static_cast<unsigned>(left));
  }
}

// Blocks of queries that meet no key: O goes over Q, whose copies have not been waited for.
TEST(ForwardSm80Window, SomeBlocksMeetNoKey) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    RandomProblem random(seed);
    Request expected;
    Arrays& arrays = expected.arrays;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
      const bool has_keys = array == Array::kK || array == Array::kV;
      arrays[array] = random.contiguous(DType::kBFloat16, {1, 1, has_keys ? 30 : 200, 32});
      if (array != Array::kO) random.fill_normal(arrays[array]);
    }
    arrays[Array::kLse] = random.array(DType::kFloat32, {1, 1, 200});
    expected.options.scale = kNan;
    expected.options.alignment = Alignment::kTopLeft;
    expected.options.window_left = 10;
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, seed);
    expect_rounded_alone(random, actual, expected, seed);
  }
}

// Rows of O that are longer than those of Q, and than Q, K and V together.
TEST(ForwardSm80Dims, NarrowQueriesWideValues) {
  RandomProblem random(9);
  Request expected;
  Arrays& arrays = expected.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool is_wide = array == Array::kV || array == Array::kO;
    arrays[array] = random.contiguous(DType::kFloat16, {1, 2, 40, is_wide ? 128 : 8});
    if (array != Array::kO) random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, 2, 40});
  expected.options.scale = kNan;
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  const Problem problem = validate(actual, Pointers::kChecked);
  constexpr ForwardSm80Config kConfig = [] {
    ForwardSm80Config config =
        config_of<DType::kFloat16, Kind::kPlain, DType::kNone, false, true>();
    config.d_qk = config.kv_rows = 16;
    config.d_v = 128;
    config.row_tiles = config.stages = 2;
    return config;
  }();
  launch<kConfig>(gpu::attention_params(problem), 9);
  expect_rounded_alone(random, actual, expected, 9);
}

TEST(ForwardSm80Planted, WhatIsHiddenDoesNotShow) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    const Request expected = planted_request(random, dtype);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, 7);
    expect_rounded_alone(random, actual, expected, 7);
  }
}

// Masks, biases of every width and documents whose rows are copied as vectors; the config is the
// one that plans choose, but for a tile that fits a small problem.
template <DType kDType, DType kBias>
void check_copied_pairs(unsigned seed) {
  RandomProblem random(seed);
  Request expected;
  Arrays& arrays = expected.arrays;
  const i64 rows = 75, keys = 144;
  for (const Array array : {Array::kQ, Array::kO}) {
    arrays[array] = random.contiguous(kDType, {2, 2, rows, 32});
  }
  for (const Array array : {Array::kK, Array::kV}) {
    arrays[array] = random.contiguous(kDType, {2, 1, keys, 32});
  }
  for (const Array array : {Array::kQ, Array::kK, Array::kV}) random.fill_normal(arrays[array]);
  arrays[Array::kLse] = random.array(DType::kFloat32, {2, 2, rows});
  arrays[Array::kMask] = random.contiguous(DType::kBool, {2, 1, rows, keys});
  RandomProblem::for_each(arrays[Array::kMask], [&](const i64* at) {
    store_bytes<u8>(RandomProblem::address(arrays[Array::kMask], at), random.chance(0.7));
  });
  arrays[Array::kBias] = random.contiguous(kBias, {1, 2, rows, keys});
  random.fill_normal(arrays[Array::kBias], 2);
  std::vector<i64> q_ids, kv_ids;
  for (i64 i = 0; i < 2 * rows; ++i) q_ids.push_back(i % rows / 40 + (i64{1} << 40));
  for (i64 j = 0; j < 2 * keys; ++j) kv_ids.push_back(j % keys / 70 + (i64{1} << 40));
  for (const auto& [array, ids, length] :
       {std::tuple{Array::kQIds, q_ids, rows}, std::tuple{Array::kKvIds, kv_ids, keys}}) {
    Tensor tensor = random.indices(DType::kInt64, ids);
    tensor.rank = 2;
    tensor.shape[0] = 2;
    tensor.strides[0] = tensor.shape[1] = length;
    tensor.strides[1] = 1;
    arrays[array] = tensor;
  }
  expected.options.scale = kNan;
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  const Problem problem = validate(actual, Pointers::kChecked);
  constexpr ForwardSm80Config kConfig = [] {
    ForwardSm80Config config = config_of<kDType, Kind::kBiased, kBias, false, false>();
    config.pair_aligned = config.aligned = config.even_k = true;
    config.d_qk = config.d_v = 32;
    return config;
  }();
  const ForwardSm80Config chosen = gpu::forward_sm80_config(problem, gpu_named("rtx4090")).value();
  EXPECT_TRUE(chosen.pair_aligned && chosen.even_k && chosen.score.mask && chosen.score.documents);
  EXPECT_EQ(chosen.score.bias, kBias);
  launch<kConfig>(gpu::attention_params(problem), seed);
  expect_rounded_alone(random, actual, expected, seed);
}

TEST(ForwardSm80Pairs, RowsAreCopiedInUnits) {
  check_copied_pairs<DType::kBFloat16, DType::kFloat32>(1);
  check_copied_pairs<DType::kFloat16, DType::kFloat16>(2);
}

// NaN in scores that a bias of -inf hides in a block that is else visible.
TEST(ForwardSm80Pairs, BiasHidesNan) {
  RandomProblem random(5);
  Request expected;
  Arrays& arrays = expected.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    arrays[array] = random.array(DType::kBFloat16, {1, 1, 130, 40});
    if (array != Array::kO) random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, 1, 130});
  arrays[Array::kBias] = random.array(DType::kBFloat16, {1, 1, 130, 130});
  random.fill_normal(arrays[Array::kBias]);
  for (i64 i = 0; i < 130; ++i) {
    const i64 pair[4] = {0, 0, i, 20}, key[4] = {0, 0, 20, 3};
    store_real(RandomProblem::address(arrays[Array::kBias], pair), DType::kBFloat16,
               -std::numeric_limits<double>::infinity());
    store_real(RandomProblem::address(arrays[Array::kK], key), DType::kBFloat16, kNan);
  }
  expected.options.scale = kNan;
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run(actual, 5);
  expect_rounded_alone(random, actual, expected, 5);
}

// A bias that grows by 50 nats from block to block, as the main loop meets them: the sums outgrow
// the shift again and again, and O must follow it as they do.
TEST(ForwardSm80Sums, OutputFollowsAShiftThatSumsRaise) {
  for (const i64 keys : {160, 191}) {
    RandomProblem random(static_cast<unsigned>(keys));
    Request expected;
    Arrays& arrays = expected.arrays;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
      const bool of_keys = array == Array::kK || array == Array::kV;
      arrays[array] = random.array(DType::kBFloat16, {1, 1, of_keys ? keys : 40, 32});
      if (array != Array::kO) random.fill_normal(arrays[array]);
    }
    arrays[Array::kLse] = random.array(DType::kFloat32, {1, 1, 40});
    arrays[Array::kStats] = random.array(DType::kFloat32, {1, 1, 40, 2});
    arrays[Array::kBias] = random.array(DType::kFloat32, {1, 1, 1, keys});
    RandomProblem::for_each(arrays[Array::kBias], [&](const i64* at) {
      store_real(RandomProblem::address(arrays[Array::kBias], at), DType::kFloat32,
                 static_cast<double>(-50 * (at[3] / 32)));
    });
    expected.options.scale = kNan;
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, static_cast<unsigned>(keys));
    expect_rounded_alone(random, actual, expected, static_cast<unsigned>(keys));
    for (i64 row = 0; row < 40; ++row) {  // no weight is above 1
      const i64 sum[4] = {0, 0, row, 1};
      EXPECT_LE(load_as<float>(RandomProblem::address(actual.arrays[Array::kStats], sum)), keys);
    }
  }
}

// A cap so large that it changes nothing: what tanh is off by is multiplied by it.
TEST(ForwardSm80Softcap, LargeCapKeepsTheScores) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(11);
    Request expected;
    Arrays& arrays = expected.arrays;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
      arrays[array] = random.array(dtype, {1, 2, 40, 32});
      if (array != Array::kO) random.fill_normal(arrays[array]);
    }
    arrays[Array::kLse] = random.array(DType::kFloat32, {1, 2, 40});
    expected.options.scale = kNan;
    expected.options.softcap = 10000;
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, 11);
    expect_rounded_alone(random, actual, expected, 11);
  }
}

// One, of each kind of kernel, whose blocks of keys all rows see whole; contiguous or not.
Request request_of_whole_blocks(RandomProblem& random, DType dtype, bool contiguous) {
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool of_keys = array == Array::kK || array == Array::kV;
    const std::vector<i64> shape{1, 2, of_keys ? 200 : 70, 32};
    arrays[array] = contiguous ? random.contiguous(dtype, shape) : random.array(dtype, shape);
    if (array != Array::kO) random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, 2, 70});
  request.options.scale = kNan;
  return request;
}

void expect_agreement(RandomProblem& random, const Request& expected, unsigned seed) {
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run(actual, seed);
  expect_rounded_alone(random, actual, expected, seed);
}

// What is ordinary takes no second main loop: as many products as where every score is 0, and fewer
// than where O is NaN.
template <Kind kKind>
void expect_one_main_loop() {
  constexpr DType kBias = kKind == Kind::kBiased ? DType::kFloat32 : DType::kNone;
  constexpr ForwardSm80Config kConfig = config_of<DType::kBFloat16, kKind, kBias, false, false>();
  RandomProblem random(16);
  const Request request = request_of_whole_blocks(random, DType::kBFloat16, false);
  const auto products = [&](double spread, double value = 1) {
    random.fill_normal(request.arrays[Array::kK], spread);
    random.fill_normal(request.arrays[Array::kV], value);
    emulator::Counters counters;
    launch<kConfig>(gpu::attention_params(validate(request, Pointers::kChecked)), 16, &counters);
    return counters.products;
  };
  const u64 ordinary = products(1);
  EXPECT_EQ(ordinary, products(0));
  if constexpr (kConfig.lazy_max && kConfig.may_repeat()) {
    EXPECT_LT(ordinary, products(1, kNan));
  }
}

TEST(ForwardSm80Sums, OrdinaryScoresTakeOneMainLoop) {
  expect_one_main_loop<Kind::kPlain>();
  expect_one_main_loop<Kind::kMasked>();
  expect_one_main_loop<Kind::kBiased>();
}

// Caps that keep scores, bend them, and flatten them: where a score is small beside the cap, tanh
// is a polynomial, for a warp by itself or for warps that share rows.
TEST(ForwardSm80Softcap, EveryCapInWholeBlocks) {
  for (const bool contiguous : {false, true}) {
    for (const double cap : {0.5, 3.0, 30.0, 300.0}) {
      RandomProblem random(12);
      Request expected = request_of_whole_blocks(random, DType::kBFloat16, contiguous);
      expected.options.softcap = cap;
      expect_agreement(random, expected, 12);
    }
  }
}

// Keys before the queries, around them and behind them: slopes of both signs, in the exponent where
// a block of keys lies on one side of all queries.
TEST(ForwardSm80Alibi, BlocksOnEitherSideOfTheQueries) {
  for (const Alignment alignment : {Alignment::kTopLeft, Alignment::kBottomRight}) {
    RandomProblem random(13);
    Request expected = request_of_whole_blocks(random, DType::kBFloat16, false);
    expected.options.alignment = alignment;
    Tensor& slopes = expected.arrays[Array::kAlibiSlopes];
    slopes = random.array(DType::kFloat32, {2});
    for (const i64 head : {0, 1}) {
      store_real(RandomProblem::address(slopes, &head), DType::kFloat32, head == 0 ? 0.3 : -0.02);
    }
    expect_agreement(random, expected, 13);
  }
}

// Statistics with copies that look at every row, and K and V in one buffer: lengths that end within
// a block and with one.
TEST(ForwardSm80Statistics, EveryRowIsLookedAt) {
  for (const bool contiguous : {false, true}) {
    for (const i64 length : {200, 130, 128, 1}) {
      RandomProblem random(14);
      Request expected = request_of_whole_blocks(random, DType::kFloat16, contiguous);
      expected.arrays[Array::kStats] = random.array(DType::kFloat32, {1, 2, 70, 2});
      expected.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {length});
      expect_agreement(random, expected, static_cast<unsigned>(length));
    }
  }
}

// Numbers of documents at addresses that are no multiple of their size.
TEST(ForwardSm80Documents, NumbersMayLieAnywhere) {
  for (const DType dtype : {DType::kInt32, DType::kInt64}) {
    RandomProblem random(15);
    Request expected = request_of_whole_blocks(random, DType::kBFloat16, false);
    for (const auto& [ids, rows] : {std::pair{Array::kQIds, 70}, std::pair{Array::kKvIds, 200}}) {
      std::vector<i64> numbers(1, 0);  // in front of the others
      for (i64 i = 0; i < rows; ++i) numbers.push_back(i / 40 + (rows == 70 ? 1 : 0));
      Tensor tensor = random.indices(dtype, numbers);
      std::memmove(static_cast<char*>(tensor.data) + 1,
                   static_cast<char*>(tensor.data) + size_bytes(dtype),
                   static_cast<size_t>(rows * size_bytes(dtype)));
      tensor.data = static_cast<char*>(tensor.data) + 1;
      tensor.rank = 2;
      tensor.shape[0] = 1;
      tensor.shape[1] = tensor.strides[0] = rows;
      tensor.strides[1] = 1;
      expected.arrays[ids] = tensor;
    }
    expect_agreement(random, expected, 15);
  }
}

// Scores up to 1e6: the statistics must fit one another, and a lone key must be copied.
TEST(ForwardSm80Statistics, HoldForHugeScores) {
  RandomProblem random(3);
  Request expected;
  Arrays& arrays = expected.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    arrays[array] = random.array(DType::kBFloat16, {1, 1, 40, 32});
  }
  random.fill_normal(arrays[Array::kQ], 300);
  random.fill_normal(arrays[Array::kK], 300);
  random.fill_normal(arrays[Array::kV]);
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, 1, 40});
  arrays[Array::kStats] = random.array(DType::kFloat32, {1, 1, 40, 2});
  expected.options.scale = kNan;
  expected.options.causal = true;
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run(actual, 3);
  expect_close(actual, expected, {Array::kLse}, 3);
  const auto number = [&](Array array, i64 row, i64 which) {
    const i64 at[4] = {0, 0, row, which};
    return load_as<float>(RandomProblem::address(actual.arrays[array], at));
  };
  for (i64 row = 0; row < 40; ++row) {
    // The largest score has weight 1, however large it is; and both say the same lse.
    const double sum = number(Array::kStats, row, 1);
    EXPECT_GE(sum, 1) << "row " << row;
    const double lse = number(Array::kStats, row, 0) + std::log(sum);
    EXPECT_NEAR(lse, number(Array::kLse, row, 0), 1e-6 * std::abs(lse)) << "row " << row;
  }
  const i64 first[4] = {0, 0, 0, 5};
  const auto bits = [&](Array array) {
    return load_as<u16>(RandomProblem::address(actual.arrays[array], first));
  };
  EXPECT_EQ(bits(Array::kO), bits(Array::kV));
}

}  // namespace
}  // namespace fulmen::test
