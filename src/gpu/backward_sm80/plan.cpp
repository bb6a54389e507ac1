// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Workspace and launches of the backward pass of sm80.

#include "gpu/backward_sm80/plan.h"

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"
#include "gpu/tile_lists.h"
#include "kernels/backward_sm80/scheduler.cuh"

namespace fulmen::gpu {
namespace {

constexpr i64 kMaxDim = 576;
constexpr i64 kHeadsUnderMask = 8;   // query heads whose blocks are neighbours in a launch
constexpr i64 kBlocksAtATime = 128;  // as many as a large card runs
constexpr i64 kDbiasBlocks = 4096;
// Tiles of an axis of all heads.
i64 tiles_of(const Problem& problem, i64 extent, i64 heads, i64 tile_rows) {
  const i64 slots = problem.packed.q ? extent / tile_rows + problem.num_sequences
                                     : ceil_div(extent, tile_rows) * problem.num_sequences;
  return slots > 2 * kMaxBlocks / max<i64>(heads, 1) ? 2 * kMaxBlocks : slots * heads;
}

// Whether simt makes dbias or dsinks.
bool needs_simt(const Problem& problem) {
  return (problem.has(Array::kDBias) && !sm80_makes_dbias(problem)) || problem.has(Array::kDSinks);
}

std::string refusal_of(const Problem& problem, const Gpu& gpu) {
  std::string refusal = sm80_refusal(problem, gpu);
  if (!refusal.empty()) return refusal;
  if (!problem.has(Array::kDQ) && !problem.has(Array::kDK) && !problem.has(Array::kDV) &&
      !sums_captures(problem)) {
    return "computes dbias and dsinks only together with other gradients";
  }
  const DType dout = problem.arrays[Array::kDOut].dtype;
  if (dout != problem.dtype) return sentence("does not take dout of ", name(dout));
  if (max(problem.dim_qk, problem.dim_v) > kMaxDim) {
    return sentence("head dimensions of the backward pass go up to ", kMaxDim, "; they are ",
                    problem.dim_qk, " and ", problem.dim_v);
  }
  if (!needs_simt(problem)) return "";
  refusal = simt_refusal(problem, gpu);
  return refusal.empty() ? "" : "dbias and dsinks come from simt: " + refusal;
}

// Key/value heads whose blocks are neighbours in a launch.
i64 heads_per_group(const Problem& problem) {
  return is_unmasked(problem) ? 1 : max<i64>(kHeadsUnderMask / problem.group_size(), 1);
}

// How many groups of heads ahead of its own a block zeroes dq_accum: as many as run at a time; or
// all, which backward_preprocess_sm80 zeroes.
i64 groups_ahead(const Problem& problem, const BackwardSm80Config& config) {
  const i64 heads = heads_per_group(problem);
  const i64 all = problem.batch_extent() * problem.heads_kv;
  if (!config.zeroes_dq) return ceil_div(all, heads);
  const i64 slots = problem.packed.kv ? problem.kv_rows / config.kv_rows + problem.num_sequences
                                      : ceil_div(problem.kv_rows, config.kv_rows);
  return ceil_div(kBlocksAtATime, max<i64>(heads * slots, 1));
}

// Lines are tiles of keys.
TileShape key_tiles_of(const BackwardSm80Config& config) {
  return {config.q_rows, config.kv_rows, true};
}

// Kernels of sm80 in the order of a run: dbias before the others or after them, lists of tiles
// first.
std::vector<KernelLaunch> launches_of(const Problem& problem, const BackwardSm80Config& config,
                                      const AttentionParams& params) {
  const i64 m_blocks = num_q_tiles(params, config.q_rows);
  const i64 n_blocks = num_kv_tiles(params, config.kv_rows);
  const i64 postprocess_blocks = sm80_postprocess_blocks(m_blocks, n_blocks);
  std::vector<KernelLaunch> launches{
      {backward_preprocess_sm80_spec(problem, config), m_blocks},
      {backward_sm80_spec(config), n_blocks, 1, config.hopper},
      {backward_postprocess_sm80_spec(config), postprocess_blocks, 1, config.hopper}};
  if (config.dbias) {
    launches.insert(config.accumulates_dbias ? launches.end() : launches.begin(),
                    {backward_dbias_sm80_spec(config), kDbiasBlocks});
  }
  if (config.score.mask_tiles) {
    const TileShape shape = key_tiles_of(config);
    launches.insert(launches.begin(), fill_tile_lists(problem, score_options_of(problem),
                                                      tile_lists_params(problem, shape), shape));
  }
  return launches;
}

// Offsets in bytes; nonfinite_m_blocks come first.
struct Workspace {
  i64 nonfinite_n_blocks = 0;
  i64 dq_semaphores = 0;
  i64 next_n_block = 0;
  i64 zeroed_blocks = 0;
  i64 dbias_accum = 0;
  i64 zeroed_bytes = 0;
  i64 row_stats = 0;
  i64 key_bounds = 0;
  i64 dq_accum = 0;
  i64 tile_lists = 0;
  i64 simt = 0;
  i64 bytes = 0;
};

Workspace workspace_of(const Problem& problem, const BackwardSm80Config& config) {
  const auto aligned = [](i64 bytes) { return ceil_div(bytes, 256) * 256; };
  const i64 m_blocks = tiles_of(problem, problem.q_rows, problem.heads_q, config.q_rows);
  const i64 n_blocks = tiles_of(problem, problem.kv_rows, problem.heads_kv, config.kv_rows);
  const i64 entries = problem.batch_extent();
  const auto& extents = problem.arrays[Array::kDBias].shape;
  Workspace at;
  at.nonfinite_n_blocks = m_blocks * 4;
  at.dq_semaphores = at.nonfinite_n_blocks + n_blocks * 4;
  at.next_n_block = at.dq_semaphores + (config.deterministic ? m_blocks * 4 : 0);
  at.zeroed_blocks = at.next_n_block + 4;
  at.dbias_accum = aligned(at.zeroed_blocks + entries * problem.heads_kv * 4);
  at.zeroed_bytes =
      at.dbias_accum +
      (config.accumulates_dbias ? extents[0] * extents[1] * extents[2] * extents[3] * 4 : 0);
  at.row_stats = aligned(at.zeroed_bytes);
  at.key_bounds = aligned(at.row_stats + m_blocks * config.row_bytes());
  at.dq_accum = aligned(at.key_bounds + (config.score.documents ? m_blocks * 8 : 0));
  at.tile_lists = aligned(at.dq_accum + (config.dq ? m_blocks * config.dq_elems() * 4 : 0));
  at.simt = at.tile_lists;
  if (config.score.mask_tiles) {
    const TileListsParams lists = tile_lists_params(problem, key_tiles_of(config));
    at.simt = aligned(at.simt + tile_lists_bytes(problem, lists));
  }
  const i64 rows = entries * problem.heads_q * problem.q_rows;
  const size_t simt = needs_simt(problem) ? simt_workspace_bytes(problem.dtype, rows) : 0;
  at.bytes = at.simt + static_cast<i64>(simt);
  return at;
}

void set_workspace(BackwardSm80Params& params, const Workspace& at, char* memory) {
  const auto words = [memory](i64 offset) { return reinterpret_cast<u32*>(memory + offset); };
  params.nonfinite_m_blocks = words(0);
  params.nonfinite_n_blocks = words(at.nonfinite_n_blocks);
  params.dq_semaphores = words(at.dq_semaphores);
  params.next_n_block = words(at.next_n_block);
  params.zeroed_blocks = words(at.zeroed_blocks);
  params.dbias_accum = reinterpret_cast<float*>(memory + at.dbias_accum);
  params.row_stats = reinterpret_cast<u8*>(memory + at.row_stats);
  params.key_bounds = reinterpret_cast<KeyRangeSm80*>(memory + at.key_bounds);
  params.dq_accum = reinterpret_cast<float*>(memory + at.dq_accum);
  params.tile_lists.words = words(at.tile_lists);
}

class BackwardSm80Plan final : public GpuPlan {
 public:
  BackwardSm80Plan(const Problem& problem, const Gpu& gpu, const BackwardSm80Config& config)
      : at_(workspace_of(problem, config)), simt_params_(side_gradient_params(problem)) {
    params_.attention = attention_params(problem);
    params_.groups = head_groups_sm80(params_.attention, config, heads_per_group(problem),
                                      groups_ahead(problem, config));
    if (config.dbias) simt_params_.dbias = ArrayView{};
    tile = {config.q_rows, config.kv_rows};
    workspace_bytes = static_cast<size_t>(at_.bytes);
    zeroed_bytes = static_cast<size_t>(at_.zeroed_bytes);
    const bool copies_pairs = config.copies_pairs() && config.pair_aligned;
    alignment_bytes = config.aligned || copies_pairs || config.tiled_dbias ? 16 : 1;
    launches = launches_of(problem, config, params_.attention);
    num_own_ = launches.size();
    if (config.score.mask_tiles) {
      lists_ = tile_lists_params(problem, key_tiles_of(config));
      params_.tile_lists = lists_->lists;
    }
    if (!needs_simt(problem)) return;
    for (KernelLaunch& launch :
         simt_backward(simt_params_, gpu.shared_bytes_per_block, false, user_terms_of(problem))) {
      launches.push_back(std::move(launch));
    }
  }

