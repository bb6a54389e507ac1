// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward kernels of sm80 on the emulator, for drawn problems.
#pragma once

#include <cmath>
#include <vector>

#include "emulator/global_memory.h"
#include "emulator/launch.h"
#include "emulator/schedules.h"
#include "emulator/sm80/neutral_arrays.h"
#include "kernels/backward_sm80/backward_sm80.cuh"
#include "kernels/backward_sm80/pre_and_postprocess.cuh"
#include "kernels/backward_sm80/scheduler.cuh"

namespace fulmen::test {

// As launched, each grid once the one before it has ended (no kernel of sm80 is a dependent launch,
// see src/gpu/backward_sm80/plan.cpp), on a workspace that is NaN where zeros are not required.
// `together`: the main kernel's blocks run at the same time. before: gives the parameters as
// kernels find them, with a user's expression behind. Returns dq_accum, dQ before rounding.
struct WithoutExpression {
  const BackwardSm80Params& operator()(const BackwardSm80Params& params) const { return params; }
};
template <BackwardSm80Config kConfig, class Before = WithoutExpression>
std::vector<float> launch(const AttentionParams& p, unsigned seed,
                          bool together = kConfig.deterministic, const Before& before = {}) {
  const i64 row_tiles_count = num_q_tiles(p, kConfig.q_rows);
  const i64 key_tiles = num_kv_tiles(p, kConfig.kv_rows);
  const auto size = [](i64 count) { return static_cast<size_t>(count); };
  std::vector<KeyRangeSm80> key_bounds(size(row_tiles_count));
  std::vector<float> row_tiles(size(row_tiles_count * kConfig.row_bytes()) / 4 + 4, NAN);
  std::vector<float> sums(size(row_tiles_count * kConfig.dq_elems()) + 4, NAN);
  std::vector<u32> nonfinite_m_blocks(size(row_tiles_count)), nonfinite_n_blocks(size(key_tiles)),
      dq_semaphores(size(row_tiles_count));
  u32 next_n_block = 0;
  std::vector<u32> zeroed_blocks(size(p.batch_extent() * p.heads_kv));
  i64 dbias_elems = 1;
  for (const i64 extent : p.dbias_extents) dbias_elems *= extent;
  std::vector<float> dbias_accum(kConfig.accumulates_dbias ? size(dbias_elems) : 0);
  const auto aligned = [](std::vector<float>& memory) {
    float* first = memory.data();
    while (reinterpret_cast<u64>(first) % 16 != 0) ++first;
    return first;
  };
  constexpr i64 kLines = 2;
  const i64 all_groups = ceil_div(p.batch_extent() * p.heads_kv, kLines);
  const i64 groups_ahead = kConfig.zeroes_dq ? 1 + seed % 3 : all_groups;
  const BackwardSm80Params bare{reinterpret_cast<u8*>(aligned(row_tiles)),
                                key_bounds.data(),
                                aligned(sums),
                                dbias_accum.data(),
                                nonfinite_m_blocks.data(),
                                nonfinite_n_blocks.data(),
                                dq_semaphores.data(),
                                &next_n_block,
                                zeroed_blocks.data(),
                                head_groups_sm80(p, kConfig, kLines, groups_ahead),
                                {},
                                p};
  const auto& all = before(bare);
  const auto& params = reinterpret_cast<const BackwardSm80Params&>(all);
  // What blocks write for each other.
  emulator::GlobalMemory memory({{.name = "dq_accum",
                                  .data = params.dq_accum,
                                  .element_bytes = sizeof(float),
                                  .extents = {row_tiles_count, kConfig.dq_elems(), 1, 1},
                                  .strides = {kConfig.dq_elems(), 1, 1, 1},
                                  .writable = true,
                                  .initialised = false,
                                  .ordered = kConfig.deterministic},
                                 {.name = "row_stats",
                                  .data = params.row_stats,
                                  .element_bytes = sizeof(float),
                                  .extents = {row_tiles_count, kConfig.row_bytes() / 4, 1, 1},
                                  .strides = {kConfig.row_bytes() / 4, 1, 1, 1},
                                  .writable = true,
                                  .initialised = false}});
  const auto run = [&](i64 blocks, i32 threads, i32 shared_bytes, bool at_once,
                       const auto& kernel) {
    if (blocks == 0) return;
    emulator::launch({.blocks = blocks,
                      .threads = threads,
                      .shared_bytes = shared_bytes,
                      .seed = seed,
                      .together = at_once,
                      .kernel = "backward_sm80",
                      .check = is_sampled(seed),
                      .memory = &memory},
                     kernel);
  };
  const auto run_dbias = [&] {
    run(3, kSm80DbiasThreads, 0, false, [&] { backward_dbias_sm80<kConfig>(params); });
  };
  if (kConfig.dbias && !kConfig.accumulates_dbias) run_dbias();
  run(row_tiles_count, kSm80PreprocessThreads, kConfig.q_rows * 4, false,
      [&] { backward_preprocess_sm80<kConfig>(params); });
  run(key_tiles, kConfig.threads(), kConfig.shared_bytes(), together,
      [&] { backward_sm80<kConfig>(params); });
  run(sm80_postprocess_blocks(row_tiles_count, key_tiles), kSm80PostprocessThreads, 0, false,
      [&] { backward_postprocess_sm80<kConfig>(params); });
  if constexpr (kConfig.accumulates_dbias) run_dbias();
  return {params.dq_accum, params.dq_accum + row_tiles_count * kConfig.dq_elems()};
}

}  // namespace fulmen::test
