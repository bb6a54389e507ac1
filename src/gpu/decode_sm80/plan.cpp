// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles and plans of decode_sm80.

#include "gpu/decode_sm80/plan.h"

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

constexpr i64 kMaxDim = 256;
constexpr i64 kMaxRows = 64;           // of a group of heads: one row tile
constexpr i64 kMaxInvariantRows = 16;  // where the batch may not decide on larger tiles
constexpr i64 kFewestBlockKeys = 16;
constexpr i64 kMostParts = 17;              // of a row tile whose keys clusters divide
constexpr i64 kFewestKeys = 256;            // below, there is nothing to divide
constexpr i32 kChunkKeys = 1024;            // where bits may not depend on who has which keys
constexpr i64 kMostBlocks = i64{1} << 30;   // of keys: they are counted in 31 bits
constexpr double kSmallestScale = 0x1p-60;  // by which slopes of ALiBi and caps are divided
constexpr size_t kWideSpillBytes =
    4096;                            // Q and O take 192 of 255 registers: 2,364 with all options
constexpr size_t kSpillBytes = 512;  // of the path for rows that met something hidden

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

i64 rows_of_group(const Problem& problem) { return problem.max_q * problem.group_size(); }

i32 rounded_up(i64 dim, i64 unit) {
  return static_cast<i32>(unit * max<i64>(ceil_div(dim, unit), 1));
}

// Upper bound of the chunks of so many keys, over all heads.
i64 num_chunks(const Problem& problem, i64 keys) {
  return ceil_div(problem.max_kv, keys) * problem.num_sequences * problem.heads_kv;
}
i64 num_chunks(const Problem& problem, const DecodeSm80Config& config) {
  return num_chunks(problem, i64{config.block_keys()} * config.chunk_blocks);
}

i64 num_row_tiles(const Problem& problem, const DecodeSm80Config& config) {
  return ceil_div(rows_of_group(problem), config.rows());
}

// Whether no length says how keys are to be divided: a cluster takes every row tile whole.
bool has_equal_row_tiles(const Problem& problem, const DecodeSm80Config& config) {
  return !config.ragged && !config.placed && (problem.num_sequences == 1 || !config.score.varlen);
}

bool fits(const DecodeSm80Config& config, const Gpu& gpu) {
  return static_cast<size_t>(config.shared_bytes()) <= gpu.shared_bytes_per_block;
}

// Clusters that a card holds at once: an H200 66 of 2, 30 of 4, 15 of 8.
i64 clusters_at_once(const Gpu& gpu, i64 size) {
  return gpu.num_multiprocessors * (size <= 2 ? 10 : 9) / 10 / size;
}
// Whether so many blocks are that many tenths of the multiprocessors.
bool are_tenths(i64 blocks, const Gpu& gpu, i64 tenths) {
  return 10 * blocks >= tenths * gpu.num_multiprocessors;
}

// The blocks of a cluster that takes every row tile whole, where that was faster on an H200
// (2026-11-29): as many as the card holds at once. Half of its multiprocessors read as fast as all,
// but for bytes, which want all products; fewer do where there is little to read.
i32 whole_cluster_size(const Problem& problem, const Gpu& gpu, const DecodeSm80Config& config) {
  constexpr i64 kFewBytes = i64{4} << 20;  // of a row tile
  if (!has_equal_row_tiles(problem, config)) return 1;
  const i64 row_tiles = problem.num_sequences * problem.heads_kv;
  for (const i64 size : {8, 4, 2}) {
    if (row_tiles > clusters_at_once(gpu, size)) continue;
    const bool is_half = are_tenths(2 * size * row_tiles, gpu, 9);
    const bool is_all = are_tenths(size * row_tiles, gpu, 9);
    const i64 bytes = problem.max_kv * (config.d_qk + config.d_v) * config.kv_bytes();
    const bool takes = is_all || (is_half && !config.is_quantised()) || bytes <= kFewBytes;
    return takes ? static_cast<i32>(size) : 1;
  }
  return 1;
}

