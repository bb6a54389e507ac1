// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// float32 inputs on forward_sm80, by three products of tf32 numbers and by one. The emulator's
// tensor core reads 19 bits of an input and cuts sums off, as the real one does. Products against
// sums by hand; then the kernel against the scalar oracle: with 3xtf32 within what simt keeps to,
// with tf32 within the same plus the rounding of P, on inputs that tf32 holds.
#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "emulator/shared_memory.h"
#include "emulator/sm80/launch_forward.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/kernels/expect_close.h"
#include "gpu/kernels/planted.h"
#include "gpu/params.h"
#include "kernels/forward_sm80/forward_sm80.cuh"

namespace fulmen::test {
namespace {

constexpr i32 kDims = 32;
constexpr i32 kRows = 32;
constexpr i32 kColumns = 16;

template <Precision kPrecision>
constexpr ForwardSm80Config products_config() {
  ForwardSm80Config config;
  config.dtype = DType::kFloat32;
  config.precision = kPrecision;
  config.warps = 1;
  config.row_tiles = 2;
  return config;
}

float element(i32 row, i32 column) {
  const u32 drawn = static_cast<u32>(row * 131 + column * 29 + 7) * 2654435761u;
  return static_cast<float>(static_cast<i32>(drawn)) * 0x1p-31f;
}

// |error| of a product x y, relative to |x y|: two roundings of 2^-11; or, with three products, the
// last bit of both small parts (2^-23 each), and their product (2^-22).
template <Precision kPrecision>
constexpr double kProductError = kPrecision == Precision::kTf32 ? 0x1.01p-10 : 0x1.01p-21;

// One warp: S = A B^T, then O = S B, each against its sum in float64.
template <Precision kPrecision>
void multiply() {
  constexpr ForwardSm80Config kConfig = products_config<kPrecision>();
  const SwizzledTile<2 * kDims, true> A{emulator::kSharedBase};
  const SwizzledTile<2 * kDims, true> B{emulator::kSharedBase + kRows * kDims * 4};
  const auto fill = [](const auto& tile, i32 rows, i32 seed) {
    for (i32 at = static_cast<i32>(lane_index()); at < rows * kDims; at += 32) {
      const u32 row = static_cast<u32>(at / kDims), d = static_cast<u32>(at % kDims);
      emulator::store_shared(tile.address(row, d / 4) + d % 4 * 4,
                             element(at / kDims + seed, at % kDims));
    }
  };
  fill(A, kRows, 0);
  fill(B, kColumns, 100);
  ptx::warp_sync();

  float S[2][kColumns / 2];
  const auto rows = left_rows(A, 0);
  multiply_rows_float32<kConfig, kDims>(
      S, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(rows.at(k, 16 * t)); }, right_rows(B));
  float O[2][kDims / 2] = {};
  multiply_columns_float32<kConfig>(O, S, B);

