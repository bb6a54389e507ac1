// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The three backward kernels of sm80, their own text on the host, against the scalar oracle: drawn
// problems with every option, stride and alignment and any subset of the gradients, lengths of
// every residue, NaN in masked pairs, scores of a million. Small tiles, so that the problems
// have several blocks in both directions.
#include <gtest/gtest.h>

#include <algorithm>

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
enum class Kind { kPlain, kSinks, kPairs, kCapped, kBiased };

template <DType kDType, Kind kKind>
constexpr BackwardSm80Config config_of() {
  BackwardSm80Config config;
  config.dtype = kDType;
  config.d_qk = kKind == Kind::kPairs ? 96 : 80;          // drawn dims are at most 80
  config.d_v = kKind == Kind::kPlain ? 96 : config.d_qk;  // dK and dV of different width
  config.warps = kKind == Kind::kPairs ? 4 : 2;
  config.q_rows = kKind == Kind::kPlain ? 48 : 32;
  config.kv_rows = 32;
  config.stages = kKind == Kind::kCapped ? 1 : 2;
  config.s_rows = 16;
  config.s_columns = kKind == Kind::kPlain ? 32 : 16;
  config.dkv_rows = kKind == Kind::kPairs ? 32 : 16;
  config.dq_rows = 16;
  config.dq_dims = 16;
  if (kKind == Kind::kPairs) {  // 96 dims in two halves
    config.warps = 2;
    config.dq_rows = 32;
    config.dq_dims = 48;
  }
  config.pair_stages = kKind == Kind::kCapped || kKind == Kind::kBiased ? 1 : 2;
  config.split_sum = kKind != Kind::kPlain;
  config.score.score_mod = kKind == Kind::kCapped;
  config.score.alibi =
      kKind == Kind::kBiased || (kKind == Kind::kCapped && kDType == DType::kFloat16);
  constexpr bool kOptions = kKind != Kind::kPlain && kKind != Kind::kSinks;
  config.score.mask = config.score.documents = kOptions;
  config.score.bias = kKind == Kind::kPairs ? kDType : kOptions ? DType::kFloat32 : DType::kNone;
  config.hopper = kKind == Kind::kPlain;
  config.deterministic = kKind == Kind::kPairs || kKind == Kind::kSinks;
  config.zeroes_dq = kKind != Kind::kPairs;
  return config;
}

// The gradients of a kernel, bits: dq, dk, dv.
constexpr BackwardSm80Config with(BackwardSm80Config config, unsigned gradients, bool dropout,
                                  bool aligned = false) {
  config.aligned = aligned;
  config.score.dropout = dropout;
  config.dq = gradients & 1;
  config.zeroes_dq = config.zeroes_dq && config.dq;
  config.dk = gradients & 2;
  config.dv = gradients & 4;
  return config;
}

// Two warps for each part of the work, with the same keys or with keys of their own.
constexpr BackwardSm80Config in_roles(BackwardSm80Config config, i32 kv_rows, i32 s_rows) {
  config.split_roles = true;
  config.unrolled = s_rows == 16;
  config.late_prefetch = !config.unrolled;
  config.d_qk = config.d_v = 96;
  config.warps = 4;
  config.dkv_rows = kv_rows;
  config.s_columns = 16;
  config.s_rows = s_rows;
  return config;
}

// The same with scores made in slices of the dims, a part for each warp of a role.
constexpr BackwardSm80Config in_slices(BackwardSm80Config config) {
  config.split_d = true;
  config.q_rows = 16;
  return config;
}

// The same with P and dS in registers.
constexpr BackwardSm80Config swap_ab(BackwardSm80Config config, bool hopper) {
  config.swap_ab = true;
  config.late_prefetch = false;
  config.hopper = hopper;
  config.d_qk = config.d_v = 64;
  return config;
}

