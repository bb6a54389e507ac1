// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles and plans of forward_sm80.

#include "gpu/forward_sm80/plan.h"

#include <span>

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/decode_sm80/plan.h"
#include "gpu/forward_sm80/shapes.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/jit/kernel_spec.h"
#include "gpu/params.h"
#include "gpu/tile_lists.h"
#include "kernels/forward_sm80/scheduler.cuh"

namespace fulmen::gpu {
namespace {

constexpr i64 kMaxDim = 576;  // of q, k: rows of 16 queries and two blocks of 16 keys fit 99 KB
constexpr double kSmallestScale = 0x1p-60;  // by which slopes of ALiBi and caps are divided

std::span<const Sm80Shape> shapes_of(const Problem& problem) {
  if (problem.has_quantised_q()) return kE4M3Shapes;
  if (problem.dtype != DType::kFloat32) return kShapes;
  if (problem.precision == Precision::kTf32) return kTf32Shapes;
  return k3xTf32Shapes;
}

i32 rounded_up(i64 dim, i64 unit) {
  return static_cast<i32>(unit * max<i64>(ceil_div(dim, unit), 1));
}

// How many options of the problem cost registers.
i32 num_options(const ForwardSm80Config& config) {
  const ScoreOptions& score = config.score;
  return score.mask + (score.bias != DType::kNone) + score.documents + score.negative_scale +
         score.score_mod + score.alibi + score.dropout + score.user.score + score.user.mask;
}

// Whether there is nothing to look up before a block begins, see ForwardSm80Config::fixed_length.
bool has_fixed_length(const Problem& problem) {
  const bool has_lengths = problem.has(Array::kQLengths) || problem.has(Array::kKvLengths);
  return !problem.packed.q && !has_lengths && !problem.has(Array::kRng) && !problem.has_caches() &&
         problem.mask.is_at_most_causal();
}

// What kernels are compiled to know; they look up lengths, structured masks and sinks when they
// run.
ScoreOptions compiled_options(const Problem& problem) {
  ScoreOptions score = score_options_of(problem);
  score.mask_kind = MaskKind::kNone;
  score.varlen = score.sinks = false;
  score.negative_scale = score.bias == DType::kNone && !score.user.score &&
                         !(problem.score_map.scale > kSmallestScale);
  return score;
}

// Options, and what leaves out an optimisation; no tile.
ForwardSm80Config options_of(const Problem& problem) {
  ForwardSm80Config config;
  config.dtype = problem.dtype;
  config.precision = problem.precision;
  config.score = compiled_options(problem);
  config.pair_aligned = has_aligned_pairs(problem);
  config.aligned = has_aligned_rows(problem, Array::kO);
  if (problem.has_quantised_q()) {
    config.dtype = problem.q_dtype();
    config.o_dtype = problem.dtype == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
    config.aligned = config.aligned && problem.arrays[Array::kO].dtype == config.o_dtype;
  }
  config.fixed_length = has_fixed_length(problem);
  config.caches = problem.has_caches();
  return config;
}

// Whether options leave a warp registers for 16 rows only: any two of them, and with float32 inputs
// any, or rows that are not aligned.
bool needs_many_registers(const ForwardSm80Config& config) {
  const i32 options = num_options(config);
  if (config.dtype == DType::kFloat32) return options > 0 || !config.aligned;
  return !config.has_8_bits() && options + config.score.fp32_out > 1;
}

// A tile of a shape, with head dimensions as computed with. Long rows of V are cut into equal
// parts.
void set_tile(ForwardSm80Config& config, const Problem& problem, const Sm80Shape& shape,
              bool many_registers) {
  const bool has_pairs = config.score.has_pair_terms();
  config.d_qk = rounded_up(problem.dim_qk, config.has_8_bits() ? 32 : 16);
  const i64 parts = max<i64>(1, ceil_div(problem.dim_v, shape.max_v()));
  const bool is_32_wide = config.dtype == DType::kFloat32 || config.has_8_bits();
  const i64 unit = is_32_wide ? 32 : 16 * shape.warps_n;
  config.d_v = rounded_up(ceil_div(problem.dim_v, parts), unit);
  config.warps = shape.warps;
  config.warps_n = shape.warps_n;
  config.row_tiles = many_registers ? 1 : shape.row_tiles;
  config.kv_rows = shape.kv_rows;
  if (has_pairs) config.kv_rows = shape.pair_kv_rows;
  if (config.score.dropout) config.kv_rows = shape.dropout_kv_rows;
  if (config.score.score_mod) config.kv_rows = shape.modified_kv_rows;
  if (many_registers) config.kv_rows = shape.many_kv_rows;
  config.stage_blocks = has_pairs ? 1 : shape.stage_blocks;
  const bool has_numbers =
      config.score.mask || config.score.bias != DType::kNone || config.score.dropout;
  config.interleaved = has_numbers && !many_registers && config.dtype != DType::kFloat32 &&
                       config.warp_columns() % 32 == 0;
  config.score.mask_tiles = has_mask_tiles(problem) && config.q_rows() % kPartRows == 0;
  config.single_buffer = shape.single_buffer;
  config.stages = shape.single_buffer ? 1 : 2;
  config.min_blocks = shape.min_blocks;
  config.q_in_registers = shape.q_in_registers && num_options(config) == 0;
  config.predicates_copies = shape.predicates_copies;
  config.even_k = config.aligned && !config.predicates_copies && config.d_qk == problem.dim_qk &&
                  config.d_v * parts == problem.dim_v;
}

// Why a shape, set in `config`, is passed over; "" where it is the one to take.
std::string passed_over(const Sm80Shape& shape, const ForwardSm80Config& config,
                        const Problem& problem, const Gpu& gpu, bool many_registers) {
  if (max(config.d_qk, config.d_v) > shape.max_dim) {
    return sentence("is for head dimensions up to ", shape.max_dim);
  }
  if ((shape.warps_n > 1 || shape.single_buffer) && many_registers) {
    return "has no registers for these options";
  }
  if (shape.single_buffer && num_options(config) > 0) return "is for problems without options";
  if (!problem.may_plan_by_lengths()) {
    if (shape.max_keys != kAnyLength) return "depends on the number of keys";
  } else if (problem.max_kv / (problem.mask.causal ? 2 : 1) > shape.max_keys) {
    return sentence("is for ", shape.max_keys, " keys a query at most");
  }
  const size_t bytes = static_cast<size_t>(config.shared_bytes());
  const size_t total = static_cast<size_t>(shape.min_blocks) * (bytes + kReservedSharedBytes);
  if (bytes > gpu.shared_bytes_per_block || total > gpu.shared_bytes_per_multiprocessor) {
    return sentence("needs ", bytes, " bytes of shared memory for each of ", shape.min_blocks,
                    " blocks");
  }
  return "";
}

void leave_out(ForwardSm80Config& config, const Problem& problem) {
  const auto keeps = [&problem](Optimisation each) { return !leaves_out(problem, each); };
  if (!keeps(Optimisation::kPipeline)) {
    config.stages = 1;
    config.single_buffer = config.predicates_copies = false;
  }
  config.swizzle &= keeps(Optimisation::kSwizzle);
  config.full_blocks &= keeps(Optimisation::kFullBlocks);
  config.folded_scale &= keeps(Optimisation::kFoldedScale);
  config.lazy_max &= keeps(Optimisation::kLazyRescale);
  config.lazy_rescale &= keeps(Optimisation::kLazyRescale);
}

// Heads whose blocks are neighbours in a launch: their K and V take half of the L2; under a causal
// mask they also keep the card busy for a while, so that the last group does not begin when the
// others are done.
i32 heads_per_group(const Problem& problem, const Gpu& gpu, const ForwardSm80Config& config) {
  const i64 heads = max<i64>(1, problem.batch_extent() * problem.heads_q);
  const i64 bytes = max<i64>(1, problem.kv_rows * (problem.dim_qk + problem.dim_v) *
                                    size_bytes(problem.dtype) / problem.group_size());
  i64 wanted = max<i64>(1, static_cast<i64>(gpu.l2_bytes / 2) / bytes);
  if (problem.mask.causal) {
    const i64 blocks = max<i64>(1, ceil_div(problem.q_rows, config.q_rows()));  // of a head
    const i64 at_once = i64{gpu.num_multiprocessors} * config.min_blocks;
    wanted = max(wanted, ceil_div(4 * at_once, blocks));
  }
  return static_cast<i32>(ceil_div(heads, ceil_div(heads, wanted)));
}

std::string refusal_of(const Problem& problem, const Gpu& gpu) {
  std::string refusal = sm80_refusal(problem, gpu);
  if (!refusal.empty()) return refusal;
  if (problem.dim_qk > kMaxDim) {
    return sentence("head dimensions of q and k go up to ", kMaxDim, "; they are ", problem.dim_qk);
  }
  return "";
}

// Of q, k and v of 8 bits.
std::string refusal_of_e4m3(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability < 89) {
    return sentence("needs compute capability 8.9 (Ada) or later for products of ",
                    name(problem.q_dtype()));
  }
  return refusal_of_8_bits(problem);
}

bool has_too_many_blocks(const Problem& problem, const ForwardSm80Config& config) {
  const i64 slots = problem.packed.q
                        ? problem.q_rows / config.q_rows() + problem.num_sequences
                        : ceil_div(problem.q_rows, config.q_rows()) * problem.num_sequences;
  return slots > kMaxBlocks / max<i64>(1, problem.heads_q * ceil_div(problem.dim_v, config.d_v));
}

class ForwardSm80Plan final : public GpuPlan {
 public:
  ForwardSm80Plan(const Problem& problem, const Gpu& gpu, const ForwardSm80Config& config) {
    params_.attention = attention_params(problem);
    const AttentionParams& attention = params_.attention;
    params_.scheduler = {attention, config, heads_per_group(problem, gpu, config)};
    tile = {config.q_rows(), config.kv_rows};
    const bool copies_pairs = config.score.mask || config.score.bias != DType::kNone;
    alignment_bytes = config.aligned || (copies_pairs && config.pair_aligned) ? 16 : 1;
    if (config.score.mask_tiles) {
      const TileShape shape{config.q_rows(), config.kv_rows, false};
      lists_ = tile_lists_params(problem, shape);
      params_.tile_lists = lists_->lists;
      workspace_bytes = static_cast<size_t>(tile_lists_bytes(problem, *lists_));
      launches = {fill_tile_lists(problem, score_options_of(problem), *lists_, shape)};
    }
    launches.push_back({forward_sm80_spec(config), num_forward_sm80_blocks(attention, config)});
  }

