// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// decode_sm80's own text on the host, against the scalar oracle: groups of heads of every size,
// lengths of every residue, grids that cut row tiles anywhere, options; keys and values that are
// NaN where no query sees them; and bits that do not depend on which block comes last.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/copies.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "gpu/kernels/expect_close.h"
#include "gpu/params.h"
#include "kernels/decode_sm80/decode_sm80.cuh"

namespace fulmen::test {
namespace {

struct DecodeShape {
  i64 batch = 1;
  i64 heads_kv = 1;
  i64 group = 1;
  i64 q_rows = 1;
  i64 kv_rows = 1;
  i64 dim_qk = 64;
  i64 dim_v = 48;
};

void fill_normal_rows(RandomProblem& random, const Tensor& tensor, i64 batch, i64 rows) {
  RandomProblem::for_each(tensor, [&](const i64* at) {
    if (at[0] != batch || at[2] >= rows) return;
    store_real(RandomProblem::address(tensor, at), tensor.dtype, random.normal());
  });
}

Request decode_request(RandomProblem& random, DType dtype, const DecodeShape& shape) {
  Request request;
  Arrays& arrays = request.arrays;
  const i64 heads_q = shape.heads_kv * shape.group;
  arrays[Array::kQ] = random.contiguous(dtype, {shape.batch, heads_q, shape.q_rows, shape.dim_qk});
  arrays[Array::kK] =
      random.contiguous(dtype, {shape.batch, shape.heads_kv, shape.kv_rows, shape.dim_qk});
  arrays[Array::kV] =
      random.contiguous(dtype, {shape.batch, shape.heads_kv, shape.kv_rows, shape.dim_v});
  arrays[Array::kO] = random.contiguous(dtype, {shape.batch, heads_q, shape.q_rows, shape.dim_v});
  arrays[Array::kLse] = random.contiguous(DType::kFloat32, {shape.batch, heads_q, shape.q_rows});
  for (const Array array : {Array::kQ, Array::kK, Array::kV}) random.fill_normal(arrays[array]);
  request.options.scale = kNan;
  return request;
}

// The same outputs elsewhere, on multiples of 16 bytes.
Request with_own_outputs(RandomProblem& random, const Request& request) {
  Request own = request;
  for (const Array array : {Array::kO, Array::kLse, Array::kStats}) {
    const Tensor& given = request.arrays[array];
    if (!given.present()) continue;
    own.arrays[array] = random.contiguous(given.dtype, {given.shape, given.shape + given.rank});
  }
  return own;
}

// The same call over keys and values of 8 bits; scaled: each key and head with a scale, or each
// head.
Request with_bytes(RandomProblem& random, const Request& given, DType dtype, bool scaled) {
  Request request = given;
  const double spread = dtype == DType::kInt8 ? 40 : dtype == DType::kFloat8E4M3 ? 20 : 1;
  for (const auto& [array, scale_array] :
       {std::pair{Array::kK, Array::kKScale}, std::pair{Array::kV, Array::kVScale}}) {
    const Tensor& wide = given.arrays[array];
    std::vector<i64> shape(wide.shape, wide.shape + wide.rank);
    const Tensor narrow = random.contiguous(dtype, shape);
    shape.back() = 1;
    if (array == Array::kV) shape[0] = 1;
    const Tensor scales = random.contiguous(DType::kFloat32, shape);
    RandomProblem::for_each(wide, [&](const i64* at) {
      const double x = load_real(RandomProblem::address(wide, at), wide.dtype);
      const bool is_used = x == x;
      if (is_used) store_real(RandomProblem::address(narrow, at), dtype, spread * x);
      const i64 scale_at[kMaxRank] = {array == Array::kV ? 0 : at[0], at[1], at[2], 0};
      const double scale = std::fabs(random.normal()) / spread;
      if (is_used) store_real(RandomProblem::address(scales, scale_at), DType::kFloat32, scale);
    });
    request.arrays[array] = narrow;
    if (scaled) request.arrays[scale_array] = scales;
  }
  if (!scaled) request.options.scale = 0.125 / spread;
  return request;
}

constexpr u64 kStamp = 0x5eed00000000;

// What the blocks of a grid write, of which each waits for others' parts.
emulator::GlobalMemory written_by(const Problem& problem, std::vector<float>& parts) {
  std::vector<emulator::GlobalArray> arrays;
  const auto add = [&arrays](const char* name, const void* data, i64 element_bytes, auto& extents,
                             auto& strides) {
    emulator::GlobalArray array{name, data, element_bytes};
    std::copy_n(extents, 4, array.extents.begin());
    std::copy_n(strides, 4, array.strides.begin());
    array.writable = true;
    array.initialised = false;
    arrays.push_back(array);
  };
  for (const Array output : {Array::kO, Array::kLse, Array::kStats}) {
    const Tensor& tensor = problem.arrays[output];
    if (tensor.present()) {
      add(name(output), tensor.data, size_bytes(tensor.dtype), tensor.shape, tensor.strides);
    }
  }
  const i64 extents[] = {1, 1, 1, static_cast<i64>(parts.size())}, strides[] = {0, 0, 0, 1};
  add("parts", parts.data(), 4, extents, strides);
  return emulator::GlobalMemory(arrays);
}

TensorMap map_of(const Tensor& tensor, i32 box_rows) {
  emulator::HostTensorMap map{static_cast<u8*>(tensor.data)};
  for (int axis = 0; axis < 4; ++axis) {  // dim, row, head, sequence or page
    map.extents[axis] = static_cast<i32>(tensor.shape[3 - axis]);
    map.strides_bytes[axis] = tensor.strides[3 - axis] * size_bytes(tensor.dtype);
  }
  map.box_rows = box_rows;
  return emulator::encode(map);
}

// Of odd seeds all blocks run at the same time, else one after the other.
template <DecodeSm80Config kConfig>
void decode(const Problem& problem, i32 workers, u32 seed, bool check = true,
            FaultBytes* faults = nullptr) {
  const AttentionParams p = gpu::attention_params(problem, faults);
  const i32 group = static_cast<i32>(problem.group_size()) * kConfig.heads;
  const i32 row_tiles = static_cast<i32>(ceil_div(problem.max_q * group, i64{kConfig.rows()}));
  const i32 grid = workers * row_tiles * kConfig.cluster;
  const i64 chunks = ceil_div(problem.max_kv, i64{kConfig.block_keys() * kConfig.chunk_blocks}) *
                     problem.num_sequences * problem.heads_kv * row_tiles;
  const size_t num_counters = static_cast<size_t>(kConfig.has_chunks() ? chunks : grid);
  const size_t num_parts =
      static_cast<size_t>(kConfig.has_chunks() ? chunks : 2 * grid / kConfig.cluster);
  std::vector<u64> counters(num_counters + 1, ~u64{0});  // workspaces may hold anything
  counters[0] = kStamp;
  std::vector<float> parts(num_parts * kConfig.part_floats() + 4, std::nanf(""));
  const u64 first = (reinterpret_cast<u64>(parts.data()) + 15) / 16 * 16;
  DecodeSm80Params params{p,
                          group,
                          row_tiles,
                          kStamp,
                          counters.data(),
                          reinterpret_cast<float*>(first),
                          score_unit(kConfig, problem.score_map.scale)};
  if constexpr (kConfig.in_warpgroups()) {
    params.k_map = map_of(problem.arrays[Array::kK], kConfig.box_rows);
    params.v_map = map_of(problem.arrays[Array::kV], kConfig.box_rows);
  }
  emulator::GlobalMemory memory = written_by(problem, parts);
  emulator::launch({.blocks = grid,
                    .threads = kConfig.threads(),
                    .shared_bytes = kConfig.shared_bytes(),
                    .seed = seed,
                    .together = seed % 2 == 1,
                    .kernel = "decode_sm80",
                    .check = check,
                    .memory = check ? &memory : nullptr,
                    .cluster_size = kConfig.cluster},
                   [&] { decode_sm80<kConfig>(params); });
  for (const u64 counter : counters) EXPECT_TRUE(counter == kStamp || counter == ~u64{0});
}

// The maximum of a row covers every score, and with the sum gives the row's lse.
void expect_statistics(const Request& actual, const Request& expected) {
  RandomProblem::for_each(expected.arrays[Array::kLse], [&](const i64* at) {
    const auto statistic = [&](const Request& request, i64 which) {
      const i64 place[kMaxRank] = {at[0], at[1], at[2], which};
      return load_real(RandomProblem::address(request.arrays[Array::kStats], place),
                       DType::kFloat32);
    };
    const double lse =
        load_real(RandomProblem::address(expected.arrays[Array::kLse], at), DType::kFloat32);
    const double largest = statistic(expected, 0);
    EXPECT_GE(statistic(actual, 0), largest - 1e-5 * std::abs(largest));
    const double found = statistic(actual, 0) + std::log(statistic(actual, 1));
    EXPECT_TRUE(found == lse || std::abs(found - lse) <= 1e-5 * max(std::abs(lse), 1.0));
  });
}

template <DecodeSm80Config kConfig>
void expect_oracle(RandomProblem& random, const Request& expected, i32 workers, u32 seed,
                   bool check = true) {
  const Request actual = with_own_outputs(random, expected);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  decode<kConfig>(validate(actual, Pointers::kChecked), workers, seed, check);
  expect_rounded(actual, expected, seed);
}

constexpr DecodeSm80Config small(i32 rows, i32 splits) {
  DecodeSm80Config config;
  config.d_qk = 64;
  config.d_v = 48;
  config.row_warps = rows / 16;
  config.splits = splits;
  config.kv_rows = config.row_warps == 4 ? 32 : 16;
  config.score.varlen = true;
  return config;
}
constexpr DecodeSm80Config kPadded = small(16, 2);
constexpr DecodeSm80Config kSixteen = [] {
  DecodeSm80Config config = small(16, 3);
  config.stages = 3;
  config.ragged = true;
  config.score.mask_kind = MaskKind::kRight;
  return config;
}();
constexpr DecodeSm80Config kDense = [] {
  DecodeSm80Config config = small(16, 2);
  config.score.varlen = false;
  config.dtype = DType::kFloat16;
  config.score.fp32_out = true;
  return config;
}();
constexpr DecodeSm80Config kThirtyTwo = [] {
  DecodeSm80Config config = small(32, 2);
  config.score.mask_kind = MaskKind::kBoth;
  return config;
}();
constexpr DecodeSm80Config kPaged = [] {
  DecodeSm80Config config = small(16, 2);
  config.paged = config.ragged = true;
  config.score.mask_kind = MaskKind::kRight;
  return config;
}();
constexpr DecodeSm80Config kPagedByLength = [] {
  DecodeSm80Config config = kPaged;
  config.ragged = false;
  return config;
}();
constexpr DecodeSm80Config kPagedWhole = [] {
  DecodeSm80Config config = kPagedByLength;
  config.score.mask_kind = MaskKind::kNone;
  return config;
}();
constexpr DecodeSm80Config kPagedInOneStage = [] {
  DecodeSm80Config config = kPagedByLength;
  config.kv_rows = 32;
  config.stages = 1;
  return config;
}();
constexpr DecodeSm80Config kChunks = [] {
  DecodeSm80Config config = kPagedByLength;
  config.chunk_blocks = 2;
  config.score.mask_kind = MaskKind::kBoth;
  return config;
}();
// In clusters, which keep at most two parts of a row tile in memory, or none.
constexpr DecodeSm80Config kPair = [] {
  DecodeSm80Config config = kPadded;
  config.cluster = 2;
  return config;
}();
constexpr DecodeSm80Config kPagedPair = [] {
  DecodeSm80Config config = kPagedByLength;
  config.cluster = 2;
  return config;
}();
constexpr DecodeSm80Config kFour = [] {
  DecodeSm80Config config = kDense;
  config.cluster = 4;
  config.splits = 1;
  return config;
}();
constexpr DecodeSm80Config kSixteenBlocks = [] {
  DecodeSm80Config config = kFour;
  config.cluster = 16;
  return config;
}();
// A query row of a few heads; and a cluster for every row tile, which needs no schedule.
constexpr DecodeSm80Config with_one_query(DecodeSm80Config config, bool whole = false) {
  config.one_query = config.transposed = true;
  config.whole = whole;
  return config;
}
// Row tiles of neighbouring heads of k and v.
constexpr DecodeSm80Config with_heads(DecodeSm80Config config, i32 heads) {
  config.heads = heads;
  config.d_v = config.d_qk;
  config.transposed = true;
  return config;
}
// Of two heads of k and v, each the 16 rows of a warp.
constexpr DecodeSm80Config with_a_warp_for_each_head(DecodeSm80Config config) {
  config.heads = config.row_warps = 2;
  config.d_v = config.d_qk;
  config.kv_rows = 32;
  config.one_query = true;
  return config;
}
// Whole row tiles of blocks by themselves: of 16 rows of a warp, and of two warps.
constexpr DecodeSm80Config kWhole = [] {
  DecodeSm80Config config = kDense;
  config.one_query = config.whole = true;
  return config;
}();
constexpr DecodeSm80Config kWholeColumns = [] {
  DecodeSm80Config config = kWhole;
  config.row_warps = 2;
  config.transposed = true;
  return config;
}();
// Two warps of 8 rows, the columns of products.
constexpr DecodeSm80Config kTwoColumns = [] {
  DecodeSm80Config config = kSixteen;
  config.row_warps = 2;
  config.transposed = true;
  return config;
}();
constexpr DecodeSm80Config kDrafted = [] {
  DecodeSm80Config config = small(32, 2);
  config.paged = config.placed = config.tree = true;
  config.score.mask_kind = MaskKind::kBoth;
  config.score.alibi = true;
  return config;
}();
constexpr DecodeSm80Config kPlaced = [] {
  DecodeSm80Config config = kPagedByLength;
  config.placed = config.tree = true;
  return config;
}();
constexpr DecodeSm80Config of_bytes(DecodeSm80Config config, DType dtype, DType quantised,
                                    bool scaled, bool converts = false) {
  config.dtype = dtype;
  config.quantised = quantised;
  config.scaled = scaled;
  config.converts = converts;
  config.kv_rows = 32;
  config.d_v = 64;
  return config;
}
// Scores in log2 before the softmax.
constexpr DecodeSm80Config kMapped = [] {
  DecodeSm80Config config = small(16, 2);
  config.score.score_mod = config.score.alibi = true;
  return config;
}();
constexpr DecodeSm80Config kTreeAlone = [] {
  DecodeSm80Config config = kPagedByLength;
  config.tree = true;
  return config;
}();
constexpr DType kE4M3 = DType::kFloat8E4M3, kE5M2 = DType::kFloat8E5M2, kInt8 = DType::kInt8;
constexpr DType kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
constexpr DecodeSm80Config kSixtyFour = [] {
  DecodeSm80Config config = small(64, 1);
  config.score.mask_kind = MaskKind::kBoth;
  config.score.score_mod = config.score.alibi = config.score.stats = true;
  return config;
}();

// Of warpgroups, with products of 64 rows: some options, pages in chunks, two of them beside each
// other, and whole dims of more than a row of 128 bytes.
constexpr DecodeSm80Config in_warpgroups(DecodeSm80Config config, i32 row_warps = 4) {
  config.d_v = 64;
  config.row_warps = row_warps;
  config.kv_rows = 32;
  config.box_rows = config.paged ? 16 : config.kv_rows;
  return config;
}
constexpr DecodeSm80Config kWarpgroups = in_warpgroups(kPadded);
constexpr DecodeSm80Config kWarpgroupOptions = in_warpgroups(kSixtyFour);
constexpr DecodeSm80Config kWholeWarpgroups = [] {
  DecodeSm80Config config = in_warpgroups(kPair);
  config.whole = true;
  return config;
}();
constexpr DecodeSm80Config kWarpgroupChunks = in_warpgroups(kChunks);
constexpr DecodeSm80Config kTwoWarpgroups = [] {
  DecodeSm80Config config = in_warpgroups(kThirtyTwo, 8);
  config.d_qk = 192;
  config.d_v = 128;
  config.splits = 1;
  config.kv_rows = config.box_rows = 64;
  return config;
}();
constexpr DecodeSm80Config kWarpgroupPages = [] {
  DecodeSm80Config config = in_warpgroups(kPagedByLength);
  config.kv_rows = 64;
  config.stages = 1;
  return config;
}();

// Two requests, one of `length` keys and one of any number; NaN past both.
void set_two_lengths(RandomProblem& random, Request& request, i64 length, i64 kv_rows) {
  const i64 lengths[] = {length, (length * 31 + 7) % kv_rows};
  request.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {lengths[0], lengths[1]});
  for (const Array array : {Array::kK, Array::kV}) {
    Tensor& cache = request.arrays[array];
    cache = random.twin(cache);
    for (i64 batch = 0; batch < 2; ++batch) {
      fill_normal_rows(random, cache, batch, lengths[batch]);
    }
  }
}

// Every length around a block of keys, and grids from one block to more than there is work for.
TEST(DecodeSm80, EveryLength) {
  for (i64 length = 0; length <= 70; ++length) {
    const u32 seed = static_cast<u32>(length);
    RandomProblem random(seed);
    const i64 group = 1 + length % 8;
    Request request = decode_request(random, DType::kBFloat16, {2, 2, group, 1, 72});
    set_two_lengths(random, request, length, 72);
    expect_oracle<kPadded>(random, request, 1 + static_cast<i32>(length % 9), seed,
                           is_sampled(seed));
  }
}

TEST(DecodeSm80, DenseBatch) {
  for (const i32 workers : {1, 2, 5, 12, 40}) {
    RandomProblem random(static_cast<unsigned>(workers));
    Request request = decode_request(random, DType::kFloat16, {3, 2, 4, 1, 133});
    request.arrays[Array::kO] = random.contiguous(DType::kFloat32, {3, 8, 1, 48});
    expect_oracle<kDense>(random, request, workers, 1);
  }
}

// Clusters: every length around a block of keys of one, of which some blocks see nothing; row tiles
// of one cluster and of several.
TEST(DecodeSm80, ClustersOfEveryLength) {
  for (i64 length = 0; length <= 140; length += tests_everything() ? 1 : 7) {
    const u32 seed = static_cast<u32>(length);
    RandomProblem random(seed);
    Request request = decode_request(random, DType::kBFloat16, {2, 2, 1 + length % 8, 1, 144});
    set_two_lengths(random, request, length, 144);
    expect_oracle<kPair>(random, request, 1 + static_cast<i32>(length % 5), seed);
    expect_oracle<with_one_query(kPair)>(random, request, 1 + static_cast<i32>(length % 5), seed);
    expect_oracle<with_one_query(kPair, true)>(random, request, 4, seed);
  }
}

// A length that the cache has not: its request is empty, and the host is told.
TEST(DecodeSm80, ClustersReportLengths) {
  RandomProblem random(1);
  Request request = decode_request(random, DType::kBFloat16, {2, 2, 4, 1, 144});
  request.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {0, 70});
  const Request expected = request;
  request.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {145, 70});
  const Request actual = with_own_outputs(random, request);
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  FaultBytes faults{};
  decode<with_one_query(kPair, true)>(validate(actual, Pointers::kChecked), 4, 1, true, &faults);
  EXPECT_EQ(faults.bits(), u32{kFaultKvLengths});
  expect_rounded(actual, expected, 1);
}

