// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The sm80 kernels with a user's score and mask, against the scalar oracle, over drawn problems and
// expressions: pair by pair beside every other option, along diagonals, and with the tiles that a
// mask leaves.
#include "cpu/backend.h"
#include "cpu/drawn_expression.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/expressions.h"
#include "emulator/sm80/launch_backward.h"
#include "emulator/sm80/neutral_arrays.h"
#include "gpu/kernels/expect_close.h"
#include "gpu/params.h"
#include "kernels/forward_sm80/forward_sm80.cuh"

namespace fulmen::test {
namespace {

constexpr UserTerms kScore{.score = true}, kMask{.mask = true}, kBoth{.score = true, .mask = true};
// What the kernel that lists tiles knows of a problem: anything.
constexpr ScoreOptions known(UserTerms user) {
  return {.mask_kind = MaskKind::kBoth, .varlen = true, .user = user};
}

constexpr ForwardSm80Config forward_with(UserTerms user, ScoreOptions score) {
  ForwardSm80Config config;
  config.score = score;
  config.score.user = user;
  config.score.stats = true;
  config.d_qk = 80;  // drawn dims are at most 80
  config.d_v = 48;
  config.warps = 2;
  config.kv_rows = 32;
  return config;
}
constexpr ForwardSm80Config kBesideAll = [] {
  ForwardSm80Config config = forward_with(
      kBoth,
      {.mask = true, .bias = DType::kFloat32, .documents = true, .alibi = true, .fp32_out = true});
  config.row_tiles = 1;
  return config;
}();
constexpr ForwardSm80Config kAlongDiagonals = forward_with(kScore, {});
constexpr ForwardSm80Config kPairByPair = forward_with(kMask, {.alibi = true});
constexpr ForwardSm80Config kTiles = [] {
  ForwardSm80Config config = forward_with(kMask, {.mask_tiles = true});
  config.warps = 4;
  return config;
}();
constexpr ForwardSm80Config kTilesOfBoth = [] {
  ForwardSm80Config config = forward_with(kBoth, {.mask_tiles = true});
  config.warps = 4;
  config.row_tiles = 1;
  config.stages = 1;
  return config;
}();

constexpr BackwardSm80Config backward_with(UserTerms user, ScoreOptions score) {
  BackwardSm80Config config;
  config.score = score;
  config.score.user = user;
  config.d_qk = config.d_v = 80;
  config.warps = 2;
  config.q_rows = 32;
  config.kv_rows = 32;
  config.s_rows = config.s_columns = config.dkv_rows = 16;
  config.dq_rows = config.dq_dims = 16;
  return config;
}
constexpr BackwardSm80Config kGradientsBesideAll = [] {
  BackwardSm80Config config = backward_with(
      kBoth,
      {.mask = true, .bias = DType::kFloat32, .documents = true, .alibi = true, .score_mod = true});
  config.split_sum = true;
  return config;
}();
constexpr BackwardSm80Config kGradientsAlongDiagonals = backward_with(kScore, {});
constexpr BackwardSm80Config kGradientsOfTiles = [] {
  BackwardSm80Config config = backward_with(kMask, {.mask_tiles = true});
  config.warps = 4;
  config.kv_rows = 64;
  config.s_columns = 32;
  return config;
}();

// A problem that a kernel of these options takes, whose arrays it has, or some of them.
template <auto kConfig>
Request drawn(RandomProblem& random) {
  Request request = random.draw();
  Arrays& arrays = request.arrays;
  Options& options = request.options;
  options.dropout_p = 0;
  if (!kConfig.score.score_mod) options.softcap = 0;
  if (kConfig.score.score_mod && options.softcap == 0) options.softcap = 3;
  if (!kConfig.score.mask) arrays[Array::kMask] = Tensor{};
  if (kConfig.score.bias == DType::kNone) arrays[Array::kBias] = Tensor{};
  if (!kConfig.score.documents) arrays[Array::kQIds] = arrays[Array::kKvIds] = Tensor{};
  if (!kConfig.score.alibi) arrays[Array::kAlibiSlopes] = Tensor{};
  if (!kConfig.scales_scores() && options.scale <= 0) options.scale = kNan;
  return with_expression(random, request);
}

// Whether it has the dtypes of a kernel.
template <auto kConfig>
bool is_of(const Request& request) {
  const Tensor& bias = request.arrays[Array::kBias];
  return request.arrays[Array::kQ].dtype == kConfig.dtype &&
         (!bias.present() || bias.dtype == kConfig.score.bias) &&
         gpu::user_terms_of(validate(request, Pointers::kChecked)) == kConfig.score.user;
}

template <bool kByKeys, auto kConfig>
TileLists listed(const Problem& problem, std::vector<u32>& words, const gpu::TileShape& shape,
                 unsigned seed) {
  TileListsParams lists = gpu::tile_lists_params(problem, shape);
  words.assign(static_cast<size_t>(gpu::tile_lists_bytes(problem, lists)) / 4, 0xa5a5a5a5u);
  lists.lists.words = words.data();
  fill_lists<kByKeys, kConfig, known(kConfig.score.user)>(problem, lists, shape, seed);
  return lists.lists;
}

template <ForwardSm80Config kConfig>
void run_forward_sm80(const Problem& problem, unsigned seed, FaultBytes* faults = nullptr) {
  const AttentionParams p = with_neutral_arrays(gpu::attention_params(problem, faults), kConfig);
  const i64 blocks = num_forward_sm80_blocks(p, kConfig);
  if (blocks == 0) return;
  std::vector<u32> words;
  TileLists lists{};
  if constexpr (kConfig.score.mask_tiles) {
    lists =
        listed<false, kConfig>(problem, words, {kConfig.q_rows(), kConfig.kv_rows, false}, seed);
  }
  const auto all = before_expression(problem, ForwardSm80Params{{p, kConfig, 2}, lists, p}, faults);
  emulator::launch({.blocks = blocks,
                    .threads = kConfig.threads(),
                    .shared_bytes = kConfig.shared_bytes(),
                    .seed = seed,
                    .kernel = "forward_sm80",
                    .check = is_sampled(seed)},
                   [&] { forward_sm80<kConfig>(all.params); });
}

template <ForwardSm80Config kConfig>
void expect_forward(unsigned first, unsigned count) {
  unsigned left = num_drawn(count);
  for (unsigned seed = first; left > 0; ++seed) {
    RandomProblem random(seed);
    const Request expected = drawn<kConfig>(random);
    if (!is_of<kConfig>(expected)) continue;
    if ((expected.arrays[Array::kO].dtype == DType::kFloat32) != kConfig.score.fp32_out) continue;
    --left;
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    run_forward_sm80<kConfig>(validate(actual, Pointers::kChecked), seed);
    expect_rounded(actual, expected, seed);
  }
}

TEST(Sm80ExpressionsOnHost, Forward) {
  expect_forward<kBesideAll>(1, 5);
  expect_forward<kAlongDiagonals>(1001, 8);
  expect_forward<kPairByPair>(2001, 5);
  expect_forward<kTiles>(3001, 10);
  expect_forward<kTilesOfBoth>(4001, 8);
}

template <BackwardSm80Config kConfig>
void expect_backward(unsigned first, unsigned count) {
  unsigned left = num_drawn(count);
  for (unsigned seed = first; left > 0; ++seed) {
    RandomProblem random(seed);
    const Request forward = drawn<kConfig>(random);
    if (!is_of<kConfig>(forward) || forward.arrays[Array::kO].dtype != kConfig.dtype) continue;
    --left;
    cpu::scalar_forward(validate(forward, Pointers::kChecked));
    const Request expected = to_backward(random, forward, 7);
    const Request actual = with_fresh_outputs(random, expected);
    cpu::scalar_backward(validate(expected, Pointers::kChecked));
    const Problem problem = validate(actual, Pointers::kChecked);
    std::vector<u32> words;
    launch<kConfig>(with_neutral_arrays(gpu::attention_params(problem), kConfig), seed, false,
                    [&](BackwardSm80Params params) {
                      if constexpr (kConfig.score.mask_tiles) {
                        params.tile_lists = listed<true, kConfig>(
                            problem, words, {kConfig.q_rows, kConfig.kv_rows, true}, seed);
                      }
                      return before_expression(problem, params);
                    });
    for (const Array output : {Array::kDQ, Array::kDK, Array::kDV}) {
      const Difference difference = compare(actual.arrays[output], expected.arrays[output]);
      EXPECT_LE(difference.largest,
                2 * tolerance(kConfig.dtype, kConfig.dtype) * max(difference.magnitude, 1.0))
          << "seed " << seed << ", " << name(output) << difference.place;
    }
  }
}

TEST(Sm80ExpressionsOnHost, Backward) {
  expect_backward<kGradientsBesideAll>(1, 5);
  expect_backward<kGradientsAlongDiagonals>(1001, 8);
  expect_backward<kGradientsOfTiles>(2001, 10);
}

// Of what the mask hides nothing is told, nor of what intervals cut off.
TEST(Sm80ExpressionsOnHost, IndicesBeyondAnArrayAreToldOfPairsThatAreShown) {
  unsigned seed = 501;
  for (const auto& [mask, told] :
       {std::pair{"ids[j] >= 0", u32{kFaultCaptures}}, std::pair{"j < 50 and ids[j] >= 0", 0u}}) {
    for (bool is_long = false; !is_long; ++seed) {
      RandomProblem random(seed);
      Request request = drawn<kPairByPair>(random);
      const Tensor &q = request.arrays[Array::kQ], &k = request.arrays[Array::kK];
      is_long = q.dtype == DType::kBFloat16 && q.rank == 4 && q.shape[2] > 20 && k.shape[2] > 80 &&
                request.arrays[Array::kO].dtype == DType::kBFloat16;
      if (!is_long) continue;
      for (int n = 0; n < kNumCaptures; ++n) request.arrays[capture(n)] = Tensor{};
      request.options.causal = false;
      request.options.window_left = request.options.window_right = kNoLimit;
      request.options.prefix = request.options.chunk = 0;
      request.options.scalar0 = 0;
      request.options.expression = expression::make(nullptr, mask, {{"ids"}, {}});
      request.arrays[capture(0)] = random.indices(DType::kInt32, std::vector<i64>(50, 1));
      FaultBytes faults{};
      run_forward_sm80<kPairByPair>(validate(request, Pointers::kChecked), seed, &faults);
      EXPECT_EQ(faults.bits(), told) << mask;
    }
  }
}

}  // namespace
}  // namespace fulmen::test
