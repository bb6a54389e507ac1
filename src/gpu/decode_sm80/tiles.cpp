// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of decode_sm80: row tiles, splits and their rings, clusters.

#include "gpu/decode_sm80/plan.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/params.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {
namespace {

constexpr i64 kMostParts = 17;  // of a row tile whose keys clusters divide
// Of a chunk, where bits may not depend on who has which keys; of warpgroups, whose parts are large
// (8 x 32k, 64 rows: 64.7, 76.7 and 91.3 us of 4,096, 2,048 and 1,024, H200, 2026-11-30).
constexpr i32 kChunkKeys = 1024, kWarpgroupChunkKeys = 4096;
constexpr double kSmallestScale = 0x1p-60;  // by which slopes of ALiBi and caps are divided

// How many splits of a block's keys, stages of their rings, and keys that a split takes at a time,
// 0: as many as else. In order of preference, the first that fits; the last does on every card:
// 128 KB in flight a multiprocessor, by one block, were best on an H200 (2026-11-29).
struct DecodeShape {
  i32 splits;
  i32 stages;
  i32 kv_rows = 0;
};
constexpr DecodeShape kShapes[] = {{8, 2}, {4, 3}, {4, 2}, {4, 1}, {2, 2}, {2, 1}, {1, 2}, {1, 1}};
// Half as many steps, of twice the keys, at d 128: in pages they look up half as often (1 to 3 %),
// else, with rows as columns, up to 3 %. Eight warps instead of four at d 256 (2 to 4 %). Three
// stages of bytes (1 to 3 %).
constexpr DecodeShape kLongShape{8, 1, 32}, kWideShape{8, 1}, kByteShape{8, 3};
// Of warpgroups, likewise in warps; and in clusters, which leave room for what these exchange.
constexpr DecodeShape kWarpgroupShapes[] = {{8, 4, 64}, {8, 2, 64}, {8, 1, 64}, {8, 1, 32},
                                            {4, 4, 64}, {4, 2, 64}, {4, 1, 64}};
constexpr DecodeShape kWarpgroupClusterShapes[] = {{8, 4, 64}, {4, 4, 64}, {4, 1, 64}};

i32 rounded_up(i64 dim, i64 unit) {
  return static_cast<i32>(unit * max<i64>(ceil_div(dim, unit), 1));
}

// Rows of the boxes in which Hopper's copy engine brings keys to warpgroups; 0 where warps multiply
// by themselves: 16 query rows or fewer, keys of 8 bits or which the engine cannot read, or of
// whose pages it would find few rows together.
i32 box_rows(const Problem& problem, const Gpu& gpu) {
  constexpr i64 kRowsOfWarp = 16;
  constexpr i64 kMostCoordinates = i64{1} << 30;
  constexpr i32 kMostRows = 64, kFewestRows = 8;
  const bool reads = gpu.compute_capability == 90 && !problem.is_quantised() &&
                     decode_rows(problem) > kRowsOfWarp && problem.kv_rows > 0 &&
                     (!problem.is_paged() || problem.num_pages > 0) &&
                     max(problem.kv_rows, problem.num_pages) < kMostCoordinates &&
                     sm90_layout_refusal(problem, Array::kK).empty() &&
                     sm90_layout_refusal(problem, Array::kV).empty();
  if (!reads) return 0;
  const i32 rows =
      problem.is_paged() ? key_box_rows(attention_params(problem), kMostRows) : kMostRows;
  return rows >= kFewestRows ? rows : 0;
}

// Whether no length says how keys are to be divided: a cluster takes every row tile whole.
bool has_equal_row_tiles(const Problem& problem, const DecodeSm80Config& config) {
  return !config.ragged && !config.placed && (problem.num_sequences == 1 || !config.score.varlen);
}

bool fits(const DecodeSm80Config& config, const Gpu& gpu) {
  return static_cast<size_t>(config.shared_bytes()) <= gpu.shared_bytes_per_block;
}

// Whether so many blocks are that many tenths of the multiprocessors.
bool are_tenths(i64 blocks, const Gpu& gpu, i64 tenths) {
  return 10 * blocks >= tenths * gpu.num_multiprocessors;
}

// Whether row tiles of so many bytes take clusters of 16 (an H200, 2026-11-30); one alone of more
// bytes is divided among all multiprocessors. The card holds four at once: of 132 multiprocessors
// in eight processing clusters of up to 18, which have an even number each, five have 16 or more.
bool takes_large_clusters(const Gpu& gpu, const DecodeSm80Config& config, i64 row_tiles,
                          i64 bytes) {
  constexpr i64 kMost = 4, kFewestBytes = i64{3} << 20, kMostBytes = i64{4} << 20;
  return gpu.num_multiprocessors >= 132 && row_tiles <= kMost &&
         bytes <= kMostBytes * min<i64>(row_tiles, 2) && (config.paged || bytes >= kFewestBytes) &&
         !config.is_quantised();
}

// The blocks of a cluster that takes every row tile whole, where that was faster on an H200
// (2026-11-29): as many as the card holds at once. Half of its multiprocessors read as fast as all,
// but for bytes, which want all products, and pages of rows of 128 bytes, which want all look-ups;
// fewer do where there is little to read.
i32 whole_cluster_size(const Problem& problem, const Gpu& gpu, const DecodeSm80Config& config) {
  constexpr i64 kFewBytes = i64{4} << 20;  // of a row tile
  if (!has_equal_row_tiles(problem, config)) return 1;
  const i64 row_tiles = heads_of_sequences(problem, config);
  const i64 bytes = problem.max_kv * 2 * config.words(config.d_qk + config.d_v);
  if (takes_large_clusters(gpu, config, row_tiles, bytes)) return 16;
  for (const i64 size : {8, 4, 2}) {
    if (row_tiles > clusters_at_once(gpu, size)) continue;
    const bool is_half = are_tenths(2 * size * row_tiles, gpu, 9);
    const bool is_all = are_tenths(size * row_tiles, gpu, 9);
    const bool are_narrow = config.words(max(config.d_qk, config.d_v)) <= 64;
    const bool wants_all =
        config.is_quantised() || config.in_warpgroups() || (config.paged && are_narrow);
    const bool takes = is_all || (is_half && !wants_all) || bytes <= kFewBytes;
    return takes ? static_cast<i32>(size) : 1;
  }
  return 1;
}

// Of clusters that divide the keys as blocks do: so large that a row tile has few parts; one or two
// for each where lengths differ. Pages want all multiprocessors, and warpgroups, but for few parts.
i32 cluster_size(const Problem& problem, const Gpu& gpu, const DecodeSm80Config& config) {
  constexpr i64 kFewRowTiles = 8;
  if (config.is_quantised()) return 1;
  const i64 row_tiles = heads_of_sequences(problem, config);
  for (const i64 size : {2, 4, 8}) {
    const i64 at_once = clusters_at_once(gpu, size);
    const bool are_few = row_tiles < kFewRowTiles && at_once <= kMostParts * row_tiles;
    const bool is_one_each = row_tiles <= at_once && are_tenths(size * row_tiles, gpu, 9);
    const bool is_half = row_tiles <= at_once && 2 * row_tiles >= at_once * 9 / 10 && size < 8;
    const bool are_enough = is_one_each || (is_half && !config.paged);
    if (are_few || (are_enough && !config.in_warpgroups())) return static_cast<i32>(size);
  }
  return 1;
}

void set_cluster(DecodeSm80Config& config, const Problem& problem, const Gpu& gpu) {
  const bool may_be_in_clusters =
      gpu.compute_capability == 90 &&
      (config.row_warps == 1 || config.transposed || config.in_warpgroups()) &&
      problem.may_plan_by_lengths() && decode_row_tiles(problem, config) == 1;
  if (!may_be_in_clusters || heads_of_sequences(problem, config) == 0) return;
  DecodeSm80Config together = config;
  together.cluster = whole_cluster_size(problem, gpu, config);
  together.whole = together.cluster > 1;
  const bool may_divide = !config.in_warpgroups() || max(config.d_qk, config.d_v) <= 128;
  if (!together.whole && may_divide) together.cluster = cluster_size(problem, gpu, config);
  if (fits(together, gpu)) config = together;
}

// Whether a row tile may have neighbouring heads of k and v: a warp multiplies each by the rows of
// all, and keeps of every row what its own head gives.
bool may_be_together(const DecodeSm80Config& config, const Problem& problem) {
  const auto fills_lanes = [](i32 dim) { return dim >= 16 && (dim & (dim - 1)) == 0; };
  return config.transposed && config.row_warps == 1 && !config.is_quantised() &&
         fills_lanes(config.d_qk) && fills_lanes(config.d_v) && problem.heads_kv > 0;
}
// As many as make rows of 128 dims, whose rows of q one warp has; where bits may not depend on the
// batch nor may this, else clusters of 8 for all row tiles still fill the card, and pairs of blocks
// for those of one head do not.
void set_heads(DecodeSm80Config& config, const Problem& problem, const Gpu& gpu) {
  constexpr i32 kTogetherDims = 128, kLargestCluster = 8;
  const i64 of_one_head = heads_of_sequences(problem, config);
  const bool are_pairs = gpu.compute_capability == 90 && problem.may_plan_by_lengths() &&
                         has_equal_row_tiles(problem, config) &&
                         of_one_head <= clusters_at_once(gpu, 2) &&
                         are_tenths(2 * of_one_head, gpu, 9);
  if (are_pairs) return;
  const auto fits = [&](i32 heads) {
    const i64 row_tiles = problem.num_sequences * problem.heads_kv / heads;
    return heads * max(config.d_qk, config.d_v) <= kTogetherDims &&
           heads * decode_rows(problem) <= config.rows_of_warp() && problem.heads_kv % heads == 0 &&
           (!problem.may_plan_by_lengths() || are_tenths(kLargestCluster * row_tiles, gpu, 9));
  };
  while (fits(2 * config.heads)) config.heads *= 2;
}

// Whether two neighbouring heads of 16 rows have a warp each: a row of 64 dims is copied with that
// of its neighbour, and a page looked up for both (an H200, 2026-11-30).
bool may_have_warps_apart(const DecodeSm80Config& config, const Problem& problem, const Gpu& gpu) {
  constexpr i32 kDims = 64, kRows = 16;
  const i64 pairs = problem.num_sequences * problem.heads_kv / 2;
  return gpu.compute_capability == 90 && config.one_query && problem.group_size() == kRows &&
         config.d_qk == kDims && config.d_v == kDims && !config.is_quantised() &&
         problem.heads_kv % 2 == 0 && problem.may_plan_by_lengths() && are_tenths(pairs, gpu, 7);
}

// By the most rows that a request of the batch may have. As columns 8, beyond 128 dims 16, by two
// warps, unless bits may not depend on the batch: O of 16 rows takes half of the registers there.
void set_rows(DecodeSm80Config& config, const Problem& problem, const Gpu& gpu) {
  const bool is_wide = max(config.d_qk, config.d_v) > 128;
  const bool may_grow = problem.may_plan_by_lengths();
  config.transposed = decode_rows(problem) <= (is_wide && may_grow ? 16 : 8);
  const i64 tiles = ceil_div(decode_rows(problem), config.rows_of_warp());
  config.row_warps = tiles <= 1                              ? 1
                     : tiles <= 2 && !config.in_warpgroups() ? 2
                     : tiles <= 4                            ? 4
                                                             : 8;
  if (may_be_together(config, problem)) set_heads(config, problem, gpu);
  const bool is_narrow = config.words(max(config.d_qk, config.d_v)) <= 64 || config.is_quantised();
  config.kv_rows = config.row_warps == 4 || is_narrow ? 32 : 16;
  if (may_have_warps_apart(config, problem, gpu)) config.heads = config.row_warps = 2;
}

// Whether a shape fits the card; then the config has it.
bool takes_shape(DecodeSm80Config& config, const DecodeShape& shape, const Gpu& gpu) {
  DecodeSm80Config shaped = config;
  shaped.splits = max(1, shape.splits / config.row_warps);
  shaped.stages = shape.stages;
  if (shape.kv_rows != 0) shaped.kv_rows = shape.kv_rows;
  shaped.box_rows = min(shaped.box_rows, shaped.kv_rows);
  if (!fits(shaped, gpu)) return false;
  config = shaped;
  return true;
}

// The shape and the cluster. Steps of twice the keys where every block has two of them, and every
// cluster.
void set_shape(DecodeSm80Config& config, const Problem& problem, const Gpu& gpu) {
  const i32 dim = config.heads * max(config.d_qk, config.d_v);  // of a row that is copied
  const bool is_one_warp = config.row_warps == 1;
  const auto takes = [&](const DecodeShape& shape) { return takes_shape(config, shape, gpu); };
  bool is_set = false;
  if (config.in_warpgroups()) {
    const DecodeSm80Config before = config;
    for (const DecodeShape& shape : kWarpgroupClusterShapes) {
      if (takes(shape)) set_cluster(config, problem, gpu);
      if (config.cluster > 1) return;
    }
    config = before;
    for (const DecodeShape& shape : kWarpgroupShapes) is_set = is_set || takes(shape);
    return;
  }
  if (config.is_quantised()) {
    if (is_one_warp && takes(kShapes[0])) {
      set_cluster(config, problem, gpu);
      if (config.cluster == 1) takes(kByteShape);
      return;
    }
  } else if (dim > 128) {
    is_set = config.transposed && is_one_warp && takes(kWideShape);
  } else if (dim > 64 && is_one_warp && (config.paged || config.transposed)) {
    const DecodeSm80Config before = config;
    if (takes(kLongShape)) {
      set_cluster(config, problem, gpu);
      const bool divides = config.cluster > 1 && !config.whole;
      if (problem.max_kv >= (divides ? 2 * kMostParts : 2) * config.block_keys()) return;
      config = before;
    }
  }
  for (const DecodeShape& shape : kShapes) is_set = is_set || takes(shape);
  set_cluster(config, problem, gpu);
}

// Whole row tiles, as the card deals out blocks, where there are enough: two blocks may lie on a
// multiprocessor, each of half the splits, with steps of 32 keys, and one goes on where the other
// ends its row tile. Faster for 16 rows, however many row tiles there are, and for those of several
// heads of which no multiprocessor has two (an H200, 2026-11-30). Two heads of 16 rows keep all
// splits.
void deal_row_tiles(DecodeSm80Config& config, const Problem& problem, const Gpu& gpu) {
  constexpr i32 kRows = 16, kStepKeys = 32;
  const i64 row_tiles = heads_of_sequences(problem, config);
  const bool is_one_each = row_tiles <= gpu.num_multiprocessors;
  const bool are_apart = config.heads > config.heads_of_warp();
  const bool is_faster = config.rows() == kRows || are_apart || (config.heads > 1 && is_one_each);
  const bool deals = gpu.compute_capability == 90 && config.cluster == 1 &&
                     config.splits % 2 == 0 && !config.is_quantised() &&
                     decode_row_tiles(problem, config) == 1 &&
                     has_equal_row_tiles(problem, config) && problem.may_plan_by_lengths();
  if (!deals || !is_faster || !are_tenths(row_tiles, gpu, 7)) return;
  config.whole = true;
  if (are_apart) return;
  config.splits /= 2;
  config.min_blocks = 2;
  if (config.stages * config.kv_rows != kStepKeys) return;
  config.kv_rows = kStepKeys;
  config.stages = 1;
}

// Rows, their dims, and the shape; in warpgroups, or with 0 by warps. These are as fast or faster
// of 32 rows or fewer up to 128 dims, but for clusters (8 x 32k, 32 rows at 64 dims: 62.3 and 65.1
// us; 8 x 8k of 8 heads: 61.5, in clusters of two 51.0, H200, 2026-11-30).
DecodeSm80Config with_tiles(const DecodeSm80Config& options, const Problem& problem, const Gpu& gpu,
                            i32 box_rows) {
  constexpr i64 kFewRows = 32, kNarrow = 128;
  DecodeSm80Config config = options;
  config.box_rows = box_rows;
  config.d_qk = rounded_up(problem.dim_qk, config.dim_unit());
  config.d_v = rounded_up(problem.dim_v, config.dim_unit());
  set_rows(config, problem, gpu);
  set_shape(config, problem, gpu);
  const bool may_be_warps = box_rows != 0 && config.cluster == 1 && problem.may_plan_by_lengths();
  if (may_be_warps && decode_rows(problem) <= kFewRows &&
      max(problem.dim_qk, problem.dim_v) <= kNarrow) {
    return with_tiles(options, problem, gpu, 0);
  }
  return config;
}

}  // namespace