TEST(DecodeSm80, ClustersOfADenseBatch) {
  for (const i32 workers : {1, 3, 6}) {
    for (const i64 rows : {1, 5}) {  // one row tile, two
      RandomProblem random(static_cast<unsigned>(workers));
      Request request = decode_request(random, DType::kFloat16, {3, 2, 4, rows, 133});
      request.arrays[Array::kO] = random.contiguous(DType::kFloat32, {3, 8, rows, 48});
      expect_oracle<kFour>(random, request, workers, 1);
      if (rows > 1) continue;
      expect_oracle<with_one_query(kFour, true)>(random, request, 6, 1);
      expect_oracle<with_one_query(kSixteenBlocks, true)>(random, request, 6, 1);
    }
  }
}

// A block for every row tile, in the order of sequences; of one warp's 16 rows, and of two warps'.
TEST(DecodeSm80, WholeRowTilesOfADenseBatch) {
  RandomProblem random(3);
  Request request = decode_request(random, DType::kFloat16, {3, 2, 13, 1, 133});
  request.arrays[Array::kO] = random.contiguous(DType::kFloat32, {3, 26, 1, 48});
  expect_oracle<kWhole>(random, request, 6, 1);
  expect_oracle<kWholeColumns>(random, request, 6, 2);
}

// Neighbouring heads in one row tile: every length around a block of keys, where keys of other
// heads and of other sequences are NaN; whole row tiles by one block and by clusters.
TEST(DecodeSm80, NeighbouringHeads) {
  constexpr DecodeSm80Config kTwo = with_heads(kPadded, 2), kFourHeads = with_heads(kPadded, 4);
  for (i64 length = 0; length <= 70; length += tests_everything() ? 1 : 7) {
    const u32 seed = static_cast<u32>(length);
    RandomProblem random(seed);
    Request request = decode_request(random, DType::kBFloat16, {2, 4, 1 + length % 2, 1, 72});
    set_two_lengths(random, request, length, 72);
    expect_oracle<kTwo>(random, request, 1 + static_cast<i32>(length % 9), seed);
    expect_oracle<with_one_query(kFourHeads)>(random, request, 1 + static_cast<i32>(length % 5),
                                              seed);
    expect_oracle<with_one_query(with_heads(kPair, 2), true)>(random, request, 4, seed);
    expect_oracle<with_one_query(kTwo, true)>(random, request, 4, seed);
  }
}

