// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a kernel with a user's expression, or with lists of tiles, is launched with on the emulator.
#pragma once

#include <gtest/gtest.h>

#include "../gpu/kernels/interpreted_expression.h"
#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "gpu/tile_lists.h"
#include "kernels/tile_lists/list_tiles.cuh"
#include "kernels/tile_lists/mask_tiles.cuh"

namespace fulmen::test {

// From lists of blocks to lists of tiles, of so many bytes.
template <bool kByKeys>
void launch_lists(const TileListsParams& params, i64 bytes, u32 seed) {
  constexpr i32 kThreads = TileListsConfig::kThreads;
  emulator::GlobalArray words{"words", params.lists.words, i64{sizeof(u32)}};
  words.extents[3] = bytes / i64{sizeof(u32)};
  words.strides[3] = 1;
  words.writable = true;
  words.initialised = kByKeys;  // zeros
  emulator::GlobalMemory memory({words});
  emulator::launch({.blocks = ceil_div(params.num_lists, kThreads / 32),
                    .threads = kThreads,
                    .seed = seed,
                    .kernel = "list_tiles",
                    .memory = &memory},
                   [&] { list_tiles<TileListsConfig{kByKeys}>(params); });
}

// With the user's expression behind them, as kernels that have one find it.
template <class Params>
WithExpression<Params> before_expression(const Problem& problem, const Params& params,
                                         FaultBytes* faults = nullptr) {
  if (problem.program == nullptr) return {params, {}};
  interpreted = &problem;
  return {params, gpu::expression_params(problem, nullptr, faults)};
}

// From lists of blocks, or a user's mask, to lists of tiles of `shape`, for a kernel of that
// config; kScore: what the kernel that fills them knows of masks.
template <bool kByKeys, auto kConfig, ScoreOptions kScore = kConfig.score>
void fill_lists(const Problem& problem, const TileListsParams& params, const gpu::TileShape& shape,
                u32 seed) {
  if constexpr (kConfig.score.blocks)
    launch_lists<kByKeys>(params, gpu::tile_lists_bytes(problem, params), seed);
  if constexpr (kConfig.score.mask_tiles) {
    const auto rows = [] {
      if constexpr (kByKeys)
        return kConfig.q_rows;
      else
        return kConfig.kv_rows;
    };
    constexpr MaskTilesConfig kMask{
        kConfig.dtype,
        kByKeys,
        rows(),
        {.mask_kind = kScore.mask_kind, .varlen = kScore.varlen, .user = kScore.user}};
    const gpu::KernelLaunch planned = gpu::fill_tile_lists(problem, kScore, params, shape);
    EXPECT_EQ(planned.spec.num_threads, kMask.threads());
    const auto all = before_expression(problem, params, params.attention.faults);
    emulator::launch({static_cast<i32>(planned.num_blocks), kMask.threads(),
                      MaskTilesConfig::kSharedBytes, seed, false, "mask_tiles", is_sampled(seed)},
                     [&] { mask_tiles<kMask>(all.params); });
  }
}

}  // namespace fulmen::test