DecodeSm80Config decode_sm80_config(const Problem& problem, const Gpu& gpu) {
  ++config_derivations();
  DecodeSm80Config config;
  config.dtype = problem.dtype;
  if (problem.is_quantised()) config.quantised = problem.kv_dtype();
  config.scaled = problem.has(Array::kKScale) || problem.has(Array::kVScale);
  config.score = score_options_of(problem);
  config.score.sinks = false;  // looked up when kernels run
  config.score.varlen |= problem.has_caches();
  config.ragged = config.score.varlen && is_ragged(problem);
  config.paged = problem.is_paged();
  config.placed = problem.has(Array::kPositions);
  config.tree = problem.has(Array::kTree);
  if (is_last_row(problem) && problem.mask.is_at_most_causal())
    config.score.mask_kind = MaskKind::kNone;
  config.converts = config.quantised == DType::kFloat8E4M3 && gpu.compute_capability >= 89;
  config.one_query = problem.max_q == 1 && !problem.packed.q;
  config.score.negative_scale = !(problem.score_map.scale > kSmallestScale);
  config = with_tiles(config, problem, gpu, box_rows(problem, gpu));
  deal_row_tiles(config, problem, gpu);
  const i32 chunk_keys = config.in_warpgroups() ? kWarpgroupChunkKeys : kChunkKeys;
  if (!problem.may_plan_by_lengths()) config.chunk_blocks = chunk_keys / config.block_keys();
  return config;
}

}  // namespace fulmen::gpu
