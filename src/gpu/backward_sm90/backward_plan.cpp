// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How a backward pass of sm90 walks, and what lies where in its workspace. Groups of lines were
// measured on an H100 SXM on 2026-11-28 (bench/hopper/backward).

#include "gpu/backward_sm90/plan.h"
#include "gpu/backward_sm90/sizes.h"
#include "gpu/sm90_problem.h"

namespace fulmen {
namespace {

constexpr i64 kMaxParts = 8;       // of an item's queries
constexpr i64 kHeadsPerGroup = 8;  // under a mask, at most; 4 and 16 are within 3 %

// Heads whose blocks of keys are walked together, under a mask: so many that what all of them read
// and add to stays in the L2 (2 of 8 to 16 MiB are 2 % faster than 8 at 128 dims, 4 to 7 % at 256;
// 4 with deterministic sums at 128 dims 4k by 1.5 %, since sums wait longer there to be rounded).
i64 heads_per_group(const Problem& problem) {
  const bool waits = wants_order(problem) && mask_kind(problem.mask) != MaskKind::kNone;
  const i64 bytes = (i64{16} << 20) / (tile_dims(problem) > 128 || waits ? 2 : 1);
  return clamp<i64>(bytes / (problem.max_q * tile_dims(problem) * 4), 2, kHeadsPerGroup);
}

// Lines, each a key/value head with its query heads, whose blocks of keys are walked together: also
// so many that the last of them leave no multiprocessor idle for long.
i64 grouped_heads(const Problem& problem, i64 num_kv_blocks, i64 multiprocessors) {
  const i64 by_size = heads_per_group(problem) / problem.group_size();
  return clamp<i64>(max(by_size, multiprocessors / num_kv_blocks), 1, kHeadsPerGroup);
}

// Into how many parts, at most `most`, the items of the last round of a grid are taken. On an H200
// (2026-11-28) a further part costs one step where few items have parts and three where half of the
// grid has.
i64 parts_of_items(i64 num_tiles, i64 num_steps, i64 most, i64 grid) {
  const double steps = static_cast<double>(num_steps);
  const double cost = 1 + 4 * static_cast<double>(num_tiles) / static_cast<double>(grid);
  i64 best = 1;
  double least = 1;
  for (i64 parts = 2; parts <= min(most, num_steps); ++parts) {
    const double rounds = static_cast<double>(ceil_div(num_tiles * parts, grid));
    const double count = static_cast<double>(parts);
    const double time = rounds / count + (count - 1) * cost / steps;
    if (time < least) {
      best = parts;
      least = time;
    }
  }
  return best;
}

// Keys of an item: of all launches alike.
i64 kv_rows(const Problem& problem) {
  const std::vector<BackwardSm90Config> configs = sm90_backward_configs(problem);
  return configs.empty() ? BackwardSm90Config{}.kv_rows() : configs[0].kv_rows();
}

// The items of the last round, where all are alike, so that it is as short as the others are full.
// With their sums no more memory is asked for than a dQ in float32 has.
void split_last_items(const Problem& problem, i64 grid, Sm90BackwardPlan& plan) {
  const std::vector<BackwardSm90Config> configs = sm90_backward_configs(problem);
  if (configs.empty() || !configs[0].splits()) return;
  const BackwardSm90Config& config = configs[0];
  const i64 split = plan.num_tiles() % grid;
  if (split == 0) return;
  const i64 all_sums = plan.num_rows * config.dims * 4;
  plan.part_bytes = split * 2 * config.kv_rows() * config.dims * 4;
  const i64 most = min(kMaxParts, 1 + (all_sums - plan.counters_at) / plan.part_bytes);
  const i64 steps = ceil_div(problem.max_q, config.q_rows) * problem.group_size();
  plan.num_parts = parts_of_items(split, steps, most, grid);
  if (plan.num_parts > 1) plan.num_split = split;
}

// Documents of blocks of rows, and what they leave of the walks, from `at` on.
void place_documents(const Problem& problem, i64 at, Sm90BackwardPlan& plan) {
  const auto blocks = [&](i64 rows, i64 block_rows) {
    return num_key_ranges(rows, problem.num_sequences, problem.packed, block_rows);
  };
  const bool has_ids = problem.has(Array::kQIds),
             has_document_blocks = sm90_has_document_blocks(problem);
  const bool has_dq = has_ids && sm90_separate_dq(problem);
  plan.num_key_ranges = has_dq ? blocks(problem.kv_rows, sm90_dq_config(problem).kv_rows) : 0;
  plan.num_query_ranges =
      has_document_blocks ? blocks(problem.q_rows, sm90_backward_configs(problem)[0].q_rows) : 0;
  const i64 num_document_blocks = has_document_blocks ? blocks(problem.kv_rows, plan.kv_rows) : 0;
  plan.key_ranges_at = at;
  plan.query_ranges_at = plan.key_ranges_at + plan.num_key_ranges * i64{sizeof(IdRange)};
  plan.document_blocks_at = plan.query_ranges_at + plan.num_query_ranges * i64{sizeof(IdRange)};
  plan.part_sums_at = plan.document_blocks_at + num_document_blocks * i64{sizeof(DocumentBlocks)};
}

}  // namespace

Sm90BackwardPlan sm90_backward_plan(const Problem& problem, const Gpu& gpu) {
  const i64 dims = tile_dims(problem);
  const bool has_sums = problem.has(Array::kDQ) && !sm90_separate_dq(problem);
  Sm90BackwardPlan plan{};
  plan.num_batch_kv_heads = problem.num_sequences * problem.heads_kv;
  plan.kv_rows = kv_rows(problem);
  plan.num_kv_blocks = ceil_div(max<i64>(problem.max_kv, 1), plan.kv_rows);
  plan.num_conversion_blocks =
      ceil_div(max<i64>(problem.max_q, 1), BackwardSm90Config::kConversionRows);
  plan.padded_rows_per_head = padded_rows_per_head(problem);
  plan.num_rows =
      (problem.packed ? 1 : problem.num_sequences) * problem.heads_q * plan.padded_rows_per_head;
  const bool differ = reads_sequences(problem);
  const bool is_ordered = has_sums && wants_order(problem);
  const bool in_groups = mask_kind(problem.mask) != MaskKind::kNone || is_ordered;
  const i64 heads_per_group =
      in_groups ? grouped_heads(problem, plan.num_kv_blocks, gpu.num_multiprocessors) : 1;
  const bool longest_last = is_ordered && mask_kind(problem.mask) != MaskKind::kNone;
  // Under a mask the last lines together, so that every multiprocessor ends with a short block. On
  // an H200 causal 1k becomes 2 to 5 % faster; without sums of dQ it does not.
  const bool has_short = has_sums && in_groups && !is_ordered && !differ;
  const i64 last_heads = has_short ? ceil_div(i64{gpu.num_multiprocessors}, plan.num_kv_blocks) : 0;
  plan.schedule =
      backward_schedule(differ ? problem.heads_kv : plan.num_batch_kv_heads, plan.num_kv_blocks,
                        heads_per_group, last_heads, gpu.num_multiprocessors, longest_last);
  const i64 slot_rows = plan.num_conversion_blocks * BackwardSm90Config::kConversionRows;
  const i64 slot_bytes = problem.group_size() * slot_rows * dims * 4;
  const i64 sum_bytes =
      differ ? plan.num_rows * dims * 4 : plan.schedule.num_accum_slots * slot_bytes;
  plan.counters_at = has_sums ? sum_bytes : 0;
  if (!has_sums) plan.schedule.lag = 0;
  split_last_items(problem, gpu.num_multiprocessors, plan);
  // One or the other: what is split is not deterministic.
  const i64 dq_semaphore =
      is_ordered ? plan.num_rows / sm90_backward_configs(problem)[0].q_rows : 0;
  const i64 counters = Sm90BackwardPlan::kLaunches + 1 + 3 * plan.num_batch_kv_heads +
                       2 * plan.num_split + dq_semaphore;
  const i64 counter_bytes = rows_up(counters * 4, 16);
  plan.zeroed_bytes = plan.counters_at + counter_bytes;
  plan.rows_at = plan.zeroed_bytes;
  plan.delta_at = plan.rows_at + plan.num_rows * (problem.has(Array::kStats) ? 8 : 4);
  plan.key_blocks_at = plan.delta_at + plan.num_rows * 4;
  const i64 num_key_block_infos = differ ? problem.num_sequences * plan.num_kv_blocks : 0;
  place_documents(problem, plan.key_blocks_at + num_key_block_infos * i64{sizeof(KeyBlockInfo)},
                  plan);
  plan.workspace_bytes = plan.part_sums_at + (plan.num_parts - 1) * plan.part_bytes;
  return plan;
}

}  // namespace fulmen
