// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The rules, in the order in which they are tried. Measured on an H100 SXM on 2026-11-28
// (bench/hopper, bench/results/2026-11-28-forward-h100.jsonl); d 256 from 4k was searched again on
// an H200 (`fulmen bench --tune`), where nothing beat them by 1 %.

#include "core/error.h"
#include "gpu/forward_sm90/plan.h"

namespace fulmen::gpu {
namespace {

// What the rules look at.
struct Facts {
  const ForwardSm90Config& options;
  i32 widest = 0;  // of the head dimensions, filled up
  bool is_short = false;
  bool has_few_queries = false;  // one tile of 64 rows holds those of a head
  bool per_pair = false;         // single pairs are hidden, dropped or added to
  i64 block_kv = 0;              // of lists of blocks
  i64 num_multiprocessors = 0;
  i64 work_tiles_of[3] = {};  // with so many warpgroups; [0]: none

  // Whether tiles of so many warpgroups find a multiprocessor each at once. Then the smallest such
  // tile is the fastest: d 64, 8 heads of 128 rows 4.2 us with one warpgroup against 5.6 with
  // three; d 128, 8 heads of 2,048 rows 30.6 us with two, 38.5 with three, 40.1 with one
  // (2026-11-28).
  bool fit_at_once = false;      // with one warpgroup
  bool fit_at_once_two = false;  // with two
};

Facts facts_of(const ForwardSm90Config& options, const Problem& problem, const Gpu& gpu) {
  const bool adapts = problem.may_plan_by_lengths();
  Facts facts{options, max(ForwardSm90Config::chunked(options.d_qk), options.d_v)};
  facts.is_short = adapts && max(problem.max_q, problem.max_kv) <= kShortRows;
  facts.has_few_queries = adapts && problem.max_q <= 64;
  facts.per_pair = options.score.asks_every_pair() || options.score.dropout;
  facts.num_multiprocessors = gpu.num_multiprocessors;
  facts.block_kv = problem.block_kv;
  for (i32 warpgroups = 1; warpgroups <= 2; ++warpgroups) {
    ForwardSm90Config config = options;
    config.warpgroups = warpgroups;
    facts.work_tiles_of[warpgroups] = max_work_tiles(problem, config);
  }
  facts.fit_at_once = adapts && facts.work_tiles_of[1] <= gpu.num_multiprocessors;
  facts.fit_at_once_two = adapts && facts.work_tiles_of[2] <= gpu.num_multiprocessors;
  return facts;
}

void set_tile(ForwardSm90Config& config, i32 warpgroups, i32 kv_rows, i32 stages, i32 q_slots) {
  config.warpgroups = warpgroups;
  config.kv_rows = kv_rows;
  config.stages = stages;
  config.q_slots = q_slots;
}

// Two blocks of a cluster: two stages as far as they fit. float16 takes the maximum of every block:
// neither of the two has the sum of its weights.
void set_paired(ForwardSm90Config& config, const Facts&) {
  config.split_dims = config.stage_output = config.ping_pong = false;
  config.paired = true;
  if (config.dtype == DType::kFloat16) config.shift_rule = ShiftRule::kWhenGrown;
  set_tile(config, 2, 64, 2, 2);
  config.q_register_dims = config.score.mask_kind == MaskKind::kBoth ? 64 : min(128, config.d_qk);
  if (!config.valid()) config.stages = 1;
}

// Beyond 256: two stages as far as they fit. Both warpgroups do the same at the same time:
// ping-pong costs 11 % (d 512, 16k, 488 TFLOP/s against 432).
void set_split_dims(ForwardSm90Config& config, const Facts&) {
  set_tile(config, 2, 64, 2, 1);
  config.stage_output = config.ping_pong = false;
  const bool has_room = !config.maps_scores() && !config.score.varlen && !config.score.dropout &&
                        config.score.mask_kind != MaskKind::kBoth;
  config.q_register_dims = has_room ? min(64, config.d_qk) : 0;
  if (!config.valid()) config.stages = 1;
}

void set_64_rows(ForwardSm90Config& config, const Facts& facts) {
  set_tile(config, 1, facts.widest <= 256 ? 64 : 48, facts.widest <= 192 ? 4 : 3, 1);
  config.stage_output = false;
  // At d 64 the assembler serialises the products of tiles that a mask cuts with another (C7514).
  if (config.score.mask_tiles && facts.widest <= 64) config.shift_rule = ShiftRule::kWhenGrown;
}

// Registers leave two warpgroups, shared memory many tiles, of which bias and mask take some. Three
// where those come in tiles and nothing else is done to scores: a mask at 16k
// rows 4.14 ms at d 128 where two take 4.84, 6.20 and 8.55 at d 64; a bias of float32 7.42
// and 5.61, 9.41 and 10.8 (H200, 2026-11-30).
void set_per_pair(ForwardSm90Config& config, const Facts& facts) {
  const ScoreOptions& score = config.score;
  const bool is_simple = !score.documents && !score.dropout && !score.alibi && !score.score_mod &&
                         !score.varlen && !score.user.any() &&
                         (score.bias != DType::kFloat32 || facts.widest <= 64);
  if (config.pair_tiles()) {
    const i32 warpgroups = is_simple && facts.widest <= 128 && !facts.fit_at_once_two ? 3 : 2;
    return set_tile(config, warpgroups, 64, facts.widest <= 64 ? 3 : 2, warpgroups);
  }
  const bool is_own = score.user.score && !score.user.mask && score.bias == DType::kNone &&
                      !score.mask && !score.documents && !score.dropout && !score.varlen;
  if (is_own && facts.widest <= 128 && !facts.fit_at_once_two) {
    return set_tile(config, 3, 64, facts.widest <= 64 ? 4 : 3, 3);
  }
  const i32 stages = facts.widest <= 64 ? 6 : facts.widest <= 128 ? 4 : 2;
  set_tile(config, 2, 64, stages, min(stages, 4));
}

void set_64_dims(ForwardSm90Config& config, const Facts& facts, i32 warpgroups) {
  const ScoreOptions& score = config.score;
  const bool wide = !(facts.is_short && score.mask_kind != MaskKind::kNone) &&
                    !config.maps_scores() && score.mask_kind != MaskKind::kBoth && !score.varlen;
  if (warpgroups == 2) {
    set_tile(config, 2, wide ? 128 : 64, wide ? 2 : 4, 2);
  } else {
    set_tile(config, 3, wide ? 128 : 64, wide ? 3 : 6, 6);
  }
  config.overlap = !wide;
  // Causal 512 and 1k: 3 % faster without ping-pong; full, 16k: 8 % slower.
  config.ping_pong = wide || !facts.is_short;
}

void set_64_dims_two(ForwardSm90Config& config, const Facts& facts) {
  set_64_dims(config, facts, 2);
}
void set_64_dims_three(ForwardSm90Config& config, const Facts& facts) {
  set_64_dims(config, facts, 3);
}

// Ping-pong buys 1 % full and costs as much causal and with windows (16k, 1,024 keys: 620 TFLOP/s
// without, 612 with; H200, 2026-11-28).
void set_128_dims_two(ForwardSm90Config& config, const Facts&) {
  const bool masked = config.score.mask_kind != MaskKind::kNone;
  config.ping_pong = !masked;
  set_tile(config, 2, masked ? 64 : 128, masked ? 4 : 2, 4);
  config.cache_hints = true;
}
void set_128_dims_three(ForwardSm90Config& config, const Facts&) {
  const ScoreOptions& score = config.score;
  config.ping_pong = score.mask_kind == MaskKind::kNone;
  set_tile(config, 3, 64, 3, 3);
  const bool has_room =
      score.mask_kind != MaskKind::kBoth && !score.varlen && !config.maps_scores();
  config.q_register_dims = has_room ? min<i32>(64, config.d_qk) : 0;
}

// Two warpgroups, whose rows may be of two lists, and tiles that lie in a block. A quarter of the
// blocks of 128 at 64k rows: d 64 1.98 ms, 2.05 without overlap, 2.24 without ping-pong, 2.27 with
// 64 keys; d 128 2.72 and 2.92 with 64 keys (H200, 2026-11-30).
void set_listed(ForwardSm90Config& config, const Facts& facts) {
  const bool of_mask = facts.options.score.mask_tiles;
  const bool is_wide =
      of_mask ? facts.widest <= 64 : facts.block_kv % 128 == 0 && facts.widest <= 128;
  if (facts.widest <= 64) {
    set_tile(config, 2, is_wide ? 128 : 64, is_wide ? 3 : 4, 2);
  } else {
    set_tile(config, 2, is_wide ? 128 : 64, facts.widest <= 128 && !is_wide ? 4 : 2,
             facts.widest <= 128 ? 4 : 2);
    config.cache_hints = true;
    config.stage_output &= facts.widest <= 192;
  }
}

void set_192_128_dims(ForwardSm90Config& config, const Facts&) { set_tile(config, 2, 112, 2, 2); }
void set_192_dims(ForwardSm90Config& config, const Facts&) { set_tile(config, 2, 80, 2, 2); }

void set_320_dims(ForwardSm90Config& config, const Facts&) {
  set_tile(config, 2, 48, 2, 2);
  config.stage_output = false;
  config.cache_hints = true;
}

void set_256_dims(ForwardSm90Config& config, const Facts&) {
  const ScoreOptions& score = config.score;
  set_tile(config, 2, 64, 2, 3);
  if (config.pair_tiles()) config.q_slots = 2;
  config.stage_output = false;
  config.cache_hints = true;
  const bool has_room = !config.maps_scores() && !score.varlen && !score.dropout;
  const i32 dims = config.dtype == DType::kFloat16 || score.mask_kind == MaskKind::kBoth ? 64 : 96;
  config.q_register_dims = has_room ? min(dims, config.d_qk) : 0;
}

// All rows of V^T, O and a sum beside it, which comes in parts beyond 128 dims, and where three
// warpgroups have 128: those spill with two-sided masks (168 bytes) and at 96 dims (384). So do
// three of packed sequences, whose scheduler takes registers (180), and which have fewer keys a
// block beyond 128 dims.
void set_8_bits(ForwardSm90Config& config, const Facts& facts) {
  const bool is_narrow = facts.widest <= 64, is_wide = facts.widest > 128;
  const bool has_parts =
      config.d_v == 128 && config.d_qk <= 192 && config.score.mask_kind != MaskKind::kBoth;
  if ((is_narrow || has_parts) && !facts.fit_at_once_two && !config.score.varlen) {
    set_tile(config, 3, 128, is_wide ? 2 : 3, 3);
  } else if (is_wide) {
    set_tile(config, 2, config.adds_in_parts() && config.score.varlen ? 96 : 128, 2, 2);
  } else {
    set_tile(config, 2, 128, is_narrow ? 4 : 3, 4);
  }
  // 16k rows, TFLOP/s full and causal: d 128 1,073 and 1,062, with ping-pong 1,055 and 1,029, two
  // warpgroups 1,019 and 972; d 192 and 128 1,156 and 1,090, without ping-pong 1,095 and 1,061, two
  // 1,029 and 969. d 64 700 and 660 with overlap, 696 and 672 in parts. d 256 1,181 and 1,121, O
  // from registers 1,165 (H200, 2026-11-30).
  config.ping_pong = is_narrow || is_wide;
  config.cache_hints = !is_narrow;
  // The assembler spills O in the loops of a kernel without masks (968 bytes; with one 40 to 100).
  if (config.adds_in_parts() && config.score.mask_kind == MaskKind::kNone) {
    config.score.mask_kind = MaskKind::kRight;
  }
}

std::string dims_beyond(const Facts& facts, i32 most) {
  if (facts.widest <= most) return "";
  return sentence("is for head dimensions up to ", most);
}

std::string too_many_tiles(const Facts& facts, i32 warpgroups) {
  return sentence("its ", facts.work_tiles_of[warpgroups], " work tiles do not run at once on ",
                  facts.num_multiprocessors, " multiprocessors");
}

// A tile, when it suits, and why not; each is asked only where none before it suits or to explain.
struct Rule {
  void (*set)(ForwardSm90Config& config, const Facts& facts);
  std::string (*why_not)(const Facts& facts);  // one clause; "" where it suits
};

constexpr Rule kRules[] = {
    {set_8_bits,
     [](const Facts& facts) {
       return facts.options.has_8_bits() ? std::string() : "is for numbers of 8 bits";
     }},
    {set_paired,
     [](const Facts& facts) {
       const ForwardSm90Config& options = facts.options;
       if (!options.split_dims) return std::string("is for head dimensions above 320");
       if (facts.has_few_queries) return std::string("would have rows of which there are none");
       const bool suits = !options.maps_scores() && !options.score.dropout &&
                          !options.score.varlen && !options.score.has_tile_lists();
       return suits ? std::string() : "is for masks of intervals alone";
     }},
    {set_split_dims,
     [](const Facts& facts) {
       return facts.options.split_dims ? std::string() : "is for head dimensions above 256";
     }},
    {set_64_rows,
     [](const Facts& facts) {
       if (facts.options.split_dims) return dims_beyond(facts, 256);
       if (facts.per_pair && facts.widest > 192) return std::string("would spill with its options");
       const bool suits = facts.has_few_queries || facts.fit_at_once;
       return suits ? std::string() : too_many_tiles(facts, 1);
     }},
    {set_per_pair,
     [](const Facts& facts) {
       if (!facts.per_pair) return std::string("is for bias, mask, documents and dropout");
       return dims_beyond(facts, 192);
     }},
    {set_listed,
     [](const Facts& facts) {
       return facts.options.score.has_tile_lists() ? std::string() : "is for lists of tiles";
     }},
    {set_64_dims_two,
     [](const Facts& facts) {
       const std::string beyond = dims_beyond(facts, 64);
       return !beyond.empty() || facts.fit_at_once_two ? beyond : too_many_tiles(facts, 2);
     }},
    {set_64_dims_three, [](const Facts& facts) { return dims_beyond(facts, 64); }},
    {set_128_dims_two,
     [](const Facts& facts) {
       const std::string beyond = dims_beyond(facts, 128);
       const bool suits = facts.is_short || facts.fit_at_once_two;
       return !beyond.empty() || suits ? beyond : too_many_tiles(facts, 2);
     }},
    {set_128_dims_three, [](const Facts& facts) { return dims_beyond(facts, 128); }},
    {set_192_128_dims,
     [](const Facts& facts) {
       return facts.options.d_v <= 128 ? dims_beyond(facts, 192)
                                       : std::string("is for values of up to 128 dims");
     }},
    {set_192_dims, [](const Facts& facts) { return dims_beyond(facts, 192); }},
    {set_320_dims,
     [](const Facts& facts) {
       return facts.widest > 256 ? std::string() : "is for head dimensions above 256";
     }},
    {set_256_dims, [](const Facts&) { return std::string(); }},
};

void replace_members(ForwardSm90Config& config, const TileChoice& tile) {
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

TileCandidate candidate(const ForwardSm90Config& config, bool chosen, const std::string& reason) {
  return {{config.q_rows(), config.kv_rows},
          chosen,
          sentence(config.warpgroups, " warpgroups, ", config.stages, " stages, ",
                   config.shared_bytes(), " bytes of shared memory: ", reason)};
}

}  // namespace

bool comes_in_tiles(const Problem& problem, const ScoreOptions& score, Array array) {
  if (!problem.has(array) || score.has_tile_lists()) return false;
  if (leaves_out(problem, Optimisation::kWarpSpecialisation)) return false;
  const Tensor& tensor = problem.arrays[array];
  const i64 size = size_bytes(tensor.dtype);
  if (tensor.strides[3] != 1 || tensor.strides[2] == 0) return false;
  for (int axis = 0; axis < 3; ++axis) {
    const i64 stride = tensor.strides[axis] * size;
    if (stride < 0 || stride % 16 != 0 || stride >= (i64{1} << 40)) return false;
  }
  return max(tensor.shape[2], tensor.shape[3]) <= 0x7fffffff;
}

TensorBox pair_box(const Problem& problem, Array array, i32 rows, u32 keys) {
  Tensor tensor = problem.arrays[array];
  for (int axis = 0; axis < 2; ++axis) {  // what is broadcast is there once
    if (tensor.strides[axis] == 0) tensor.shape[axis] = 1;
  }
  TensorBox box = tensor_box(tensor, rows);
  box.box_dims = min(box.box_dims, keys);
  return box;
}

void set_tiled_pairs(ForwardSm90Config& config, const Problem& problem) {
  config.tiled_bias = comes_in_tiles(problem, config.score, Array::kBias);
  config.tiled_mask = comes_in_tiles(problem, config.score, Array::kMask);
  config.pair_stages = config.pair_tiles() ? 1 : 0;  // at least
}

void set_pair_stages(ForwardSm90Config& config) {
  constexpr i32 kMostStages = 4;
  if (!config.pair_tiles()) return;
  for (const bool staged : {config.stage_output, false}) {  // O makes room for them
    ForwardSm90Config tiled = config;
    tiled.stage_output = staged;
    for (tiled.pair_stages = kMostStages; tiled.pair_stages > 0; --tiled.pair_stages) {
      if (!tiled.valid()) continue;
      config = tiled;
      return;
    }
  }
  config.tiled_bias = config.tiled_mask = false;
  config.pair_stages = 0;
}

ForwardSm90Config with_tile(const ForwardSm90Config& options, const Problem& problem,
                            const Gpu& gpu, std::vector<TileCandidate>* compared) {
  const Facts facts = facts_of(options, problem, gpu);
  const Rule* chosen = nullptr;
  ForwardSm90Config result = options;
  for (const Rule& rule : kRules) {
    if (chosen != nullptr && compared == nullptr) break;
    std::string why_not = rule.why_not(facts);
    const bool is_chosen = chosen == nullptr && why_not.empty();
    ForwardSm90Config config = options;
    rule.set(config, facts);
    set_pair_stages(config);
    if (is_chosen) {
      chosen = &rule;
      result = config;
      why_not = "the first that suits";
    }
    if (compared == nullptr) continue;
    if (why_not.empty()) why_not = "a tile before it suits";
    compared->push_back(candidate(config, is_chosen && !problem.tile.given(), why_not));
  }
  replace_members(result, problem.tile);
  if (problem.tile.given()) set_pair_stages(result);
  if (compared != nullptr && problem.tile.given()) {
    compared->push_back(candidate(result, true, "named by the caller"));
  }
  return result;
}

}  // namespace fulmen::gpu
