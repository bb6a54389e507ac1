// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the Hopper backward refuses, its configs, and its launches.

#include "gpu/backward_sm90/plan.h"

#include "core/error.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"

namespace fulmen::gpu {
namespace {

constexpr i64 kMaxDim = kMostWideDims;
constexpr i64 kElements = 8;  // of 16 bytes, in which the copy engine moves
// From about as many heads on as there are multiprocessors: 32 and 64 causal ones of 512 rows take
// 6 to 18 % longer by their best times than where their blocks of keys are shared out (H200,
// 2026-11-30).
constexpr i64 kFewestWholeHeads = 128;
constexpr i64 kMaxCount = i64{1} << 30;
constexpr i32 kKeyRegisterDims = 16;       // with 16 more ptxas serialises the products (C7512)
constexpr i32 kDividedRegisterDims = 128;  // up to 256 dims; beyond there is room for none

ScoreOptions score_of(const Problem& problem) {
  ScoreOptions score = score_options_of(problem);
  score.dropout |= problem.has(Array::kRng);
  score.sinks = false;  // in lse already
  score.fp32_out = false;
  score.mask_tiles = has_mask_tiles(problem);
  return score;
}

// Whether scores are more than a positive scale times dot(q, k), or pairs more than visible.
bool has_options(const ScoreOptions& score) {
  return score.asks_every_pair() || score.alibi || score.score_mod || score.negative_scale ||
         score.dropout;
}

// What a problem asks for that these kernels do not have, one clause; "" where there is nothing.
std::string option_refusal(const Problem& problem) {
  if (problem.has(Array::kDBias)) return "does not sum dbias";
  if (problem.has(Array::kSinks) && problem.has(Array::kDLse)) return "has no dlse with sinks";
  if (problem.has(Array::kBlocks) && tile_dims(problem) > 192) {
    return "takes lists of blocks in head dimensions up to 192";
  }
  const DType bias = problem.arrays[Array::kBias].dtype;
  if (bias != DType::kNone && bias != DType::kFloat32 && bias != problem.dtype) {
    return sentence("does not read a bias of ", name(bias), " in the backward pass");
  }
  return "";
}

std::string layout_refusal(const Problem& problem) {
  for (const Array array : {Array::kQ, Array::kK, Array::kV, Array::kO, Array::kDOut, Array::kDQ,
                            Array::kDK, Array::kDV}) {
    const std::string refusal =
        problem.has(array) ? sm90_layout_refusal(problem, array) : std::string();
    if (!refusal.empty()) return refusal;
  }
  return "";
}

// Why it cannot compute a problem; "" where it can.
std::string refusal(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability != 90) return "needs compute capability 9.0 (Hopper)";
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) {
    return sentence("has no arithmetic for ", name(problem.dtype), ", only float16 and bfloat16");
  }
  const std::string option = option_refusal(problem);
  if (!option.empty()) return option;
  const auto fits = [](i64 dim) {
    return kElements <= dim && dim <= kMaxDim && dim % kElements == 0;
  };
  if (!fits(problem.dim_qk) || !fits(problem.dim_v)) {
    return sentence("head dimensions of the backward pass must be multiples of ", kElements,
                    " up to ", kMaxDim, "; they are ", problem.dim_qk, " and ", problem.dim_v);
  }
  const std::string wide = wide_refusal(problem);
  if (!wide.empty()) return wide;
  if (problem.q_rows == 0 || problem.kv_rows == 0 || problem.num_sequences == 0 ||
      problem.heads_kv == 0) {
    return "needs at least one query and one key";
  }
  for (const Array array : {Array::kO, Array::kDOut, Array::kDQ, Array::kDK, Array::kDV}) {
    const DType dtype = problem.arrays[array].dtype;
    if (problem.has(array) && dtype != problem.dtype) {
      return sentence("does not take ", name(array), " of ", name(dtype));
    }
  }
  const i64 most =
      max(padded_rows_per_head(problem), rows_up(problem.kv_rows, BackwardSm90Config{}.kv_rows()));
  if (problem.num_sequences >= kMaxCount / problem.heads_q ||
      most >= kMaxCount / (problem.num_sequences * problem.heads_q)) {
    return "counts rows of all heads in 30 bits";
  }
  return layout_refusal(problem);
}

