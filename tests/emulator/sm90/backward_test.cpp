// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper backward's own text on the host, against the scalar oracle, over drawn problems.
#include <cstdlib>

#include "cpu/tiled_support.h"
#include "launch_backward.h"

namespace fulmen::test {
namespace {

constexpr Kernels kCausal{{.dims = 64, .q_rows = 128, .score = {.mask_kind = MaskKind::kRight}}};
constexpr Kernels kStats{{.dtype = DType::kFloat16,
                          .dims = 64,
                          .q_rows = 128,
                          .score = {.mask_kind = MaskKind::kBoth, .stats = true}}};
constexpr Kernels kDeterministic{
    {.dims = 128, .dq = false, .score = {.mask_kind = MaskKind::kBoth}},
    dq_config(128, 64, MaskKind::kBoth, false)};
constexpr Kernels kLengths{{.dims = 64, .q_rows = 128, .dq = false, .score = {.varlen = true}}, [] {
                             ForwardSm90Config config = dq_config(64, 128, MaskKind::kNone, false);
                             config.score.varlen = true;
                             return config;
                           }()};
constexpr Kernels kWide{{.dims = 192,
                         .dq = false,
                         .register_dims = 128,
                         .score = {.mask_kind = MaskKind::kBoth, .stats = true}},
                        dq_config(192, 64, MaskKind::kBoth, true)};

// Sums of two products.
constexpr ForwardSm90Config two_products_dq(DType dtype, const ScoreOptions& score) {
  ForwardSm90Config config = dq_config(320, 48, score.mask_kind, score.stats);
  config.dtype = dtype;
  config.warpgroups = 1;
  config.q_slots = 2;
  config.score = score;
  return config;
}
constexpr Kernels two_products(DType dtype, const ScoreOptions& score) {
  return {{.dtype = dtype, .dims = 320, .dq = false, .ping_pong = false, .score = score},
          two_products_dq(dtype, score)};
}
constexpr Kernels kTwoProducts =
    two_products(DType::kBFloat16, {.mask_kind = MaskKind::kBoth, .varlen = true, .stats = true});
constexpr Kernels kTwoProductsOfHalves =
    two_products(DType::kFloat16, {.mask_kind = MaskKind::kRight});

constexpr Kernels kPaired{{.dims = 256,
                           .register_dims = 128,
                           .paired = true,
                           .score = {.mask_kind = MaskKind::kRight, .stats = true}}};
constexpr Kernels kPairedFull{
    {.dims = 256, .register_dims = 128, .paired = true, .score = {.stats = true}}};
constexpr Kernels kPairedHalves{{.dtype = DType::kFloat16,
                                 .dims = 256,
                                 .register_dims = 128,
                                 .paired = true,
                                 .score = {.stats = true}}};
constexpr Kernels kPairedInOrder{{.dims = 256,
                                  .deterministic = true,
                                  .register_dims = 128,
                                  .paired = true,
                                  .staggered = false,
                                  .score = {.mask_kind = MaskKind::kRight, .stats = true}}};
constexpr Kernels kSharedLoads{
    {.dims = 128, .register_dims = 16, .shares_loads = true, .score = {.stats = true}}};
// A thread block has all blocks of keys of a head.
constexpr Kernels whole_heads(DType dtype, MaskKind mask, bool stats, bool ping_pong) {
  return {{.dtype = dtype,
           .dims = 64,
           .register_dims = 64,
           .whole_heads = true,
           .ping_pong = ping_pong,
           .score = {.mask_kind = mask, .stats = stats}}};
}
constexpr Kernels kWholeHeads = whole_heads(DType::kBFloat16, MaskKind::kRight, true, false);
constexpr Kernels kWholeHeadsFull = whole_heads(DType::kBFloat16, MaskKind::kNone, true, true);
constexpr Kernels kWholeHeadsOfHalves = whole_heads(DType::kFloat16, MaskKind::kBoth, false, false);
// dQ and dK, which at 256 dims have one stage of dO.
constexpr Kernels kKeysAlone{
    {.dims = 256, .dq = false, .dv = false, .score = {.mask_kind = MaskKind::kRight}}, [] {
      ForwardSm90Config config = dq_config(256, 48, MaskKind::kRight, false);
      config.q_register_dims = 64;
      config.ping_pong = false;
      return config;
    }()};

// Every option of a score, in three sets. The forward's config of dQ says which.
constexpr ForwardSm90Config kCappedDq = [] {
  ForwardSm90Config config = dq_config(128, 64, MaskKind::kRight, true);
  config.dtype = DType::kFloat16;
  config.score.negative_scale = config.score.score_mod = config.score.alibi = true;
  return config;
}();
constexpr ForwardSm90Config kPairsDq = [] {
  ForwardSm90Config config = dq_config(64, 64, MaskKind::kBoth, false);
  config.score.bias = DType::kFloat32;
  config.score.mask = config.score.dropout = true;
  return config;
}();
// The same in tiles, and a bias of 16 bits.
constexpr ForwardSm90Config kPairTilesDq = [] {
  ForwardSm90Config config = kPairsDq;
  config.tiled_bias = config.tiled_mask = true;
  config.pair_stages = 1;
  return config;
}();
constexpr ForwardSm90Config kBiasTilesDq = [] {
  ForwardSm90Config config = dq_config(128, 64, MaskKind::kRight, true);
  config.score.bias = DType::kBFloat16;
  config.tiled_bias = true;
  config.pair_stages = 2;
  return config;
}();
constexpr ForwardSm90Config kWideDq = [] {
  ForwardSm90Config config = dq_config(256, 48, MaskKind::kRight, true);
  config.dtype = DType::kFloat16;
  config.score.score_mod = config.score.alibi = config.score.dropout = config.score.varlen = true;
  return config;
}();
constexpr ForwardSm90Config kDocumentsDq = [] {
  ForwardSm90Config config = dq_config(64, 64, MaskKind::kNone, false);
  config.score.varlen = config.score.documents = config.score.dropout = config.score.sinks = true;
  config.skips_documents = true;
  config.score.bias = DType::kBFloat16;
  return config;
}();
constexpr Kernels kCapped = kernels_of(kCappedDq);
constexpr Kernels kPairs = kernels_of(kPairsDq);
constexpr Kernels kPairTiles = kernels_of(kPairTilesDq);
constexpr Kernels kBiasTiles = kernels_of(kBiasTilesDq);
constexpr Kernels kWideOptions = kernels_of(kWideDq);
constexpr Kernels kDocuments = kernels_of(kDocumentsDq);

// Lists of blocks: with dQ among the sums, and by a kernel of its own.
constexpr Kernels kListed{
    {.dims = 128, .register_dims = 16, .score = {.stats = true, .blocks = true}}};
constexpr Kernels kListedCausal{{.dtype = DType::kFloat16,
                                 .dims = 64,
                                 .q_rows = 128,
                                 .score = {.mask_kind = MaskKind::kRight, .blocks = true}}};
constexpr Kernels kListedOptions = kernels_of([] {
  ForwardSm90Config config = dq_config(64, 64, MaskKind::kBoth, false);
  config.score.varlen = config.score.score_mod = config.score.blocks = true;
  return config;
}());
constexpr Kernels kListedWide{
    {.dims = 192, .dq = false, .register_dims = 128, .score = {.stats = true, .blocks = true}}, [] {
      ForwardSm90Config config = dq_config(192, 64, MaskKind::kNone, true);
      config.score.blocks = true;
      return config;
    }()};

TEST(Sm90BackwardOnHost, DqByQueries) {
  expect_agreement<kDeterministic>(201, 4, false);
  expect_agreement<kWide>(301, 3, false);
  expect_agreement<kKeysAlone>(413, 2, false);
}

TEST(Sm90BackwardOnHost, SumsOfTwoProducts) {
  expect_agreement<kTwoProducts>(4101, 2, false);
  expect_agreement<kTwoProducts>(4201, 1, true);
  expect_agreement<kTwoProductsOfHalves>(4301, 2, false);
}

// Several heads for a thread block, up to 512 rows of those that share keys, and several blocks of
// keys.
TEST(Sm90BackwardOnHost, WholeHeads) {
  expect_agreement<kWholeHeads>(1, 6, false);
  expect_agreement<kWholeHeadsFull>(101, 6, false);
  expect_agreement<kWholeHeadsOfHalves>(201, 4, false);
  expect_agreement<kWholeHeads>(1101, 3, true);
}

TEST(Sm90BackwardOnHost, ListsOfBlocks) {
  expect_agreement<kListed>(2101, 5, false);
  expect_agreement<kListedCausal>(2201, 5, false);
  expect_agreement<kListedOptions>(2301, 4, false);
  expect_agreement<kListedWide>(2401, 3, false);
  expect_agreement<kListedCausal>(2501, 2, true);
}

TEST(Sm90BackwardOnHost, Options) {
  expect_agreement<kCapped>(601, 4, false);
  expect_agreement<kPairs>(701, 4, false);
  expect_agreement<kPairTiles>(721, 3, false);
  expect_agreement<kBiasTiles>(741, 3, false);
  expect_agreement<kDocuments>(801, 4, false);
  expect_agreement<kWideOptions>(1001, 2, false);
}

// Causal, aligned to the top left: the last blocks of keys are for the second warpgroup's rows.
TEST(Sm90BackwardOnHost, BlocksOfKeysForOtherRows) {
  expect_agreement_of_rows<kCapped>(1100, 130, [](Request& request, RandomProblem&) {
    request.options.causal = true;
    request.options.alignment = Alignment::kTopLeft;
    request.options.prefix = 0;
    request.options.window_right = kNoLimit;
  });
}

// The same, whose bias comes in tiles.
TEST(Sm90BackwardOnHost, BlocksOfKeysForOtherRowsWithTheirBias) {
  expect_agreement_of_rows<kBiasTiles>(1150, 130, [](Request& request, RandomProblem&) {
    request.options.causal = true;
    request.options.alignment = Alignment::kTopLeft;
    request.options.prefix = 0;
    request.options.window_right = kNoLimit;
  });
}

// Blocks in pairs, which plans choose from so many keys on; few queries, so that it is quick. Every
// run is checked. The seeds are those of the first such problems: one of 700 is.
template <Kernels kKernels>
void expect_agreement_of_pairs(unsigned seed, i64 keys, const Blocks& blocks, bool unusual) {
  for (;; ++seed) {
    RandomProblem random(seed);
    const Request request = drawn_request<kKernels>(random, keys + 60);
    const Tensor &q = request.arrays[Array::kQ], &k = request.arrays[Array::kK];
    if (q.rank != 4 || q.shape[0] * q.shape[1] > 2) continue;
    if (q.shape[2] > 200 || k.shape[2] <= keys || !is_for<kKernels>(request, random)) continue;
    if (unusual) plant_unusual(request, random);
    return expect_agreement<kKernels>(request, random, seed / 4 * 4 + 1, unusual, blocks);
  }
}

TEST(Sm90BackwardOnHost, PairsOfBlocks) {
  expect_agreement_of_pairs<kPaired>(1975, 512, {1, false}, true);
  expect_agreement_of_pairs<kPairedFull>(1770, 256, {1, false}, false);
  expect_agreement_of_pairs<kPairedHalves>(1929, 256, {1, false}, false);
}

TEST(Sm90BackwardOnHost, BlocksThatShareLoads) {
  expect_agreement_of_pairs<kSharedLoads>(101, 512, {1, false}, false);
  expect_agreement_of_pairs<kSharedLoads>(401, 512, {3, true}, false);
}

// Three pairs at the same time, and work tiles whose dQ another pair makes 16-bit.
TEST(Sm90BackwardOnHost, PairsOfBlocksTogether) {
  expect_agreement_of_pairs<kPaired>(1975, 512, {3, true}, false);
  expect_agreement_of_pairs<kPairedFull>(1929, 256, {3, true}, false);
  expect_agreement_of_pairs<kPairedInOrder>(683, 1024, {3, true}, false);
}

// A document of 70 rows, then another: of whole blocks some are of one document, one is of both.
TEST(Sm90BackwardOnHost, WholeBlocksOfADocument) {
  expect_agreement_of_rows<kDocuments>(1200, 200, [](Request& request, RandomProblem& random) {
    Arrays& arrays = request.arrays;
    arrays[Array::kQLengths] = Tensor{};
    const Tensor& lengths = arrays[Array::kKvLengths];
    const i64 q_rows = arrays[Array::kQ].shape[2], kv_rows = arrays[Array::kK].shape[2];
    for (i64 b = 0; b < lengths.shape[0]; ++b) static_cast<i64*>(lengths.data)[b] = kv_rows;
    for (const Array array : {Array::kK, Array::kV}) random.fill_normal(arrays[array]);
    i32* const q_ids = static_cast<i32*>(arrays[Array::kQIds].data);
    i64* const kv_ids = static_cast<i64*>(arrays[Array::kKvIds].data);
    for (i64 i = 0; i < q_rows; ++i) q_ids[i] = i < 70 ? 0 : 1;
    for (i64 j = 0; j < kv_rows; ++j) kv_ids[j] = j < 70 ? 0 : 1;
  });
}

TEST(Sm90BackwardOnHost, HiddenNanDoesNotShow) {
  expect_agreement<kDeterministic>(501, 2, true);
  expect_agreement<kLengths>(515, 3, false);
  expect_agreement<kPairs>(901, 2, true);
}

// Blocks that run at the same time, in 20 schedules: nobody adds to another's rows, so that every
// schedule gives the same bits.
template <Kernels kKernels>
void expect_the_same_bits(unsigned number) {
  // Three blocks of keys, so that a buffer of K is used again.
  const auto is_long = [](const Request& request) {
    const Tensor &q = request.arrays[Array::kQ], &k = request.arrays[Array::kK];
    const i64 dims = max(q.shape[3], request.arrays[Array::kV].shape[3]);
    return dims > kKernels.first.dims - 64 && q.shape[0] * q.shape[1] <= 2 && q.shape[2] <= 200 &&
           k.shape[2] > 256;
  };
  for (bool found = false; !found; ++number) {
    RandomProblem random(number);
    found = is_long(drawn_request<kKernels>(random, 300));
  }
  RandomProblem random(number - 1);
  Request forward = drawn_request<kKernels>(random, 300);
  forward.options.causal = false;
  forward.options.prefix = forward.options.chunk = 0;
  forward.options.window_left = 280;
  forward.options.window_right = kNoLimit;
  cpu::scalar_forward(validate(forward, Pointers::kChecked));
  Request backward = to_backward(random, forward, 7);
  backward.options.deterministic = true;
  backward.arrays[Array::kStats] = Tensor{};
  Request first;
  for (u32 seed = 1; seed <= 20; ++seed) {
    const Request actual = with_fresh_outputs(random, backward);
    run<kKernels>(validate(actual, Pointers::kChecked), seed, {3, true});
    if (seed == 1) first = actual;
    for (const Array output : {Array::kDQ, Array::kDK, Array::kDV}) {
      const Difference difference = compare(actual.arrays[output], first.arrays[output]);
      ASSERT_EQ(difference.largest, 0)
          << "seed " << seed << ", " << name(output) << difference.place;
    }
  }
}

TEST(Sm90BackwardOnHost, BitsAreTheSameInEverySchedule) {
  expect_the_same_bits<kDeterministic>(231);
  expect_the_same_bits<kWholeHeadsOfHalves>(231);
}

// A block of keys visits the blocks of queries from its first document's first row to its last
// document's last, and knows those of one document with all keys of a warpgroup.
TEST(Sm90BackwardOnHost, VisitsEndWithTheDocuments) {
  constexpr i32 kLength = 700, kDocument = 200, kQueries = 64, kKeys = 128;
  std::vector<i32> ids;
  for (i32 row = 0; row < kLength; ++row) ids.push_back(row / kDocument);
  std::vector<IdRange> ranges(static_cast<size_t>(ceil_div(kLength, kQueries)));
  std::vector<DocumentBlocks> visits(static_cast<size_t>(ceil_div(kLength, kKeys)));
  ForwardArguments queries{};
  queries.params.shape = {kLength, kLength, 0};
  queries.params.key_ranges = ranges.data();
  AttentionParams& arrays = queries.params.attention;
  arrays.q_rows = arrays.kv_rows = kLength;
  arrays.num_sequences = 1;
  arrays.q_ids = arrays.kv_ids = {reinterpret_cast<u8*>(ids.data()), {0, 0, 0, 1}, DType::kInt32};
  launch_ranges<kQueries, false>(queries, static_cast<i64>(ranges.size()), 1);
  BackwardPreprocessParams params{};
  params.attention = arrays;
  params.query_ranges = ranges.data();
  params.q_rows = kQueries;
  params.kv_rows = kKeys;
  params.document_blocks = visits.data();
  emulator::launch({1, 32, 0, 1, false, "visits", true}, [&] {
    FindDocumentBlocks{params, ptx::thread_index()}.run(
        0, 1, [&](i64 index) { return dense_sequence(params.attention, index); });
  });
  for (i32 block = 0; block < static_cast<i32>(visits.size()); ++block) {
    const DocumentBlocks& visit = visits[static_cast<size_t>(block)];
    const i32 first = block * kKeys, last = min(first + kKeys, kLength) - 1;
    const i32 end = min((last / kDocument + 1) * kDocument, kLength);
    EXPECT_EQ(visit.begin, first / kDocument * kDocument / kQueries) << block;
    EXPECT_EQ(visit.end, ceil_div(end, kQueries)) << block;
    for (i32 w = 0; w < 2; ++w) {
      const i32 key = first + 64 * w, document = key / kDocument;
      const bool is_one = key < kLength && min(key + 63, kLength - 1) / kDocument == document;
      EXPECT_EQ(visit.full_end[w] > visit.full_begin[w], is_one) << block;
      if (!is_one) continue;
      EXPECT_EQ(visit.full_begin[w], ceil_div(document * kDocument, kQueries)) << block;
      EXPECT_EQ(visit.full_end[w], document == 3 ? 11 : (document + 1) * kDocument / kQueries);
    }
  }
}

// Sums of dQ are for sequences above 512 rows, which take long here.
TEST(Sm90BackwardOnHost, HiddenNanDoesNotShowInSums) {
  if (std::getenv("FULMEN_TEST_FULL") == nullptr) GTEST_SKIP() << "FULMEN_TEST_FULL is not set";
  expect_agreement<kCausal>(1, 1, true);
  expect_agreement<kStats>(101, 1, true);
}

}  // namespace
}  // namespace fulmen::test
