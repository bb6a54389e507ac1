// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper kernels with a user's score and mask, against the scalar oracle, over drawn problems
// and expressions: pair by pair, and with the tiles that a mask leaves.
#include "core/expression.h"

#include "launch_backward.h"

namespace fulmen::test {
namespace {

constexpr UserTerms kScore{.score = true}, kMask{.mask = true}, kBoth{.score = true, .mask = true};

constexpr ForwardSm90Config with_user(UserTerms user, ScoreOptions score) {
  score.user = user;
  return {.d_qk = 64,
          .d_v = 64,
          .kv_rows = 64,
          .shift_rule = ShiftRule::kWhenGrown,
          .stage_output = false,
          .score = score};
}
constexpr ForwardSm90Config kScores = with_user(kScore, {.bias = DType::kFloat32, .stats = true});
// What scores have the same along diagonals is found for a block of keys at a time.
constexpr ForwardSm90Config kScoresAlone = [] {
  ForwardSm90Config config = with_user(kScore, {.mask_kind = MaskKind::kRight, .stats = true});
  config.warpgroups = 3;
  return config;
}();
constexpr ForwardSm90Config kPairByPair = with_user(kBoth, {.mask_kind = MaskKind::kRight});
constexpr ForwardSm90Config kTilesOfMask =
    with_user(kMask, {.mask_kind = MaskKind::kBoth, .mask_tiles = true});
constexpr ForwardSm90Config kTilesOfSequences =
    with_user(kBoth, {.varlen = true, .mask_tiles = true});

template <ForwardSm90Config kConfig>
void expect_expressions_agree(unsigned first, unsigned count) {
  unsigned left = num_drawn(count);
  for (unsigned seed = first; left > 0; ++seed) {
    RandomProblem random(seed);
    const Request request = with_expression(random, HopperRequest(random, kConfig, 300).request);
    const Problem problem = validate(request, Pointers::kChecked);
    if (gpu::user_terms_of(problem) != kConfig.score.user) continue;
    --left;
    expect_agreement<kConfig>(request, random, seed);
  }
}

TEST(Sm90ExpressionsOnHost, Forward) {
  expect_expressions_agree<kScores>(1, 8);
  expect_expressions_agree<kScoresAlone>(51, 8);
  expect_expressions_agree<kPairByPair>(101, 8);
  expect_expressions_agree<kTilesOfMask>(201, 12);
  expect_expressions_agree<kTilesOfSequences>(301, 12);
}

constexpr ForwardSm90Config dq_with_user(UserTerms user, ScoreOptions score) {
  ForwardSm90Config config = dq_config(64, 64, score.mask_kind, score.stats);
  config.score = score;
  config.score.user = user;
  return config;
}
constexpr Kernels kScoreGradients = kernels_of(dq_with_user(
    kScore, {.mask_kind = MaskKind::kRight, .bias = DType::kFloat32, .score_mod = true}));
constexpr Kernels kScoreGradientsAlone =
    kernels_of(dq_with_user(kScore, {.mask_kind = MaskKind::kRight}));
// A mask alone is no option of scores: dQ is made beside dK and dV, or apart where that has an
// order.
constexpr Kernels kMaskGradients{
    {.dims = 64, .q_rows = 128, .score = {.mask_tiles = true, .user = kMask}}};
constexpr Kernels kMaskGradientsApart{
    {.dims = 64, .q_rows = 128, .dq = false, .score = {.mask_tiles = true, .user = kMask}}, [] {
      ForwardSm90Config config = dq_with_user(kMask, {.mask_tiles = true});
      config.kv_rows = 128;
      return config;
    }()};
constexpr Kernels kBothGradients = kernels_of(
    dq_with_user(kBoth, {.mask_kind = MaskKind::kBoth, .varlen = true, .mask_tiles = true}));

TEST(Sm90ExpressionsOnHost, GradientsOfScores) {
  expect_agreement<kScoreGradients>(1001, 4, false);
  expect_agreement<kScoreGradientsAlone>(1051, 4, false);
}
TEST(Sm90ExpressionsOnHost, GradientsOfMasks) {
  expect_agreement<kMaskGradients>(1104, 3, false, 290);
  expect_agreement<kMaskGradientsApart>(1151, 2, false, 260);
  expect_agreement<kMaskGradients>(1543, 1, true, 260);
  expect_agreement<kMaskGradients>(2771, 1, true, 260);
}
TEST(Sm90ExpressionsOnHost, GradientsOfBoth) {
  expect_agreement<kBothGradients>(1219, 4, false, 260);
  expect_agreement<kBothGradients>(1301, 2, true, 260);
}

// Masks that hide one row or key of a tile, a half of it, all but a pair, all of it, and other
// tiles of another head.
constexpr const char* kMasks[] = {"j != 37",
                                  "i != 41",
                                  "j % 64 < 32 or i % 64 < 32",
                                  "j % 64 >= 32 and i % 64 >= 32",
                                  "i % 64 == 41 and j % 64 == 41",
                                  "i // 64 != 1 or j < 64",
                                  "h == 0 or j // 64 != 1"};

void set_mask(Request& request, const char* mask, expression::Names names = {}) {
  request.options.expression = expression::make(nullptr, mask, std::move(names));
  for (int n = 0; n < kNumCaptures; ++n) request.arrays[capture(n)] = Tensor{};
  request.options.scalar0 = 0;
}

TEST(Sm90ExpressionsOnHost, TilesOfMasks) {
  unsigned seed = 401;
  for (const char* const mask : kMasks) {
    for (bool is_long = false; !is_long; ++seed) {
      RandomProblem random(seed);
      Request request = HopperRequest(random, kTilesOfMask, 300).request;
      const Tensor &q = request.arrays[Array::kQ], &k = request.arrays[Array::kK];
      is_long =
          q.shape[2] > 130 && k.shape[2] > 190 && q.shape[0] * q.shape[1] <= 4 && q.shape[1] > 1;
      if (!is_long) continue;
      request.options.causal = false;
      request.options.window_left = request.options.window_right = kNoLimit;
      request.options.prefix = request.options.chunk = 0;
      set_mask(request, mask);
      SCOPED_TRACE(mask);
      expect_agreement<kTilesOfMask>(request, random, seed);
    }
  }
}

// Of what the mask hides nothing is told.
TEST(Sm90ExpressionsOnHost, IndicesBeyondAnArrayAreToldOfPairsThatAreShown) {
  unsigned seed = 501;
  for (const auto& [mask, told] :
       {std::pair{"ids[j] >= 0", u32{kFaultCaptures}}, std::pair{"j < 50 and ids[j] >= 0", 0u}}) {
    for (bool is_long = false; !is_long; ++seed) {
      RandomProblem random(seed);
      Request request = HopperRequest(random, kTilesOfMask, 300).request;
      is_long = request.arrays[Array::kQ].shape[2] > 20 && request.arrays[Array::kK].shape[2] > 80;
      if (!is_long) continue;
      set_mask(request, mask, {{"ids"}, {}});
      request.arrays[capture(0)] = random.indices(DType::kInt32, std::vector<i64>(50, 1));
      FaultBytes faults{};
      run_forward<kTilesOfMask>(validate(request, Pointers::kChecked), seed, false, &faults);
      EXPECT_EQ(faults.bits(), told) << mask;
    }
  }
}

TEST(Sm90ExpressionsOnHost, GradientsOfTilesOfMasks) {
  unsigned seed = 1401;
  for (const char* const mask : kMasks) {
    SCOPED_TRACE(mask);
    expect_agreement_of_rows<kMaskGradientsApart>(
        seed += 40, 140, [&](Request& request, RandomProblem&) { set_mask(request, mask); });
  }
}

}  // namespace
}  // namespace fulmen::test
