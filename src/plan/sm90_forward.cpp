// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table of tiles, and what the copy engine cannot read. Tiles and groups of heads were measured
// on an H100 SXM on 2026-11-28 (bench/hopper, bench/results/2026-11-28-forward-h100.jsonl); d 256
// from 4k was searched again on an H200 (`fulmen bench --tune`), where nothing beat them by 1 %.

#include "plan/sm90_forward.h"

#include "core/error.h"
#include "plan/sm90_forward_tuned.h"

namespace fulmen {
namespace {

constexpr i64 kMaxDim = 512;
constexpr i64 kUnit = 8;  // elements of 16 bytes, in which the copy engine moves
constexpr i64 kMaxStrideBytes = i64{1} << 40;
constexpr i64 kMaxCount = 0x7fffffff;
constexpr i64 kShort = 1024;  // lengths up to this take the configs with a quick start

bool has_upper_limit(const IntervalMask& mask) {
  return mask.causal || mask.window_right != kNoLimit;
}
bool has_lower_limit(const IntervalMask& mask) {
  return mask.window_left != kNoLimit || mask.chunk > 0;
}

bool reads_sequences(const Problem& problem) {
  return problem.packed || problem.has(Array::kQLengths) || problem.has(Array::kKvLengths);
}

i32 product_width(i64 dim) {
  i32 width = 64;
  while (width < dim || !AttentionConfig::is_product_width(width)) width += 16;
  return width;
}

// Heads of one key head whose queries fit a tile of 64 rows together: their keys and values are
// read once for all of them.
i32 heads_per_tile(const Problem& problem, const AttentionConfig& config) {
  if (problem.batch_invariant || config.split_dims || config.alibi || config.has_pair_terms() ||
      config.dropout) {
    return 1;
  }
  i32 heads = 1;
  while (heads < 8 && problem.group_size() % (2 * heads) == 0 && 2 * heads * problem.max_q <= 64) {
    heads *= 2;
  }
  return heads;
}

// What the problem asks of any tile.
AttentionConfig options_of(const Problem& problem) {
  AttentionConfig config;
  config.dtype = problem.dtype;
  config.d_qk = static_cast<i32>(16 * ceil_div(problem.dim_qk, 16));
  config.split_dims = max(problem.dim_qk, problem.dim_v) > 256;
  config.d_v = config.split_dims ? static_cast<i32>(128 * ceil_div(problem.dim_v, 128))
                                 : product_width(problem.dim_v);
  const IntervalMask& mask = problem.mask;
  config.mask = has_lower_limit(mask)   ? MaskKind::kBoth
                : has_upper_limit(mask) ? MaskKind::kUpper
                                        : MaskKind::kLength;
  config.sequences = reads_sequences(problem);
  config.softcap = problem.score_map.softcap != 0;
  config.signed_scale = !config.softcap && !(problem.score_map.scale > 0);
  config.alibi = problem.has(Array::kAlibiSlopes);
  config.sinks = problem.has(Array::kSinks);
  config.stats = problem.has(Array::kStats);
  config.wide_output = problem.arrays[Array::kO].dtype == DType::kFloat32;
  config.bias = problem.arrays[Array::kBias].dtype;
  config.pair_mask = problem.has(Array::kMask);
  config.documents = config.skips_documents = problem.has(Array::kQIds);
  config.dropout = problem.dropout.enabled();
  config.stage_output = !config.sequences && !config.wide_output;
  // ALiBi and bias take keys out of the range that the first block sets, a mask sets none, and the
  // assembler serialises the products of documents at d 64 with any other rule (C7514).
  const bool is_narrow = max(config.d_qk, config.d_v) <= 64;
  if (config.alibi || config.bias != DType::kNone || config.pair_mask ||
      (config.documents && is_narrow)) {
    config.shift_rule = ShiftRule::kWhenGrown;
  } else if (problem.dtype == DType::kFloat16) {
    config.shift_rule = ShiftRule::kWhenSumGrew;
  }
  config.heads_per_tile = heads_per_tile(problem, config);
  return config;
}

void set_tile(AttentionConfig& config, i32 warpgroups, i32 kv_rows, i32 stages, i32 q_slots) {
  config.warpgroups = warpgroups;
  config.kv_rows = kv_rows;
  config.stages = stages;
  config.q_slots = q_slots;
}

// Whether tiles of so many warpgroups find a multiprocessor each at once. Then the smallest such
// tile is the fastest: d 64, 8 heads of 128 rows 4.2 us with one warpgroup against 5.6 with three;
// d 128, 8 heads of 2,048 rows 30.6 us with two, 38.5 with three, 40.1 with one (2026-11-28).
bool fits_at_once(const Problem& problem, AttentionConfig config, i32 warpgroups) {
  constexpr i64 kMultiprocessors = 132;  // of an H100 SXM
  config.warpgroups = warpgroups;
  return !problem.batch_invariant && sm90_max_q_blocks(problem, config) <= kMultiprocessors;
}

void set_tile_of_64_rows(AttentionConfig& config, i32 widest) {
  set_tile(config, 1, 64, widest <= 192 ? 4 : 3, 1);
  config.stage_output = false;
}

// Terms of single pairs, up to d 192: registers leave two warpgroups, shared memory many tiles.
void set_tile_of_pairs(AttentionConfig& config, i32 widest) {
  const i32 stages = widest <= 64 ? 6 : widest <= 128 ? 4 : 2;
  set_tile(config, 2, 64, stages, min(stages, 4));
}

// Both head dimensions at most 64.
void set_tile_64(AttentionConfig& config, bool is_short, bool is_small) {
  const bool is_wide = !(is_short && config.mask != MaskKind::kLength) && !config.maps_scores() &&
                       config.mask != MaskKind::kBoth && !config.sequences;
  if (is_small) {
    set_tile(config, 2, is_wide ? 128 : 64, is_wide ? 2 : 4, 2);
  } else {
    set_tile(config, 3, is_wide ? 128 : 64, is_wide ? 3 : 6, 6);
  }
  config.overlap = !is_wide;
  // Causal 512 and 1k: 3 % faster without turns; full, 16k: 8 % slower.
  config.ping_pong = is_wide || !is_short;
}

// Turns buy 1 % full and cost as much causal and with windows (16k, 1,024 keys: 620 TFLOP/s
// without, 612 with; H200, 2026-11-28).
void set_tile_128(AttentionConfig& config, bool is_short, bool is_small) {
  config.ping_pong = config.mask == MaskKind::kLength;
  if (is_short || is_small) {
    const bool masked = config.mask != MaskKind::kLength;
    set_tile(config, 2, masked ? 64 : 128, masked ? 4 : 2, 4);
    config.cache_hints = true;
    return;
  }
  set_tile(config, 3, 64, 3, 3);
  const bool has_room =
      config.mask != MaskKind::kBoth && !config.sequences && !config.maps_scores();
  config.q_register_dims = has_room ? min<i32>(64, config.d_qk) : 0;
}

void set_tile_256(AttentionConfig& config) {
  set_tile(config, 2, 64, 2, 3);
  config.stage_output = false;
  config.cache_hints = true;
  const bool has_room = !config.maps_scores() && !config.sequences && !config.dropout;
  const i32 dims = config.dtype == DType::kFloat16 || config.mask == MaskKind::kBoth ? 64 : 96;
  config.q_register_dims = has_room ? min(dims, config.d_qk) : 0;
}

// Beyond 256: two stages as far as they fit. Both warpgroups do the same at the same time: turns
// cost 11 % (d 512, 16k, 488 TFLOP/s against 432).
void set_tile_512(AttentionConfig& config) {
  set_tile(config, 2, 64, 2, 1);
  config.stage_output = config.ping_pong = false;
  const bool has_room = !config.maps_scores() && !config.sequences && !config.dropout &&
                        config.mask != MaskKind::kBoth;
  config.q_register_dims = has_room ? min(64, config.d_qk) : 0;
  if (!config.valid()) config.stages = 1;
}

void leave_out(AttentionConfig& config, const Problem& problem) {
  const auto keeps = [&problem](Optimisation each) { return !leaves_out(problem, each); };
  if (!keeps(Optimisation::kPipeline)) config.stages = 1;
  if (!keeps(Optimisation::kLazyRescale)) config.shift_rule = ShiftRule::kEveryBlock;
  config.specialised &= keeps(Optimisation::kWarpSpecialisation);
  config.swizzle &= keeps(Optimisation::kSwizzle);
  config.overlap &= keeps(Optimisation::kOverlap);
  config.ping_pong &= keeps(Optimisation::kPingPong);
  config.folded_scale &= keeps(Optimisation::kFoldedScale);
  config.longest_first &= keeps(Optimisation::kBlockOrder);
  config.skip_full_masks &= keeps(Optimisation::kFullBlocks);
}

bool is_short(const Problem& problem) {
  return !problem.batch_invariant && max(problem.max_q, problem.max_kv) <= kShort;
}

// What the tuned tiles were searched for: enough rows, and no options but one mask.
bool is_plain(const Problem& problem, const AttentionConfig& config) {
  return problem.dtype == DType::kBFloat16 && problem.dim_qk == problem.dim_v &&
         config.mask != MaskKind::kBoth && !config.maps_scores() && !config.sequences &&
         !config.sinks && !config.stats && !config.wide_output && !config.dropout &&
         !problem.batch_invariant && problem.max_q > 64 && !fits_at_once(problem, config, 2);
}

// The tile that a search asks for, or else one that a search has found.
TileChoice chosen_tile(const Problem& problem) {
  if (problem.tile.given() || !is_plain(problem, options_of(problem))) return problem.tile;
  for (const TunedTile& each : kTunedTiles) {
    const bool is_of_class = each.dim == problem.dim_qk && each.is_short == is_short(problem) &&
                             each.causal == has_upper_limit(problem.mask);
    if (is_of_class) return each.tile;
  }
  return {};
}

void choose(AttentionConfig& config, const TileChoice& tile) {
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

std::string sm90_layout_refusal(const Problem& problem, Array array) {
  const Tensor& tensor = problem.arrays[array];
  if (tensor.strides[3] != 1 && tensor.shape[3] > 1) {
    return sentence(name(array), " has stride ", tensor.strides[3],
                    " along the head dimension; the copy engine needs 1");
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (tensor.shape[axis] <= 1) continue;
    const i64 stride = tensor.strides[axis];
    if (stride % kUnit != 0 || stride <= 0 || stride * 2 >= kMaxStrideBytes) {
      return sentence(name(array), " has stride ", stride, " along axis ", axis,
                      "; the copy engine needs positive multiples of ", kUnit);
    }
  }
  return "";
}

std::string sm90_forward_refusal(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability != 90) return "needs compute capability 9.0 (Hopper)";
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) {
    return sentence("has no arithmetic for ", name(problem.dtype), ", only float16 and bfloat16");
  }
  if (problem.dim_qk < 1 || problem.dim_v < 1 || problem.dim_qk > kMaxDim ||
      problem.dim_v > kMaxDim || problem.dim_v % kUnit != 0) {
    return sentence("head dimensions must be 1 to ", kMaxDim, ", that of v a multiple of ", kUnit,
                    "; they are ", problem.dim_qk, " and ", problem.dim_v);
  }
  if (problem.kv_rows == 0) return "needs at least one key";
  if (problem.q_rows > kMaxCount - 256 || problem.kv_rows > kMaxCount - 256 ||
      problem.num_sequences > kMaxCount) {
    return "counts rows in 31 bits";
  }
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO}) {
    const std::string refusal = sm90_layout_refusal(problem, array);
    if (!refusal.empty()) return refusal;
  }
  const DType o = problem.arrays[Array::kO].dtype;
  if (o != problem.dtype && o != DType::kFloat32) return sentence("does not write ", name(o));
  const AttentionConfig config = sm90_forward_config(problem);
  if (problem.tile.given() && !config.valid()) {
    return sentence("a tile of ", config.q_rows(), " x ", config.kv_rows, " with ", config.stages,
                    " stages and ", config.num_q_slots(), " slots of Q, ", config.shared_bytes(),
                    " bytes of shared memory, is none that its kernel can have");
  }
  if (sm90_max_q_blocks(problem, config) > kMaxCount) {
    return "counts blocks of queries in 31 bits";
  }
  return "";
}