// Each returns dq_accum.
template <DType kDType, Kind kKind>
std::vector<float> launch_kind(const AttentionParams& problem, bool aligned, unsigned seed) {
  constexpr BackwardSm80Config kAll = config_of<kDType, kKind>();
  const AttentionParams p = with_neutral_arrays(problem, kAll);
  if constexpr (kHasScoreTerms<kDType>) {
    if (p.dropout.enabled()) return launch<with(kAll, 7, true)>(p, seed);
  }
  if constexpr (kKind == Kind::kPlain) {
    if (!p.dk.present() && !p.dv.present()) return launch<with(kAll, 1, false)>(p, seed);
    if (!p.dq.present() && !p.dk.present()) return launch<with(kAll, 4, false)>(p, seed);
    if (!p.dq.present()) return launch<with(kAll, 6, false)>(p, seed);
  }
  if constexpr (kKind == Kind::kPlain) {
    constexpr BackwardSm80Config kAligned = with(kAll, 7, false, true);
    const bool both = p.dq.present() && p.dk.present() && p.dv.present();
    if (both && seed % 3 == 1 && p.dim_qk <= 64 && p.dim_v <= 64) {
      if (aligned) return launch<swap_ab(in_roles(kAligned, 16, 48), true)>(p, seed);
      return launch<swap_ab(in_roles(kAll, 16, 16), false)>(p, seed);
    }
    if (both && seed % 3 != 0) {
      if (aligned) return launch<in_roles(kAligned, 16, 48)>(p, seed);
      constexpr BackwardSm80Config kRoles = in_roles(kAll, 32, 16);
      return launch<kDType == DType::kBFloat16 ? in_slices(kRoles) : kRoles>(p, seed);
    }
    if (aligned) return launch<kAligned>(p, seed);
  }
  return launch<kAll>(p, seed);
}

template <DType kDType>
std::vector<float> launch_dtype(const AttentionParams& p, bool aligned, unsigned seed) {
  if constexpr (kHasScoreTerms<kDType>) {
    if (p.score_map.softcap != 0) return launch_kind<kDType, Kind::kCapped>(p, aligned, seed);
    if (p.bias.dtype == DType::kFloat32 || p.alibi_slopes.present() || p.score_map.scale <= 0) {
      return launch_kind<kDType, Kind::kBiased>(p, aligned, seed);
    }
  }
  if (p.mask.present() || p.bias.present() || p.q_ids.present())
    return launch_kind<kDType, Kind::kPairs>(p, aligned, seed);
  if (p.sinks.present() && p.dlse.present())
    return launch_kind<kDType, Kind::kSinks>(p, aligned, seed);
  return launch_kind<kDType, Kind::kPlain>(p, aligned, seed);
}

std::vector<float> run(const Request& request, unsigned seed) {
  const Problem problem = validate(request, Pointers::kChecked);
  const AttentionParams p = gpu::attention_params(problem);
  const bool aligned =
      gpu::has_aligned_rows(problem, Array::kO) && gpu::has_aligned_rows(problem, Array::kDOut);
  if (problem.dtype == DType::kFloat16) return launch_dtype<DType::kFloat16>(p, aligned, seed);
  return launch_dtype<DType::kBFloat16>(p, aligned, seed);
}

// P and dS are rounded to 16 bits as well as the results.
void expect_rounded_gradients(const RandomProblem& random, const Request& actual,
                              const Request& expected, unsigned seed) {
  const DType dtype = expected.arrays[Array::kQ].dtype;
  for (const Array output : {Array::kDQ, Array::kDK, Array::kDV, Array::kDBias}) {
    const Tensor& stored = actual.arrays[output];
    if (!stored.present()) continue;
    const Difference difference = compare(stored, expected.arrays[output]);
    EXPECT_LE(difference.largest, 2 * tolerance(dtype, dtype) * max(difference.magnitude, 1.0))
        << "seed " << seed << ", " << name(output) << difference.place;
    EXPECT_TRUE(random.is_intact_around(stored)) << "seed " << seed << ", " << name(output);
  }
}

void expect_agreement(RandomProblem& random, const Request& expected, unsigned seed) {
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_backward(validate(expected, Pointers::kChecked));
  run(seed % 4 < 2 ? with_rng_array(random, actual) : actual, seed);
  expect_rounded_gradients(random, actual, expected, seed);
}

class BackwardSm80 : public testing::TestWithParam<unsigned> {};

TEST_P(BackwardSm80, AgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + num_drawn(50); ++seed) {
    RandomProblem random(seed);
    const Request forward = random.draw();
    const Arrays& arrays = forward.arrays;
    const DType dtype = arrays[Array::kQ].dtype;
    if (size_bytes(dtype) != 2 || arrays[Array::kO].dtype != dtype) continue;
    if (!has_kernel(forward)) continue;
    const Tensor& bias = arrays[Array::kBias];
    const bool has_slopes = forward.options.softcap != 0 || arrays[Array::kAlibiSlopes].present() ||
                            forward.options.scale <= 0;
    const bool is_capped_and_sloped = dtype == DType::kBFloat16 && forward.options.softcap != 0 &&
                                      arrays[Array::kAlibiSlopes].present();
    if (is_capped_and_sloped || (bias.present() && bias.dtype == dtype && has_slopes)) {
      continue;  // no kernel is made for it
    }
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const unsigned need = seed % 7 + 1;  // bits: dq, dk, dv
    expect_agreement(random, to_backward(random, forward, need), seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, BackwardSm80, testing::Range(0u, 200u, 50u));

// A problem whose rows are as many as given, not yet computed forward.
Request request_of(RandomProblem& random, DType dtype, i64 rows, i64 keys, i64 dim, double spread) {
  Request request;
  Arrays& arrays = request.arrays;
  arrays[Array::kQ] = random.array(dtype, {1, 2, rows, dim});
  arrays[Array::kK] = random.array(dtype, {1, 1, keys, dim});
  arrays[Array::kV] = random.array(dtype, {1, 1, keys, 40});
  arrays[Array::kO] = random.array(dtype, {1, 2, rows, 40});
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, 2, rows});
  arrays[Array::kStats] = random.array(DType::kFloat32, {1, 2, rows, 2});
  random.fill_normal(arrays[Array::kQ], spread);
  random.fill_normal(arrays[Array::kK], spread);
  random.fill_normal(arrays[Array::kV]);
  request.options.scale = kNan;
  return request;
}