// Warpgroups: every length around a step and a block of keys, of rows from 1 to 64.
TEST(DecodeSm80, WarpgroupsOfEveryLength) {
  for (i64 length = 0; length <= 140; length += tests_everything() ? 1 : 10) {
    const u32 seed = static_cast<u32>(length);
    RandomProblem random(seed);
    const i64 rows = 1 + length % 4;
    Request request = decode_request(random, DType::kBFloat16, {2, 2, 1 + length % 16, rows, 144});
    set_two_lengths(random, request, length, 144);
    expect_oracle<kWarpgroups>(random, request, 1 + static_cast<i32>(length % 7), seed);
    if (length % 20 != 0) continue;
    expect_oracle<in_warpgroups(kPair)>(random, request, 3, seed);
    expect_oracle<kWholeWarpgroups>(random, request, 4, seed);
  }
}

// Two that share keys, beside each other and in two row tiles.
TEST(DecodeSm80, WindowOfTwoWarpgroups) {
  for (const i64 rows : {30, 40}) {
    RandomProblem random(static_cast<unsigned>(rows));
    Request request = decode_request(random, DType::kBFloat16, {2, 1, 4, rows, 200, 192, 128});
    request.options.causal = true;
    request.options.window_left = 70;
    request.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {200, 61});
    expect_oracle<kTwoWarpgroups>(random, request, 2, 1);
  }
}