AttentionConfig sm90_forward_config(const Problem& problem) {
  AttentionConfig config = options_of(problem);
  const bool fills_one_tile = !problem.batch_invariant && problem.max_q <= 64;
  const bool per_pair = config.has_pair_terms() || config.dropout;
  const i32 widest = max(AttentionConfig::chunked(config.d_qk), config.d_v);
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
  choose(config, chosen_tile(problem));
  leave_out(config, problem);
  return config;
}

// Those that change the config: d 64 full, say, has no overlap to leave out.
u32 sm90_forward_switches(const Problem& problem) {
  Problem each = problem;
  each.without = 0;
  const AttentionConfig whole = sm90_forward_config(each);
  u32 switches = 0;
  for (u32 bit = 1; bit <= kAllOptimisations; bit *= 2) {
    each.without = bit;
    if (sm90_forward_config(each) != whole) switches |= bit;
  }
  return switches;
}

GpuNeeds sm90_forward_needs(const Problem& problem, const Gpu& gpu) {
  const AttentionConfig config = sm90_forward_config(problem);
  GpuNeeds needs;
  needs.tile = {config.q_rows(), config.kv_rows};
  if (sm90_counts_blocks(problem, gpu, config)) {
    needs.workspace_bytes = needs.zeroed_bytes = sizeof(u32);
  }
  if (config.skips_documents) {
    needs.workspace_bytes =
        kKeyRangesOffset + sm90_num_key_ranges(problem, config) * sizeof(IdRange);
  }
  needs.alignment_bytes = 16;
  return needs;
}

