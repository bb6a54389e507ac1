// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The order of work tiles of a backward pass of sm90, and what lies where in its workspace. Groups
// of heads were measured on an H100 SXM on 2026-11-28 (bench/hopper/backward).

#include "gpu/backward_sm90/plan.h"

namespace fulmen::gpu {
namespace {

constexpr i64 kMaxParts = 8;       // of a work tile's queries
constexpr i64 kHeadsPerGroup = 8;  // under a mask, at most; 4 and 16 are within 3 %

bool is_masked(const BackwardSm90Configs& configs) {
  return configs.main ? configs.main->score.may_be_causal()
                      : configs.dq && configs.dq->score.may_be_causal();
}

// KV heads whose blocks of keys are interleaved under a mask or in deterministic mode: so many that
// what all of them read and add to stays in the L2 (2 of 8 to 16 MiB are 2 % faster than 8 at 128
// dims, 4 to 7 % at 256; 4 in deterministic mode at 128 dims 4k by 1.5 %, since sums wait longer
// there to be converted), and that the last of them leave no multiprocessor idle for long.
i64 heads_per_group(const Problem& problem, bool waits, i64 num_kv_blocks, i64 multiprocessors) {
  const i64 bytes = (i64{16} << 20) / (tile_dims(problem) > 128 || waits ? 2 : 1);
  const i64 q_heads =
      clamp<i64>(bytes / (problem.max_q * tile_dims(problem) * 4), 2, kHeadsPerGroup);
  return clamp<i64>(max(q_heads / problem.group_size(), multiprocessors / num_kv_blocks), 1,
                    kHeadsPerGroup);
}

// Into how many parts, at most `most`, the work tiles of the last wave of a grid are split. On an
// H200 (2026-11-28) a further part costs one step where few work tiles have parts and three where
// half of the grid has.
i64 best_num_parts(i64 num_tiles, i64 num_steps, i64 most, i64 grid) {
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

// Splits the work tiles of the last wave, where all are alike, so that it is as short as the others
// are full. With their sums no more memory is asked for than a dQ in float32 has.
void split_last_tiles(const Problem& problem, const BackwardSm90Configs& configs, i64 grid,
                      BackwardSm90Layout& layout) {
  if (!configs.main || !configs.main->splits()) return;
  const BackwardSm90Config& config = *configs.main;
  const i64 split = layout.num_claims() % grid;
  if (split == 0) return;
  const i64 all_sums = layout.num_rows * config.dims * 4;
  layout.part_bytes = split * 2 * config.tiles_of_claim() * config.kv_rows() * config.dims * 4;
  const i64 room = (all_sums - layout.counters_at) / layout.part_bytes;
  const i64 most = min(kMaxParts, !config.paired ? 1 + room : room > 0 ? kMaxParts : 1);
  const i64 steps = ceil_div(problem.max_q, config.q_rows) * problem.group_size();
  layout.num_parts = best_num_parts(split, steps, most, grid);
  if (layout.num_parts > 1) layout.num_split = split;
}

// Documents of blocks of rows, and the blocks of queries that they leave, from `at` on.
void place_documents(const Problem& problem, const BackwardSm90Configs& configs, i64 at,
                     BackwardSm90Layout& layout) {
  const auto blocks = [&](i64 rows, i64 block_rows) {
    return num_key_ranges(rows, problem.num_sequences, problem.packed.kv, block_rows);
  };
  const bool has_dq = configs.dq && configs.dq->score.documents;
  const bool has_blocks = configs.has_document_blocks();
  layout.num_key_ranges = has_dq ? blocks(problem.kv_rows, configs.dq->kv_rows) : 0;
  layout.num_query_ranges = has_blocks ? blocks(problem.q_rows, configs.main->q_rows) : 0;
  const i64 num_document_blocks = has_blocks ? blocks(problem.kv_rows, layout.kv_rows) : 0;
  layout.key_ranges_at = at;
  layout.query_ranges_at = at + layout.num_key_ranges * i64{sizeof(IdRange)};
  layout.document_blocks_at =
      layout.query_ranges_at + layout.num_query_ranges * i64{sizeof(IdRange)};
  layout.part_sums_at =
      layout.document_blocks_at + num_document_blocks * i64{sizeof(DocumentBlocks)};
}

// Lists of tiles: of blocks of keys, for backward_sm90, cleared with the counters; of blocks of
// queries, for backward_dq_sm90, among what no kernel has to clear.
void add_lists(const Problem& problem, const BackwardSm90Configs& configs,
               BackwardSm90Layout& layout) {
  if (configs.main && configs.main->score.has_tile_lists()) {
    layout.key_lists_at = layout.zeroed_bytes;
    layout.zeroed_bytes +=
        rows_up(tile_lists_bytes(problem, tile_lists_params(problem, configs.lists_of_main())), 16);
  }
  if (configs.dq && configs.dq->score.has_tile_lists()) {
    layout.query_lists_bytes =
        rows_up(tile_lists_bytes(problem, tile_lists_params(problem, configs.lists_of_dq())), 16);
  }
}

BackwardSchedule schedule_of(const Problem& problem, const BackwardSm90Configs& configs,
                             const BackwardSm90Layout& layout, i64 grid) {
  const bool varlen = configs.preprocess.score.varlen, masked = is_masked(configs);
  const bool has_sums = configs.main && configs.main->adds_dq();
  const bool ordered = has_sums && configs.main->deterministic;
  const bool waits = is_deterministic(problem) && masked;
  const bool whole_heads = configs.main && configs.main->whole_heads;
  const bool in_groups = (masked || ordered) && !whole_heads;
  const i64 of_group = in_groups ? heads_per_group(problem, waits, layout.claims_of_head, grid) : 1;
  // Under a mask a larger last group, so that every multiprocessor ends with a short work tile. On
  // an H200 causal 1k becomes 2 to 5 % faster; without sums of dQ it does not.
  const bool has_short = has_sums && in_groups && !ordered && !varlen;
  const i64 last = has_short ? ceil_div(grid, layout.claims_of_head) : 0;
  BackwardSchedule schedule =
      backward_schedule(varlen ? problem.heads_kv : layout.num_batch_kv_heads,
                        layout.claims_of_head, of_group, last, grid, ordered && masked);
  if (!has_sums) schedule.lag = 0;
  return schedule;
}

}  // namespace

BackwardSm90Layout backward_sm90_layout(const Problem& problem, const BackwardSm90Configs& configs,
                                        const Gpu& gpu) {
  // Thread blocks, or clusters of two.
  const i64 blocks_of_tile = configs.main ? configs.main->blocks_of_tile() : 1;
  const i64 tiles_of_claim = configs.main ? configs.main->tiles_of_claim() : 1;
  const i64 grid = gpu.num_multiprocessors / (blocks_of_tile * tiles_of_claim);
  const bool varlen = configs.preprocess.score.varlen;
  const bool has_sums = configs.main && configs.main->adds_dq();
  BackwardSm90Layout layout{};
  layout.num_batch_kv_heads = problem.num_sequences * problem.heads_kv;
  layout.kv_rows = configs.kv_rows();
  layout.claims_of_head = ceil_div(max<i64>(problem.max_kv, 1), layout.kv_rows * tiles_of_claim);
  layout.num_kv_blocks = layout.claims_of_head * tiles_of_claim;
  layout.num_conversion_blocks =
      ceil_div(max<i64>(problem.max_q, 1), BackwardSm90Config::kConversionRows);
  layout.padded_rows_per_head = padded_rows_per_head(problem);
  layout.num_rows = problem.batch_extent() * problem.heads_q * layout.padded_rows_per_head;
  layout.schedule = schedule_of(problem, configs, layout, grid);
  if (has_sums) {
    const i64 slot_rows = layout.num_conversion_blocks * BackwardSm90Config::kConversionRows;
    const i64 sum_rows = varlen
                             ? layout.num_rows
                             : layout.schedule.num_accum_slots * problem.group_size() * slot_rows;
    layout.counters_at = sum_rows * tile_dims(problem) * 4;
  }
  split_last_tiles(problem, configs, grid, layout);
  // Parts of pairs add to the same sums, which begin at 0.
  const bool paired = configs.main && configs.main->paired;
  const i64 added_at = layout.counters_at;
  if (paired && layout.num_split > 0) layout.counters_at += layout.part_bytes;
  // One or the other: what is split is not deterministic.
  const bool ordered = has_sums && configs.main->deterministic;
  const i64 semaphores = ordered ? layout.num_rows / configs.main->q_rows * blocks_of_tile : 0;
  layout.num_part_counters = 2 * blocks_of_tile * tiles_of_claim * layout.num_split;
  const i64 counters = BackwardSm90Layout::kLaunches + 1 + 3 * layout.num_batch_kv_heads +
                       layout.num_part_counters + semaphores;
  layout.zeroed_bytes = layout.counters_at + rows_up(counters * 4, 16);
  add_lists(problem, configs, layout);
  layout.lse_at = layout.zeroed_bytes;
  layout.delta_at = layout.lse_at + layout.num_rows * (configs.preprocess.score.stats ? 8 : 4);
  layout.key_blocks_at = layout.delta_at + layout.num_rows * 4;
  const i64 num_key_blocks = varlen ? problem.num_sequences * layout.num_kv_blocks : 0;
  place_documents(
      problem, configs,
      layout.key_blocks_at + num_key_blocks * i64{sizeof(KeyBlockInfo)} + layout.query_lists_bytes,
      layout);
  layout.query_lists_at = layout.key_ranges_at - layout.query_lists_bytes;
  layout.workspace_bytes = layout.part_sums_at;
  if (paired) {
    layout.part_sums_at = added_at;
  } else {
    layout.workspace_bytes += (layout.num_parts - 1) * layout.part_bytes;
  }
  return layout;
}

}  // namespace fulmen::gpu