TEST(DecodeSm80, AWarpForEachHead) {
  constexpr DecodeSm80Config kTwo = with_a_warp_for_each_head(kPadded);
  constexpr DecodeSm80Config kWholes = with_a_warp_for_each_head(kWhole);
  for (i64 length = 0; length <= 70; length += tests_everything() ? 1 : 14) {
    const u32 seed = static_cast<u32>(length);
    RandomProblem random(seed);
    Request request = decode_request(random, DType::kBFloat16, {2, 4, 16, 1, 72, 64, 64});
    set_two_lengths(random, request, length, 72);
    expect_oracle<kTwo>(random, request, 1 + static_cast<i32>(length % 5), seed);
    expect_oracle<with_a_warp_for_each_head(kPair)>(random, request, 3, seed);
  }
  RandomProblem random(3);
  Request request = decode_request(random, DType::kFloat16, {3, 2, 16, 1, 133, 64, 64});
  request.arrays[Array::kO] = random.contiguous(DType::kFloat32, {3, 32, 1, 64});
  expect_oracle<kWholes>(random, request, 3, 1);
  expect_oracle<with_a_warp_for_each_head(kFour)>(random, request, 2, 1);
}

// Drafts: several query rows, causal among themselves.
TEST(DecodeSm80, Drafts) {
  for (const i64 q_rows : {2, 3, 4, 5}) {
    RandomProblem random(static_cast<unsigned>(q_rows));
    Request request = decode_request(random, DType::kBFloat16, {3, 2, 4, q_rows, 150});
    request.options.causal = true;
    request.arrays[Array::kKvLengths] = random.indices(DType::kInt64, {150, 2, 97});
    request.arrays[Array::kQLengths] = random.indices(DType::kInt64, {q_rows, 2, q_rows - 1});
    request.arrays[Array::kSinks] = random.contiguous(DType::kFloat32, {8});
    random.fill_normal(request.arrays[Array::kSinks]);
    expect_oracle<kSixteen>(random, request, 7, static_cast<u32>(q_rows));
    if (q_rows <= 4) expect_oracle<kTwoColumns>(random, request, 7, static_cast<u32>(q_rows));
  }
}

// Two warps share keys; rows of different windows.
TEST(DecodeSm80, WindowOfThirtyTwoRows) {
  for (const i64 left : {0, 5, 40}) {
    RandomProblem random(static_cast<unsigned>(left));
    Request request = decode_request(random, DType::kBFloat16, {2, 1, 4, 8, 130});
    request.options.causal = true;
    request.options.window_left = left;
    request.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {130, 61});
    expect_oracle<kThirtyTwo>(random, request, 3, 1);
  }
}

template <DecodeSm80Config kConfig>
void expect_options_of_sixty_four_rows() {
  for (const i64 rows : {13, 20}) {  // one row tile, two
    RandomProblem random(static_cast<unsigned>(rows));
    Request request = decode_request(random, DType::kBFloat16, {2, 1, 4, rows, 100});
    request.options.softcap = 20;
    request.options.window_left = 50;
    request.options.window_right = 3;
    Arrays& arrays = request.arrays;
    arrays[Array::kKvLengths] = random.indices(DType::kInt32, {100, 3});
    arrays[Array::kAlibiSlopes] = random.contiguous(DType::kFloat32, {2, 4});
    random.fill_normal(arrays[Array::kAlibiSlopes], 0.1);
    arrays[Array::kStats] = random.contiguous(DType::kFloat32, {2, 4, rows, 2});
    cpu::scalar_forward(validate(request, Pointers::kChecked));
    const Request actual = with_own_outputs(random, request);
    decode<kConfig>(validate(actual, Pointers::kChecked), 2, 1);
    expect_rounded(actual, request, 1);
    expect_statistics(actual, request);
  }
}
TEST(DecodeSm80, OptionsOfSixtyFourRows) { expect_options_of_sixty_four_rows<kSixtyFour>(); }
TEST(DecodeSm80, OptionsOfAWarpgroup) { expect_options_of_sixty_four_rows<kWarpgroupOptions>(); }

// Packed queries beside packed keys; rows past the last offset are zeros.
TEST(DecodeSm80, PackedSequences) {
  RandomProblem random(5);
  Request request = decode_request(random, DType::kBFloat16, {1, 2, 4, 12, 300});
  Arrays& arrays = request.arrays;
  arrays[Array::kCuQ] = random.indices(DType::kInt32, {0, 4, 4, 5, 8, 9});
  arrays[Array::kCuKv] = random.indices(DType::kInt32, {0, 90, 100, 100, 290, 291});
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO, Array::kLse}) {
    Tensor& tensor = arrays[array];
    for (int axis = 1; axis < tensor.rank; ++axis) {
      tensor.shape[axis - 1] = tensor.shape[axis];
      tensor.strides[axis - 1] = tensor.strides[axis];
    }
    --tensor.rank;
  }
  request.options.max_q = 4;
  request.options.causal = true;
  for (const i32 workers : {1, 4, 11}) {
    expect_oracle<kSixteen>(random, request, workers, static_cast<u32>(workers));
  }
}

// Pools in which the pages of requests lie anywhere and some belong to two; rows that nobody owns
// are NaN, entries that nobody needs are garbage.
struct Pools {
  std::vector<i64> lengths;
  i64 page_rows;
  i64 table_width;
  std::vector<i64> table;  // (request, table_width)

  Pools(RandomProblem& random, i64 page_rows_, std::vector<i64> lengths_)
      : lengths(std::move(lengths_)), page_rows(page_rows_) {
    i64 longest = 1;
    for (const i64 length : lengths) longest = max(longest, length);
    table_width = ceil_div(longest, page_rows) + 1;
    std::vector<i64> ids(static_cast<size_t>(num_pages()));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<i64>(i);
    for (size_t i = ids.size(); i-- > 1;) {
      std::swap(ids[i], ids[static_cast<size_t>(random.number(0, static_cast<i64>(i)))]);
    }
    size_t next = 0;
    for (size_t request = 0; request < lengths.size(); ++request) {
      for (i64 page = 0; page < table_width; ++page) {
        const bool is_used = page * page_rows < lengths[request];
        table.push_back(is_used ? ids[next++] : random.one_of<i64>({-1, 1 << 30, 7}));
      }
    }
    if (lengths.size() > 1 && lengths[0] > 0 && lengths[1] > 0) {
      table[static_cast<size_t>(table_width)] = table[0];  // a shared first page
    }
  }
  // Key `key` of a request becomes NaN.
  void set_nan(const Tensor& pool, i64 request, i64 key) const {
    const i64 page = table[static_cast<size_t>(request * table_width + key / page_rows)];
    RandomProblem::for_each(pool, [&](const i64* at) {
      if (at[0] != page || at[2] != key % page_rows) return;
      store_real(RandomProblem::address(pool, at), pool.dtype, kNan);
    });
  }
  i64 num_pages() const { return static_cast<i64>(lengths.size()) * table_width; }