  void run(const Call& call) const override {
    ForwardSm80Params params = params_;
    bind_params(params.attention, call.problem, call.faults);
    size_t kernel = 0;
    if (lists_) {
      TileListsParams lists = *lists_;
      bind_params(lists.attention, call.problem, call.faults);
      lists.lists.words = params.tile_lists.words = reinterpret_cast<u32*>(call.workspace);
      call.launch(kernel++, lists);
    }
    call.launch(kernel, params);
  }

 private:
  ForwardSm80Params params_{};            // but for pointers
  std::optional<TileListsParams> lists_;  // likewise
};

}  // namespace

std::string sm80_refusal(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability < 80) return "needs compute capability 8.0 (Ampere) or later";
  if (problem.has_segments() && (problem.dropout.enabled() || problem.has(Array::kRng))) {
    return "draws dropout for eight keys that follow each other, which those of segments need not";
  }
  if (problem.dtype == DType::kFloat16 || problem.dtype == DType::kBFloat16) return "";
  if (problem.dtype != DType::kFloat32) {
    return sentence("has no arithmetic for ", name(problem.dtype), ", only float16 and bfloat16");
  }
  if (problem.precision == Precision::kFloat32) {
    return "computes float32 only with precision tf32 or 3xtf32; the problem asks for float32";
  }
  const i64 widest = max(problem.dim_qk, problem.dim_v);
  if (widest <= kMaxFloat32Dim) return "";
  return sentence("head dimensions of float32 go up to ", kMaxFloat32Dim, "; the widest is ",
                  widest);
}