// Of clusters that divide the keys as blocks do: so large that a row tile has few parts; one or two
// for each where lengths differ. Pages want all multiprocessors.
i32 cluster_size(const Problem& problem, const Gpu& gpu, const DecodeSm80Config& config) {
  constexpr i64 kFewRowTiles = 8;
  if (config.is_quantised()) return 1;
  const i64 row_tiles = problem.num_sequences * problem.heads_kv;
  for (const i64 size : {2, 4, 8}) {
    const i64 at_once = clusters_at_once(gpu, size);
    const bool are_few = row_tiles < kFewRowTiles && at_once <= kMostParts * row_tiles;
    const bool is_one_each = row_tiles <= at_once && are_tenths(size * row_tiles, gpu, 9);
    const bool is_half = row_tiles <= at_once && 2 * row_tiles >= at_once * 9 / 10 && size < 8;
    if (are_few || is_one_each || (is_half && !config.paged)) return static_cast<i32>(size);
  }
  return 1;
}

void set_cluster(DecodeSm80Config& config, const Problem& problem, const Gpu& gpu) {
  const bool may_be_in_clusters =
      gpu.compute_capability == 90 && (config.row_warps == 1 || config.transposed) &&
      problem.may_plan_by_lengths() && num_row_tiles(problem, config) == 1;
  if (!may_be_in_clusters || problem.num_sequences * problem.heads_kv == 0) return;
  DecodeSm80Config together = config;
  together.cluster = whole_cluster_size(problem, gpu, config);
  together.whole = together.cluster > 1;
  if (!together.whole) together.cluster = cluster_size(problem, gpu, config);
  if (fits(together, gpu)) config = together;
}

// By the most rows that a request of the batch may have; 16 where bits may not depend on the batch.
// As columns 8, beyond 128 dims 16, by two warps: O of 16 rows takes half of the registers there.
void set_rows(DecodeSm80Config& config, const Problem& problem) {
  const bool is_wide = max(config.d_qk, config.d_v) > 128;
  const bool may_grow = problem.may_plan_by_lengths();
  config.transposed = rows_of_group(problem) <= (is_wide && may_grow ? 16 : 8);
  const i64 tiles = may_grow ? ceil_div(rows_of_group(problem), config.rows_of_warp()) : 1;
  config.row_warps = tiles <= 1 ? 1 : tiles <= 2 ? 2 : 4;
  const bool is_narrow = max(config.d_qk, config.d_v) <= 64 || config.is_quantised();
  config.kv_rows = config.row_warps == 4 || is_narrow ? 32 : 16;
}

// Whether a shape fits the card; then the config has it.
bool takes_shape(DecodeSm80Config& config, const DecodeShape& shape, const Gpu& gpu) {
  DecodeSm80Config shaped = config;
  shaped.splits = max(1, shape.splits / config.row_warps);
  shaped.stages = shape.stages;
  if (shape.kv_rows != 0) shaped.kv_rows = shape.kv_rows;
  if (!fits(shaped, gpu)) return false;
  config = shaped;
  return true;
}

