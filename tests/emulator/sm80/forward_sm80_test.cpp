// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm80's own text on the host, against the scalar oracle: drawn problems with every option,
// stride and alignment, lengths of every residue, keys and values that are NaN where nobody sees
// them. Small tiles, so that the problems have several blocks in both directions; one and more
// stages, one and two row tiles.
#include "kernels/forward_sm80.cuh"

#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "cuda/kernels/expect_close.h"
#include "cuda/kernels/planted.h"
#include "cuda/params.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "plan/sm80.h"

namespace fulmen::test {
namespace {

// The kinds of problem that are different kernels.
enum class Kind { kPlain, kStats, kTerms, kCapped, kBiased };

template <DType kDType, Kind kKind, bool kDropout, bool kUnits>
constexpr Sm80Config config_of() {
  Sm80Config config;
  config.units = kUnits;
  config.exact = !kUnits;  // then some outputs are float32
  config.dtype = kDType;
  config.d_qk = 80;  // drawn dims are at most 80
  config.d_v = 48;   // two parts of V at most
  config.warps = 2;
  config.row_tiles = kKind == Kind::kCapped || kKind == Kind::kBiased ? 1 : 2;
  config.columns = kKind == Kind::kPlain ? 48 : 32;
  config.stages = kDropout ? 1 : kKind == Kind::kPlain ? 3 : 2;
  config.q_in_registers = kKind == Kind::kTerms;
  config.terms = kKind == Kind::kTerms || kKind == Kind::kBiased;
  config.natural = kKind == Kind::kCapped || kKind == Kind::kBiased;
  config.softcap = kKind == Kind::kCapped;
  config.alibi = config.natural;
  config.dropout = kDropout;
  config.stats = kKind != Kind::kPlain;
  config.terms = config.terms || kKind == Kind::kCapped;
  return config;
}

template <Sm80Config kConfig>
void launch(const AttentionParams& p, unsigned seed) {
  const Sm80Params params{p, {p, kConfig, 2}};
  const i64 blocks = forward_sm80_blocks(p, kConfig);
  if (blocks == 0) return;
  emulator::launch({static_cast<i32>(blocks), kConfig.threads(), kConfig.forward_shared_bytes(),
                    seed, false, "forward_sm80", is_sampled(seed)},
                   [&] { forward_sm80<kConfig>(params); });
}

template <DType kDType, Kind kKind, bool kUnits>
void launch_kind(const AttentionParams& p, unsigned seed) {
  if (p.dropout.enabled()) return launch<config_of<kDType, kKind, true, kUnits>()>(p, seed);
  launch<config_of<kDType, kKind, false, kUnits>()>(p, seed);
}

template <DType kDType, bool kUnits>
void launch_dtype(const AttentionParams& p, unsigned seed) {
  const bool terms = p.mask.present() || p.q_ids.present();
  if (p.score_map.softcap != 0) return launch_kind<kDType, Kind::kCapped, kUnits>(p, seed);
  if (p.bias.present() || p.alibi_slopes.present() || p.score_map.scale <= 0) {
    return launch_kind<kDType, Kind::kBiased, kUnits>(p, seed);
  }
  if (terms) return launch_kind<kDType, Kind::kTerms, kUnits>(p, seed);
  if (p.stats.present()) return launch_kind<kDType, Kind::kStats, kUnits>(p, seed);
  launch_kind<kDType, Kind::kPlain, kUnits>(p, seed);
}

void run(const Request& request, unsigned seed) {
  const Problem problem = validate(request, Pointers::kChecked);
  const AttentionParams p = cuda::attention_params(problem);
  const bool is_half = problem.dtype == DType::kFloat16;
  if (sm80_has_units(problem)) {
    return is_half ? launch_dtype<DType::kFloat16, true>(p, seed)
                   : launch_dtype<DType::kBFloat16, true>(p, seed);
  }
  is_half ? launch_dtype<DType::kFloat16, false>(p, seed)
          : launch_dtype<DType::kBFloat16, false>(p, seed);
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

// As expect_close, but P is rounded to 16 bits on its way to O.
void expect_rounded(const Request& actual, const Request& expected, unsigned seed) {
  const DType dtype = expected.arrays[Array::kQ].dtype;
  const Tensor& o = actual.arrays[Array::kO];
  const Difference difference = compare(o, expected.arrays[Array::kO]);
  const double allowed = tolerance(dtype, o.dtype) + tolerance(dtype, dtype);
  EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0)) << "seed " << seed;
  expect_close(actual, expected, {Array::kLse}, seed);
}

class ForwardSm80 : public testing::TestWithParam<unsigned> {};

TEST_P(ForwardSm80, AgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + num_drawn(50); ++seed) {
    RandomProblem random(seed);
    Request expected = random.draw();
    if (!has_16_bits(expected)) continue;
    if (seed % 2 == 0) expected.arrays[Array::kStats] = Tensor{};
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, seed);
    expect_rounded(actual, expected, seed);
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
    expect_rounded(actual, expected, static_cast<unsigned>(rows));
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
    expect_rounded(actual, expected, static_cast<unsigned>(left));
  }
}

TEST(ForwardSm80Planted, WhatIsHiddenDoesNotShow) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    const Request expected = planted_request(random, dtype);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, 7);
    expect_rounded(actual, expected, 7);
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
    expect_rounded(actual, expected, 11);
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