std::optional<ForwardSm80Config> forward_sm80_config(const Problem& problem, const Gpu& gpu,
                                                     std::vector<TileCandidate>* compared) {
  ++config_derivations();
  ForwardSm80Config config = options_of(problem);
  const bool many_registers = needs_many_registers(config);
  // By three products one path through a block is 2 % faster than two (d 64 and 128, H200,
  // 2026-11-28); with options two of float32 do not fit the registers.
  const bool is_float32 = config.dtype == DType::kFloat32;
  config.lazy_max = !is_float32 || (problem.precision == Precision::kTf32 && !many_registers);
  if (config.has_8_bits()) config.lazy_max = false;  // e4m3 ends at 448
  for (const Sm80Shape& shape : shapes_of(problem)) {
    set_tile(config, problem, shape, many_registers);
    std::string reason = passed_over(shape, config, problem, gpu, many_registers);
    const bool chosen = reason.empty();
    if (chosen) reason = "the first that fits, of tiles in the order of their measured speed";
    if (compared != nullptr) {
      compared->push_back({{config.q_rows(), config.kv_rows}, chosen, std::move(reason)});
    }
    if (!chosen) continue;
    leave_out(config, problem);
    return config;
  }
  return std::nullopt;
}

u32 forward_sm80_switches(const Problem&, const Gpu&) {
  return static_cast<u32>(Optimisation::kSwizzle) | static_cast<u32>(Optimisation::kPipeline) |
         static_cast<u32>(Optimisation::kFullBlocks) |
         static_cast<u32>(Optimisation::kLazyRescale) |
         static_cast<u32>(Optimisation::kFoldedScale);
}

