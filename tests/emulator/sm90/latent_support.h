// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Calls of latent attention for the tests of mla_sm90 and combine_mla on the host, and their runs
// against the scalar oracle. What no query sees is NaN.
#pragma once

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
#include "kernels/mla_sm90/few_rows.cuh"
#include "kernels/mla_sm90/mla_sm90.cuh"
#include "tensor_map.h"

namespace fulmen::test {

struct LatentShape {
  std::vector<i64> lengths;
  i64 heads = 16;
  i64 heads_kv = 1;
  i64 q_rows = 1;
  i64 page_rows = 0;  // 0: no pages
  std::vector<i64> packed = {};
};

inline constexpr MlaSm90Config kOneRow = [] {
  MlaSm90Config config;
  config.schedule.score.varlen = true;
  return config;
}();
// Rows `first` to `last` of an entry or page become numbers; each row `growth` times the one
// before, so that maxima grow.
inline void fill_rows(RandomProblem& random, const Tensor& keys, i64 entry, i64 rows,
                      double growth) {
  RandomProblem::for_each(keys, [&](const i64* at) {
    if (at[0] != entry || at[2] >= rows) return;
    const double x = random.normal() * (1 + growth * static_cast<double>(at[2]));
    store_real(RandomProblem::address(keys, at), keys.dtype, x);
  });
}

inline void add_pages(RandomProblem& random, Request& request, const LatentShape& shape,
                      DType dtype, double growth) {
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

inline Request latent_request(RandomProblem& random, const MlaSm90Config& config,
                              const LatentShape& shape, double growth = 0) {
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
  if (!kConfig.gathers) {
    const i32 box_rows =
        problem.is_paged() ? key_box_rows(arguments.attention, kConfig.keys()) : kConfig.keys();
    arguments.kv = map_of(problem.arrays[Array::kK], box_rows);
  }
  emulator::launch({.blocks = grid,
                    .threads = MlaSm90Config::threads(),
                    .shared_bytes = kConfig.shared_bytes(),
                    .seed = seed,
                    .kernel = "mla_sm90"},
                   [&] { mla_sm90<kConfig>(arguments); });
  const i64 combined = arguments.by_sequence ? problem.num_sequences * problem.heads_kv : workers;
  emulator::launch({.blocks = combined * arguments.row_tiles * arguments.slices,
                    .threads = MlaSm90Config::combine_threads(),
                    .shared_bytes = kConfig.combine_bytes(),
                    .seed = seed,
                    .kernel = "combine_mla"},
                   [&] { combine_mla<kConfig>(arguments); });
}

// A cluster of few_rows.cuh for every row tile.
template <MlaFewRowsConfig kConfig>
void attend_few_rows(const Problem& problem, u32 seed, FaultBytes* faults = nullptr) {
  MlaSm90Arguments arguments = gpu::mla_few_rows_arguments(problem);
  arguments.attention.faults = faults;
  constexpr i32 kCluster = kConfig.common.schedule.cluster;
  const i64 tiles = problem.num_sequences * problem.heads_kv * arguments.row_tiles;
  emulator::launch({.blocks = tiles * kCluster,
                    .threads = MlaFewRowsConfig::threads(),
                    .shared_bytes = kConfig.shared_bytes(),
                    .seed = seed,
                    .kernel = "mla_few_rows",
                    .cluster_size = kCluster},
                   [&] { mla_few_rows<kConfig>(arguments); });
}

// run: of the kernels that are tested, for a problem.
template <class Run>
void expect_latent(RandomProblem& random, const Request& expected, u32 seed, const Run& run) {
  Request actual = expected;
  for (const Array array : {Array::kO, Array::kLse, Array::kStats}) {
    const Tensor& given = expected.arrays[array];
    if (!given.present()) continue;
    actual.arrays[array] = random.contiguous(given.dtype, {given.shape, given.shape + given.rank});
  }
  cpu::scalar_forward(validate(expected, Pointers::kChecked));
  run(validate(actual, Pointers::kChecked));
  expect_rounded(actual, expected, seed);
}
template <MlaSm90Config kConfig>
void expect_latent(RandomProblem& random, const Request& expected, i64 workers, u32 seed) {
  expect_latent(random, expected, seed,
                [&](const Problem& problem) { attend<kConfig>(problem, workers, seed); });
}

}  // namespace fulmen::test
