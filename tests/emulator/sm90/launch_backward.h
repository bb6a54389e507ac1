// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper backward on the emulator, for problems: from a Problem through the workspace, the
// tensor maps and the params that a run would launch with. And requests that kernels are for.
#pragma once

#include <stdexcept>

#include "../../cpu/drawn_expression.h"
#include "../../gpu/kernels/hopper_request.h"
#include "gpu/backward_sm90/plan.h"
#include "gpu/params.h"
#include "kernels/backward_sm90/backward_sm90.cuh"
#include "kernels/backward_sm90/fallback.cuh"
#include "kernels/backward_sm90/preprocess.cuh"
#include "kernels/dq_sm90/backward_dq_sm90.cuh"
#include "launch_forward.h"

namespace fulmen::test {

// What a problem is computed by: backward_sm90 and, where dQ is not among its results,
// backward_dq_sm90.
struct Kernels {
  BackwardSm90Config first;
  ForwardSm90Config dq = {};
};

constexpr ForwardSm90Config dq_config(i32 dims, i32 kv_rows, MaskKind mask, bool stats) {
  ForwardSm90Config config{
      .q_slots = 4, .shift_rule = ShiftRule::kWhenGrown, .stage_output = false};
  config.d_qk = config.d_v = dims;
  config.kv_rows = kv_rows;
  config.score.mask_kind = mask;
  config.score.stats = stats;
  return config;
}

// The forward's config of dQ says which options there are.
constexpr Kernels kernels_of(const ForwardSm90Config& dq) {
  BackwardSm90Config config{.dtype = dq.dtype,
                            .dims = dq.d_qk,
                            .q_rows = 64,
                            .dq = false,
                            .register_dims = dq.d_qk > 128 ? 128 : 0,
                            .score = dq.score};
  config.score.sinks = false;
  config.tiled_bias = dq.tiled_bias;
  config.tiled_mask = dq.tiled_mask;
  return {config, dq};
}

// The blocks of a grid, which run one after the other or at the same time.
struct Blocks {
  i32 most = 1;
  bool together = false;
};

// Bias and mask of blocks of 64 queries, or of two warpgroups' 64, as far as they come in tiles.
template <auto kConfig>
void map_pairs(const Problem& problem, u32 keys, BackwardTensorMaps& maps) {
  const i32 rows = keys == 64 ? 128 : 64;
  if (kConfig.tiled_bias) maps.bias = map_of(gpu::pair_box(problem, Array::kBias, rows, keys));
  if (kConfig.tiled_mask) maps.mask = map_of(gpu::pair_box(problem, Array::kMask, rows, keys));
}

template <BackwardSm90Config kConfig>
void launch(const Problem& problem, const BackwardSm90Config& chosen, BackwardParams params,
            u32 seed, const Blocks& blocks) {
  ASSERT_EQ(chosen.dims, kConfig.dims);
  ASSERT_EQ(chosen.score.mask_kind, kConfig.score.mask_kind);
  ASSERT_EQ(chosen.dk, kConfig.dk);
  ASSERT_EQ(chosen.dv, kConfig.dv);
  const Arrays& arrays = problem.arrays;
  params.maps = {map_of(arrays[Array::kQ], kConfig.q_rows),
                 map_of(arrays[Array::kK], kConfig.key_box_rows()),
                 map_of(arrays[Array::kV], kConfig.value_box_rows()),
                 map_of(arrays[Array::kDOut], kConfig.q_rows),
                 map_of(arrays[Array::kDK], 64),
                 kConfig.dv ? map_of(arrays[Array::kDV], 64) : TensorMap{},
                 {},
                 {}};
  map_pairs<kConfig>(problem, 128, params.maps);
  // The last two work tiles in two parts, which a plan does where there are many.
  std::vector<float> part_sums(kConfig.in_clusters() ? size_t{4 * 4 * 64} * kConfig.dims + 4 : 0);
  std::vector<u32> parts_done(8);
  if constexpr (kConfig.in_clusters() && kConfig.splits()) {
    const i32 claims = params.num_kv_blocks / kConfig.tiles_of_claim();
    params.num_split = min(2, params.num_batch_kv_heads() * claims);
    params.num_parts = params.shape.q_len > kConfig.q_rows ? 2 : 1;
    params.part_sums = part_sums.data() + (16 - reinterpret_cast<u64>(part_sums.data()) % 16) / 4;
    params.parts_done = parts_done.data();
  }
  constexpr i32 kPerTile = kConfig.cluster_blocks();
  emulator::Grid grid{(blocks.together ? blocks.most : 1) * kPerTile,
                      kConfig.threads(),
                      kConfig.shared_bytes(),
                      seed,
                      blocks.together,
                      "backward_sm90",
                      is_sampled(seed)};
  grid.cluster_size = kPerTile;
  const auto all = before_expression(problem, params);
  emulator::launch(grid, [&] { backward_sm90<kConfig>(all.params); });
}

template <ForwardSm90Config kConfig>
void launch_dq(const Problem& problem, const ForwardSm90Config& chosen, BackwardDqParams params,
               u32 seed, const Blocks& blocks) {
  ASSERT_EQ(chosen.d_qk, kConfig.d_qk);
  ASSERT_EQ(chosen.kv_rows, kConfig.kv_rows);
  ASSERT_EQ(chosen.score.mask_kind, kConfig.score.mask_kind);
  const Arrays& arrays = problem.arrays;
  params.maps.q = map_of(arrays[Array::kQ], 64);
  params.maps.k = map_of(arrays[Array::kK], kConfig.kv_rows);
  params.maps.v = map_of(arrays[Array::kV], kConfig.kv_rows);
  params.maps.dout = map_of(arrays[Array::kDOut], 64);
  map_pairs<kConfig>(problem, 64, params.maps);
  const auto all = before_expression(problem, params);
  const i64 count = min<i64>(gpu::max_work_tiles(problem, kConfig), blocks.most);
  emulator::launch({static_cast<i32>(count), kConfig.threads(), kConfig.shared_bytes(), seed,
                    blocks.together, "backward_dq_sm90", is_sampled(seed)},
                   [&] { backward_dq_sm90<kConfig>(all.params); });
}

template <i32 kRows, bool kSequences>
void launch_ranges(const ForwardArguments& arguments, i64 count, u32 seed) {
  constexpr ForwardSm90Config kConfig{.kv_rows = kRows, .score = {.varlen = kSequences}};
  const i64 blocks = ceil_div(count, kKeyRangeThreads);
  emulator::launch({static_cast<i32>(blocks), kKeyRangeThreads, 0, seed, false,
                    "document_ranges_sm90", is_sampled(seed)},
                   [&] { document_ranges_sm90<kConfig>(arguments); });
}

// Whether the fallback had something to do: what left float32 is right afterwards all the same.
template <Kernels kKernels>
bool run(const Problem& problem, u32 seed, const Blocks& blocks = {.most = 2}) {
  const Gpu gpu = gpu_named("h100");
  const gpu::PlanOrRefusal made = gpu::plan_backward_sm90(problem, gpu);
  if (made.plan == nullptr) throw std::runtime_error(made.refusal);
  auto& plan = static_cast<gpu::BackwardSm90Plan&>(*made.plan);
  // Which plans choose where there are many heads, or long ones.
  if constexpr (kKernels.first.whole_heads || kKernels.first.shares_loads) {
    plan.configs.main = kKernels.first;
    plan.configs.dq.reset();
    plan.layout = gpu::backward_sm90_layout(problem, plan.configs, gpu);
    plan.set_params(problem, gpu);
    plan.workspace_bytes = static_cast<size_t>(plan.layout.workspace_bytes);
  }
  std::vector<char> memory(static_cast<size_t>(plan.workspace_bytes) + 256, '\xff');
  char* const workspace = memory.data() + (256 - reinterpret_cast<u64>(memory.data()) % 256);

  constexpr BackwardSm90Config kFirst = kKernels.first;
  constexpr BackwardPreprocessConfig kPrepare{.dtype = kFirst.dtype,
                                              .dims = kFirst.dims > 256   ? 512
                                                      : kFirst.dims > 128 ? 256
                                                                          : kFirst.dims,
                                              .score = {.documents = kFirst.score.documents,
                                                        .sinks = kKernels.dq.score.sinks,
                                                        .varlen = kFirst.score.varlen,
                                                        .stats = kFirst.score.stats}};
  if constexpr (kFirst.score.documents) {
    const BackwardDqParams dq = plan.dq_of(problem, workspace);
    launch_ranges<kKernels.dq.kv_rows, kFirst.score.varlen>({{}, dq.forward},
                                                            plan.layout.num_key_ranges, seed);
    launch_ranges<kFirst.q_rows, kFirst.score.varlen>(plan.query_ranges_of(problem, workspace),
                                                      plan.layout.num_query_ranges, seed);
  }
  const BackwardPreprocessParams prepare = plan.preprocess_of(problem, workspace, nullptr);
  emulator::launch(
      {2, kPrepare.kThreads, 0, seed, false, "backward_preprocess_sm90", is_sampled(seed)},
      [&] { backward_preprocess_sm90<kPrepare>(prepare); });
  if constexpr (kFirst.score.has_tile_lists()) {
    if constexpr (!kFirst.dq) {
      fill_lists<false, kKernels.dq>(problem,
                                     plan.tile_lists_of(false, problem, workspace, nullptr),
                                     plan.configs.lists_of_dq(), seed);
    }
    fill_lists<true, kFirst>(problem, plan.tile_lists_of(true, problem, workspace, nullptr),
                             plan.configs.lists_of_main(), seed);
  }
  const BackwardParams params = plan.main_of(problem, workspace);
  launch<kFirst>(problem, *plan.configs.main, params, seed, blocks);
  if constexpr (!kFirst.dq) {
    launch_dq<kKernels.dq>(problem, *plan.configs.dq, plan.dq_of(problem, workspace), seed, blocks);
  }
  constexpr BackwardFallbackConfig kFallback{kFirst.dtype, kFirst.score.user};
  const auto fallback = before_expression(problem, plan.fallback_of(problem, workspace));
  emulator::launch({2, BackwardFallbackConfig::kThreads, 0, seed, false, "backward_fallback_sm90",
                    is_sampled(seed)},
                   [&] { backward_fallback_sm90<kFallback>(fallback.params); });
  return fallback.params.nonfinite[0] != 0;
}

// Head dimensions that the backward pass takes: multiples of 8. The new columns are not NaN.
inline void widen_rows(Tensor& tensor) {
  i64& dim = tensor.shape[tensor.rank - 1];
  const i64 before = dim;
  dim = ceil_div(dim, 8) * 8;
  RandomProblem::for_each(tensor, [&](const i64* at) {
    if (at[tensor.rank - 1] < before) return;
    store_real(RandomProblem::address(tensor, at), tensor.dtype, 0.25);
  });
}

template <Kernels kKernels>
Request drawn_request(RandomProblem& random, i64 longest = kKernels.first.dq ? 580 : 140) {
  constexpr BackwardSm90Config kConfig = kKernels.first;
  ForwardSm90Config like = kKernels.dq;
  like.dtype = kConfig.dtype;
  like.d_qk = like.d_v = kConfig.dims;
  like.score.mask_kind = kConfig.score.mask_kind;
  like.score.stats = kConfig.score.stats;
  Request request = HopperRequest(random, like, longest).request;
  for (const Array array : {Array::kQ, Array::kK}) widen_rows(request.arrays[array]);
  // Scores far beyond kLargeScore.
  if (kConfig.score.stats && !kConfig.score.varlen && random.chance(0.7)) {
    random.fill_normal(request.arrays[Array::kK], 3000);
  }
  if (kConfig.score.blocks) request = with_blocks(random, request);
  if (kConfig.score.user.any()) request = with_expression(random, request);
  // An entry without a key.
  if (void* const lengths = request.arrays[Array::kKvLengths].data) *static_cast<i64*>(lengths) = 0;
  return request;
}

// Fills the rows of entries without a key, which nobody may look at.
inline void plant_rows_without_keys(const Request& request) {
  const Tensor& lengths = request.arrays[Array::kKvLengths];
  if (lengths.data == nullptr) return;
  for (const Array array : {Array::kQ, Array::kDOut}) {
    const Tensor& tensor = request.arrays[array];
    RandomProblem::for_each(tensor, [&](const i64* at) {
      if (static_cast<const i64*>(lengths.data)[at[0]] > 0) return;
      store_real(RandomProblem::address(tensor, at), tensor.dtype, kNan);
    });
  }
}

template <Kernels kKernels>
void expect_agreement(const Request& forward, RandomProblem& random, unsigned seed, bool unusual,
                      const Blocks& blocks = {.most = 2}) {
  constexpr BackwardSm90Config kConfig = kKernels.first;
  cpu::scalar_forward(validate(forward, Pointers::kChecked));
  Request expected = to_backward(random, forward, 7);
  expected.options.deterministic = !kConfig.dq || kConfig.deterministic;
  plant_rows_without_keys(expected);
  if (kKernels.dq.score.sinks) expected.arrays[Array::kDLse] = Tensor{};  // not together
  if (!kConfig.score.stats) expected.arrays[Array::kStats] = Tensor{};
  if (kConfig.score.stats) expected.arrays[Array::kStats] = forward.arrays[Array::kStats];
  if (!kConfig.dv) expected.arrays[Array::kDV] = Tensor{};
  Request actual = expected;
  std::vector<Array> outputs{Array::kDQ, Array::kDK};
  if (kConfig.dv) outputs.push_back(Array::kDV);
  for (const Array output : outputs) {
    actual.arrays[output] = random.twin(expected.arrays[output]);
  }
  cpu::scalar_backward(validate(expected, Pointers::kChecked));
  const Request given = seed % 2 == 0 ? with_rng_array(random, actual) : actual;
  const bool fell_back = run<kKernels>(validate(given, Pointers::kChecked), seed, blocks);
  if constexpr (!kConfig.score.varlen) {  // there, rows without keys hold NaN
    EXPECT_TRUE(unusual || !fell_back) << "seed " << seed << ": finite scores left float32";
  }
  expect_close(actual, expected, outputs, seed);
  for (const Array output : outputs) {
    EXPECT_TRUE(random.is_intact_around(actual.arrays[output]))
        << "seed " << seed << ", " << name(output);
  }
}

// Whether a plan of the request's gradients would take these kernels.
template <Kernels kKernels>
bool is_for(const Request& forward, RandomProblem& random) {
  constexpr BackwardSm90Config kConfig = kKernels.first;
  Request backward = to_backward(random, forward, 7);
  backward.options.deterministic = !kConfig.dq || kConfig.deterministic;
  if (!kConfig.dv) backward.arrays[Array::kDV] = Tensor{};
  const Problem problem = validate(backward, Pointers::kChecked);
  if (kConfig.whole_heads && !gpu::fits_whole_heads(problem)) return false;
  const BackwardSm90Config chosen = *gpu::backward_sm90_configs(problem).main;
  if (kConfig.whole_heads) return chosen.score.mask_kind == kConfig.score.mask_kind;
  return chosen.dims == kConfig.dims && chosen.dq == kConfig.dq &&
         chosen.paired == kConfig.paired && chosen.deterministic == kConfig.deterministic &&
         chosen.score.mask_kind == kConfig.score.mask_kind && chosen.q_rows == kConfig.q_rows &&
         chosen.score.varlen == kConfig.score.varlen && chosen.score.user == kConfig.score.user &&
         chosen.score.mask_tiles == kConfig.score.mask_tiles;
}

// Seeds from `first` on, as many as draw these kernels `count` times. `unusual`: values that are
// NaN or infinite, seen by some rows of a block and hidden from others.
template <Kernels kKernels>
void expect_agreement(unsigned first, int count, bool unusual,
                      i64 longest = kKernels.first.dq ? 580 : 140) {
  for (unsigned seed = first; count > 0; ++seed) {
    RandomProblem random(seed);
    const Request request = drawn_request<kKernels>(random, longest);
    if (!is_for<kKernels>(request, random)) continue;
    if (unusual) plant_unusual(request, random);
    expect_agreement<kKernels>(request, random, seed, unusual);
    --count;
  }
}

// The first request from `seed` on, not packed, that has at least as many rows and keys, and at
// most two heads. `change` makes of it what a test is about.
template <Kernels kKernels>
void expect_agreement_of_rows(unsigned seed, i64 rows, const auto& change) {
  for (;; ++seed) {
    RandomProblem random(seed);
    Request request = drawn_request<kKernels>(random, rows + 60);
    const Tensor &q = request.arrays[Array::kQ], &k = request.arrays[Array::kK];
    if (q.rank != 4 || q.shape[0] * q.shape[1] > 2) continue;
    if (q.shape[2] < rows || k.shape[2] < rows) continue;
    change(request, random);
    if (!is_for<kKernels>(request, random)) continue;
    return expect_agreement<kKernels>(request, random, seed, false);
  }
}

}  // namespace fulmen::test