  void put_into(RandomProblem& random, Request& request, DType dtype, const DecodeShape& shape) {
    Arrays& arrays = request.arrays;
    const i64 pages = num_pages();
    const auto pool = [&](i64 dim) {
      return random.contiguous(dtype, {pages, shape.heads_kv, page_rows, dim});
    };
    arrays[Array::kK] = pool(shape.dim_qk);
    arrays[Array::kV] = pool(shape.dim_v);
    for (const Array array : {Array::kK, Array::kV}) {
      for (size_t at = 0; at < table.size(); ++at) {
        const i64 request_at = static_cast<i64>(at) / table_width;
        const i64 first = static_cast<i64>(at) % table_width * page_rows;
        const i64 rows = lengths[static_cast<size_t>(request_at)] - first;
        if (rows > 0) fill_normal_rows(random, arrays[array], table[at], min(rows, page_rows));
      }
    }
    Tensor ids = random.indices(DType::kInt32, table);
    ids.rank = 2;
    ids.shape[0] = static_cast<i64>(lengths.size());
    ids.shape[1] = ids.strides[0] = table_width;
    ids.strides[1] = 1;
    arrays[Array::kPageTable] = ids;
    arrays[Array::kKvLengths] = random.indices(DType::kInt32, lengths);
  }
};

TEST(DecodeSm80, PagesOfEverySize) {
  for (const i64 page_rows : {1, 3, 16, 17, 64, 200}) {
    RandomProblem random(static_cast<unsigned>(page_rows));
    const DecodeShape shape{4, 2, 4, 3, 1};
    Request request = decode_request(random, DType::kBFloat16, shape);
    request.options.causal = true;
    Pools pools(random, page_rows, {77, 130, 0, 5});
    pools.put_into(random, request, DType::kBFloat16, shape);
    if (page_rows % 2 == 1) {
      request.arrays[Array::kKvStart] = random.indices(DType::kInt64, {3, 40, 0, 5});
    }
    for (const i32 workers : {1, 3, 14}) {
      if (page_rows % 2 == 1) {
        expect_oracle<kPaged>(random, request, workers, 1);
      } else {
        expect_oracle<kPagedByLength>(random, request, workers, 1);
        expect_oracle<kPagedInOneStage>(random, request, workers, 1);
      }
    }
    if (page_rows % 2 == 0) expect_oracle<kPagedPair>(random, request, 3, 1);
  }
}

TEST(DecodeSm80, PagesOfAWarpForEachHead) {
  for (const i64 page_rows : {1, 3, 16, 64}) {
    RandomProblem random(static_cast<unsigned>(page_rows));
    const DecodeShape shape{4, 2, 16, 1, 1, 64, 64};
    Request request = decode_request(random, DType::kBFloat16, shape);
    Pools pools(random, page_rows, {77, 130, 0, 5});
    pools.put_into(random, request, DType::kBFloat16, shape);
    expect_oracle<with_a_warp_for_each_head(kPagedWhole)>(random, request, 3, 1);
  }
}

// By boxes of 16 rows, of which a step has four; and of 32 in pages of 32.
TEST(DecodeSm80, PagesOfAWarpgroup) {
  for (const i64 page_rows : {16, 48, 64}) {
    for (const i64 length : {1, 77, 112}) {
      RandomProblem random(static_cast<unsigned>(page_rows + length));
      const DecodeShape shape{4, 2, 8, 3, 1, 64, 64};
      Request request = decode_request(random, DType::kBFloat16, shape);
      request.options.causal = true;
      Pools pools(random, page_rows, {length, 130, 0, 5});
      pools.put_into(random, request, DType::kBFloat16, shape);
      expect_oracle<kWarpgroupPages>(random, request, 3, 1);
      expect_oracle<in_warpgroups(kPagedByLength)>(random, request, 14, 1);
    }
  }
}

TEST(DecodeSm80, PagesByOffsets) {
  RandomProblem random(4);
  const DecodeShape shape{3, 1, 2, 1, 1};
  Request request = decode_request(random, DType::kBFloat16, shape);
  Pools pools(random, 5, {33, 0, 61});
  pools.put_into(random, request, DType::kBFloat16, shape);
  Arrays& arrays = request.arrays;
  arrays[Array::kPageIndptr] = random.indices(
      DType::kInt32, {0, pools.table_width, 2 * pools.table_width, 3 * pools.table_width});
  arrays[Array::kPageTable] = random.indices(DType::kInt64, pools.table);
  request.options.max_kv = 70;
  expect_oracle<kPaged>(random, request, 4, 1);
}

// One request of a batch.
Request request_alone(const Request& batch, i64 index) {
  Request alone = batch;
  for (const Array array :
       {Array::kQ, Array::kO, Array::kLse, Array::kPageTable, Array::kKvLengths}) {
    Tensor& tensor = alone.arrays[array];
    const i64 at[kMaxRank] = {index, 0, 0, 0};
    tensor.data = RandomProblem::address(tensor, at);
    tensor.shape[0] = 1;
  }
  return alone;
}

// With chunks the bits of a request do not depend on its neighbours, its place or the grid.
template <DecodeSm80Config kConfig>
void expect_bits_of_a_request(const DecodeShape& shape) {
  RandomProblem random(12);
  Request batch = decode_request(random, DType::kBFloat16, shape);
  batch.options.causal = true;
  batch.options.window_left = 150;
  Pools pools(random, 16, {77, 130, 0, 5, 200});
  pools.put_into(random, batch, DType::kBFloat16, shape);
  for (const i32 workers : {1, 4, 13}) {
    expect_oracle<kConfig>(random, batch, workers, static_cast<u32>(workers));
    const Request together = with_own_outputs(random, batch);
    decode<kConfig>(validate(together, Pointers::kChecked), workers, 1);
    for (i64 index = 0; index < shape.batch; ++index) {
      const Request one = request_alone(together, index);
      const Request alone = with_own_outputs(random, one);
      decode<kConfig>(validate(alone, Pointers::kChecked), 1 + workers % 3, 2, false);
      for (const Array array : {Array::kO, Array::kLse}) {
        const Tensor &x = alone.arrays[array], &y = one.arrays[array];
        i64 elements = 1;
        for (int axis = 0; axis < x.rank; ++axis) elements *= x.shape[axis];
        EXPECT_EQ(std::memcmp(x.data, y.data, static_cast<size_t>(elements * size_bytes(x.dtype))),
                  0)
            << "request " << index << ", " << workers << " workers, " << name(array);
      }
    }
  }
}
TEST(DecodeSm80, ChunksMakeBitsARequestsOwn) { expect_bits_of_a_request<kChunks>({5, 2, 4, 3, 1}); }
TEST(DecodeSm80, ChunksOfAWarpgroup) {
  expect_bits_of_a_request<kWarpgroupChunks>({5, 1, 16, 3, 1});
}