// Every length around a tile, on both axes, causal at both alignments.
TEST(BackwardSm80Residues, EveryLengthAroundATile) {
  for (i64 rows = 0; rows <= 50; ++rows) {
    const unsigned seed = static_cast<unsigned>(rows);
    RandomProblem random(seed);
    const DType dtype = rows % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    Request forward = request_of(random, dtype, rows, (rows * 7 + 3) % 51, 64, 1);
    forward.options.causal = rows % 3 != 0;
    if (rows % 5 == 0) forward.options.alignment = Alignment::kTopLeft;
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    expect_agreement(random, to_backward(random, forward, 7), seed);
  }
}

TEST(BackwardSm80Planted, WhatIsHiddenDoesNotShow) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    RandomProblem random(7);
    const Request forward = planted_request(random, dtype);
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    expect_agreement(random, to_backward(random, forward, 7), 7);
  }
}

// Rows of q and dout that see nothing may hold anything.
TEST(BackwardSm80Planted, RowsThatSeeNothing) {
  for (const bool is_nan : {true, false}) {
    RandomProblem random(5);
    Request forward = request_of(random, DType::kBFloat16, 40, 20, 32, 1);
    forward.options.causal = true;  // the first 20 rows see nothing
    const double planted = is_nan ? kNan : std::numeric_limits<double>::infinity();
    const auto plant = [&](const Tensor& tensor, i64 row) {
      const i64 at[4] = {0, 1, row, 3};
      store_real(RandomProblem::address(tensor, at), tensor.dtype, planted);
    };
    plant(forward.arrays[Array::kQ], 7);
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const Request expected = to_backward(random, forward, 7);
    plant(expected.arrays[Array::kDOut], 11);
    expect_agreement(random, expected, 5);
  }
}

enum class Dbias { kPairs, kTiles, kSums };

// dbias, of a bias for each head or for both, next to a masked key that is NaN.
template <Dbias kDbias>
void expect_dbias() {
  constexpr bool kSums = kDbias == Dbias::kSums;
  constexpr BackwardSm80Config kConfig = [] {
    BackwardSm80Config config = config_of<DType::kBFloat16, Kind::kPairs>();
    config.split_sum = false;
    config.dbias = true;
    config.accumulates_dbias = kSums;
    config.tiled_dbias = kDbias == Dbias::kTiles;
    if (config.tiled_dbias) config.pair_stages = 1;
    return config;
  }();
  constexpr i64 kKeys = kConfig.tiled_dbias ? 72 : 75;
  RandomProblem random(11);
  Request forward = request_of(random, DType::kBFloat16, 70, kKeys, 64, 1);
  forward.options.causal = true;
  const Tensor bias = random.array(DType::kBFloat16, {1, kSums ? 1 : 2, 70, kKeys});
  random.fill_normal(bias);
  RandomProblem::for_each(bias, [&](const i64* at) {
    if (at[3] != 7) return;
    store_real(RandomProblem::address(bias, at), bias.dtype,
               -std::numeric_limits<double>::infinity());
  });
  forward.arrays[Array::kBias] = bias;
  const i64 hidden[4] = {0, 0, 7, 3};
  store_real(RandomProblem::address(forward.arrays[Array::kV], hidden), DType::kBFloat16, kNan);
  cpu::scalar_forward(validate(forward, Pointers::kChecked));
  Request expected = to_backward(random, forward, 15);
  i64(&strides)[4] = expected.arrays[Array::kDBias].strides;
  const i64 rows_of_units[4] = {2 * 70 * kKeys, 70 * kKeys, kKeys, 1};
  if (kConfig.tiled_dbias) std::copy(rows_of_units, rows_of_units + 4, strides);
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_backward(validate(expected, Pointers::kChecked));
  const Problem problem = validate(actual, Pointers::kChecked);
  launch<kConfig>(with_neutral_arrays(gpu::attention_params(problem), kConfig), 11);
  expect_rounded_gradients(random, actual, expected, 11);
}
TEST(BackwardSm80Bias, IsStoredForEachHead) { expect_dbias<Dbias::kPairs>(); }
TEST(BackwardSm80Bias, IsCopiedForEachHead) { expect_dbias<Dbias::kTiles>(); }
TEST(BackwardSm80Bias, IsSummedOverHeads) { expect_dbias<Dbias::kSums>(); }