PlanOrRefusal plan_forward_sm80(const Problem& problem, const Gpu& gpu) {
  if (prefers_decode_sm80(problem, gpu)) return plan_decode_sm80(problem, gpu);
  for (const Array array :
       {Array::kPositions, Array::kTree, Array::kBias, Array::kMask, Array::kQIds}) {
    if (!problem.has_caches() || !problem.has(array)) continue;
    return sentence("takes ", name(problem.cache_array()), " without ", name(array),
                    " beside more than a few queries");
  }
  if (problem.has_caches() && user_terms_of(problem).any()) {
    return sentence("takes ", name(problem.cache_array()), " without an expression");
  }
  if (problem.has_records()) return "does not take k of records";
  const bool has_8_bits = problem.has_quantised_q();
  if (problem.is_quantised() && !has_8_bits) {
    return sentence("takes k and v of ", name(problem.kv_dtype()),
                    " beside few queries of 16 bits, in rows of 16-byte vectors");
  }
  std::string refusal = has_8_bits ? refusal_of_e4m3(problem, gpu) : refusal_of(problem, gpu);
  if (!refusal.empty()) return refusal;
  std::vector<TileCandidate> compared;
  const std::optional<ForwardSm80Config> config = forward_sm80_config(problem, gpu, &compared);
  if (!config) {
    return sentence("its narrowest tiles need more than the ", gpu.shared_bytes_per_block,
                    " bytes of shared memory of a block");
  }
  if (has_too_many_blocks(problem, *config)) return "counts blocks of queries in 31 bits";
  auto plan = std::make_unique<ForwardSm80Plan>(problem, gpu, *config);
  plan->compared = std::move(compared);
  return plan;
}

}  // namespace fulmen::gpu