  void run(const Call& call) const override {
    BackwardSm80Params params = params_;
    bind_params(params.attention, call.problem, call.faults);
    set_workspace(params, at_, call.workspace);
    size_t first = 0;
    if (lists_) {
      TileListsParams lists = *lists_;
      bind_params(lists.attention, call.problem, call.faults);
      lists.lists = params.tile_lists;
      call.launch(first++, lists);
    }
    for (size_t i = first; i < num_own_; ++i) call.launch(i, params);
    if (launches.size() == num_own_) return;
    AttentionParams simt = simt_params_;
    bind_params(simt, call.problem, call.faults);
    set_row_terms(simt, reinterpret_cast<u8*>(call.workspace + at_.simt));
    for (size_t i = num_own_; i < launches.size(); ++i) call.launch(i, simt);
  }

 private:
  Workspace at_;
  BackwardSm80Params params_{};           // but for pointers
  std::optional<TileListsParams> lists_;  // likewise
  AttentionParams simt_params_;           // likewise
  size_t num_own_ = 0;                    // launches of sm80; those of simt follow
};

}  // namespace

PlanOrRefusal plan_backward_sm80(const Problem& problem, const Gpu& gpu) {
  std::string refusal = refusal_of(problem, gpu);
  if (!refusal.empty()) return refusal;
  std::vector<TileCandidate> compared;
  const std::optional<BackwardSm80Config> config = backward_sm80_config(problem, gpu, &compared);
  if (!config) {
    return sentence("its narrowest tiles need more than the ", gpu.shared_bytes_per_block,
                    " bytes of shared memory of a block");
  }
  if (tiles_of(problem, problem.q_rows, problem.heads_q, config->q_rows) +
          tiles_of(problem, problem.kv_rows, problem.heads_kv, config->kv_rows) >
      kMaxBlocks) {
    return "counts blocks of queries and keys in 31 bits";
  }
  auto plan = std::make_unique<BackwardSm80Plan>(problem, gpu, *config);
  plan->compared = std::move(compared);
  return plan;
}

u32 backward_sm80_switches(const Problem&, const Gpu&) {
  return static_cast<u32>(Optimisation::kSwizzle) | static_cast<u32>(Optimisation::kPipeline) |
         static_cast<u32>(Optimisation::kFullBlocks);
}

// Every pair has an element of its own there; sums of several pairs are made in any order.
bool sm80_makes_dbias(const Problem& problem) {
  if (!problem.has(Array::kDBias) || problem.packed.q) return false;
  const Tensor& dbias = problem.arrays[Array::kDBias];
  if (dbias.shape[2] != problem.q_rows || dbias.shape[3] != problem.kv_rows) return false;
  return !sm80_shares_dbias(problem) || !problem.has_ordered_sums();
}

bool sm80_shares_dbias(const Problem& problem) {
  const Tensor& dbias = problem.arrays[Array::kDBias];
  return dbias.shape[0] != problem.num_sequences || dbias.shape[1] != problem.heads_q;
}

bool is_unmasked(const Problem& problem) {
  const IntervalMask& mask = problem.mask;
  return !mask.causal && mask.window_left == kNoLimit && mask.window_right == kNoLimit &&
         mask.chunk == 0;
}

}  // namespace fulmen::gpu