// The shape and the cluster. Steps of twice the keys where every block has two of them, and every
// cluster.
void set_shape(DecodeSm80Config& config, const Problem& problem, const Gpu& gpu) {
  const i32 dim = max(config.d_qk, config.d_v);
  const bool is_one_warp = config.row_warps == 1;
  const auto takes = [&](const DecodeShape& shape) { return takes_shape(config, shape, gpu); };
  bool is_set = false;
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

KernelSpec spec(const DecodeSm80Config& config) {
  const std::string distinction = sentence(
      name(config.dtype), config.is_quantised() ? sentence("_", name(config.quantised)) : "",
      config.scaled ? "_scaled" : "", "_d", config.d_qk, "_", config.d_v, "_", config.rows(), "x",
      config.block_keys(), name_suffix(config.score), config.ragged ? "_ragged" : "",
      config.paged ? "_paged" : "", config.placed ? "_placed" : "", config.tree ? "_tree" : "",
      config.mixed ? "_mixed" : "",
      config.has_chunks() ? sentence("_chunks", config.chunk_blocks) : "",
      config.cluster > 1 ? sentence("_cluster", config.cluster) : "", config.whole ? "_whole" : "",
      config.one_query ? "_single" : "", config.transposed ? "_transposed" : "");
  KernelSpec spec = on_tensor_cores(
      spec_of<DecodeSm80Params>("decode_sm80/decode_sm80", "decode_sm80", distinction, config),
      config, max(config.d_qk, config.d_v) > 128 ? kWideSpillBytes : kSpillBytes);
  spec.min_blocks = config.min_blocks;
  return spec;
}

// Blocks of a launch for each row tile of a head, or clusters. As many for every head of k and v,
// where that leaves few multiprocessors idle: then no block has keys of two heads, and those that
// share a head end together. One for every row tile, where such clusters are half of the card.
i64 num_workers(const Problem& problem, const Gpu& gpu, const DecodeSm80Config& config,
                i64 row_tiles) {
  const i64 all_row_tiles = problem.num_sequences * problem.heads_kv;
  const i64 blocks = i64{gpu.num_multiprocessors} * config.min_blocks / row_tiles;
  const i64 at_once =
      config.cluster > 1 ? clusters_at_once(gpu, config.cluster) : max<i64>(1, blocks);
  const bool is_one_each =
      config.whole || (config.cluster > 1 && 2 * all_row_tiles >= at_once * 9 / 10);
  if (is_one_each) return all_row_tiles;
  const i64 even = at_once / problem.heads_kv * problem.heads_kv;
  const i64 workers = even * 20 >= at_once * 19 ? even : at_once;
  return clamp<i64>(workers, 1, max<i64>(1, num_chunks(problem, config)));
}

// A number that no memory holds by chance, see ptx::start_counter: splitmix64 (Steele, Lea, Flood,
// 2014) of the time and place of this process and of how many were made.
u64 new_stamp() {
  static std::atomic<u64> made =
      static_cast<u64>(std::chrono::system_clock::now().time_since_epoch().count()) ^
      reinterpret_cast<std::uintptr_t>(&made) << 20;
  u64 x = made += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return (x ^ x >> 31) << 16 | u64{1} << 63;
}

// Workspace: counters, then parts.
class DecodeSm80Plan final : public GpuPlan {
 public:
  // part: what is left of `gpu` beside another kernel.
  DecodeSm80Plan(const Problem& problem, const Gpu& gpu, const DecodeSm80Config& config,
                 const Gpu& part) {
    params_.attention = attention_params(problem);
    params_.group = static_cast<i32>(problem.group_size());
    params_.row_tiles = static_cast<i32>(num_row_tiles(problem, config));
    params_.workers_beside =
        static_cast<i32>(num_workers(problem, part, config, params_.row_tiles));
    params_.stamp = new_stamp();
    params_.unit = score_unit(config, problem.score_map.scale);
    const i64 row_tiles = params_.row_tiles;
    const i64 workers = num_workers(problem, gpu, config, row_tiles) * row_tiles;
    const i64 chunks = num_chunks(problem, config) * row_tiles;
    const i64 grid = workers * config.cluster;
    const i64 counters = config.whole ? 0 : config.has_chunks() ? chunks : grid;
    const i64 parts = config.whole ? 0 : config.has_chunks() ? chunks : 2 * workers;
    parts_at_ = ceil_div(counters * 8, 256) * 256;
    workspace_bytes = static_cast<size_t>(parts_at_ + parts * config.part_floats() * 4);
    tile = {config.rows(), config.block_keys()};
    alignment_bytes = 16;
    launches = {{spec(config), problem.num_sequences == 0 && !problem.packed.q ? 0 : grid,
                 static_cast<unsigned>(config.cluster)}};
  }

  void run(const Call& call) const override {
    DecodeSm80Params params = params_;
    bind_params(params.attention, call.problem, call.faults);
    params.counters = reinterpret_cast<u64*>(call.workspace);
    params.parts = reinterpret_cast<float*>(call.workspace + parts_at_);
    call.launch(0, params);
  }

 private:
  DecodeSm80Params params_{};  // but for pointers
  i64 parts_at_;
};

}  // namespace

bool is_ragged(const Problem& problem) {
  return problem.packed.q || problem.packed.kv || !problem.has(Array::kKvLengths) ||
         problem.has(Array::kQLengths) || problem.has(Array::kKvStart) ||
         problem.has(Array::kPageIndptr);
}

bool has_aligned_o(const Problem& problem) {
  const Tensor& o = problem.arrays[Array::kO];
  const i64 unit = 16 / size_bytes(o.dtype);
  bool fits = o.strides[3] == 1;
  for (int axis = 0; axis < 3; ++axis) {
    fits = fits && (o.shape[axis] <= 1 || o.strides[axis] % unit == 0);
  }
  return fits;
}

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
  config.d_qk = rounded_up(problem.dim_qk, config.dim_unit());
  config.d_v = rounded_up(problem.dim_v, config.dim_unit());
  set_rows(config, problem);
  set_shape(config, problem, gpu);
  if (!problem.may_plan_by_lengths()) config.chunk_blocks = kChunkKeys / config.block_keys();
  return config;
}