  const i32 quad = static_cast<i32>(lane_index() % 4);
  for (i32 t = 0; t < 2; ++t) {
    for (i32 i = 0; i < kColumns / 2; ++i) {
      const i32 row = 16 * t + static_cast<i32>(lane_index() / 4) + 8 * (i / 2 % 2);
      const i32 column = 8 * (i / 4) + 2 * quad + i % 2;
      double sum = 0, size = 0;
      for (i32 d = 0; d < kDims; ++d) {
        const double term = static_cast<double>(element(row, d)) * element(column + 100, d);
        sum += term, size += std::abs(term);
      }
      ASSERT_NEAR(S[t][i], sum, (kProductError<kPrecision> + 0x1p-21) * size) << t << " " << i;
    }
  }
  // A row of S is spread over the quad.
  float all[2][2][kColumns];
  for (i32 t = 0; t < 2; ++t) {
    for (i32 h = 0; h < 2; ++h) {
      for (i32 j = 0; j < kColumns; ++j) {
        for (i32 e = 0; e < 2; ++e) {
          const i32 bits = __builtin_bit_cast(i32, S[t][4 * (j / 8) + 2 * h + e]);
          const u32 from = lane_index() / 4 * 4 + static_cast<u32>(j % 8 / 2);
          const i32 x = ptx::shuffle(bits, from);
          if (e == j % 2) all[t][h][j] = __builtin_bit_cast(float, x);
        }
      }
    }
  }
  for (i32 t = 0; t < 2; ++t) {
    for (i32 at = 0; at < kDims / 2; ++at) {
      const i32 dim = 8 * (at / 4) + 2 * quad + at % 2;
      double sum = 0, size = 0;
      for (i32 j = 0; j < kColumns; ++j) {
        const double term = static_cast<double>(all[t][at / 2 % 2][j]) * element(j + 100, dim);
        sum += term, size += std::abs(term);
      }
      ASSERT_NEAR(O[t][at], sum, (kProductError<kPrecision> + 0x1p-21) * size) << t << " " << at;
    }
  }
}

TEST(Float32Products, AreAsGoodAsPromised) {
  constexpr i32 kBytes = (kRows + kColumns) * kDims * 4;
  emulator::launch({1, 32, kBytes, 1}, [] { multiply<Precision::kTf32>(); });
  emulator::launch({1, 32, kBytes, 1}, [] { multiply<Precision::k3xTf32>(); });
}

// The kinds of problem that are different kernels.
enum class Kind { kPlain, kOptions, kCapped };

template <Precision kPrecision, Kind kKind, bool kAligned>
constexpr ForwardSm80Config config_of() {
  constexpr bool kOptions = kKind != Kind::kPlain;
  ForwardSm80Config config;
  config.dtype = DType::kFloat32;
  config.precision = kPrecision;
  config.aligned = kAligned;
  config.score.fp32_out = true;
  config.d_qk = 80;  // drawn dims are at most 80
  config.d_v = 64;   // two parts of V at most
  config.warps = 2;
  config.row_tiles = kOptions ? 1 : 2;
  config.lazy_max = kPrecision == Precision::kTf32 && !kOptions;  // as plans have it
  config.kv_rows = 32;
  config.single_buffer = !kOptions && kPrecision == Precision::k3xTf32 && kAligned;
  config.stages = kOptions || config.single_buffer ? 1 : 2;
  config.score.mask = config.score.documents = config.score.alibi = kOptions;
  config.score.bias = kOptions ? DType::kFloat32 : DType::kNone;
  config.score.dropout = config.score.stats = kOptions;
  config.score.score_mod = kKind == Kind::kCapped;
  return config;
}

bool has_options(const Problem& problem) {
  return problem.score_map.scale <= 0 || problem.dropout.enabled() || problem.has(Array::kMask) ||
         problem.has(Array::kQIds) || problem.has(Array::kBias) ||
         problem.has(Array::kAlibiSlopes) || problem.has(Array::kStats);
}

template <Kind kKind, Precision kPrecision = Precision::k3xTf32>
void launch_kind(const Problem& problem, unsigned seed) {
  const AttentionParams p = gpu::attention_params(problem);
  gpu::has_aligned_rows(problem, Array::kO)
      ? launch<config_of<kPrecision, kKind, true>()>(p, seed)
      : launch<config_of<kPrecision, kKind, false>()>(p, seed);
}

void run(const Request& request, unsigned seed) {
  const Problem problem = validate(request, Pointers::kChecked);
  if (problem.score_map.softcap != 0) return launch_kind<Kind::kCapped>(problem, seed);
  if (has_options(problem)) return launch_kind<Kind::kOptions>(problem, seed);
  launch_kind<Kind::kPlain>(problem, seed);
}

class ForwardFloat32 : public testing::TestWithParam<unsigned> {};

TEST_P(ForwardFloat32, AgreesWithTheOracle) {
  for (unsigned seed = GetParam(); seed < GetParam() + num_drawn(50); ++seed) {
    RandomProblem random(seed);
    Request expected = random.draw();
    if (expected.arrays[Array::kQ].dtype != DType::kFloat32) continue;
    if (seed % 2 == 0) expected.arrays[Array::kStats] = Tensor{};
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run(actual, seed);
    expect_close(actual, expected, {Array::kO, Array::kLse}, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Drawn, ForwardFloat32, testing::Range(0u, 100u, 50u));

// q, k and v that tf32 holds: scores are float32's, and P is off by up to 2^-11 of itself.
TEST(ForwardTf32, RoundsNothingButP) {
  for (unsigned seed = 0; seed < 3; ++seed) {
    RandomProblem random(seed);
    Request expected;
    Arrays& arrays = expected.arrays;
    for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
      arrays[array] = random.array(DType::kFloat32, {1, 2, 50, 48});
      if (array == Array::kO) continue;
      RandomProblem::for_each(arrays[array], [&](const i64* at) {
        const u32 bits = __builtin_bit_cast(u32, static_cast<float>(random.normal()));
        store_real(RandomProblem::address(arrays[array], at), DType::kFloat32,
                   __builtin_bit_cast(float, bits & 0xffffe000u));
      });
    }
    arrays[Array::kLse] = random.array(DType::kFloat32, {1, 2, 50});
    expected.options.scale = kNan;
    expected.options.causal = seed != 1;
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    launch_kind<Kind::kPlain, Precision::kTf32>(validate(actual, Pointers::kChecked), seed);
    expect_close(actual, expected, {Array::kLse}, seed);
    const Difference o = compare(actual.arrays[Array::kO], expected.arrays[Array::kO]);
    double largest_v = 0;
    RandomProblem::for_each(arrays[Array::kV], [&](const i64* at) {
      float v;
      std::memcpy(&v, RandomProblem::address(arrays[Array::kV], at), sizeof v);
      largest_v = max(largest_v, std::abs(static_cast<double>(v)));
    });
    EXPECT_LE(o.largest, 0x1p-11 * largest_v + 1e-5) << "seed " << seed << ", o" << o.place;
    EXPECT_GT(o.largest, 1e-6) << "seed " << seed << ": tf32 would have rounded P";
  }
}

// Sums of 2,000 equal values: cut off 250 times in a row they would be far from their mean.
TEST(ForwardFloat32Sums, DoNotDrift) {
  RandomProblem random(5);
  Request expected;
  Arrays& arrays = expected.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const i64 rows = array == Array::kQ || array == Array::kO ? 16 : 2000;
    arrays[array] = random.array(DType::kFloat32, {1, 1, rows, 32});
    random.fill_normal(arrays[array], array == Array::kV ? 0 : 0.01);
  }
  RandomProblem::for_each(arrays[Array::kV], [&](const i64* at) {
    store_real(RandomProblem::address(arrays[Array::kV], at), DType::kFloat32, 1.9);
  });
  expected.options.scale = kNan;
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run(actual, 5);
  const Difference o = compare(actual.arrays[Array::kO], expected.arrays[Array::kO]);
  // Tensor cores cut sums off: as in multiply().
  EXPECT_LE(o.largest, (kProductError<Precision::k3xTf32> + 0x1p-21) * 1.9) << "o" << o.place;
}

TEST(ForwardFloat32Planted, WhatIsHiddenDoesNotShow) {
  RandomProblem random(7);
  const Request expected = planted_request(random, DType::kFloat32);
  const Request actual = with_fresh_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run(actual, 7);
  expect_close(actual, expected, {Array::kO, Array::kLse, Array::kStats}, 7);
}

}  // namespace
}  // namespace fulmen::test