// Whether what lies between two work tiles of backward_sm90, the sums of dQ foremost, costs more
// than the products that a kernel for dQ takes again. On an H200 (2026-11-28) it does not at 64
// dims, 512 rows, full (64 and 128 dims: 327 TFLOP/s against 302, 372 against 353), but under a
// causal mask and with 128 dims (239 against 215); 64 dims then have 199 against 188.
bool is_short(const Problem& problem, const ScoreOptions& score) {
  const bool is_light = tile_dims(problem) == 64 || score.mask_kind == MaskKind::kNone;
  return max(problem.max_q, problem.max_kv) <= (is_light ? 256 : 512);
}

// Whether blocks of keys add to dQ in an order faster than a kernel for dQ makes it. On an H200
// (2026-11-28) they do at 128 dims by 1.17 full and 1.08 causal at 2k rows, 1.21 and 1.22 at 16k;
// at 1k an earlier text did not (0.90).
bool has_order(const Problem& problem, const ScoreOptions& score) {
  return score.mask_kind != MaskKind::kBoth && !score.varlen && !score.has_tile_lists() &&
         max(problem.max_q, problem.max_kv) > 1024;
}

// Whether blocks are paired, to make dQ beside dK and dV above 128 dims. On an H200 (2026-11-29)
// that takes 256 dims from 465 to 673 TFLOP/s full 16k, 498 to 648 causal, 452 to 552 causal 4k,
// 317 to 321 causal 1k; at 512 rows causal from 223 to 202. float16 (2026-11-30) from 0.89 to 0.79
// ms full 1k, 12.7 to 9.9 full 16k; in order bfloat16 from 12.2 to 10.4. Windows were not timed;
// with lse alone, without a mask, ptxas serialises the products (C7511).
bool pairs_blocks(const Problem& problem, const ScoreOptions& score) {
  return tile_dims(problem) == 256 && score.stats && problem.has(Array::kDQ) &&
         problem.has(Array::kDK) && problem.has(Array::kDV) && !has_options(score) &&
         !score.varlen && !score.has_tile_lists() && score.mask_kind != MaskKind::kBoth &&
         !is_short(problem, score) && (!is_deterministic(problem) || has_order(problem, score));
}

// Their sums have an order, so that where one is asked for the number of heads does not count.
// Whether two thread blocks share their loads of Q and dO. On an H200 (2026-11-30, in turns) that
// takes 2 % from 128 dims full 16k and 8k, 1 to 3 % from 4k and 2k; under a causal mask, where one
// of them walks over two steps that it does not see, it costs 4 %.
bool shares_loads(const Problem& problem, const ScoreOptions& score) {
  return tile_dims(problem) == 128 && score.mask_kind == MaskKind::kNone && score.stats &&
         !score.varlen && !score.has_tile_lists() && !is_deterministic(problem) &&
         min(problem.max_q, problem.max_kv) >= 2048;
}

bool has_whole_heads(const Problem& problem) {
  const bool has_many_heads = problem.num_sequences * problem.heads_kv >= kFewestWholeHeads;
  return fits_whole_heads(problem) && (has_many_heads || is_deterministic(problem));
}

bool has_dq_kernel(const Problem& problem, const ScoreOptions& score) {
  if (!problem.has(Array::kDQ) || pairs_blocks(problem, score) || has_whole_heads(problem)) {
    return false;
  }
  const bool is_alone = !problem.has(Array::kDK) && !problem.has(Array::kDV);
  // Steps of 128 queries at 64 dims lie in blocks of as many.
  const bool straddles = score.blocks && tile_dims(problem) == 64 && problem.block_q % 128 != 0;
  return is_alone || is_short(problem, score) || has_options(score) || tile_dims(problem) > 128 ||
         straddles || (is_deterministic(problem) && !has_order(problem, score));
}

ForwardSm90Config dq_config(const Problem& problem, const ScoreOptions& score) {
  ForwardSm90Config config;
  config.dtype = problem.dtype;
  config.score = score;
  config.score.user.captures = sums_captures(problem);
  config.d_qk = config.d_v = tile_dims(problem);
  config.kv_rows = config.d_qk >= 256 ? 48 : config.d_qk == 64 && !has_options(score) ? 128 : 64;
  if (config.d_qk > 256) config.warpgroups = 1;  // shared memory ends there
  if (score.blocks && problem.block_kv % config.kv_rows != 0) config.kv_rows = 64;
  config.q_slots = 2 * config.warpgroups;     // Q and dO
  config.shift_rule = ShiftRule::kWhenGrown;  // not looked at
  config.stage_output = false;
  config.skips_documents = score.documents;
  // Ping-pong makes 64 dims 17 % faster, 128 and 256 dims 4 and 9 % slower.
  config.ping_pong = config.d_qk == 64 && !leaves_out(problem, Optimisation::kPingPong);
  // More of Q in registers, or with more options, they would spill.
  const bool has_room = !has_options(score) && !score.varlen && score.mask_kind != MaskKind::kBoth;
  config.q_register_dims = config.d_qk == 256 && has_room ? 64 : 0;
  set_tiled_pairs(config, problem);
  set_pair_stages(config);
  return config;
}

