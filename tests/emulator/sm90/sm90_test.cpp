// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90's own text on the host, against the scalar oracle, over drawn problems: from a
// Problem through the tensor maps and params that a run would launch with. Six configs that
// between them hold every option.
#include "../../gpu/kernels/hopper_request.h"
#include "launch_forward.h"

namespace fulmen::test {
namespace {

constexpr ForwardSm90Config kSigned{
    .d_qk = 96,
    .d_v = 80,
    .kv_rows = 64,
    .stage_output = false,
    .score = {.mask_kind = MaskKind::kBoth, .negative_scale = true, .varlen = true, .stats = true}};
constexpr ForwardSm90Config kCapped{.dtype = DType::kFloat16,
                                    .d_qk = 64,
                                    .d_v = 64,
                                    .warpgroups = 1,
                                    .kv_rows = 80,
                                    .shift_rule = ShiftRule::kWhenSumGrew,
                                    .stage_output = false,
                                    .score = {.mask_kind = MaskKind::kBoth,
                                              .score_mod = true,
                                              .sinks = true,
                                              .varlen = true,
                                              .fp32_out = true}};
constexpr ForwardSm90Config kBiased{.d_qk = 48,
                                    .d_v = 96,
                                    .warpgroups = 3,
                                    .kv_rows = 64,
                                    .stages = 1,
                                    .q_slots = 4,
                                    .shift_rule = ShiftRule::kWhenGrown,
                                    .stage_output = false,
                                    .score = {.mask_kind = MaskKind::kRight,
                                              .alibi = true,
                                              .sinks = true,
                                              .varlen = true,
                                              .stats = true}};
constexpr ForwardSm90Config kStaged{.d_qk = 128,
                                    .d_v = 112,
                                    .kv_rows = 64,
                                    .q_slots = 3,
                                    .q_register_dims = 32,
                                    .score = {.mask_kind = MaskKind::kBoth, .stats = true}};

// Float32 rows, as they are.
constexpr ForwardSm90Config kFloats{
    .d_qk = 48,
    .d_v = 128,
    .kv_rows = 64,
    .score = {.mask_kind = MaskKind::kRight, .stats = true, .fp32_out = true}};

constexpr ForwardSm90Config kPairs{
    .d_qk = 64,
    .d_v = 64,
    .kv_rows = 64,
    .shift_rule = ShiftRule::kWhenGrown,
    .score = {
        .mask_kind = MaskKind::kBoth, .mask = true, .bias = DType::kFloat32, .dropout = true}};
// The same in tiles, of three warpgroups.
constexpr ForwardSm90Config kPairTiles = [] {
  ForwardSm90Config config = kPairs;
  config.warpgroups = 3;
  config.tiled_bias = config.tiled_mask = true;
  config.pair_stages = 1;
  return config;
}();
constexpr ForwardSm90Config kBiasTiles = [] {
  ForwardSm90Config config = kPairs;
  config.score = {.bias = DType::kBFloat16, .varlen = true, .stats = true};
  config.stage_output = false;
  config.tiled_bias = true;
  config.pair_stages = 3;
  return config;
}();
constexpr ForwardSm90Config kDocuments{
    .d_qk = 64,
    .d_v = 64,
    .kv_rows = 64,
    .shift_rule = ShiftRule::kWhenGrown,
    .stage_output = false,
    .score = {.bias = DType::kBFloat16, .documents = true, .dropout = true, .varlen = true}};

// Blocks of other documents are skipped.
constexpr ForwardSm90Config kPackedDocuments{
    .d_qk = 64,
    .d_v = 64,
    .warpgroups = 3,
    .kv_rows = 64,
    .stage_output = false,
    .skips_documents = true,
    .score = {.mask_kind = MaskKind::kBoth, .documents = true, .varlen = true, .stats = true}};
constexpr ForwardSm90Config kCausalDocuments{
    .dtype = DType::kFloat16,
    .d_qk = 64,
    .d_v = 64,
    .warpgroups = 2,
    .kv_rows = 48,
    .shift_rule = ShiftRule::kWhenSumGrew,
    .skips_documents = true,
    .score = {.mask_kind = MaskKind::kRight, .bias = DType::kFloat16, .documents = true}};

constexpr ForwardSm90Config kFolded{.d_qk = 64,
                                    .d_v = 64,
                                    .kv_rows = 64,
                                    .stage_output = false,
                                    .score = {.mask_kind = MaskKind::kRight}};

// Several heads share a tile.
constexpr ForwardSm90Config kFourHeads{
    .d_qk = 64,
    .d_v = 64,
    .warpgroups = 2,
    .kv_rows = 64,
    .heads_per_tile = 4,
    .stage_output = false,
    .score = {.mask_kind = MaskKind::kBoth, .sinks = true, .varlen = true, .stats = true}};
constexpr ForwardSm90Config kEightHeads{.dtype = DType::kFloat16,
                                        .d_qk = 96,
                                        .d_v = 80,
                                        .warpgroups = 1,
                                        .kv_rows = 64,
                                        .heads_per_tile = 8,
                                        .shift_rule = ShiftRule::kWhenSumGrew,
                                        .stage_output = false,
                                        .score = {.mask_kind = MaskKind::kRight}};

// Two warpgroups share their rows, each with half of the columns.
constexpr ForwardSm90Config kWide{
    .d_qk = 272,
    .d_v = 384,
    .kv_rows = 64,
    .stages = 1,
    .q_register_dims = 64,
    .split_dims = true,
    .stage_output = false,
    .score = {.mask_kind = MaskKind::kBoth, .varlen = true, .stats = true}};

// Each warpgroup has all columns of its rows: O is two products.
constexpr ForwardSm90Config kTwoProducts{
    .d_qk = 304,
    .d_v = 320,
    .kv_rows = 48,
    .stage_output = false,
    .cache_hints = true,
    .score = {.mask_kind = MaskKind::kBoth, .varlen = true, .stats = true}};
constexpr ForwardSm90Config kTwoProductsAlone{.dtype = DType::kFloat16,
                                              .d_qk = 320,
                                              .d_v = 320,
                                              .warpgroups = 1,
                                              .kv_rows = 48,
                                              .stages = 3,
                                              .shift_rule = ShiftRule::kWhenSumGrew,
                                              .stage_output = false,
                                              .score = {.mask_kind = MaskKind::kRight}};

// Two blocks of a cluster share their rows.
constexpr ForwardSm90Config kPair{.d_qk = 336,
                                  .d_v = 384,
                                  .kv_rows = 64,
                                  .paired = true,
                                  .stage_output = false,
                                  .ping_pong = false,
                                  .score = {.mask_kind = MaskKind::kBoth, .stats = true}};
constexpr ForwardSm90Config kCausalPair{.d_qk = 512,
                                        .d_v = 512,
                                        .kv_rows = 64,
                                        .stages = 1,
                                        .q_register_dims = 32,
                                        .paired = true,
                                        .stage_output = false,
                                        .ping_pong = false,
                                        .score = {.mask_kind = MaskKind::kRight, .sinks = true}};
constexpr ForwardSm90Config kPairOfHalves{.dtype = DType::kFloat16,
                                          .d_qk = 352,
                                          .d_v = 256,
                                          .kv_rows = 64,
                                          .q_register_dims = 16,
                                          .paired = true,
                                          .shift_rule = ShiftRule::kWhenGrown,
                                          .stage_output = false};

// What ablations leave out.
constexpr ForwardSm90Config kUnswizzled = [] {
  ForwardSm90Config config = kStaged;
  config.swizzle = false;
  return config;
}();
constexpr ForwardSm90Config kUnswizzledSequences = [] {
  ForwardSm90Config config = kSigned;
  config.swizzle = config.ping_pong = false;
  return config;
}();
constexpr ForwardSm90Config kSerial = [] {
  ForwardSm90Config config = kStaged;
  config.stages = 1;
  config.overlap = config.folded_scale = false;
  return config;
}();
constexpr ForwardSm90Config kUnspecialised = [] {
  ForwardSm90Config config = kStaged;
  config.specialised = false;
  return config;
}();
constexpr ForwardSm90Config kUnspecialisedSequences = [] {
  ForwardSm90Config config = kSigned;
  config.warpgroups = 3;
  config.stages = 1;
  config.specialised = false;
  return config;
}();
constexpr ForwardSm90Config kTextbook = [] {
  ForwardSm90Config config = kStaged;
  config.shift_rule = ShiftRule::kEveryBlock;
  config.skip_full_masks = config.longest_first = false;
  return config;
}();

template <ForwardSm90Config kConfig>
void expect_agreement(unsigned first, unsigned count) {
  for (unsigned seed = first; seed < first + num_drawn(count); ++seed) {
    RandomProblem random(seed);
    expect_agreement<kConfig>(HopperRequest(random, kConfig, 300).request, random, seed);
  }
}

// What is ordinary takes no second attempt: as many products as where every score is 0. Returns how
// many more there are where V is NaN.
template <ForwardSm90Config kConfig>
u64 expect_one_attempt(unsigned seed) {
  RandomProblem random(seed);
  const Request request = HopperRequest(random, kConfig, 200).request;
  const auto products = [&](double spread, double value = 1) {
    random.fill_normal(request.arrays[Array::kK], spread);
    random.fill_normal(request.arrays[Array::kV], value);
    return run_forward<kConfig>(validate(request, Pointers::kChecked), seed, true);
  };
  const u64 ordinary = products(1);
  EXPECT_EQ(ordinary, products(0)) << "seed " << seed;
  return products(1, kNan) - ordinary;
}

// Keys and values that are NaN or infinite, seen by some rows of a block and hidden from others.
template <ForwardSm90Config kConfig>
void expect_hidden_does_not_show(unsigned first, unsigned count) {
  for (unsigned seed = first; seed < first + num_drawn(count); ++seed) {
    RandomProblem random(seed);
    const Request request = HopperRequest(random, kConfig, 200).request;
    plant_unusual(request, random);
    expect_agreement<kConfig>(request, random, seed);
  }
}

TEST(Sm90OnHost, SignedScaleSequencesStats) { expect_agreement<kSigned>(1, 12); }
TEST(Sm90OnHost, SoftcapSinksWideOutput) { expect_agreement<kCapped>(101, 12); }
TEST(Sm90OnHost, AlibiSinksOneStage) { expect_agreement<kBiased>(201, 12); }
TEST(Sm90OnHost, StagedOutputOddDims) { expect_agreement<kStaged>(301, 12); }

TEST(Sm90OnHost, FloatsInHalves) { expect_agreement<kFloats>(3301, 6); }
TEST(Sm90OnHost, OrdinaryScoresTakeOneAttempt) {
  u64 second_attempts = 0;
  for (const unsigned seed : {3201u, 3202u, 3203u}) {
    second_attempts += expect_one_attempt<kSigned>(seed);
    second_attempts += expect_one_attempt<kCapped>(seed);
    second_attempts += expect_one_attempt<kBiased>(seed);
    second_attempts += expect_one_attempt<kStaged>(seed);
    second_attempts += expect_one_attempt<kPairs>(seed);
    second_attempts += expect_one_attempt<kDocuments>(seed);
    second_attempts += expect_one_attempt<kCausalDocuments>(seed);
    second_attempts += expect_one_attempt<kFolded>(seed);
  }
  EXPECT_GT(second_attempts, 0u);
}

// More sequences than a warp has lanes. Only those from the 32nd on have a second block of rows.
Request request_of_sequences(RandomProblem& random, const ForwardSm90Config& config) {
  constexpr i64 kSequences = 40;
  Request request;
  std::vector<i64> cu_q{0}, cu_kv{0};
  for (i64 sequence = 0; sequence < kSequences; ++sequence) {
    cu_q.push_back(cu_q.back() + (sequence < 34 ? sequence % 3 : 70 + sequence));
    cu_kv.push_back(cu_kv.back() + sequence % 4 * 9);
  }
  Arrays& arrays = request.arrays;
  arrays[Array::kCuQ] = random.indices(DType::kInt32, cu_q);
  arrays[Array::kCuKv] = random.indices(DType::kInt32, cu_kv);
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool of_keys = array == Array::kK || array == Array::kV;
    const DType dtype =
        array == Array::kO && config.score.fp32_out ? DType::kFloat32 : config.dtype;
    arrays[array] = random.contiguous(dtype, {2, of_keys ? cu_kv.back() : cu_q.back(), 64});
    if (array != Array::kO) random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.contiguous(DType::kFloat32, {2, cu_q.back()});
  request.options.scale = kNan;
  request.options.causal = config.score.mask_kind != MaskKind::kNone;
  if (config.score.score_mod) request.options.softcap = 3;
  if (config.score.sinks) {
    arrays[Array::kSinks] = random.array(DType::kFloat32, {2});
    random.fill_normal(arrays[Array::kSinks]);
  }
  return request;
}

TEST(Sm90OnHost, MoreSequencesThanLanes) {
  RandomProblem random(1);
  const Request request = request_of_sequences(random, kCapped);
  expect_agreement<kCapped>(request, random, 1);
}

// Lengths, offsets and rng that are out of range: as nothing is there, and the host hears of it.
TEST(Sm90OnHost, InvalidEntriesAreRecorded) {
  for (const u32 bad : {0u, u32{kFaultQOffsets}, u32{kFaultKvOffsets}, u32{kFaultRng}}) {
    RandomProblem random(2);
    Request request = request_of_sequences(random, kDocuments);
    Arrays& arrays = request.arrays;
    const i64 q_rows = arrays[Array::kQ].shape[1], kv_rows = arrays[Array::kK].shape[1];
    arrays[Array::kBias] = random.array(DType::kBFloat16, {1, 1, 1, 1});
    random.fill_normal(arrays[Array::kBias]);
    const auto zeros = [](i64 count) { return std::vector<i64>(static_cast<size_t>(count), 0); };
    arrays[Array::kQIds] = random.indices(DType::kInt32, zeros(q_rows));
    arrays[Array::kKvIds] = random.indices(DType::kInt32, zeros(kv_rows));
    request.options.dropout_p = 0.5;
    arrays[Array::kRng] =
        random.indices(DType::kInt64, {7, bad == kFaultRng ? i64{1} << 32 : i64{7}});
    // Of sequence 35, which the second lane group looks at: its rows end before they begin.
    if (bad == kFaultQOffsets) static_cast<i32*>(arrays[Array::kCuQ].data)[36] = 3;
    if (bad == kFaultKvOffsets) static_cast<i32*>(arrays[Array::kCuKv].data)[36] = 1 << 20;
    FaultBytes faults{};
    run_forward<kDocuments>(validate(request, Pointers::kChecked), 2, false, &faults);
    EXPECT_EQ(faults.bits(), bad);
  }
}

// A length that is out of range counts as 0.
TEST(Sm90OnHost, InvalidLengthsAreEmpty) {
  for (const Array array : {Array::kQLengths, Array::kKvLengths}) {
    for (const i64 bad : {i64{-1}, i64{1} << 40}) {
      RandomProblem random(3);
      Request expected = request_of_sequences(random, kCapped);
      Arrays& arrays = expected.arrays;
      std::vector<i64> lengths;
      const i32* const offsets = static_cast<const i32*>(
          arrays[array == Array::kQLengths ? Array::kCuQ : Array::kCuKv].data);
      for (i64 i = 0; i < 40; ++i) lengths.push_back(i == 35 ? 0 : offsets[i + 1] - offsets[i]);
      arrays[array] = random.indices(DType::kInt64, lengths);
      cpu::scalar_forward(validate(expected, Pointers::kChecked));
      Request actual = expected;
      for (const Array output : {Array::kO, Array::kLse}) {
        actual.arrays[output] = random.twin(arrays[output]);
      }
      lengths[35] = bad;
      actual.arrays[array] = random.indices(DType::kInt64, lengths);
      FaultBytes faults{};
      run_forward<kCapped>(validate(actual, Pointers::kChecked), 2, false, &faults);
      EXPECT_EQ(faults.bits(), u32{array == Array::kQLengths ? kFaultQLengths : kFaultKvLengths});
      expect_close_rows(actual, expected, 2);
    }
  }
}

TEST(Sm90OnHost, HeadsShareTiles) {
  expect_agreement<kFourHeads>(2201, 8);
  expect_agreement<kEightHeads>(2301, 8);
  expect_hidden_does_not_show<kFourHeads>(2401, 4);
}

TEST(Sm90OnHost, SkipsOtherDocuments) {
  expect_agreement<kPackedDocuments>(2501, 10);
  expect_agreement<kCausalDocuments>(2601, 10);
  expect_hidden_does_not_show<kPackedDocuments>(2701, 4);
  expect_hidden_does_not_show<kCausalDocuments>(2801, 4);
}

TEST(Sm90OnHost, WideHeads) {
  expect_agreement<kWide>(2001, 3);
  expect_hidden_does_not_show<kWide>(2101, 2);
  expect_agreement<kTwoProducts>(3301, 3);
  expect_hidden_does_not_show<kTwoProducts>(3401, 2);
  expect_agreement<kTwoProductsAlone>(3501, 2);
}

TEST(Sm90OnHost, PairsOfBlocks) {
  expect_agreement<kPair>(3601, 4);
  expect_hidden_does_not_show<kPair>(3701, 2);
  expect_agreement<kCausalPair>(3801, 3);
  expect_agreement<kPairOfHalves>(3901, 3);
}

// Both blocks compute theirs again.
TEST(Sm90OnHost, ColumnsOfOneBlockOfAPairAreNotFinite) {
  for (const bool is_last : {false, true}) {
    RandomProblem random(3952);
    const Request request = HopperRequest(random, kPairOfHalves, 100).request;
    const Tensor& v = request.arrays[Array::kV];
    ASSERT_GT(v.shape[3], kPairOfHalves.d_v / 2);
    const i64 at[4] = {0, 0, 0, is_last ? v.shape[3] - 1 : 0};
    store_real(RandomProblem::address(v, at), v.dtype, kNan);
    expect_agreement<kPairOfHalves>(request, random, 3952);
  }
}

TEST(Sm90OnHost, Unswizzled) { expect_agreement<kUnswizzled>(1501, 6); }
TEST(Sm90OnHost, UnswizzledSequences) { expect_agreement<kUnswizzledSequences>(1601, 6); }
TEST(Sm90OnHost, NothingOverlaps) { expect_agreement<kSerial>(1701, 6); }
TEST(Sm90OnHost, NoWarpOfItsOwnLoads) {
  expect_agreement<kUnspecialised>(2901, 6);
  expect_agreement<kUnspecialisedSequences>(3001, 6);
  expect_hidden_does_not_show<kUnspecialisedSequences>(3101, 3);
}
TEST(Sm90OnHost, MaximumAndMaskEverywhere) { expect_agreement<kTextbook>(1801, 6); }

TEST(Sm90OnHost, BiasMaskDropout) { expect_agreement<kPairs>(801, 12); }
TEST(Sm90OnHost, BiasAndMaskInTiles) {
  expect_agreement<kPairTiles>(831, 8);
  expect_agreement<kBiasTiles>(861, 6);
  expect_hidden_does_not_show<kPairTiles>(891, 4);
}
TEST(Sm90OnHost, BiasDocumentsDropoutSequences) { expect_agreement<kDocuments>(901, 12); }

// Equal scores of 1e11 and more: what is left of a rounded product of that size is no exponent.
template <ForwardSm90Config kConfig>
void expect_equal_scores_hold(unsigned first, unsigned count) {
  for (unsigned seed = first; seed < first + num_drawn(count); ++seed) {
    RandomProblem random(seed);
    Request request = HopperRequest(random, kConfig, 200).request;
    request.options.scale = 0.125;  // the oracle's products are exact
    for (const Array array : {Array::kQ, Array::kK}) {
      const Tensor& tensor = request.arrays[array];
      RandomProblem::for_each(tensor, [&](const i64* at) {
        store_real(RandomProblem::address(tensor, at), tensor.dtype, 133120);
      });
    }
    expect_agreement<kConfig>(request, random, seed);
  }
}

TEST(Sm90OnHost, HugeEqualScores) {
  expect_equal_scores_hold<kStaged>(1201, 6);
  expect_equal_scores_hold<kFolded>(1301, 6);
}

// The lowest float32 is a bias like any other: a row of nothing else sees all keys alike.
TEST(Sm90OnHost, LowestBiasIsFinite) {
  for (unsigned seed = 1401; seed < 1401 + num_drawn(12); ++seed) {
    RandomProblem random(seed);
    const Request request = HopperRequest(random, kPairs, 200).request;
    const Tensor& bias = request.arrays[Array::kBias];
    RandomProblem::for_each(bias, [&](const i64* at) {
      if (at[2] % 2 != 0) return;
      store_real(RandomProblem::address(bias, at), bias.dtype,
                 std::numeric_limits<float>::lowest());
    });
    expect_agreement<kPairs>(request, random, seed);
  }
}

// The first row sees all of the first block of keys and nothing of the one after, with which its
// rows begin: it has no maximum when it meets scores that are all far below 0.
TEST(Sm90OnHost, LowScoresInABlockThatAllRowsSee) {
  RandomProblem random(1);
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const i64 rows = array == Array::kQ || array == Array::kO ? 64 : kCapped.kv_rows + 63;
    const DType dtype = array == Array::kO ? DType::kFloat32 : kCapped.dtype;
    arrays[array] = random.contiguous(dtype, {1, 1, rows, 64});
    if (array != Array::kO) random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.contiguous(DType::kFloat32, {1, 1, 64});
  arrays[Array::kSinks] = random.contiguous(DType::kFloat32, {1});
  const auto fill = [&](Array array, double mean, double spread) {
    RandomProblem::for_each(arrays[array], [&](const i64* at) {
      store_real(RandomProblem::address(arrays[array], at), arrays[array].dtype,
                 mean + spread * random.normal());
    });
  };
  fill(Array::kQ, 1, 0);
  fill(Array::kK, -7, 0.5);
  fill(Array::kSinks, -52, 0);
  request.options.scale = 0.125;
  request.options.softcap = 100;
  request.options.causal = true;
  expect_agreement<kCapped>(request, random, 1);
}

TEST(Sm90OnHost, HiddenNanDoesNotShow) {
  expect_hidden_does_not_show<kSigned>(401, 12);
  expect_hidden_does_not_show<kCapped>(501, 12);
  expect_hidden_does_not_show<kBiased>(601, 12);
  expect_hidden_does_not_show<kStaged>(701, 12);
  expect_hidden_does_not_show<kPairs>(1001, 12);
  expect_hidden_does_not_show<kDocuments>(1101, 12);
  expect_hidden_does_not_show<kUnswizzledSequences>(1901, 6);
}

}  // namespace
}  // namespace fulmen::test
