// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// forward_sm90 on the emulator, for problems: from a Problem through the tensor maps and params
// that a run would launch with. And what its rows are judged by.
#pragma once

#include "../../gpu/kernels/expect_close.h"
#include "cpu/backend.h"
#include "emulator/expressions.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "gpu/forward_sm90/plan.h"
#include "kernels/common/documents_sm90.cuh"
#include "kernels/forward_sm90/forward_sm90.cuh"
#include "tensor_map.h"

namespace fulmen::test {

// Returns how many products of matrices it took, if they are to be counted.
template <ForwardSm90Config kConfig>
u64 run_forward(const Problem& problem, u32 seed, bool counts = false,
                FaultBytes* faults = nullptr) {
  u32 next_block = 0;
  emulator::Counters counters;
  const auto map = [&](Array array, i32 box_rows) {
    gpu::TensorBox box = gpu::tensor_box(problem.arrays[array], box_rows);
    box.swizzle = kConfig.swizzle;
    if (!kConfig.swizzle && array != Array::kO) box.box_dims = 8;
    return map_of(box);
  };
  ForwardArguments arguments{};
  arguments.params = gpu::forward_sm90_params(problem, kConfig, gpu_named("h100"));
  const i32 page_rows =
      kConfig.paged ? key_box_rows(arguments.params.attention, kConfig.kv_rows) : 0;
  arguments.maps = {map(Array::kQ, kConfig.tile_rows()),
                    map(Array::kK, kConfig.paged ? page_rows : kConfig.own_keys()),
                    map(Array::kV, kConfig.paged ? page_rows : kConfig.kv_rows),
                    map(Array::kO, 64),
                    {},
                    {}};
  const auto map_pairs = [&](Array array) {
    return map_of(gpu::pair_box(problem, array, kConfig.q_rows(), 64));
  };
  if (kConfig.tiled_bias) arguments.maps.bias = map_pairs(Array::kBias);
  if (kConfig.tiled_mask) arguments.maps.mask = map_pairs(Array::kMask);
  arguments.params.next_block = &next_block;
  arguments.params.attention.faults = faults;
  std::vector<IdRange> key_ranges(gpu::num_key_ranges(problem, kConfig));
  arguments.params.key_ranges = key_ranges.data();
  if (kConfig.skips_documents) {
    const i64 blocks = ceil_div(static_cast<i64>(key_ranges.size()), kKeyRangeThreads);
    emulator::launch(
        {static_cast<i32>(blocks), kKeyRangeThreads, 0, seed, false, "document_ranges_sm90"},
        [&] { document_ranges_sm90<kConfig>(arguments); });
  }
  std::vector<u32> words;
  if constexpr (kConfig.score.has_tile_lists()) {
    const gpu::TileShape shape{kConfig.q_rows(), kConfig.kv_rows, false};
    TileListsParams lists = gpu::tile_lists_params(problem, shape);
    words.assign(static_cast<size_t>(gpu::tile_lists_bytes(problem, lists)) / 4, 0xa5a5a5a5u);
    lists.lists.words = words.data();
    lists.attention.faults = faults;
    fill_lists<false, kConfig>(problem, lists, shape, seed);
    arguments.params.tile_lists = lists.lists;
  }
  const auto all = before_expression(problem, arguments, faults);
  const i64 blocks = min<i64>(gpu::max_work_tiles(problem, kConfig), 2) * kConfig.blocks_of_tile();
  emulator::launch({.blocks = blocks,
                    .threads = kConfig.threads(),
                    .shared_bytes = kConfig.shared_bytes(),
                    .seed = seed,
                    .kernel = "forward_sm90",
                    .check = is_sampled(seed),
                    .counters = counts ? &counters : nullptr,
                    .cluster_size = kConfig.blocks_of_tile()},
                   [&] { forward_sm90<kConfig>(all.params); });
  EXPECT_EQ(next_block, 0u) << "the next launch would begin elsewhere";
  return counters.products;
}

// What stats say of a row's lse.
inline void expect_same_lse(const Request& request, unsigned seed) {
  const Tensor& lse = request.arrays[Array::kLse];
  const Tensor& stats = request.arrays[Array::kStats];
  if (!stats.present()) return;
  RandomProblem::for_each(lse, [&](const i64* at) {
    i64 place[4] = {at[0], at[1], lse.rank == 2 ? 0 : at[2], 0};
    const double row_max = load_real(RandomProblem::address(stats, place), DType::kFloat32);
    place[lse.rank] = 1;
    const double row_sum = load_real(RandomProblem::address(stats, place), DType::kFloat32);
    const double expected = load_real(RandomProblem::address(lse, at), DType::kFloat32);
    const double found = row_max + std::log(row_sum);
    const bool same = found == expected || (std::isnan(found) && std::isnan(expected));
    EXPECT_TRUE(same || std::abs(found - expected) < 1e-5 * (1 + std::abs(expected)))
        << "seed " << seed << ": " << row_max << ", " << row_sum << " for " << expected;
  });
}

// O is as wrong as probabilities rounded to 16 bits make it, however wide it is stored.
inline void expect_close_rows(const Request& actual, const Request& expected, unsigned seed) {
  const DType dtype = expected.arrays[Array::kQ].dtype;
  const Difference o = compare(actual.arrays[Array::kO], expected.arrays[Array::kO]);
  EXPECT_LE(o.largest, tolerance(dtype, dtype) * max(o.magnitude, 1.0))
      << "seed " << seed << ", o" << o.place;
  expect_close(actual, expected, {Array::kLse}, seed);
  expect_same_lse(actual, seed);
}

template <ForwardSm90Config kConfig>
void expect_agreement(const Request& expected, RandomProblem& random, unsigned seed) {
  Request actual = expected;
  for (const Array output : {Array::kO, Array::kLse, Array::kStats}) {
    actual.arrays[output] = random.twin(expected.arrays[output]);
  }
  const Problem problem = validate(expected, Pointers::kChecked);
  check_lengths(problem);
  check_pages(problem);
  cpu::scalar_forward(problem);
  const Request given = seed % 2 == 0 ? with_rng_array(random, actual) : actual;
  run_forward<kConfig>(validate(given, Pointers::kChecked), seed);
  expect_close_rows(actual, expected, seed);
  for (const Array output : {Array::kO, Array::kLse, Array::kStats}) {
    EXPECT_TRUE(random.is_intact_around(actual.arrays[output]))
        << "seed " << seed << ", " << name(output);
  }
}

}  // namespace fulmen::test
