// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// mla_sm90 and combine_mla on the host, against the scalar oracle: any number of rows, lengths at
// the ends of halves and blocks of keys, pages, grids that cut row tiles anywhere, maxima that grow
// from block to block, rows that see no key or a key without a page. What no query sees is NaN.
#include "latent_support.h"

namespace fulmen::test {
namespace {

constexpr MlaSm90Config kCausalLatents = [] {
  MlaSm90Config config = kOneRow;
  config.schedule.dtype = DType::kFloat16;
  config.schedule.score.mask_kind = MaskKind::kRight;
  config.schedule.score.stats = config.schedule.score.fp32_out = true;
  config.schedule.paged = true;
  return config;
}();
constexpr MlaSm90Config kPackedLatents = [] {
  MlaSm90Config config = kOneRow;
  config.schedule.score.mask_kind = MaskKind::kBoth;
  config.schedule.ragged = config.schedule.paged = true;
  return config;
}();
constexpr MlaSm90Config kAllKeys{};
constexpr MlaSm90Config kOneSequence = [] {
  MlaSm90Config config = kOneRow;
  config.several = false;
  return config;
}();
constexpr MlaSm90Config kSmallPages = [] {
  MlaSm90Config config = kCausalLatents;
  config.gathers = true;
  return config;
}();

TEST(MlaSm90, LengthsAtTheEndsOfHalvesAndBlocks) {
  const std::vector<std::vector<i64>> lengths = {
      {1, 64, 0}, {63, 65, 127}, {128, 129, 192}, {193, 256, 257}};
  for (u32 seed = 0; seed < 4; ++seed) {
    RandomProblem random(seed);
    const Request request = latent_request(random, kOneRow, {lengths[seed], 16});
    expect_latent<kOneRow>(random, request, 1 + seed, seed);
  }
}

// In up to three parts: groups of combine_mla have dims of their own or, of an even number of
// workers, parts (attend).
TEST(MlaSm90, RowsOfEveryCount) {
  for (const auto& [heads, workers] : {std::pair{1, 3}, {63, 4}, {70, 3}}) {
    RandomProblem random(static_cast<unsigned>(heads));
    const Request request = latent_request(random, kCausalLatents, {{230, 9}, heads, 1, 2, 16});
    expect_latent<kCausalLatents>(random, request, workers, 5);
  }
}

// Keys that no row sees are NaN, before those of a window and behind those of the first rows.
TEST(MlaSm90, WhatNoRowSeesIsNaN) {
  for (const bool is_first : {true, false}) {
    RandomProblem random(6);
    Request request = latent_request(random, kPackedLatents, {{200, 130}, 24, 1, 0, 8, {2, 3}});
    if (is_first) request.options.alignment = Alignment::kTopLeft;
    request.options.window_left = 20;
    RandomProblem::for_each(request.arrays[Array::kK], [&](const i64* at) {
      const i64 key = (request.arrays[Array::kK].shape[0] - 1 - at[0]) % 25 * 8 + at[2];
      const i64 length = at[0] >= 25 ? 200 : 130;
      if (is_first ? key < 3 : key >= length - 23) return;
      store_real(RandomProblem::address(request.arrays[Array::kK], at), DType::kBFloat16,
                 std::nan(""));
    });
    expect_latent<kPackedLatents>(random, request, 2, 3);
  }
}

TEST(MlaSm90, AllKeysOfEqualLengths) {
  RandomProblem random(2);
  const Request request = latent_request(random, kAllKeys, {{200, 200, 200}, 8, 2});
  expect_latent<kAllKeys>(random, request, 5, 3);
}

// A worker for each of ten blocks of keys of a row tile: more parts than combine_mla has groups.
TEST(MlaSm90, SinksOfEqualLengths) {
  RandomProblem random(6);
  Request request = latent_request(random, kAllKeys, {{450, 450}, 32, 2});
  Tensor& sinks = request.arrays[Array::kSinks] = random.contiguous(DType::kFloat32, {32});
  random.fill_normal(sinks, 5);
  expect_latent<kAllKeys>(random, request, 40, 3);
}

// Packed queries, some of no request, over pages of 8 rows, of which a window shows some.
TEST(MlaSm90, PackedQueries) {
  RandomProblem random(3);
  const LatentShape shape{{140, 0, 40, 300}, 24, 1, 0, 8, {3, 1, 0, 2}};
  expect_latent<kPackedLatents>(random, latent_request(random, kPackedLatents, shape), 4, 7);
}

// Each reference grows by more than 2^8 over the one before it, in one part to five.
TEST(MlaSm90, MaximaThatGrow) {
  for (const i64 workers : {1, 2, 4, 7}) {
    RandomProblem random(static_cast<unsigned>(workers));
    const Request request = latent_request(random, kOneSequence, {{400}, 16}, 0.2);
    expect_latent<kOneSequence>(random, request, workers, static_cast<u32>(workers));
  }
}

// Sequences are more than workers, and more than the threads of a block.
TEST(MlaSm90, ManySequences) {
  RandomProblem random(9);
  std::vector<i64> lengths(530, 0);
  lengths[3] = 300;
  lengths[400] = 5;
  lengths[529] = 140;
  const Request request = latent_request(random, kCausalLatents, {lengths, 2, 1, 1, 64});
  expect_latent<kCausalLatents>(random, request, 3, 1);
}

TEST(MlaSm90, PagesOfFewRows) {
  RandomProblem random(8);
  const Request request = latent_request(random, kSmallPages, {{150, 70}, 16, 1, 2, 3});
  expect_latent<kSmallPages>(random, request, 3, 5);
}

TEST(MlaSm90, AKeyWithoutAPageEmptiesTheRowsThatSeeIt) {
  for (const i64 workers : {2, 3}) {  // the first request's keys in one part, in two
    RandomProblem random(4);
    Request request = latent_request(random, kCausalLatents, {{150, 70}, 16, 1, 2, 16});
    const Tensor& table = request.arrays[Array::kPageTable];
    static_cast<i32*>(table.data)[9] = -1;  // of the last rows of the first request
    FaultBytes faults{};
    attend<kCausalLatents>(validate(request, Pointers::kChecked), workers, 6, &faults);
    RandomProblem::for_each(request.arrays[Array::kLse], [&](const i64* at) {
      const double lse =
          load_real(RandomProblem::address(request.arrays[Array::kLse], at), DType::kFloat32);
      EXPECT_EQ(lse == -kInfinity<double>, at[0] == 0) << at[0] << ", " << at[2];
    });
  }
}

}  // namespace
}  // namespace fulmen::test