// Rows that see a key without a page are empty, all others what they are: row i of the first
// request sees keys up to 87 + i, and page 11 holds those from 88 on.
TEST(DecodeSm80, PagesThatDoNotExist) {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  for (const i64 id : {i64{-1}, i64{1} << 40}) {
    for (const size_t entry : {size_t{3}, size_t{11}}) {
      RandomProblem random(8);
      const DecodeShape shape{2, 2, 4, 3, 1};
      Request request = decode_request(random, DType::kBFloat16, shape);
      request.options.causal = true;
      Pools pools(random, 8, {90, 100});
      pools.put_into(random, request, DType::kBFloat16, shape);
      cpu::scalar_forward(validate(request, Pointers::kChecked));
      const Request expected = request;
      const i64 first = entry == 3 ? 0 : 1;  // of the rows that see its keys
      RandomProblem::for_each(expected.arrays[Array::kO], [&](const i64* at) {
        if (at[0] != 0 || at[2] < first) return;
        store_real(RandomProblem::address(expected.arrays[Array::kO], at), DType::kBFloat16, 0);
      });
      RandomProblem::for_each(expected.arrays[Array::kLse], [&](const i64* at) {
        if (at[0] != 0 || at[2] < first) return;
        store_real(RandomProblem::address(expected.arrays[Array::kLse], at), DType::kFloat32,
                   kNothing);
      });
      std::vector<i64> table = pools.table;
      table[entry] = id;
      Tensor& ids = request.arrays[Array::kPageTable];
      ids.dtype = DType::kInt64;
      ids.data = random.indices(DType::kInt64, table).data;
      const Request actual = with_own_outputs(random, request);
      FaultBytes faults{};
      decode<kPaged>(validate(actual, Pointers::kChecked), 5, 1, true, &faults);
      EXPECT_EQ(faults.bits(), u32{kFaultPages});
      expect_rounded(actual, expected, 1);
    }
  }
}

// Where rows see all keys of their request it is empty, and no other, whatever is copied to the
// same place behind it.
TEST(DecodeSm80, APageThatDoesNotExistIsNoOtherRequests) {
  for (const i32 workers : {1, 3}) {
    RandomProblem random(8);
    const DecodeShape shape{3, 2, 4, 1, 1};
    Request request = decode_request(random, DType::kBFloat16, shape);
    Pools pools(random, 8, {90, 40, 100});
    pools.put_into(random, request, DType::kBFloat16, shape);
    Request expected = request;
    static_cast<i32*>(expected.arrays[Array::kKvLengths].data)[0] = 0;
    cpu::scalar_forward(validate(expected, Pointers::kChecked));
    static_cast<i32*>(expected.arrays[Array::kKvLengths].data)[0] = 90;
    std::vector<i64> table = pools.table;
    table[3] = -1;
    request.arrays[Array::kPageTable].data = random.indices(DType::kInt32, table).data;
    const Request actual = with_own_outputs(random, request);
    FaultBytes faults{};
    decode<kPagedWhole>(validate(actual, Pointers::kChecked), workers, 1, true, &faults);
    EXPECT_EQ(faults.bits(), u32{kFaultPages});
    expect_rounded(actual, expected, 1);
  }
}

// Entries that no request can have: it is empty, and the host is told.
TEST(DecodeSm80, EntriesOutOfRange) {
  struct Entry {
    Array array;
    i64 value;
    u32 fault;
  };
  for (const Entry& entry : {Entry{Array::kKvLengths, -1, kFaultKvLengths},
                             {Array::kKvLengths, 151, kFaultKvLengths},
                             {Array::kQLengths, -1, kFaultQLengths},
                             {Array::kQLengths, 5, kFaultQLengths},
                             {Array::kKvStart, 98, kFaultKvLengths}}) {
    RandomProblem random(6);
    Request request = decode_request(random, DType::kBFloat16, {3, 2, 4, 4, 150});
    request.options.causal = true;
    Arrays& arrays = request.arrays;
    arrays[Array::kKvLengths] = random.indices(DType::kInt64, {150, 97, 60});
    arrays[Array::kQLengths] = random.indices(DType::kInt64, {4, 4, 2});
    arrays[Array::kKvStart] = random.indices(DType::kInt64, {0, 3, 0});
    Request empty = request;
    empty.arrays[Array::kKvStart] = random.indices(DType::kInt64, {0, 0, 0});
    if (entry.array == Array::kQLengths) {
      empty.arrays[Array::kQLengths] = random.indices(DType::kInt64, {4, 0, 2});
    } else {
      empty.arrays[Array::kKvLengths] = random.indices(DType::kInt64, {150, 0, 60});
    }
    cpu::scalar_forward(validate(empty, Pointers::kChecked));
    static_cast<i64*>(arrays[entry.array].data)[1] = entry.value;
    const Request actual = with_own_outputs(random, request);
    FaultBytes faults{};
    decode<kSixteen>(validate(actual, Pointers::kChecked), 4, 1, true, &faults);
    EXPECT_EQ(faults.bits(), entry.fault);
    expect_rounded(actual, empty, 1);
  }
}

// The same where lengths are all that there is.
TEST(DecodeSm80, LengthsOutOfRange) {
  for (const i64 length : {i64{-1}, i64{41}, i64{1} << 40}) {
    RandomProblem random(6);
    Request request = decode_request(random, DType::kBFloat16, {3, 1, 4, 1, 40});
    Tensor& lengths = request.arrays[Array::kKvLengths];
    lengths = random.indices(DType::kInt64, {40, 0, 17});
    cpu::scalar_forward(validate(request, Pointers::kChecked));
    static_cast<i64*>(lengths.data)[1] = length;
    const Request actual = with_own_outputs(random, request);
    FaultBytes faults{};
    decode<kPadded>(validate(actual, Pointers::kChecked), 2, 1, true, &faults);
    EXPECT_EQ(faults.bits(), u32{kFaultKvLengths});
    expect_rounded(actual, request, 1);
  }
}

// More sequences than a block has threads to count them, some without keys.
TEST(DecodeSm80, MoreSequencesThanThreads) {
  RandomProblem random(8);
  Request request = decode_request(random, DType::kBFloat16, {150, 1, 2, 1, 40});
  std::vector<i64> lengths(150);
  for (i64& length : lengths) length = random.chance(0.2) ? 0 : random.number(1, 40);
  request.arrays[Array::kKvLengths] = random.indices(DType::kInt32, lengths);
  static_assert(kPadded.threads() < 75);
  expect_oracle<kPadded>(random, request, 7, 1);
}

// A position beyond 32 bits counts as the nearest inside.
TEST(DecodeSm80, PositionsBeyond32Bits) {
  for (const i64 position : {i64{1} << 62, -(i64{1} << 40)}) {
    RandomProblem random(7);
    const DecodeShape shape{2, 1, 4, 2, 1};
    Request request = decode_request(random, DType::kBFloat16, shape);
    Pools pools(random, 16, {70, 33});
    pools.put_into(random, request, DType::kBFloat16, shape);
    request.options.causal = true;
    Arrays& arrays = request.arrays;
    const i64 nearest = position > 0 ? kMaxPosition : -kMaxPosition - 1;
    const auto put = [&](Array array, std::vector<i64> values) {
      Tensor& tensor = arrays[array] = random.indices(DType::kInt64, std::move(values));
      tensor.rank = 2;
      tensor.shape[0] = tensor.shape[1] = tensor.strides[0] = 2;
      tensor.strides[1] = 1;
    };
    put(Array::kTree, {3, 3, 3, 3});
    put(Array::kPositions, {30, nearest, 3, 4});
    cpu::scalar_forward(validate(request, Pointers::kChecked));
    const Request expected = request;
    put(Array::kPositions, {30, position, 3, 4});
    const Request actual = with_own_outputs(random, request);
    FaultBytes faults{};
    decode<kPlaced>(validate(actual, Pointers::kChecked), 3, 1, true, &faults);
    EXPECT_EQ(faults.bits(), u32{kFaultPositions});
    expect_rounded(actual, expected, 1);
  }
}

