// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// float32 inputs on the backward kernels of sm80, by three products of tf32 numbers and by one,
// against the scalar oracle: drawn problems with every option, stride and alignment and any subset
// of the gradients, and NaN in masked pairs; and that tf32 rounds factors to 11 bits, no less
// and no more.
#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/sm80/launch_backward.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/kernels/planted.h"
#include "gpu/params.h"

namespace fulmen::test {
namespace {

// The kinds of problem that are different kernels.
enum class Kind { kPlain, kRoles, kOptions, kDropout, kCapped };

template <Precision kPrecision, Kind kKind, bool kAligned>
constexpr BackwardSm80Config config_of() {
  constexpr bool kOptions = kKind != Kind::kPlain && kKind != Kind::kRoles;
  BackwardSm80Config config;
  config.dtype = DType::kFloat32;
  config.precision = kPrecision;
  config.aligned = kAligned;
  config.d_qk = config.d_v = 96;  // drawn dims are at most 80
  config.warps = kOptions ? 2 : 4;
  config.q_rows = kOptions ? 32 : 48;
  config.kv_rows = 32;
  config.stages = kKind == Kind::kCapped ? 1 : 2;
  config.pair_stages = kOptions ? 1 : 2;
  config.s_rows = 16;
  config.s_columns = kOptions ? 16 : 32;
  config.dkv_rows = kKind == Kind::kRoles ? 32 : 16;
  config.dq_rows = 16;
  config.dq_dims = kOptions ? 16 : 48;
  config.split_roles = kKind == Kind::kRoles;
  config.split_sum = config.score.mask = config.score.documents = config.score.alibi = kOptions;
  config.score.bias = kOptions ? DType::kFloat32 : DType::kNone;
  config.score.score_mod = kKind == Kind::kCapped;
  config.score.dropout = kKind == Kind::kDropout || kKind == Kind::kCapped;
  config.deterministic = config.score.score_mod;
  config.hopper = !kOptions;
  return config;
}

bool has_options(const Problem& problem) {
  return problem.score_map.scale <= 0 || problem.has(Array::kMask) || problem.has(Array::kQIds) ||
         problem.has(Array::kBias) || problem.has(Array::kAlibiSlopes) ||
         problem.has(Array::kSinks);
}

template <Kind kKind, bool kAligned>
void launch_kind(const AttentionParams& p, unsigned seed) {
  launch<config_of<Precision::k3xTf32, kKind, kAligned>()>(p, seed);
}

void run(const Request& request, unsigned seed) {
  const Problem problem = validate(request, Pointers::kChecked);
  const AttentionParams given = gpu::attention_params(problem);
  const AttentionParams p =
      with_neutral_arrays(given, config_of<Precision::k3xTf32, Kind::kOptions, false>());
  const bool all = given.dq.present() && given.dk.present() && given.dv.present();
  if (problem.score_map.softcap != 0) {
    launch_kind<Kind::kCapped, false>(p, seed);
  } else if (problem.dropout.enabled()) {
    launch_kind<Kind::kDropout, false>(p, seed);
  } else if (has_options(problem)) {
    launch_kind<Kind::kOptions, false>(p, seed);
  } else if (all && seed % 2 == 0) {
    launch_kind<Kind::kRoles, false>(p, seed);
  } else if (gpu::has_aligned_rows(problem, Array::kDOut)) {
    launch_kind<Kind::kPlain, true>(p, seed);
  } else {
    launch_kind<Kind::kPlain, false>(p, seed);
  }
}

const std::vector<Array> kGradients = {Array::kDQ, Array::kDK, Array::kDV};

// Ten times what float32 is given elsewhere: where a sum cancels, as dK of rows whose P is 1, the
// errors of its terms are all that is left.
const double kAllowed = 10 * tolerance(DType::kFloat32, DType::kFloat32);

void expect_agreement(RandomProblem& random, const Request& expected, unsigned seed) {
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_backward(validate(expected, Pointers::kChecked));
  run(actual, seed);
  for (const Array output : kGradients) {
    if (!actual.arrays[output].present()) continue;
    const Difference difference = compare(actual.arrays[output], expected.arrays[output]);
    EXPECT_LE(difference.largest, kAllowed * max(difference.magnitude, 1.0))
        << "seed " << seed << ", " << name(output) << difference.place;
    EXPECT_TRUE(random.is_intact_around(actual.arrays[output])) << "seed " << seed;
  }
}

class BackwardFloat32 : public testing::TestWithParam<unsigned> {};

TEST_P(BackwardFloat32, AgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + num_drawn(25); ++seed) {
    RandomProblem random(seed);
    const Request forward = random.draw();
    const Arrays& arrays = forward.arrays;
    if (arrays[Array::kQ].dtype != DType::kFloat32) continue;
    if (arrays[Array::kO].dtype != DType::kFloat32) continue;
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    expect_agreement(random, to_backward(random, forward, seed % 7 + 1), seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, BackwardFloat32, testing::Range(0u, 50u, 25u));

Request plain_request(RandomProblem& random, i64 rows, i64 keys) {
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool of_keys = array == Array::kK || array == Array::kV;
    arrays[array] = random.array(DType::kFloat32, {1, 2, of_keys ? keys : rows, 48});
    random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, 2, rows});
  request.options.scale = kNan;
  return request;
}

// Rows that are copied and read as vectors. By seed: by warps that do all, and in roles.
TEST(BackwardFloat32Rows, AreVectors) {
  for (const unsigned seed : {1u, 2u}) {
    RandomProblem random(seed);
    Request forward;
    Arrays& arrays = forward.arrays;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
      const bool of_keys = array == Array::kK || array == Array::kV;
      arrays[array] = random.contiguous(DType::kFloat32, {1, 2, of_keys ? 70 : 60, 48});
      random.fill_normal(arrays[array]);
    }
    arrays[Array::kLse] = random.array(DType::kFloat32, {1, 2, 60});
    forward.options.scale = kNan;
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    expect_agreement(random, to_backward(random, forward, 7), seed);
  }
}

TEST(BackwardTf32, RoundsFactors) {
  for (unsigned seed = 0; seed < 2; ++seed) {
    RandomProblem random(seed);
    Request forward = plain_request(random, 60, 70);
    forward.options.causal = seed == 1;
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const Request expected = to_backward(random, forward, 7);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    const AttentionParams p = gpu::attention_params(validate(actual, Pointers::kChecked));
    launch<config_of<Precision::kTf32, Kind::kPlain, false>()>(p, seed);
    for (const Array output : kGradients) {
      const Difference difference = compare(actual.arrays[output], expected.arrays[output]);
      EXPECT_LE(difference.largest, 0x1p-8 * max(difference.magnitude, 1.0))
          << name(output) << difference.place;
      EXPECT_GT(difference.largest, 0x1p-15) << name(output) << ": nothing was rounded";
    }
  }
}

TEST(BackwardFloat32Planted, WhatIsHiddenDoesNotShow) {
  RandomProblem random(7);
  const Request forward = planted_request(random, DType::kFloat32);
  cpu::scalar_forward(validate(forward, Pointers::kChecked));
  expect_agreement(random, to_backward(random, forward, 7), 7);
}

}  // namespace
}  // namespace fulmen::test
