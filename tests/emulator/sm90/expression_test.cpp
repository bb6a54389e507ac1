// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper kernels with a user's score and mask, against the scalar oracle, over drawn problems
// and expressions: pair by pair, and with the tiles that a mask leaves.
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
constexpr Kernels kMaskGradients = kernels_of(dq_with_user(kMask, {.mask_tiles = true}));
constexpr Kernels kBothGradients = kernels_of(
    dq_with_user(kBoth, {.mask_kind = MaskKind::kBoth, .varlen = true, .mask_tiles = true}));

TEST(Sm90ExpressionsOnHost, Backward) {
  expect_agreement<kScoreGradients>(1001, 4, false);
  expect_agreement<kMaskGradients>(1101, 4, false, 260);
  expect_agreement<kBothGradients>(1201, 4, false, 260);
  expect_agreement<kBothGradients>(1301, 2, true, 260);
}

}  // namespace
}  // namespace fulmen::test
