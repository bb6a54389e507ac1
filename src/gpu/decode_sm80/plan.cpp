// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plans of decode_sm80: which problems it takes, its launch and workspace.

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
constexpr i64 kMaxRows = 64;  // of a group of heads: one row tile
constexpr i64 kFewestBlockKeys = 16;
constexpr i64 kFewestKeys = 256;           // below, there is nothing to divide
constexpr i64 kMostBlocks = i64{1} << 30;  // of keys: they are counted in 31 bits
constexpr size_t kWideSpillBytes =
    4096;                            // Q and O take 192 of 255 registers: 2,364 with all options
constexpr size_t kSpillBytes = 512;  // of the path for rows that met something hidden

// Upper bound of the chunks of so many keys, over so many heads of all sequences.
i64 num_chunks(const Problem& problem, i64 keys, i64 heads) {
  return ceil_div(problem.max_kv, keys) * heads;
}
i64 num_chunks(const Problem& problem, const DecodeSm80Config& config) {
  return num_chunks(problem, i64{config.block_keys()} * config.chunk_blocks,
                    heads_of_sequences(problem, config));
}

KernelSpec spec(const DecodeSm80Config& config) {
  const std::string distinction = sentence(
      name(config.dtype), config.is_quantised() ? sentence("_", name(config.quantised)) : "",
      config.scaled ? "_scaled" : "", "_d", config.d_qk, "_", config.d_v, "_", config.rows(), "x",
      config.block_keys(), config.heads > 1 ? sentence("_heads", config.heads) : "",
      name_suffix(config.score), config.ragged ? "_ragged" : "", config.paged ? "_paged" : "",
      config.placed ? "_placed" : "", config.tree ? "_tree" : "", config.mixed ? "_mixed" : "",
      config.has_chunks() ? sentence("_chunks", config.chunk_blocks) : "",
      config.cluster > 1 ? sentence("_cluster", config.cluster) : "", config.whole ? "_whole" : "",
      config.one_query ? "_single" : "", config.transposed ? "_transposed" : "",
      config.in_warpgroups() ? sentence("_boxes", config.box_rows) : "");
  KernelSpec spec = on_tensor_cores(
      spec_of<DecodeSm80Params>("decode_sm80/decode_sm80", "decode_sm80", distinction, config),
      config, max(config.d_qk, config.d_v) > 128 ? kWideSpillBytes : kSpillBytes);
  spec.min_blocks = config.min_blocks;
  return spec;
}

// Blocks of a launch for each row tile of a head, or clusters. As many for every head of k and v,
// where that leaves few multiprocessors idle: then no block has keys of two heads, and those that
// share a head end together; and, if there is such a number, as many for every row tile, or row
// tiles for each. One for every row tile, where such clusters are half of the card.
i64 num_workers(const Problem& problem, const Gpu& gpu, const DecodeSm80Config& config,
                i64 row_tiles) {
  const i64 all_row_tiles = heads_of_sequences(problem, config);
  const i64 heads = head_tiles(problem, config);
  const i64 blocks = i64{gpu.num_multiprocessors} * config.min_blocks / row_tiles;
  const i64 at_once =
      config.cluster > 1 ? clusters_at_once(gpu, config.cluster) : max<i64>(1, blocks);
  const bool is_one_each =
      config.whole || (config.cluster > 1 && 2 * all_row_tiles >= at_once * 9 / 10);
  if (is_one_each) return all_row_tiles;
  const auto are_enough = [&](i64 workers) { return workers * 20 >= at_once * 19; };
  const auto divide_row_tiles = [&](i64 workers) {
    return all_row_tiles % workers == 0 || (all_row_tiles > 0 && workers % all_row_tiles == 0);
  };
  const i64 even = at_once / heads * heads;
  i64 workers = even;
  while (are_enough(workers) && !divide_row_tiles(workers)) workers -= heads;
  if (!are_enough(workers)) workers = are_enough(even) ? even : at_once;
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
                 const Gpu& part)
      : box_rows_(config.box_rows) {
    params_.attention = attention_params(problem);
    params_.group = static_cast<i32>(problem.group_size() * config.heads);
    params_.row_tiles = static_cast<i32>(decode_row_tiles(problem, config));
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
    if (box_rows_ != 0) {
      encode(call.driver, tensor_box(call.problem.arrays[Array::kK], box_rows_), params.k_map);
      encode(call.driver, tensor_box(call.problem.arrays[Array::kV], box_rows_), params.v_map);
    }
    call.launch(0, params);
  }

 private:
  DecodeSm80Params params_{};  // but for pointers
  i64 parts_at_;
  i32 box_rows_;
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

bool prefers_decode_sm80(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability < 80 || problem.without != 0 || problem.tile.given()) return false;
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return false;
  for (const Array array : {Array::kMask, Array::kBias, Array::kQIds})
    if (problem.has(array)) return false;
  if (problem.dropout.enabled() || problem.has_channel_scales() || problem.has_quantised_q()) {
    return false;
  }
  if (user_terms_of(problem).any()) return false;
  const bool fits = max(problem.dim_qk, problem.dim_v) <= kMaxDim && problem.heads_q > 0 &&
                    problem.heads_kv > 0 && has_aligned_rows(problem, Array::kV) &&
                    has_aligned_o(problem);
  if (!fits || decode_rows(problem) > kMaxRows || decode_rows(problem) == 0) return false;
  const bool may_be_short =
      problem.has_caches() || problem.is_quantised() || !problem.may_plan_by_lengths();
  if (problem.max_kv < kFewestKeys && !may_be_short) return false;
  return num_chunks(problem, kFewestBlockKeys, problem.num_sequences * problem.heads_kv) <
         kMostBlocks;
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
  Problem pairs = split;  // of heads, where they are neighbours in a row tile
  pairs.heads_kv = 2;
  pairs.num_sequences = 128;
  std::vector<std::vector<KernelSpec>> entries{
      specs_of(split, gpu), specs_of(plain, gpu), specs_of(group, gpu), specs_of(drafts, gpu),
      specs_of(all, gpu),   specs_of(paged, gpu), specs_of(pairs, gpu)};
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
    Problem quantised = dtype == DType::kFloat8E5M2 ? paged : group;
    quantised.arrays[Array::kK].dtype = quantised.arrays[Array::kV].dtype = dtype;
    if (dtype != DType::kInt8) quantised.arrays[Array::kVScale].dtype = DType::kFloat32;
    entries.push_back(specs_of(quantised, gpu));
  }
  return entries;
}

}  // namespace fulmen::gpu