bool prefers_decode_sm80(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability < 80 || problem.without != 0 || problem.tile.given()) return false;
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return false;
  for (const Array array : {Array::kMask, Array::kBias, Array::kQIds})
    if (problem.has(array)) return false;
  if (problem.dropout.enabled() || problem.has_channel_scales()) return false;
  if (user_terms_of(problem).any()) return false;
  const bool fits = max(problem.dim_qk, problem.dim_v) <= kMaxDim && problem.heads_q > 0 &&
                    problem.heads_kv > 0 && has_aligned_rows(problem, Array::kV) &&
                    has_aligned_o(problem);
  const i64 most_rows = problem.may_plan_by_lengths() ? kMaxRows : kMaxInvariantRows;
  if (!fits || rows_of_group(problem) > most_rows || rows_of_group(problem) == 0) return false;
  const bool may_be_short =
      problem.has_caches() || problem.is_quantised() || !problem.may_plan_by_lengths();
  if (problem.max_kv < kFewestKeys && !may_be_short) return false;
  return num_chunks(problem, kFewestBlockKeys) < kMostBlocks;
}

PlanOrRefusal plan_decode_sm80(const Problem& problem, const Gpu& gpu) {
  return std::make_unique<DecodeSm80Plan>(problem, gpu, decode_sm80_config(problem, gpu), gpu);
}

std::unique_ptr<GpuPlan> plan_decode_beside(const Problem& problem, const Gpu& gpu,
                                            int multiprocessors) {
  DecodeSm80Config config = decode_sm80_config(problem, gpu);
  config.mixed = true;
  config.cluster = 1;  // the other kernel may leave no neighbours free
  config.whole = false;
  Gpu part = gpu;
  part.num_multiprocessors = multiprocessors;
  return std::make_unique<DecodeSm80Plan>(problem, gpu, config, part);
}

namespace {

constexpr i64 kCompiledDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {96, 96}, {192, 128}};

std::vector<KernelSpec> specs_of(Problem problem, const Gpu& gpu) {
  std::vector<KernelSpec> specs;
  const auto add = [&](DType dtype) {
    problem.dtype = dtype;
    problem.arrays[Array::kO].dtype = dtype;
    specs.push_back(spec(decode_sm80_config(problem, gpu)));
  };
  for (const auto& [dim_qk, dim_v] : kCompiledDims) {
    problem.dim_qk = dim_qk;
    problem.dim_v = dim_v;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) add(dtype);
  }
  return specs;
}

}  // namespace

std::vector<std::vector<KernelSpec>> decode_sm80_specs(const Gpu& gpu) {
  Problem plain;
  plain.score_map.scale = 1;
  plain.heads_q = plain.heads_kv = plain.max_q = 1;
  Problem group = plain;
  group.heads_q = 16;
  group.arrays[Array::kKvLengths].dtype = DType::kInt32;
  Problem drafts = group;
  drafts.max_q = 4;
  drafts.mask.causal = true;
  drafts.arrays[Array::kStats].dtype = DType::kFloat32;
  Problem all = drafts;
  all.max_q = 2;
  all.mask.window_left = 1;
  all.score_map = {1, 50};
  all.arrays[Array::kAlibiSlopes].dtype = DType::kFloat32;
  Problem paged = all;
  paged.page_rows = 16;
  paged.arrays[Array::kKvStart].dtype = DType::kInt32;
  paged.arrays[Array::kTree].dtype = paged.arrays[Array::kPositions].dtype = DType::kInt64;
  Problem split = group;  // in clusters, where there are any
  split.heads_q = 32;
  split.heads_kv = 8;
  split.num_sequences = 1;
  std::vector<std::vector<KernelSpec>> entries{specs_of(split, gpu), specs_of(plain, gpu),
                                               specs_of(group, gpu), specs_of(drafts, gpu),
                                               specs_of(all, gpu),   specs_of(paged, gpu)};
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
    Problem quantised = dtype == DType::kFloat8E5M2 ? paged : group;
    quantised.arrays[Array::kK].dtype = quantised.arrays[Array::kV].dtype = dtype;
    if (dtype != DType::kInt8) quantised.arrays[Array::kVScale].dtype = DType::kFloat32;
    entries.push_back(specs_of(quantised, gpu));
  }
  return entries;
}

}  // namespace fulmen::gpu
