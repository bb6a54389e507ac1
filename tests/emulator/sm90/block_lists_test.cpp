// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 with lists of blocks, against the scalar oracle, over drawn problems.
#include "../../gpu/kernels/hopper_request.h"
#include "launch_forward.h"

namespace fulmen::test {
namespace {

constexpr ForwardSm90Config kListed{.d_qk = 64,
                                    .d_v = 64,
                                    .kv_rows = 64,
                                    .stage_output = false,
                                    .score = {.stats = true, .blocks = true}};
constexpr ForwardSm90Config kListedCausal{.dtype = DType::kFloat16,
                                          .d_qk = 64,
                                          .d_v = 64,
                                          .kv_rows = 64,
                                          .stages = 4,
                                          .shift_rule = ShiftRule::kWhenGrown,
                                          .ping_pong = false,
                                          .score = {.mask_kind = MaskKind::kRight, .blocks = true}};
constexpr ForwardSm90Config kListedSequences{
    .d_qk = 64,
    .d_v = 64,
    .warpgroups = 1,
    .kv_rows = 64,
    .stage_output = false,
    .score = {.mask_kind = MaskKind::kBoth, .sinks = true, .varlen = true, .blocks = true}};
constexpr ForwardSm90Config kListedPairs{.d_qk = 64,
                                         .d_v = 64,
                                         .kv_rows = 64,
                                         .stages = 1,
                                         .shift_rule = ShiftRule::kWhenGrown,
                                         .stage_output = false,
                                         .score = {.bias = DType::kFloat32,
                                                   .documents = true,
                                                   .dropout = true,
                                                   .varlen = true,
                                                   .blocks = true}};
constexpr ForwardSm90Config kListedWide{.d_qk = 272,
                                        .d_v = 384,
                                        .kv_rows = 64,
                                        .stages = 1,
                                        .split_dims = true,
                                        .stage_output = false,
                                        .score = {.blocks = true}};

template <ForwardSm90Config kConfig>
void expect_lists_agree(unsigned first, unsigned count, bool unusual = false) {
  for (unsigned seed = first; seed < first + num_drawn(count); ++seed) {
    RandomProblem random(seed);
    const Request drawn = HopperRequest(random, kConfig, 400).request;
    const Request request = with_blocks(random, drawn);
    if (unusual) plant_unusual(request, random);
    expect_agreement<kConfig>(request, random, seed);
  }
}

TEST(Sm90ListsOnHost, Plain) { expect_lists_agree<kListed>(1, 12); }
TEST(Sm90ListsOnHost, Causal) { expect_lists_agree<kListedCausal>(101, 12); }
TEST(Sm90ListsOnHost, Sequences) { expect_lists_agree<kListedSequences>(201, 12); }
TEST(Sm90ListsOnHost, PairTerms) { expect_lists_agree<kListedPairs>(301, 8); }
TEST(Sm90ListsOnHost, WideHeads) { expect_lists_agree<kListedWide>(401, 3); }
TEST(Sm90ListsOnHost, HiddenDoesNotShow) {
  expect_lists_agree<kListed>(501, 5, true);
  expect_lists_agree<kListedSequences>(601, 5, true);
}

// Every block is listed, so that intervals alone cut tiles: several of each row's.
template <ForwardSm90Config kConfig>
void expect_intervals_agree(unsigned seed, i64 window_left) {
  for (;; ++seed) {
    RandomProblem random(seed);
    Request request = HopperRequest(random, kConfig, 300).request;
    const Tensor &q = request.arrays[Array::kQ], &k = request.arrays[Array::kK];
    if (q.rank != 4 || q.shape[2] < 150 || k.shape[2] < 250) continue;
    request.options.causal = true;
    request.options.prefix = request.options.chunk = 0;
    request.options.window_right = kNoLimit;
    request.options.window_left = window_left;
    request.options.block_q = request.options.block_kv = 64;
    const i64 keys = ceil_div(k.shape[2], 64);
    const Tensor lists = random.array(DType::kInt32, {1, 1, ceil_div(q.shape[2], 64), keys});
    RandomProblem::for_each(lists, [&](const i64* at) {
      store_bytes(RandomProblem::address(lists, at), static_cast<i32>(at[3]));
    });
    request.arrays[Array::kBlocks] = lists;
    return expect_agreement<kConfig>(request, random, seed);
  }
}

TEST(Sm90ListsOnHost, IntervalsCutListedTiles) {
  expect_intervals_agree<kListedCausal>(701, kNoLimit);
  expect_intervals_agree<kListedSequences>(801, 70);
  expect_intervals_agree<kListedSequences>(901, 190);  // what is whole is met before what is cut
}

// An id that names no block is told, and is as if it were not there.
TEST(Sm90ListsOnHost, AnIdOfNoBlockIsTold) {
  for (const i32 bad : {4, -2}) {
    RandomProblem random(9);
    Request request = HopperRequest(random, kListed, 64).request;
    const i64 keys = request.arrays[Array::kK].shape[2];
    request.options.block_q = request.options.block_kv = 64;
    const std::vector<i64> ids{0, bad * ceil_div(keys, 64)};
    Tensor lists = random.indices(DType::kInt64, ids);
    lists.rank = 4;
    const i64 shape[4] = {1, 1, 1, 2}, strides[4] = {0, 0, 0, 1};
    std::copy_n(shape, 4, lists.shape);
    std::copy_n(strides, 4, lists.strides);
    request.arrays[Array::kBlocks] = lists;
    FaultBytes faults{};
    run_forward<kListed>(validate(request, Pointers::kUnknown), 1, false, &faults);
    EXPECT_EQ(faults.bits(), u32{kFaultBlocks}) << bad;
  }
}

// Beside one head of keys, in plain tiles.
constexpr ForwardSm90Config kListedPlain{
    .d_qk = 64, .d_v = 64, .kv_rows = 64, .stage_output = false, .score = {.blocks = true}};
Request listed_request(RandomProblem& random, i64 rows, i64 keys, i64 block) {
  Request request;
  Arrays& arrays = request.arrays;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const bool is_of_keys = array == Array::kK || array == Array::kV;
    arrays[array] = random.contiguous(DType::kBFloat16, {1, 1, is_of_keys ? keys : rows, 64});
    if (array != Array::kO) random.fill_normal(arrays[array]);
  }
  arrays[Array::kLse] = random.array(DType::kFloat32, {1, 1, rows});
  request.options.scale = kNan;
  request.options.block_q = request.options.block_kv = block;
  return request;
}

// So many lists for all heads, of equal lengths.
Tensor lists_of(RandomProblem& random, i64 count, const std::vector<i32>& ids) {
  const i64 length = static_cast<i64>(ids.size()) / count;
  const Tensor lists = random.array(DType::kInt32, {1, 1, count, length});
  RandomProblem::for_each(lists, [&](const i64* at) {
    store_bytes(RandomProblem::address(lists, at),
                ids[static_cast<size_t>(at[2] * length + at[3])]);
  });
  return lists;
}

// More tiles than a word of a list has bits.
TEST(Sm90ListsOnHost, TilesOfSeveralWords) {
  for (const std::vector<i32>& ids :
       {std::vector<i32>{0, 68}, {3}, {40}, {65, 31}, {32, 63, 64}, {-1}}) {
    RandomProblem random(10);
    Request request = listed_request(random, 64, 69 * 64 - 10, 64);
    request.arrays[Array::kBlocks] = lists_of(random, 1, ids);
    expect_agreement<kListedPlain>(request, random, 10);
  }
}

// Rows of which lists leave nothing take one attempt, as others do; blocks that nobody lists take
// no products.
TEST(Sm90ListsOnHost, WhatIsNotListedTakesNoProducts) {
  RandomProblem random(7);
  Request request = listed_request(random, 512, 512, 128);
  const auto products = [&](const std::vector<i32>& ids) {
    request.arrays[Array::kBlocks] = lists_of(random, 4, ids);
    return run_forward<kListedPlain>(validate(request, Pointers::kChecked), 1, true);
  };
  const u64 all = products({0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 0, 1, 2, 3});
  const u64 half = products({0, -1, -1, 3, 1, 2, 2, 1, 0, 1, -1, -1, 3, 2, -1, -1});
  const u64 few = products({0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2, -1, -1, -1});
  EXPECT_EQ(2 * half, all);
  EXPECT_EQ(32 * few, 6 * all) << "two blocks, and a tile for each tile of rows without any";
}

// Rows of a tile behind the last list meet nothing, whatever was in memory before.
TEST(Sm90ListsOnHost, RowsBehindTheLastListMeetNothing) {
  RandomProblem random(8);
  Request request = listed_request(random, 64, 512, 64);
  const auto products = [&](const std::vector<i32>& ids) {
    request.arrays[Array::kBlocks] = lists_of(random, 1, ids);
    return run_forward<kListedPlain>(validate(request, Pointers::kChecked), 1, true);
  };
  EXPECT_EQ(8 * products({-1, 1, -1, -1, -1, -1, -1, -1}), products({0, 1, 2, 3, 4, 5, 6, 7}));
}

}  // namespace
}  // namespace fulmen::test