// Scores near -100 at every length of a tile: a padded key with score 0 would drown every real one.
TEST(BackwardSm80Residues, ScoresFarBelowZero) {
  for (i64 rows = 33; rows <= 64; rows += 3) {
    const unsigned seed = static_cast<unsigned>(rows);
    RandomProblem random(seed);
    const DType dtype = rows % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    Request forward = request_of(random, dtype, rows, rows, 8, 1);
    const double size = std::sqrt(100 / std::sqrt(8.0));  // 8 products of it, scaled, are -100
    for (const auto& [array, middle] : {std::pair{Array::kQ, size}, std::pair{Array::kK, -size}}) {
      const Tensor& tensor = forward.arrays[array];
      RandomProblem::for_each(tensor, [&](const i64* at) {
        store_real(RandomProblem::address(tensor, at), tensor.dtype,
                   middle * (1 + 0.03 * random.normal()));
      });
    }
    // Equal values: dS is 0 but for rounding, and no sum of dS K cancels.
    const Tensor& v = forward.arrays[Array::kV];
    RandomProblem::for_each(
        v, [&](const i64* at) { store_real(RandomProblem::address(v, at), v.dtype, 0.75); });
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    expect_agreement(random, to_backward(random, forward, 7), seed);
  }
}

// dim 0 of every row of q or k, or v as a whole.
void fill_dims(const Tensor& tensor, i64 dims, double value) {
  RandomProblem::for_each(tensor, [&](const i64* at) {
    if (at[3] < dims) store_real(RandomProblem::address(tensor, at), tensor.dtype, value);
  });
}

// Scores of a million, and such around 1,024, a nat apart: only the statistics, apart, say what the
// weights are. By seed: warps that do all, P and dS in registers, warps in roles.
TEST(BackwardSm80Statistics, HoldForHugeScores) {
  for (const unsigned seed : {3u, 1u, 2u}) {
    for (const bool close : {false, true}) {
      RandomProblem random(3);
      Request forward = request_of(random, DType::kBFloat16, 40, 50, 64, close ? 1 : 300);
      if (close) {
        fill_dims(forward.arrays[Array::kQ], 1, 128);
        fill_dims(forward.arrays[Array::kK], 1, 64);
        fill_dims(forward.arrays[Array::kV], 40, 0.75);  // dS is 0 but for dlse
      }
      forward.options.causal = true;
      cpu::scalar_forward(validate(forward, Pointers::kChecked));
      Request expected = to_backward(random, forward, 7);
      expected.arrays[Array::kStats] = forward.arrays[Array::kStats];
      expect_agreement(random, expected, seed);
    }
  }
}

// Blocks of keys past a length write zeros: a whole one, and what is left of another.
TEST(BackwardSm80Residues, KeysPastALength) {
  for (const unsigned seed : {3u, 1u, 2u}) {
    RandomProblem random(seed);
    Request forward = request_of(random, DType::kBFloat16, 40, 100, 64, 1);
    forward.arrays[Array::kKvLengths] = random.indices(DType::kInt64, {20});
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    expect_agreement(random, to_backward(random, forward, 7), seed);
  }
}

// A sink above the largest scores, and one among them, where P holds its share.
TEST(BackwardSm80Sinks, AreInTheSumOfARow) {
  for (const unsigned seed : {3u, 1u, 2u}) {
    RandomProblem random(seed);
    Request forward = request_of(random, DType::kBFloat16, 40, 50, 64, 1);
    forward.arrays[Array::kSinks] = random.array(DType::kFloat32, {2});
    for (const i64 head : {0, 1}) {
      const Tensor& sinks = forward.arrays[Array::kSinks];
      store_real(RandomProblem::address(sinks, &head), sinks.dtype, head == 0 ? 6 : 1);
    }
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    Request expected = to_backward(random, forward, 7);
    expected.arrays[Array::kDLse] = Tensor{};
    expect_agreement(random, expected, seed);
  }
}

}  // namespace
}  // namespace fulmen::test
