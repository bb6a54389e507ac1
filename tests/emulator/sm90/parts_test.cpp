// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper kernels on parts of a sequence, against the scalar oracle: results merged with what is
// there, and dropout beside segments, whose pairs are counted as in the whole.
#include "../../cpu/drawn_parts.h"
#include "launch_backward.h"

namespace fulmen::test {
namespace {

constexpr ForwardSm90Config merging(ForwardSm90Config config) {
  config.d_qk = config.d_v = 64;
  config.kv_rows = 64;
  config.stage_output = false;
  config.score.stats = config.score.fp32_out = config.score.accumulate = true;
  return config;
}
constexpr ForwardSm90Config kMergedSequences = merging(
    {.warpgroups = 3, .score = {.mask_kind = MaskKind::kBoth, .sinks = true, .varlen = true}});
constexpr ForwardSm90Config kMergedPairs = merging(
    {.dtype = DType::kFloat16,
     .shift_rule = ShiftRule::kWhenGrown,
     .score = {.mask = true, .bias = DType::kFloat32, .dropout = true, .negative_scale = true}});

// Of rows that leave in tiles.
constexpr ForwardSm90Config kMergedTiles = [] {
  ForwardSm90Config config = merging({.score = {.mask_kind = MaskKind::kBoth}});
  config.stage_output = true;
  return config;
}();
constexpr ForwardSm90Config kMergedHalves = [] {
  ForwardSm90Config config = merging({.dtype = DType::kFloat16,
                                      .warpgroups = 3,
                                      .shift_rule = ShiftRule::kWhenSumGrew,
                                      .score = {.mask_kind = MaskKind::kRight, .sinks = true}});
  config.stage_output = true;
  config.d_v = 128;
  return config;
}();

template <ForwardSm90Config kConfig>
void expect_merged(RandomProblem& random, const Request& drawn, unsigned seed) {
  const Request expected = with_parts(random, drawn);
  const Request actual = with_parts_elsewhere(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run_forward<kConfig>(validate(actual, Pointers::kChecked), seed);
  expect_close_rows(actual, expected, seed);
  for (const Array output : {Array::kO, Array::kLse, Array::kStats}) {
    EXPECT_TRUE(random.is_intact_around(actual.arrays[output]))
        << "seed " << seed << ", " << name(output);
  }
}
template <ForwardSm90Config kConfig>
void expect_merged(unsigned first, unsigned count, bool unusual) {
  for (unsigned seed = first; seed < first + num_drawn(count); ++seed) {
    RandomProblem random(seed);
    const Request drawn = HopperRequest(random, kConfig, 200).request;
    if (unusual) plant_unusual(drawn, random);
    expect_merged<kConfig>(random, drawn, seed);
  }
}

TEST(Sm90PartsOnHost, AreMerged) {
  expect_merged<kMergedSequences>(1, 12, false);
  expect_merged<kMergedSequences>(101, 8, true);
  expect_merged<kMergedPairs>(201, 8, false);
  expect_merged<kMergedTiles>(501, 8, false);
  expect_merged<kMergedTiles>(601, 6, true);
  expect_merged<kMergedHalves>(701, 8, false);
}

// Scores of a warp's rows leave the range of float32: the fallback computes the work tile again,
// and merges these alone.
TEST(Sm90PartsOnHost, AreMergedOnceBesideRowsThatFail) {
  constexpr ForwardSm90Config kWhole = [] {
    ForwardSm90Config config = kMergedSequences;
    config.score.varlen = false;
    config.score.mask_kind = MaskKind::kNone;
    return config;
  }();
  for (unsigned seed = 301;; ++seed) {
    RandomProblem random(seed);
    const Request drawn = HopperRequest(random, kWhole, 200).request;
    const Tensor& q = drawn.arrays[Array::kQ];
    if (q.shape[2] < 40 || drawn.arrays[Array::kK].shape[2] < 140) continue;
    RandomProblem::for_each(q, [&](const i64* at) {
      if (at[2] / 16 != 1) return;
      char* const to = RandomProblem::address(q, at);
      store_real(to, q.dtype, 300 * load_real(to, q.dtype));
    });
    return expect_merged<kMergedSequences>(random, drawn, seed);
  }
}

constexpr UserTerms kMaskOfParts{.mask = true};
constexpr ForwardSm90Config kDrops{
    .d_qk = 64,
    .d_v = 64,
    .kv_rows = 64,
    .shift_rule = ShiftRule::kWhenGrown,
    .stage_output = false,
    .score = {.dropout = true, .mask_tiles = true, .user = kMaskOfParts}};
constexpr Kernels kDropsGradients = kernels_of([] {
  ForwardSm90Config config = dq_config(64, 64, MaskKind::kNone, false);
  config.score = kDrops.score;
  return config;
}());

// A causal request in segments, whose mask is steps over positions then.
template <ForwardSm90Config kConfig>
Request request_of_parts(RandomProblem& random) {
  Request request = HopperRequest(random, kConfig, 140).request;
  for (const Array array : {Array::kQ, Array::kK}) widen_rows(request.arrays[array]);
  request.options.causal = true;
  return with_segments(random, request);
}

TEST(Sm90PartsOnHost, DropWhatTheWholeDrops) {
  unsigned left = num_drawn(20);
  for (unsigned seed = 301; left > 0; ++seed) {
    RandomProblem random(seed);
    const Request request = request_of_parts<kDrops>(random);
    if (!request.arrays[Array::kQSegments].present()) continue;
    --left;
    expect_agreement<kDrops>(request, random, seed);
  }
}

TEST(Sm90PartsOnHost, DropInGradientsWhatTheWholeDrops) {
  unsigned left = 6;
  for (unsigned seed = 401; left > 0; ++seed) {
    RandomProblem random(seed);
    Request request = request_of_parts<kDropsGradients.dq>(random);
    if (!request.arrays[Array::kQSegments].present()) continue;
    if (!is_for<kDropsGradients>(request, random)) continue;
    --left;
    expect_agreement<kDropsGradients>(request, random, seed, false);
  }
}

}  // namespace
}  // namespace fulmen::test
