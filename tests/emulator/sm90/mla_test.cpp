// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// mla_sm90 and combine_mla on the host, against the scalar oracle: any number of rows, lengths at
// the ends of halves and blocks of keys, pages, grids that cut row tiles anywhere, maxima that grow
// from block to block, rows that see no key or a key without a page. What no query sees is NaN.
#include <algorithm>
#include <numeric>

#include "../../gpu/kernels/expect_close.h"
#include "cpu/backend.h"
#include "cpu/random_problem.h"
#include "cpu/tiled_support.h"
#include "emulator/launch.h"
#include "gpu/mla_sm90/plan.h"
#include "kernels/forward_sm90/config.h"
#include "kernels/mla_sm90/combine.cuh"
#include "kernels/mla_sm90/mla_sm90.cuh"
#include "tensor_map.h"

namespace fulmen::test {
namespace {

struct LatentShape {
  std::vector<i64> lengths;
  i64 heads = 16;
  i64 heads_kv = 1;
  i64 q_rows = 1;
  i64 page_rows = 0;  // 0: no pages
  std::vector<i64> packed = {};
};

constexpr MlaSm90Config kOneRow = [] {
  MlaSm90Config config;
  config.schedule.score.varlen = true;
  return config;
}();
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

// Rows `first` to `last` of an entry or page become numbers; each row `growth` times the one
// before, so that maxima grow.
void fill_rows(RandomProblem& random, const Tensor& keys, i64 entry, i64 rows, double growth) {
  RandomProblem::for_each(keys, [&](const i64* at) {
    if (at[0] != entry || at[2] >= rows) return;
    const double x = random.normal() * (1 + growth * static_cast<double>(at[2]));
    store_real(RandomProblem::address(keys, at), keys.dtype, x);
  });
}

void add_pages(RandomProblem& random, Request& request, const LatentShape& shape, DType dtype,
               double growth) {
  const i64 batch = static_cast<i64>(shape.lengths.size());
  const i64 longest = *std::max_element(shape.lengths.begin(), shape.lengths.end());
  const i64 width = max<i64>(1, ceil_div(longest, shape.page_rows));
  Arrays& arrays = request.arrays;
  arrays[Array::kK] = random.contiguous(
      dtype, {batch * width, shape.heads_kv, shape.page_rows, MlaSm90Config::kDims});
  std::vector<i64> table(static_cast<size_t>(batch * width), i64{1} << 30);
  for (i64 b = 0; b < batch; ++b) {
    const i64 length = shape.lengths[static_cast<size_t>(b)];
    for (i64 page = 0; page * shape.page_rows < length; ++page) {
      const i64 id = batch * width - 1 - (b * width + page);
      table[static_cast<size_t>(b * width + page)] = id;
      const i64 rows = min(shape.page_rows, length - page * shape.page_rows);
      fill_rows(random, arrays[Array::kK], id, rows, growth);
    }
  }
  Tensor& page_table = arrays[Array::kPageTable] = random.indices(DType::kInt32, table);
  page_table.rank = 2;
  page_table.shape[0] = batch;
  page_table.shape[1] = page_table.strides[0] = width;
  page_table.strides[1] = 1;
}

Request latent_request(RandomProblem& random, const MlaSm90Config& config, const LatentShape& shape,
                       double growth = 0) {
  const DecodeSm80Config& schedule = config.schedule;
  Request request;
  Arrays& arrays = request.arrays;
  const i64 batch = static_cast<i64>(shape.lengths.size());
  const bool is_packed = !shape.packed.empty();
  const i64 all_rows = std::accumulate(shape.packed.begin(), shape.packed.end(), i64{0}) + 2;
  const auto of_queries = [&](DType dtype, std::vector<i64> dims) {
    std::vector<i64> extents{batch, shape.heads, shape.q_rows};
    if (is_packed) extents = {shape.heads, all_rows};
    extents.insert(extents.end(), dims.begin(), dims.end());
    return random.contiguous(dtype, extents);
  };
  const DType o_dtype = schedule.score.fp32_out ? DType::kFloat32 : schedule.dtype;
  arrays[Array::kQ] = of_queries(schedule.dtype, {MlaSm90Config::kDims});
  arrays[Array::kO] = of_queries(o_dtype, {512});
  arrays[Array::kLse] = of_queries(DType::kFloat32, {});
  if (schedule.score.stats) arrays[Array::kStats] = of_queries(DType::kFloat32, {2});
  random.fill_normal(arrays[Array::kQ]);
  if (shape.page_rows > 0) {
    add_pages(random, request, shape, schedule.dtype, growth);
  } else {
    const i64 rows = *std::max_element(shape.lengths.begin(), shape.lengths.end());
    arrays[Array::kK] =
        random.contiguous(schedule.dtype, {batch, shape.heads_kv, rows, MlaSm90Config::kDims});
    for (i64 b = 0; b < batch; ++b) {
      fill_rows(random, arrays[Array::kK], b, shape.lengths[static_cast<size_t>(b)], growth);
    }
  }
  arrays[Array::kV] = arrays[Array::kK];
  arrays[Array::kV].shape[3] = 512;
  if (schedule.score.varlen) {
    arrays[Array::kKvLengths] = random.indices(DType::kInt32, shape.lengths);
  }
  if (is_packed) {
    std::vector<i64> offsets{0};
    for (const i64 rows : shape.packed) offsets.push_back(offsets.back() + rows);
    arrays[Array::kCuQ] = random.indices(DType::kInt32, offsets);
    request.options.max_q = *std::max_element(shape.packed.begin(), shape.packed.end());
  }
  request.options.causal = schedule.score.mask_kind != MaskKind::kNone;
  if (schedule.score.mask_kind == MaskKind::kBoth) request.options.window_left = 90;
  request.options.scale = 0.07;
  return request;
}

template <MlaSm90Config kConfig>
void attend(const Problem& problem, i64 workers, u32 seed, FaultBytes* faults = nullptr) {
  MlaSm90Arguments arguments = gpu::mla_sm90_arguments(problem, workers);
  arguments.slices = workers % 2 == 0 ? 8 : 2;
  const i64 grid = workers * arguments.row_tiles;
  std::vector<float> parts(static_cast<size_t>(2 * grid * MlaSm90Config::part_floats()) + 4,
                           std::nanf(""));
  arguments.parts = reinterpret_cast<float*>((reinterpret_cast<u64>(parts.data()) + 15) / 16 * 16);
  arguments.attention.faults = faults;
  const i32 box_rows = problem.is_paged() ? key_box_rows(arguments.attention, MlaSm90Config::kKeys)
                                          : MlaSm90Config::kKeys;
  arguments.kv = map_of(problem.arrays[Array::kK], box_rows);
  emulator::launch({.blocks = grid,
                    .threads = MlaSm90Config::threads(),
                    .shared_bytes = MlaSm90Config::shared_bytes(),
                    .seed = seed,
                    .kernel = "mla_sm90"},
                   [&] { mla_sm90<kConfig>(arguments); });
  const i64 combined = arguments.by_sequence ? problem.num_sequences * problem.heads_kv : workers;
  emulator::launch({.blocks = combined * arguments.row_tiles * arguments.slices,
                    .threads = MlaSm90Config::combine_threads(),
                    .shared_bytes = MlaSm90Config::combine_bytes(),
                    .seed = seed,
                    .kernel = "combine_mla"},
                   [&] { combine_mla<kConfig>(arguments); });
}

template <MlaSm90Config kConfig>
void expect_latent(RandomProblem& random, const Request& expected, i64 workers, u32 seed) {
  Request actual = expected;
  for (const Array array : {Array::kO, Array::kLse, Array::kStats}) {
    const Tensor& given = expected.arrays[array];
    if (!given.present()) continue;
    actual.arrays[array] = random.contiguous(given.dtype, {given.shape, given.shape + given.rank});
  }
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  attend<kConfig>(validate(actual, Pointers::kChecked), workers, seed);
  const DType dtype = expected.arrays[Array::kQ].dtype;
  const Tensor& o = actual.arrays[Array::kO];
  const Difference difference = compare(o, expected.arrays[Array::kO]);
  const double allowed = tolerance(dtype, o.dtype) + tolerance(dtype, dtype);
  EXPECT_LE(difference.largest, allowed * max(difference.magnitude, 1.0))
      << "seed " << seed << ", o" << difference.place;
  expect_close(actual, expected, {Array::kLse}, seed);
}

TEST(MlaSm90, LengthsAtTheEndsOfHalvesAndBlocks) {
  const std::vector<std::vector<i64>> lengths = {
      {1, 64, 0}, {63, 65, 127}, {128, 129, 192}, {193, 256, 257}};
  for (u32 seed = 0; seed < 4; ++seed) {
    RandomProblem random(seed);
    const Request request = latent_request(random, kOneRow, {lengths[seed], 16});
    expect_latent<kOneRow>(random, request, 1 + seed, seed);
  }
}

TEST(MlaSm90, RowsOfEveryCount) {
  for (const i64 heads : {1, 63, 70}) {
    RandomProblem random(static_cast<unsigned>(heads));
    const Request request = latent_request(random, kCausalLatents, {{150, 9}, heads, 1, 2, 16});
    expect_latent<kCausalLatents>(random, request, 3, 5);
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

// More workers than row tiles, so that each has a block that adds up its parts.
TEST(MlaSm90, SinksOfEqualLengths) {
  RandomProblem random(6);
  Request request = latent_request(random, kAllKeys, {{200, 200, 200}, 32, 2});
  Tensor& sinks = request.arrays[Array::kSinks] = random.contiguous(DType::kFloat32, {32});
  random.fill_normal(sinks, 5);
  expect_latent<kAllKeys>(random, request, 9, 3);
}

// Packed queries, some of no request, over pages of 8 rows, of which a window shows some.
TEST(MlaSm90, PackedQueries) {
  RandomProblem random(3);
  const LatentShape shape{{140, 0, 40, 300}, 24, 1, 0, 8, {3, 1, 0, 2}};
  expect_latent<kPackedLatents>(random, latent_request(random, kPackedLatents, shape), 4, 7);
}

// Each reference grows by more than 2^8 over the one before it; up to three parts of a row tile.
TEST(MlaSm90, MaximaThatGrow) {
  for (u32 seed = 1; seed < 4; ++seed) {
    RandomProblem random(seed);
    const Request request = latent_request(random, kOneRow, {{400}, 16}, 0.2);
    expect_latent<kOneRow>(random, request, seed, seed);
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