// A tree of drafts: rows stand where the array says and see what their words say.
TEST(DecodeSm80, Trees) {
  for (const i64 q_rows : {1, 5, 8}) {
    RandomProblem random(static_cast<unsigned>(q_rows));
    const DecodeShape shape{2, 1, 4, q_rows, 1};
    Request request = decode_request(random, DType::kBFloat16, shape);
    Pools pools(random, 16, {70, q_rows + 1});
    pools.put_into(random, request, DType::kBFloat16, shape);
    Arrays& arrays = request.arrays;
    std::vector<i64> words, places;
    for (i64 at = 0; at < 2 * q_rows; ++at) {
      const i64 i = at % q_rows;
      const i64 hidden = q_rows > 1 ? i64{1} << (q_rows - 2) : 0;  // a key that no row sees
      words.push_back((random.number(0, (i64{1} << q_rows) - 1) | i64{1} << i) & ~hidden);
      places.push_back(pools.lengths[static_cast<size_t>(at / q_rows)] - q_rows + i / 2);
    }
    for (const auto& [array, values] :
         {std::pair{Array::kTree, words}, std::pair{Array::kPositions, places}}) {
      Tensor tensor = random.indices(DType::kInt64, values);
      tensor.rank = 2;
      tensor.shape[0] = 2;
      tensor.shape[1] = tensor.strides[0] = q_rows;
      tensor.strides[1] = 1;
      arrays[array] = tensor;
    }
    if (q_rows > 1) pools.set_nan(arrays[Array::kV], 0, 70 - 2);
    arrays[Array::kAlibiSlopes] = random.contiguous(DType::kFloat32, {2, 4});
    random.fill_normal(arrays[Array::kAlibiSlopes], 0.1);
    request.options.causal = true;
    request.options.window_left = 50;
    expect_oracle<kDrafted>(random, request, 3, 1);
  }
}

// Without positions: rows and drafts stand at the end of the keys.
TEST(DecodeSm80, TreesAtTheEnd) {
  RandomProblem random(4);
  const DecodeShape shape{2, 1, 4, 3, 1};
  Request request = decode_request(random, DType::kBFloat16, shape);
  Pools pools(random, 16, {70, 20});
  pools.put_into(random, request, DType::kBFloat16, shape);
  Tensor& words = request.arrays[Array::kTree];
  words = random.indices(DType::kInt64, {7, 7, 5, 1, 6, 7});  // 4: a draft beyond the row
  words.rank = 2;
  words.shape[0] = 2;
  words.shape[1] = words.strides[0] = 3;
  words.strides[1] = 1;
  request.options.causal = true;
  expect_oracle<kTreeAlone>(random, request, 3, 1);
}

// Keys and values of 8 bits: a request of every page form and length, and drafts.
template <DType kDType, DType kQuantised, bool kScaled, bool kConverts = false>
void expect_bytes(i64 page_rows) {
  RandomProblem random(static_cast<unsigned>(page_rows));
  const DecodeShape shape{4, 2, 4, 2, 1};
  Request wide = decode_request(random, kDType, shape);
  wide.options.causal = true;
  Pools pools(random, page_rows, {77, 130, 0, 5});
  pools.put_into(random, wide, kDType, shape);
  const Request request = with_bytes(random, wide, kQuantised, kScaled);
  for (const i32 workers : {1, 3, 14}) {
    expect_oracle<of_bytes(kPagedByLength, kDType, kQuantised, kScaled, kConverts)>(random, request,
                                                                                    workers, 1);
  }
}

TEST(DecodeSm80, PagesOfBytes) {
  for (const i64 page_rows : {1, 3, 16, 64}) {
    expect_bytes<kBF16, kE4M3, true>(page_rows);
    expect_bytes<kF16, kE4M3, true, true>(page_rows);
    expect_bytes<kBF16, kE5M2, false>(page_rows);
    expect_bytes<kF16, kE5M2, true>(page_rows);
    expect_bytes<kBF16, kInt8, true>(page_rows);
    expect_bytes<kF16, kInt8, false>(page_rows);
  }
}

TEST(DecodeSm80, LengthsOfBytes) {
  for (i64 length = 0; length <= 70; length += 7) {
    RandomProblem random(static_cast<unsigned>(length));
    Request wide = decode_request(random, kBF16, {2, 2, 1 + length % 8, 1, 72});
    wide.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {length, 72 - length});
    expect_oracle<with_one_query(of_bytes(kPadded, kBF16, kE4M3, true, true))>(
        random, with_bytes(random, wide, kE4M3, true), 1 + static_cast<i32>(length % 9), 1);
    expect_oracle<of_bytes(kPadded, kBF16, kInt8, false)>(
        random, with_bytes(random, wide, kInt8, false), 3, 1);
    if (length % 2 != 0) continue;
    Request of_keys = with_bytes(random, wide, kE4M3, true);
    of_keys.arrays[Array::kVScale] = {};
    expect_oracle<of_bytes(kPadded, kBF16, kE4M3, true)>(random, of_keys, 2, 1);
  }
}

// Queries beyond the ends of float16, and scales that differ by more than it has room for.
TEST(DecodeSm80, BytesOfFarQueriesAndScales) {
  for (const double factor : {0x1p100, 0x1p-100}) {
    RandomProblem random(5);
    Request wide = decode_request(random, kBF16, {2, 2, 3, 1, 72});
    wide.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {72, 40});
    const Tensor& q = wide.arrays[Array::kQ];
    RandomProblem::for_each(q, [&](const i64* at) {
      char* const element = RandomProblem::address(q, at);
      const double row = at[1] % 2 == 0 ? factor : 1;  // beside rows of another size
      store_real(element, q.dtype, load_real(element, q.dtype) * row);
    });
    Request request = with_bytes(random, wide, kE4M3, true);
    const Tensor& v_scale = request.arrays[Array::kVScale];
    RandomProblem::for_each(v_scale, [&](const i64* at) {
      char* const element = RandomProblem::address(v_scale, at);
      const double size = at[2] == 50 ? 0x1p40 : at[2] % 8 == 0 ? 0x1p-40 : 0x1p20;
      store_real(element, v_scale.dtype, load_real(element, v_scale.dtype) * size);
    });
    request.options.scale = 0.1 / factor;
    expect_oracle<with_one_query(of_bytes(kPadded, kBF16, kE4M3, true, true))>(random, request, 3,
                                                                               1);
  }
}

TEST(DecodeSm80, BytesBesideMappedScores) {
  RandomProblem random(5);
  Request wide = decode_request(random, kBF16, {2, 2, 3, 1, 72});
  Arrays& arrays = wide.arrays;
  arrays[Array::kKvLengths] = random.indices(DType::kInt32, {72, 40});
  arrays[Array::kAlibiSlopes] = random.contiguous(DType::kFloat32, {2, 6});
  random.fill_normal(arrays[Array::kAlibiSlopes], 0.1);
  wide.options.softcap = 3;
  expect_oracle<of_bytes(kMapped, kBF16, kE4M3, true, true)>(
      random, with_bytes(random, wide, kE4M3, true), 3, 1);
}

void set_scale(const Request& request, Array array, i64 key, double value) {
  const i64 at[kMaxRank] = {0, 0, key, 0};
  const Tensor& scales = request.arrays[array];
  store_real(RandomProblem::address(scales, at), scales.dtype, value);
}

// A scale that is infinite or NaN makes NaN of its values, for rows that see the key.
TEST(DecodeSm80, ScalesOfBytesThatAreNotFinite) {
  for (const Array array : {Array::kKScale, Array::kVScale}) {
    for (const double scale : {kInfinity<double>, -kInfinity<double>, kNan}) {
      RandomProblem random(3);
      Request wide = decode_request(random, kBF16, {1, 1, 4, 2, 64});
      wide.options.causal = true;
      const Request request = with_bytes(random, wide, kInt8, true);
      set_scale(request, array, 63, scale);  // only the second row sees it
      expect_oracle<of_bytes(kSixteen, kBF16, kInt8, true)>(random, request, 2, 1);
    }
  }
}

