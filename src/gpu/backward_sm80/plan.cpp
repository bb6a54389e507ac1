// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Kernels, workspace and launches of the backward pass of sm80.

#include "gpu/backward_sm80/plan.h"

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/fma.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/jit/spec_of.h"
#include "gpu/params.h"
#include "gpu/score_options.h"
#include "gpu/simt/plan.h"
#include "kernels/backward_sm80/scheduler.cuh"

namespace fulmen::gpu {
namespace {

constexpr i64 kMaxDim = 576;
constexpr i64 kHeadsUnderMask = 8;   // query heads whose blocks are neighbours in a launch
constexpr i64 kBlocksAtATime = 128;  // as many as a large card runs
constexpr int kSideThreads = 256;    // kSm80PreprocessThreads, kSm80PostprocessThreads
constexpr int kSideBlocks = 4;
constexpr i64 kDbiasBlocks = 4096;
// What the main kernel may spill, a third above the most that was met (NVRTC 13.0): 848 bytes at
// d 128 with every option and rows that are not aligned for sm_80; for sm_90a 704 with every
// option, 540 at d 256 without any. Its loops over tiles load at most two spilled words an
// iteration; the rest is written and read where a block stores what the array's strides do not let
// it store 16 bytes at a time.
constexpr size_t kSpillBytes = 1152;

// Tiles of an axis of all heads.
i64 tiles_of(const Problem& problem, i64 extent, i64 heads, i64 tile_rows) {
  const i64 slots = problem.packed ? extent / tile_rows + problem.num_sequences
                                   : ceil_div(extent, tile_rows) * problem.num_sequences;
  return slots > 2 * kMaxBlocks / max<i64>(heads, 1) ? 2 * kMaxBlocks : slots * heads;
}

// Whether rows of o and dout are 16-byte vectors, and LSE, stats and dlse float32.
bool has_aligned_outputs(const Problem& problem) {
  for (const Array array : {Array::kStats, Array::kLse, Array::kDLse}) {
    if (problem.has(array) && problem.arrays[array].dtype != DType::kFloat32) return false;
  }
  return has_aligned_rows(problem, Array::kO) && has_aligned_rows(problem, Array::kDOut);
}

// Whether simt makes dbias or dsinks.
bool needs_simt(const Problem& problem) {
  return (problem.has(Array::kDBias) && !sm80_makes_dbias(problem)) || problem.has(Array::kDSinks);
}

std::string refusal_of(const Problem& problem, const Gpu& gpu) {
  std::string refusal = sm80_dtype_refusal(problem, gpu);
  if (!refusal.empty()) return refusal;
  if (!problem.has(Array::kDQ) && !problem.has(Array::kDK) && !problem.has(Array::kDV)) {
    return "computes dbias and dsinks only together with dq, dk or dv";
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
  const i64 all = (problem.packed ? 1 : problem.num_sequences) * problem.heads_kv;
  if (!config.zeroes_dq) return ceil_div(all, heads);
  const i64 slots = problem.packed ? problem.kv_rows / config.kv_rows + problem.num_sequences
                                   : ceil_div(problem.kv_rows, config.kv_rows);
  return ceil_div(kBlocksAtATime, max<i64>(heads * slots, 1));
}

// Those parts of a config on which the kernels around the main one depend, so that fewer of them
// are compiled.
BackwardSm80Config preprocess_config(const Problem& problem, const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.q_rows = config.q_rows;
  reduced.d_qk = config.d_qk;
  reduced.dq = config.dq;
  reduced.split_sum = config.split_sum;
  reduced.hopper = config.hopper;
  reduced.aligned = has_aligned_outputs(problem);
  reduced.score.documents = config.score.documents;
  return reduced;
}

BackwardSm80Config postprocess_config(const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.d_qk = config.d_qk;
  reduced.q_rows = config.q_rows;
  reduced.kv_rows = config.kv_rows;
  reduced.dq_rows = config.dq_rows;
  reduced.dq_dims = config.dq_dims;
  reduced.hopper = config.hopper;
  return reduced;
}

BackwardSm80Config dbias_config(const BackwardSm80Config& config) {
  BackwardSm80Config reduced;
  reduced.dtype = config.dtype;
  reduced.accumulates_dbias = config.accumulates_dbias;
  reduced.tiled_dbias = config.tiled_dbias;
  return reduced;
}

KernelSpec backward_spec(const char* entry, const std::string& distinction,
                         const BackwardSm80Config& config) {
  const bool has_precision = config.precision != Precision::kFloat32;
  return spec_of<BackwardSm80Params>(
      sentence("backward_sm80/", entry), entry,
      sentence(has_precision ? name(config.precision) : name(config.dtype), distinction), config);
}

// A kernel before or after the main one.
KernelSpec side_spec(const char* entry, const std::string& distinction,
                     const BackwardSm80Config& config) {
  KernelSpec spec = backward_spec(entry, distinction, config);
  spec.num_threads = kSideThreads;
  spec.min_blocks = kSideBlocks;
  return spec;
}

KernelSpec preprocess_spec(const Problem& problem, const BackwardSm80Config& main_config) {
  const BackwardSm80Config config = preprocess_config(problem, main_config);
  KernelSpec spec =
      side_spec("backward_preprocess_sm80",
                sentence("_", config.q_rows, config.dq ? sentence("_dq", config.d_qk) : "",
                         config.split_sum ? "_split_sum" : "", config.hopper ? "_hopper" : "",
                         name_suffix(config.score), config.aligned ? "" : "_unaligned"),
                config);
  spec.shared_bytes = static_cast<size_t>(config.q_rows) * 4;
  spec.shared_bytes_text = "kConfig.q_rows * 4";
  return spec;
}

const char* dbias_suffix(const BackwardSm80Config& config) {
  if (config.accumulates_dbias) return "_accumulated";
  return config.tiled_dbias ? "_tiled" : "";
}

KernelSpec main_spec(const BackwardSm80Config& config) {
  KernelSpec spec = backward_spec(
      "backward_sm80",
      sentence("_d", config.d_qk, "_", config.d_v, "_", config.q_rows, "x", config.kv_rows,
               config.dq ? "_dq" : "", config.dk ? "_dk" : "", config.dv ? "_dv" : "",
               name_suffix(config.score),
               config.dbias ? sentence("_dbias", dbias_suffix(config)) : "",
               config.pair_aligned || !config.hides_pairs() ? "" : "_unaligned_pairs",
               config.split_sum ? "_split_sum" : "", config.deterministic ? "_deterministic" : "",
               config.aligned ? "" : "_unaligned"),
      config);
  spec.num_threads = config.threads();
  spec.min_blocks = config.min_blocks;
  spec.shared_bytes = static_cast<size_t>(config.shared_bytes());
  spec.shared_bytes_text = "kConfig.shared_bytes()";
  spec.tensor_cores = true;
  spec.spill_allowance_bytes = kSpillBytes;
  return spec;
}

KernelSpec dbias_spec(const BackwardSm80Config& config) {
  return side_spec("backward_dbias_sm80", dbias_suffix(config), dbias_config(config));
}

KernelSpec postprocess_spec(const BackwardSm80Config& config) {
  return side_spec("backward_postprocess_sm80",
                   sentence("_d", config.d_qk, "_", config.q_rows, "x", config.kv_rows, "_",
                            config.dq_rows, "x", config.dq_dims, config.hopper ? "_hopper" : ""),
                   postprocess_config(config));
}

// Kernels of sm80 in the order of a run: dbias before the others or after them.
std::vector<KernelLaunch> launches_of(const Problem& problem, const BackwardSm80Config& config,
                                      const AttentionParams& params) {
  const i64 m_blocks = num_q_tiles(params, config.q_rows);
  const i64 n_blocks = num_kv_tiles(params, config.kv_rows);
  const i64 postprocess_blocks = sm80_postprocess_blocks(m_blocks, n_blocks);
  std::vector<KernelLaunch> launches{
      {preprocess_spec(problem, config), m_blocks},
      {main_spec(config), n_blocks, 1, config.hopper},
      {postprocess_spec(config), postprocess_blocks, 1, config.hopper}};
  if (config.dbias) {
    launches.insert(config.accumulates_dbias ? launches.end() : launches.begin(),
                    {dbias_spec(config), kDbiasBlocks});
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
  i64 simt = 0;
  i64 bytes = 0;
};

Workspace workspace_of(const Problem& problem, const BackwardSm80Config& config) {
  const auto aligned = [](i64 bytes) { return ceil_div(bytes, 256) * 256; };
  const i64 m_blocks = tiles_of(problem, problem.q_rows, problem.heads_q, config.q_rows);
  const i64 n_blocks = tiles_of(problem, problem.kv_rows, problem.heads_kv, config.kv_rows);
  const i64 entries = problem.packed ? 1 : problem.num_sequences;
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
  at.simt = aligned(at.dq_accum + (config.dq ? m_blocks * config.dq_elems() * 4 : 0));
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
    const bool copies_pairs = config.hides_pairs() && config.pair_aligned;
    alignment_bytes = config.aligned || copies_pairs || config.tiled_dbias ? 16 : 1;
    launches = launches_of(problem, config, params_.attention);
    num_own_ = launches.size();
    if (!needs_simt(problem)) return;
    for (KernelLaunch& launch : simt_backward(simt_params_, gpu.shared_bytes_per_block)) {
      launches.push_back(std::move(launch));
    }
  }

  void run(const Call& call) const override {
    BackwardSm80Params params = params_;
    bind_params(params.attention, call.problem, call.faults);
    set_workspace(params, at_, call.workspace);
    for (size_t i = 0; i < num_own_; ++i) call.launch(i, params);
    if (launches.size() == num_own_) return;
    AttentionParams simt = simt_params_;
    bind_params(simt, call.problem, call.faults);
    set_row_terms(simt, reinterpret_cast<u8*>(call.workspace + at_.simt));
    for (size_t i = num_own_; i < launches.size(); ++i) call.launch(i, simt);
  }

 private:
  Workspace at_;
  BackwardSm80Params params_{};  // but for pointers
  AttentionParams simt_params_;  // likewise
  size_t num_own_ = 0;           // launches of sm80; those of simt follow
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
  if (!problem.has(Array::kDBias) || problem.packed) return false;
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

namespace {

// The main kernel of problems of one kind, in the tiles of several head dimensions, and what runs
// before and after it.
void add_specs(std::vector<KernelSpec>& main, std::vector<KernelSpec>& around, Problem problem,
               const Gpu& gpu) {
  const BackwardSm80Config config = *backward_sm80_config(problem, gpu);
  main.push_back(main_spec(config));
  around.push_back(preprocess_spec(problem, config));
  around.push_back(postprocess_spec(config));
  if (config.dbias) around.push_back(dbias_spec(config));
}

void set_inputs(Problem& problem, DType dtype, i64 dim_qk, i64 dim_v) {
  problem.dtype = dtype;
  problem.dim_qk = dim_qk;
  problem.dim_v = dim_v;
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO, Array::kDOut}) {
    problem.arrays[array].dtype = dtype;
    problem.arrays[array].strides[3] = dtype == DType::kFloat16 ? 2 : 1;  // not aligned, or aligned
  }
}

// Problems whose kernels CI compiles.
struct CompiledProblems {
  Problem all, dq_alone, dkdv_alone, capped, pairs, dropping, everything;
  CompiledProblems() {
    const auto with = [](Problem problem, std::initializer_list<Array> arrays) {
      for (const Array array : arrays) problem.arrays[array].dtype = DType::kFloat32;
      return problem;
    };
    Problem none;
    none.operation = Operation::kBackward;
    none.score_map.scale = 1;
    all = with(none, {Array::kDQ, Array::kDK, Array::kDV});
    dq_alone = with(none, {Array::kDQ});
    dkdv_alone = with(none, {Array::kDK, Array::kDV});
    capped = with(all, {Array::kAlibiSlopes});
    capped.score_map.softcap = 50;
    pairs = with(all, {Array::kMask, Array::kQIds});
    pairs.deterministic = true;
    dropping = all;
    dropping.dropout.threshold = 1;
    everything = with(capped, {Array::kBias, Array::kDBias, Array::kSinks, Array::kDLse});
    everything.dropout.threshold = 1;
  }
};

}  // namespace

std::vector<std::vector<KernelSpec>> backward_sm80_specs(const Gpu& gpu) {
  constexpr i64 kDims[][2] = {{64, 64}, {128, 128}, {256, 256}, {96, 96}, {192, 128}, {512, 512}};
  std::vector<KernelSpec> plain, with_options, around, float32;
  const auto add = [&](std::vector<KernelSpec>& specs, Problem problem) {
    for (const auto& [dim_qk, dim_v] : kDims) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        set_inputs(problem, dtype, dim_qk, dim_v);
        add_specs(specs, around, problem, gpu);
      }
    }
  };
  const auto add_float32 = [&](Problem problem) {
    for (const Precision precision : {Precision::k3xTf32, Precision::kTf32}) {
      problem.precision = precision;
      for (const i64 dim : {64, 128, 256, 96}) {
        set_inputs(problem, DType::kFloat32, dim, dim);
        add_specs(float32, around, problem, gpu);
      }
    }
  };
  const CompiledProblems problems;
  for (const Problem& problem : {problems.all, problems.dq_alone, problems.dkdv_alone}) {
    add(plain, problem);
  }
  for (const Problem& problem :
       {problems.capped, problems.pairs, problems.dropping, problems.everything}) {
    add(with_options, problem);
  }
  add_float32(problems.all);
  add_float32(problems.everything);
  return {plain, with_options, around, float32};
}

}  // namespace fulmen::gpu