// Without a gradient: none.
BackwardSm90Config main_config(const Problem& problem, const ScoreOptions& score, bool makes_dq) {
  BackwardSm90Config config;
  config.dtype = problem.dtype;
  config.score = score;
  config.dims = tile_dims(problem);
  config.whole_heads = has_whole_heads(problem);
  config.q_rows = config.dims == 64 && !has_options(score) && !config.whole_heads ? 128 : 64;
  if (score.blocks && problem.block_q % config.q_rows != 0) config.q_rows = 64;
  config.dq = makes_dq;
  const bool makes_both =  // beyond 256 dims always; what is not wanted is not written
      config.dims > 256 && (problem.has(Array::kDK) || problem.has(Array::kDV));
  config.dk = makes_both || problem.has(Array::kDK);
  config.dv = makes_both || problem.has(Array::kDV);
  // Under a mask, with dQ, ping-pong is 1 % slower; without one up to 5 % faster.
  const bool is_even = score.mask_kind == MaskKind::kNone || !config.dq;
  config.ping_pong = !leaves_out(problem, Optimisation::kPingPong) && is_even;
  config.early_dv = !leaves_out(problem, Optimisation::kOverlap);
  config.register_dims = config.whole_heads                ? config.dims
                         : config.dq && config.dims == 128 ? kKeyRegisterDims
                                                           : 0;
  config.deterministic = config.dq && is_deterministic(problem) && !config.whole_heads;
  config.staggered = !leaves_out(problem, Optimisation::kBlockOrder) && !config.deterministic;
  config.shares_loads = shares_loads(problem, score) && config.dq;
  if (config.divides_products()) {
    config.register_dims = config.dims <= 256 ? kDividedRegisterDims : 0;
    config.paired = config.dq;
    config.ping_pong = false;  // 4 to 10 % slower with
    config.early_dv = true;    // looked at elsewhere only
  }
  config.tiled_bias = comes_in_tiles(problem, score, Array::kBias);
  config.tiled_mask = comes_in_tiles(problem, score, Array::kMask);
  if (!config.valid()) config.tiled_bias = config.tiled_mask = false;
  return config;
}

// Whether gradients of what an expression reads are not summed beside dQ, but in a pass on CUDA
// cores.
bool sums_captures_apart(const Problem& problem, const BackwardSm90Configs& configs) {
  return sums_captures(problem) && !configs.dq;
}

void add_launches(const Problem& problem, const Gpu& gpu, BackwardSm90Plan& plan) {
  const BackwardSm90Configs& configs = plan.configs;
  std::vector<KernelLaunch>& launches = plan.launches;
  const auto add_ranges = [&](i64 count, i32 block_rows) {
    ForwardSm90Config config;
    config.kv_rows = block_rows;
    config.score.varlen = configs.preprocess.score.varlen;
    launches.push_back({sm90_key_ranges_spec(config), ceil_div(count, kKeyRangeThreads)});
  };
  if (plan.layout.num_key_ranges > 0) add_ranges(plan.layout.num_key_ranges, configs.dq->kv_rows);
  if (plan.layout.num_query_ranges > 0) {
    add_ranges(plan.layout.num_query_ranges, configs.main->q_rows);
  }
  launches.push_back(
      {backward_preprocess_spec(configs.preprocess),
       i64{gpu.num_multiprocessors} * BackwardPreprocessConfig::kBlocksPerMultiprocessor});
  const auto add_lists = [&](const ScoreOptions& score, const TileListsParams& params,
                             const TileShape& shape) {
    if (score.has_tile_lists()) {
      launches.push_back(fill_tile_lists(problem, score, params, shape));
    }
  };
  if (configs.dq) add_lists(configs.dq->score, plan.query_lists, configs.lists_of_dq());
  if (configs.main) add_lists(configs.main->score, plan.key_lists, configs.lists_of_main());
  const auto add = [&](KernelSpec spec, i64 num_blocks, unsigned cluster_size = 1) {
    const i64 cluster = cluster_size;
    const i64 most = gpu.num_multiprocessors / cluster * cluster;
    launches.push_back({std::move(spec), min<i64>(num_blocks * cluster_size, most), cluster_size});
    launches.back().overlap_previous = true;
  };
  if (configs.main) {
    const BackwardSm90Layout& layout = plan.layout;
    add(backward_sm90_spec(*configs.main),
        configs.main->whole_heads ? layout.num_batch_kv_heads : layout.num_claims(),
        static_cast<unsigned>(configs.main->cluster_blocks()));
  }
  if (configs.dq) add(backward_dq_spec(*configs.dq), max_work_tiles(problem, *configs.dq));
  const UserTerms user = user_terms_of(problem);
  if (configs.has_fallback) {
    add(backward_fallback_spec({problem.dtype, user}), gpu.num_multiprocessors);
  }
  const bool captures = sums_captures_apart(problem, configs);
  if (!captures && !problem.has(Array::kDSinks)) return;
  for (KernelLaunch& launch :
       simt_backward(plan.side, gpu.shared_bytes_per_block, false, user, captures)) {
    launches.push_back(std::move(launch));
  }
}

}  // namespace