// A row's results do not know how large the scales of keys are that only another row sees.
TEST(DecodeSm80, ScalesOfKeysThatOtherRowsSee) {
  RandomProblem random(3);
  Request wide = decode_request(random, kBF16, {1, 1, 8, 2, 64});
  wide.options.causal = true;
  Request request = with_bytes(random, wide, kInt8, true);
  set_scale(request, Array::kVScale, 63, 1e35);
  Request actual = with_own_outputs(random, request);
  cpu::scalar_forward(validate(request, Pointers::kChecked));
  decode<of_bytes(kSixteen, kBF16, kInt8, true)>(validate(actual, Pointers::kChecked), 2, 1);
  expect_rounded(actual, request, 1);
  for (Request* const outputs : {&actual, &request}) outputs->arrays[Array::kO].shape[2] = 1;
  expect_rounded(actual, request, 1);
}

// Values of far larger scales, and then keys beside which those before count for nothing.
TEST(DecodeSm80, ScalesOfKeysThatNoLongerCount) {
  RandomProblem random(3);
  Request wide = decode_request(random, kBF16, {1, 1, 4, 1, 96});
  const auto fill = [&](Array array, const auto& value) {
    const Tensor& tensor = wide.arrays[array];
    RandomProblem::for_each(tensor, [&](const i64* at) {
      store_real(RandomProblem::address(tensor, at), tensor.dtype, value(at[2]));
    });
  };
  fill(Array::kQ, [](i64) { return 1; });
  fill(Array::kK, [](i64 key) { return key < 64 ? -1 : 1; });
  wide.options.scale = 2;
  wide.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {96});
  const Request request = with_bytes(random, wide, kInt8, true);
  for (i64 key = 0; key < 96; ++key) {
    set_scale(request, Array::kKScale, key, 1. / 40);
    set_scale(request, Array::kVScale, key, key < 64 ? 0x1p40 : 0x1p-10);
  }
  Request actual = with_own_outputs(random, request);
  cpu::scalar_forward(validate(request, Pointers::kChecked));
  decode<with_one_query(of_bytes(kPadded, kBF16, kInt8, true))>(
      validate(actual, Pointers::kChecked), 1, 1);
  const Difference difference = compare(actual.arrays[Array::kO], request.arrays[Array::kO]);
  EXPECT_LE(difference.largest, 0.01 * difference.magnitude) << difference.place;
}

// NaN and infinities of 8 bits: rows that see one, and rows that do not.
TEST(DecodeSm80, BytesThatAreNotFinite) {
  for (const Array array : {Array::kK, Array::kV}) {
    for (const DType dtype : {kE4M3, kE5M2}) {
      RandomProblem random(3);
      Request wide = decode_request(random, kBF16, {1, 1, 2, 2, 64});
      wide.options.causal = true;
      Request request = with_bytes(random, wide, dtype, false);
      const i64 last[] = {0, 0, 63, 5};  // only the second row sees it
      *reinterpret_cast<u8*>(RandomProblem::address(request.arrays[array], last)) = 0x7f;
      const Request actual = with_own_outputs(random, request);
      cpu::scalar_forward(validate(request, Pointers::kChecked));
      if (dtype == kE4M3) {
        const Request converted = with_own_outputs(random, request);
        decode<of_bytes(kSixteen, kBF16, kE4M3, false)>(validate(actual, Pointers::kChecked), 2, 1);
        decode<of_bytes(kSixteen, kBF16, kE4M3, false, true)>(
            validate(converted, Pointers::kChecked), 2, 1);
        expect_rounded(converted, request, 1);
      } else {
        decode<of_bytes(kSixteen, kBF16, kE5M2, false)>(validate(actual, Pointers::kChecked), 2, 1);
      }
      expect_rounded(actual, request, 1);
    }
  }
}

// A value that no query sees is NaN, beside keys that are seen: the row is computed again.
TEST(DecodeSm80, HiddenNan) {
  RandomProblem random(3);
  Request request = decode_request(random, DType::kBFloat16, {1, 1, 2, 2, 64});
  request.options.causal = true;
  const i64 last[] = {0, 0, 63, 5};  // only the second row sees it
  store_real(RandomProblem::address(request.arrays[Array::kV], last), DType::kBFloat16, kNan);
  const Request actual = with_own_outputs(random, request);
  cpu::scalar_forward(validate(request, Pointers::kChecked));
  decode<kSixteen>(validate(actual, Pointers::kChecked), 2, 1);
  expect_rounded(actual, request, 1);
}

// Scores far apart between blocks, splits and parts.
TEST(DecodeSm80, ScoresFarApart) {
  for (const double factor : {60., -60., 3000.}) {
    RandomProblem random(9);
    Request request = decode_request(random, DType::kBFloat16, {1, 1, 4, 1, 200});
    request.arrays[Array::kKvLengths] = random.indices(DType::kInt32, {200});
    RandomProblem::for_each(request.arrays[Array::kK], [&](const i64* at) {
      if (at[2] % 37 != 5) return;
      char* const to = RandomProblem::address(request.arrays[Array::kK], at);
      store_real(to, DType::kBFloat16, factor * static_cast<double>(at[2]) / 200 * random.normal());
    });
    expect_oracle<kPadded>(random, request, 5, 1);
  }
}

template <DecodeSm80Config kConfig>
void expect_same_bits_in_every_schedule(i32 workers) {
  RandomProblem random(11);
  Request request = decode_request(random, DType::kBFloat16, {2, 2, 4, 1, 250});
  request.arrays[Array::kKvLengths] = random.indices(DType::kInt64, {250, 249});
  Request first;
  for (u32 seed = 1; seed <= 20; ++seed) {
    const Request actual = with_own_outputs(random, request);
    decode<kConfig>(validate(actual, Pointers::kChecked), workers, seed, is_checked(seed));
    if (seed == 1) first = actual;
    for (const Array array : {Array::kO, Array::kLse}) {
      const Tensor& one = actual.arrays[array];
      i64 elements = 1;
      for (int axis = 0; axis < one.rank; ++axis) elements *= one.shape[axis];
      EXPECT_EQ(std::memcmp(one.data, first.arrays[array].data,
                            static_cast<size_t>(elements * size_bytes(one.dtype))),
                0)
          << "seed " << seed << ", " << name(array);
    }
  }
}

// Whichever block comes last adds the parts in the order of their keys.
TEST(DecodeSm80, BitsDoNotDependOnTheSchedule) {
  expect_same_bits_in_every_schedule<kPadded>(9);
  expect_same_bits_in_every_schedule<kPair>(5);
}

// The law of the division, for every small number of blocks and workers.
TEST(KeyShares, CoverEveryBlockOnceAndEvenly) {
  for (i32 blocks = 1; blocks <= 130; ++blocks) {
    for (i32 workers = 1; workers <= 140; ++workers) {
      const KeyShares shares(blocks, workers);
      EXPECT_LE(shares.num_workers, blocks);
      EXPECT_EQ(shares.begin(0), 0);
      EXPECT_EQ(shares.begin(shares.num_workers), blocks);
      for (i32 worker = 0; worker < shares.num_workers; ++worker) {
        const i32 size = shares.begin(worker + 1) - shares.begin(worker);
        EXPECT_TRUE(size == blocks / shares.num_workers || size == blocks / shares.num_workers + 1);
        for (i32 block = shares.begin(worker); block < shares.begin(worker + 1); ++block) {
          ASSERT_EQ(shares.owner(block), worker) << blocks << " blocks, " << workers << " workers";
        }
      }
    }
  }
}

}  // namespace
}  // namespace fulmen::test
