// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What it refuses, and its configs.

#include "gpu/backward_sm90/plan.h"

#include "core/error.h"
#include "gpu/backward_sm90/sizes.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/sm90_problem.h"

namespace fulmen {
namespace {

constexpr i64 kMaxDim = 256;
constexpr i64 kUnit = 8;  // elements of 16 bytes, in which the copy engine moves
constexpr i64 kMaxCount = i64{1} << 30;
constexpr i32 kKeyRegisterDims = 16;  // with 16 more ptxas serialises the products (C7512)
constexpr i32 kDividedRegisterDims = 128;

bool has_dropout(const Problem& problem) {
  return problem.dropout.enabled() || problem.has(Array::kRng);
}

// Whether what lies between two items of backward_sm90, the sums of dQ foremost, costs more than
// the products that a kernel for dQ takes again. On an H200 (2026-11-28) it does not at 64 dims,
// 512 rows, full (64 and 128 dims: 327 TFLOP/s against 302, 372 against 353), but under a causal
// mask and with 128 dims (239 against 215); 64 dims then have 199 against 188.
bool is_short(const Problem& problem) {
  const bool is_light = tile_dims(problem) == 64 || mask_kind(problem.mask) == MaskKind::kNone;
  return max(problem.max_q, problem.max_kv) <= (is_light ? 256 : 512);
}

// Whether scores are more than scale dot(q, k), or pairs more than visible.
bool maps_pairs(const Problem& problem) {
  for (const Array array : {Array::kBias, Array::kMask, Array::kQIds, Array::kAlibiSlopes}) {
    if (problem.has(array)) return true;
  }
  return problem.score_map.softcap != 0 || !(problem.score_map.scale > 0) || has_dropout(problem);
}

// Dims of Q that backward_dq_sm90 keeps in registers; more, or with more options, they would spill.
i32 dq_register_dims(const Problem& problem) {
  const bool is_plain = !maps_pairs(problem) && !reads_sequences(problem) &&
                        mask_kind(problem.mask) != MaskKind::kBoth;
  return tile_dims(problem) == 256 && is_plain ? 64 : 0;
}

// What a problem asks for that these kernels do not have, one clause; "" where there is nothing.
std::string option_refusal(const Problem& problem) {
  if (problem.has(Array::kDBias)) return "does not sum dbias";
  if (problem.has(Array::kSinks) && problem.has(Array::kDLse)) return "has no dlse with sinks";
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

template <class Config>
void add_score_options(Config& config, const Problem& problem) {
  config.signed_scale = !(problem.score_map.scale > 0);
  config.softcap = problem.score_map.softcap != 0;
  config.alibi = problem.has(Array::kAlibiSlopes);
  config.bias = problem.arrays[Array::kBias].dtype;
  config.pair_mask = problem.has(Array::kMask);
  config.documents = problem.has(Array::kQIds);
  config.dropout = has_dropout(problem);
}

}  // namespace

std::string sm90_backward_refusal(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability != 90) return "needs compute capability 9.0 (Hopper)";
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) {
    return sentence("has no arithmetic for ", name(problem.dtype), ", only float16 and bfloat16");
  }
  const std::string option = option_refusal(problem);
  if (!option.empty()) return option;
  const auto fits = [](i64 dim) { return kUnit <= dim && dim <= kMaxDim && dim % kUnit == 0; };
  if (!fits(problem.dim_qk) || !fits(problem.dim_v)) {
    return sentence("head dimensions of the backward pass must be multiples of ", kUnit, " up to ",
                    kMaxDim, "; they are ", problem.dim_qk, " and ", problem.dim_v);
  }
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

namespace {

// Whether blocks of keys add to dQ in an order faster than a kernel for dQ makes it. On an H200
// (2026-11-28) they do at 128 dims by 1.17 full and 1.08 causal at 2k rows, 1.21 and 1.22 at 16k;
// at 1k an earlier text did not (0.90).
bool has_order(const Problem& problem) {
  return mask_kind(problem.mask) != MaskKind::kBoth && !reads_sequences(problem) &&
         max(problem.max_q, problem.max_kv) > 1024;
}

}  // namespace

bool sm90_separate_dq(const Problem& problem) {
  if (!problem.has(Array::kDQ)) return false;
  const bool is_alone = !problem.has(Array::kDK) && !problem.has(Array::kDV);
  return is_alone || is_short(problem) || maps_pairs(problem) || tile_dims(problem) > 128 ||
         (wants_order(problem) && !has_order(problem));
}

ForwardSm90Config sm90_dq_config(const Problem& problem) {
  ForwardSm90Config config;
  config.dtype = problem.dtype;
  config.d_qk = config.d_v = tile_dims(problem);
  config.kv_rows = config.d_qk == 256 ? 48 : config.d_qk == 64 && !maps_pairs(problem) ? 128 : 64;
  config.q_slots = 2 * config.warpgroups;  // Q and dO
  config.mask = mask_kind(problem.mask);
  config.shift_rule = ShiftRule::kWhenGrown;  // not looked at
  config.stage_output = false;
  config.sequences = reads_sequences(problem);
  config.stats = problem.has(Array::kStats);
  config.skips_documents = problem.has(Array::kQIds);
  // Turns make 64 dims 17 % faster, 128 and 256 dims 4 and 9 % slower.
  config.ping_pong =
      config.d_qk == 64 && !(problem.without & static_cast<u32>(Optimisation::kPingPong));
  add_score_options(config, problem);
  config.q_register_dims = dq_register_dims(problem);
  return config;
}

std::vector<BackwardSm90Config> sm90_backward_configs(const Problem& problem) {
  BackwardSm90Config config;
  config.dtype = problem.dtype;
  config.dims = tile_dims(problem);
  config.q_rows = config.dims == 64 && !maps_pairs(problem) ? 128 : 64;
  add_score_options(config, problem);
  config.mask = mask_kind(problem.mask);
  config.has_stats = problem.has(Array::kStats);
  config.sequences = reads_sequences(problem);
  config.dq = problem.has(Array::kDQ) && !sm90_separate_dq(problem);
  config.dk = problem.has(Array::kDK);
  config.dv = problem.has(Array::kDV);
  const auto has = [&](Optimisation each) { return !(problem.without & static_cast<u32>(each)); };
  // Under a mask, with dQ, dq_semaphore are 1 % slower; without one up to 5 % faster.
  const bool is_even = config.mask == MaskKind::kNone || !config.dq;
  config.ping_pong = has(Optimisation::kPingPong) && is_even;
  config.early_dv = has(Optimisation::kOverlap);
  config.register_dims = config.dq && config.dims == 128 ? kKeyRegisterDims : 0;
  config.deterministic = config.dq && wants_order(problem);
  config.staggered = has(Optimisation::kBlockOrder) && !config.deterministic;
  if (config.divides_products()) {
    config.register_dims = kDividedRegisterDims;
    config.ping_pong = false;  // 4 to 10 % slower with
    config.early_dv = true;    // looked at elsewhere only
  }
  if (!config.dq && !config.dk && !config.dv) return {};
  return {config};
}

u32 sm90_backward_switches(const Problem& problem) {
  Problem each = problem;
  each.without = 0;
  const bool has_dq_kernel = sm90_separate_dq(each);
  const ForwardSm90Config whole_dq = sm90_dq_config(each);
  const std::vector<BackwardSm90Config> whole = sm90_backward_configs(each);
  u32 switches = 0;
  for (u32 bit = 1; bit <= kAllOptimisations; bit *= 2) {
    each.without = bit;
    if (sm90_backward_configs(each) != whole) switches |= bit;
    if (has_dq_kernel && sm90_dq_config(each) != whole_dq) switches |= bit;
  }
  return switches;
}

bool sm90_hides_pairs(const Problem& problem) {
  const bool by_pairs =
      problem.has(Array::kBias) || problem.has(Array::kMask) || problem.has(Array::kQIds);
  return mask_kind(problem.mask) != MaskKind::kNone || by_pairs;
}

BackwardPreprocessConfig sm90_preprocess_config(const Problem& problem) {
  BackwardPreprocessConfig config;
  config.dtype = problem.dtype;
  config.dims = problem.dim_v <= 64 ? 64 : problem.dim_v <= 128 ? 128 : 256;
  config.has_stats = problem.has(Array::kStats);
  config.sequences = reads_sequences(problem);
  config.sinks = problem.has(Array::kSinks);
  config.documents = sm90_has_document_blocks(problem);
  return config;
}

bool sm90_has_document_blocks(const Problem& problem) {
  return problem.has(Array::kQIds) && (problem.has(Array::kDK) || problem.has(Array::kDV));
}

GpuNeeds sm90_backward_needs(const Problem& problem, const Gpu& gpu) {
  GpuNeeds needs;
  const std::vector<BackwardSm90Config> configs = sm90_backward_configs(problem);
  needs.tile = configs.empty() ? Tile{128, sm90_dq_config(problem).kv_rows}
                               : Tile{configs[0].q_rows, configs[0].kv_rows()};
  needs.workspace_bytes = static_cast<size_t>(sm90_backward_plan(problem, gpu).workspace_bytes);
  needs.alignment_bytes = 16;
  return needs;
}

}  // namespace fulmen