std::string wide_refusal(const Problem& problem) {
  if (tile_dims(problem) <= 256) return "";
  const ScoreOptions score = score_of(problem);
  if (has_options(score) || score.has_tile_lists()) {
    return "takes masks of intervals, lengths and sinks alone beyond 256 head dimensions";
  }
  return "";
}

bool fits_whole_heads(const Problem& problem) {
  const ScoreOptions score = score_of(problem);
  const i64 rows = rows_up(problem.max_q, BackwardSm90Config::kConversionRows);
  return tile_dims(problem) == 64 && problem.has(Array::kDQ) && problem.has(Array::kDK) &&
         problem.has(Array::kDV) && !has_options(score) && !score.varlen &&
         !score.has_tile_lists() && rows * problem.group_size() <= BackwardSm90Config::kHeadRows;
}

BackwardSm90Configs backward_sm90_configs(const Problem& problem) {
  ++config_derivations();
  const ScoreOptions score = score_of(problem);
  BackwardSm90Configs configs;
  if (has_dq_kernel(problem, score)) configs.dq = dq_config(problem, score);
  const BackwardSm90Config main =
      main_config(problem, score, problem.has(Array::kDQ) && !configs.dq);
  if (main.dq || main.dk || main.dv) configs.main = main;
  configs.has_fallback =
      score.mask_kind != MaskKind::kNone || score.has_pair_terms() || score.blocks;
  configs.preprocess.dtype = problem.dtype;
  configs.preprocess.dims = 64;
  while (configs.preprocess.dims < problem.dim_v) configs.preprocess.dims *= 2;
  configs.preprocess.score = {.documents = score.documents && (main.dk || main.dv),
                              .sinks = problem.has(Array::kSinks),
                              .varlen = score.varlen,
                              .stats = score.stats};
  return configs;
}

u32 backward_sm90_switches(const Problem& problem, const Gpu&) {
  Problem each = problem;
  each.without = 0;
  const BackwardSm90Configs whole = backward_sm90_configs(each);
  u32 switches = 0;
  for (u32 bit = 1; bit <= kAllOptimisations; bit *= 2) {
    each.without = bit;
    if (backward_sm90_configs(each) != whole) switches |= bit;
  }
  return switches;
}

PlanOrRefusal plan_backward_sm90(const Problem& problem, const Gpu& gpu) {
  std::string why_not = refusal(problem, gpu);
  if (!why_not.empty()) return why_not;
  auto plan = std::make_unique<BackwardSm90Plan>();
  plan->configs = backward_sm90_configs(problem);
  plan->layout = backward_sm90_layout(problem, plan->configs, gpu);
  plan->set_params(problem, gpu);
  if (plan->configs.main) {
    plan->tile = {plan->configs.main->q_rows, plan->configs.main->kv_rows()};
  } else if (plan->configs.dq) {
    plan->tile = {plan->configs.dq->q_rows(), plan->configs.dq->kv_rows};
  }
  plan->workspace_bytes = static_cast<size_t>(plan->layout.workspace_bytes);
  if (sums_captures_apart(problem, plan->configs)) {
    plan->row_terms_at = (plan->workspace_bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
                         kWorkspaceAlignment;
    const i64 rows = problem.batch_extent() * problem.heads_q * problem.q_rows;
    plan->workspace_bytes = plan->row_terms_at + simt_workspace_bytes(problem.dtype, rows);
  }
  plan->alignment_bytes = 16;
  add_launches(problem, gpu, *plan);
  return plan;
}

}  // namespace fulmen::gpu
