// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The rules, by head dimension. Measured on an H100 SXM on 2026-11-28 (bench/hopper,
// bench/results/2026-11-28-forward-h100.jsonl); d 256 from 4k was searched again on an H200
// (`fulmen bench --tune`), where nothing beat them by 1 %.

#include "gpu/forward_sm90/tiles.h"

#include "gpu/forward_sm90/plan.h"

namespace fulmen {
namespace {

void set_tile(ForwardSm90Config& config, i32 warpgroups, i32 kv_rows, i32 stages, i32 q_slots) {
  config.warpgroups = warpgroups;
  config.kv_rows = kv_rows;
  config.stages = stages;
  config.q_slots = q_slots;
}

// Whether tiles of so many warpgroups find a multiprocessor each at once. Then the smallest such
// tile is the fastest: d 64, 8 heads of 128 rows 4.2 us with one warpgroup against 5.6 with three;
// d 128, 8 heads of 2,048 rows 30.6 us with two, 38.5 with three, 40.1 with one (2026-11-28).
bool fits_at_once(const Problem& problem, ForwardSm90Config config, i32 warpgroups) {
  constexpr i64 kMultiprocessors = 132;  // of an H100 SXM
  config.warpgroups = warpgroups;
  return !problem.batch_invariant && sm90_max_q_blocks(problem, config) <= kMultiprocessors;
}

void set_tile_of_64_rows(ForwardSm90Config& config, i32 widest) {
  set_tile(config, 1, 64, widest <= 192 ? 4 : 3, 1);
  config.stage_output = false;
}

// Terms of single pairs, up to d 192: registers leave two warpgroups, shared memory many tiles.
void set_tile_of_pairs(ForwardSm90Config& config, i32 widest) {
  const i32 stages = widest <= 64 ? 6 : widest <= 128 ? 4 : 2;
  set_tile(config, 2, 64, stages, min(stages, 4));
}

// Both head dimensions at most 64.
void set_tile_64(ForwardSm90Config& config, bool is_short, bool is_small) {
  const bool has_large_dims = !(is_short && config.mask != MaskKind::kNone) &&
                              !config.maps_scores() && config.mask != MaskKind::kBoth &&
                              !config.sequences;
  if (is_small) {
    set_tile(config, 2, has_large_dims ? 128 : 64, has_large_dims ? 2 : 4, 2);
  } else {
    set_tile(config, 3, has_large_dims ? 128 : 64, has_large_dims ? 3 : 6, 6);
  }
  config.overlap = !has_large_dims;
  // Causal 512 and 1k: 3 % faster without turns; full, 16k: 8 % slower.
  config.ping_pong = has_large_dims || !is_short;
}

// Turns buy 1 % full and cost as much causal and with windows (16k, 1,024 keys: 620 TFLOP/s
// without, 612 with; H200, 2026-11-28).
void set_tile_128(ForwardSm90Config& config, bool is_short, bool is_small) {
  config.ping_pong = config.mask == MaskKind::kNone;
  if (is_short || is_small) {
    const bool masked = config.mask != MaskKind::kNone;
    set_tile(config, 2, masked ? 64 : 128, masked ? 4 : 2, 4);
    config.cache_hints = true;
    return;
  }
  set_tile(config, 3, 64, 3, 3);
  const bool has_room =
      config.mask != MaskKind::kBoth && !config.sequences && !config.maps_scores();
  config.q_register_dims = has_room ? min<i32>(64, config.d_qk) : 0;
}

void set_tile_256(ForwardSm90Config& config) {
  set_tile(config, 2, 64, 2, 3);
  config.stage_output = false;
  config.cache_hints = true;
  const bool has_room = !config.maps_scores() && !config.sequences && !config.dropout;
  const i32 dims = config.dtype == DType::kFloat16 || config.mask == MaskKind::kBoth ? 64 : 96;
  config.q_register_dims = has_room ? min(dims, config.d_qk) : 0;
}

// Beyond 256: two stages as far as they fit. Both warpgroups do the same at the same time: turns
// cost 11 % (d 512, 16k, 488 TFLOP/s against 432).
void set_tile_512(ForwardSm90Config& config) {
  set_tile(config, 2, 64, 2, 1);
  config.stage_output = config.ping_pong = false;
  const bool has_room = !config.maps_scores() && !config.sequences && !config.dropout &&
                        config.mask != MaskKind::kBoth;
  config.q_register_dims = has_room ? min(64, config.d_qk) : 0;
  if (!config.valid()) config.stages = 1;
}

bool is_short(const Problem& problem) {
  return !problem.batch_invariant && max(problem.max_q, problem.max_kv) <= kShortRows;
}

void set_tile_of_rules(ForwardSm90Config& config, const Problem& problem) {
  const bool fills_one_tile = !problem.batch_invariant && problem.max_q <= 64;
  const bool per_pair = config.has_pair_terms() || config.dropout;
  const i32 widest = max(ForwardSm90Config::chunked(config.d_qk), config.d_v);
  if (config.split_dims) {
    set_tile_512(config);
  } else if ((fills_one_tile || fits_at_once(problem, config, 1)) &&
             !(per_pair && widest > 192)) {  // that would spill
    set_tile_of_64_rows(config, widest);
  } else if (per_pair && widest <= 192) {
    set_tile_of_pairs(config, widest);
  } else if (widest <= 64) {
    set_tile_64(config, is_short(problem), fits_at_once(problem, config, 2));
  } else if (widest <= 128) {
    set_tile_128(config, is_short(problem), fits_at_once(problem, config, 2));
  } else if (widest <= 192 && config.d_v <= 128) {
    set_tile(config, 2, 112, 2, 2);
  } else if (widest <= 192) {
    set_tile(config, 2, 80, 2, 2);
  } else {
    set_tile_256(config);
  }
}

void choose(ForwardSm90Config& config, const TileChoice& tile) {
  choose_member(config.warpgroups, tile.warpgroups);
  choose_member(config.kv_rows, tile.kv_rows);
  choose_member(config.stages, tile.stages);
  choose_member(config.q_slots, tile.q_slots);
  choose_member(config.q_register_dims, tile.q_register_dims);
  choose_member(config.ping_pong, tile.ping_pong);
  choose_member(config.overlap, tile.overlap);
  choose_member(config.stage_output, tile.stage_output);
  choose_member(config.cache_hints, tile.cache_hints);
}

}  // namespace

void set_sm90_forward_tile(ForwardSm90Config& config, const Problem& problem) {
  set_tile_of_rules(config, problem);
  choose(config, problem.tile);
}

}  // namespace fulmen