bool sm90_counts_blocks(const Problem& problem, const Gpu& gpu, const AttentionConfig& config) {
  return sm90_max_q_blocks(problem, config) > gpu.num_multiprocessors;
}

size_t sm90_num_key_ranges(const Problem& problem, const AttentionConfig& config) {
  return static_cast<size_t>(
      num_key_ranges(problem.kv_rows, problem.num_sequences, problem.packed, config.kv_rows));
}

i32 sm90_heads_per_group(const Problem& problem, const Gpu& gpu) {
  const i32 chosen = chosen_tile(problem).heads_per_group;
  if (chosen != TileChoice::kOfTable) return chosen;
  const bool masked = has_upper_limit(problem.mask) || has_lower_limit(problem.mask);
  if (!masked && !reads_sequences(problem) && problem.max_kv > kShort) return 1;
  const i64 rows = problem.packed || !reads_sequences(problem)
                       ? problem.kv_rows
                       : problem.kv_rows * problem.num_sequences;
  const i64 bytes = max<i64>(rows * (problem.dim_qk + problem.dim_v) * 2 / problem.group_size(), 1);
  const i64 fitting = static_cast<i64>(gpu.l2_bytes) * 2 / 3 / bytes;
  const i64 most = clamp<i64>(fitting, 1, masked ? 16 : 2);
  // Groups of one size: a last one of few heads would leave multiprocessors idle (d 256 causal, 8k,
  // 16 heads as 5 + 5 + 5 + 1: 716 TFLOP/s on an H200; as 4 x 4: 808 on an H100, 2026-11-28).
  const i64 heads = max<i64>(problem.heads_q, 1) *
                    (reads_sequences(problem) ? 1 : max<i64>(problem.num_sequences, 1));
  for (i64 size = most; 2 * size >= most; --size) {
    if (heads % size == 0) return static_cast<i32>(size);
  }
  return static_cast<i32>(ceil_div(heads, ceil_div(heads, most)));
}

i64 sm90_max_q_blocks(const Problem& problem, const AttentionConfig& config) {
  if (problem.q_rows == 0) return 0;  // also when packed: nothing is launched
  const i64 rows = config.q_rows();
  const i64 of_a_head = problem.packed ? problem.q_rows / rows + problem.num_sequences
                                       : ceil_div(problem.q_rows, rows) * problem.num_sequences;
  return of_a_head * problem.heads_q / config.heads_per_tile;
}

}  // namespace fulmen
