// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a problem to the options of its config and the order of work tiles; and its run: pointers,
// tensor maps, launches. Groups of heads were measured on an H100 SXM on 2026-11-28 (bench/hopper).

#include "gpu/forward_sm90/plan.h"

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/decode_sm80/plan.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/mla_sm90/plan.h"
#include "gpu/params.h"
#include "gpu/simt/plan.h"
#include "kernels/common/sequences.cuh"

namespace fulmen::gpu {
namespace {

constexpr i64 kElements = 8;  // of 16 bytes, in which the copy engine moves
constexpr i64 kMaxCount = 0x7fffffff;

// in_halves: the fallback computes half of the columns at a time.
i32 product_width(i64 dim, bool in_halves) {
  const auto suits = [=](i32 width) {
    return ForwardSm90Config::is_product_width(width) &&
           (!in_halves || width <= 128 || ForwardSm90Config::is_product_width(width / 2));
  };
  i32 width = 64;
  while (width < dim || !suits(width)) width += 16;
  return width;
}

// Heads of one key head whose queries fit a tile of 64 rows together: their keys and values are
// read once for all of them.
i32 heads_per_tile(const Problem& problem, const ForwardSm90Config& config) {
  if (!problem.may_plan_by_lengths() || config.split_dims || config.has_8_bits() ||
      config.score.blocks || config.score.alibi || config.score.has_pair_terms() ||
      config.score.dropout) {
    return 1;
  }
  i32 heads = 1;
  while (heads < 8 && problem.group_size() % (2 * heads) == 0 && 2 * heads * problem.max_q <= 64) {
    heads *= 2;
  }
  return heads;
}

// ALiBi, bias and a user's score take keys out of the range that the first block sets, a mask sets
// none, nor may lists of tiles, which float16 needs, and the assembler serialises the products of
// documents, and of dropout beside float32 O, at d 64 with any other rule (C7514).
ShiftRule shift_rule(const ForwardSm90Config& config) {
  const ScoreOptions& score = config.score;
  if (score.alibi || score.bias != DType::kNone || score.mask || score.user.score ||
      (score.user.mask && !score.mask_tiles) ||
      (score.has_tile_lists() && config.dtype == DType::kFloat16) ||
      ((score.documents || (score.dropout && score.fp32_out)) &&
       max(config.d_qk, config.d_v) <= 64)) {
    return ShiftRule::kWhenGrown;
  }
  return config.dtype == DType::kBFloat16 ? ShiftRule::kFirstBlock : ShiftRule::kWhenSumGrew;
}

// Whether two warpgroups share their rows: beyond 256 dims, unless registers hold O of 64 rows
// beside scores of 48 keys on which no options work.
bool splits_dims(const Problem& problem, const ForwardSm90Config& config) {
  const i64 widest = max(problem.dim_qk, problem.dim_v);
  const bool is_plain = !config.maps_scores() && !config.score.dropout &&
                        !config.score.has_tile_lists() && !config.caches;
  return widest > (is_plain ? kMostWideDims : 256);
}

// What the problem asks of any tile.
ForwardSm90Config options_of(const Problem& problem) {
  ForwardSm90Config config;
  config.dtype = problem.dtype;
  if (problem.has_quantised_q()) {
    config.dtype = problem.q_dtype();
    config.o_dtype = problem.dtype == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
  }
  const i64 unit = 32 / config.element_bytes();  // of a product
  config.d_qk = static_cast<i32>(unit * ceil_div(problem.dim_qk, unit));
  config.score = score_options_of(problem);
  config.caches = problem.has_caches();
  config.split_dims = splits_dims(problem, config);
  config.d_v = config.split_dims     ? static_cast<i32>(128 * ceil_div(problem.dim_v, 128))
               : problem.dim_v > 256 ? kMostWideDims
                                     : product_width(problem.dim_v, config.has_8_bits());
  config.paged = problem.is_paged();
  config.score.varlen |= config.caches;
  if (config.score.score_mod) config.score.negative_scale = false;  // the modifier takes any scale
  config.skips_documents = config.score.documents;
  config.score.mask_tiles = has_mask_tiles(problem);
  config.stage_output = !config.score.varlen &&
                        (!config.score.fp32_out || ForwardSm90Config::stages_floats(config.d_v));
  config.shift_rule = shift_rule(config);
  config.heads_per_tile = heads_per_tile(problem, config);
  set_tiled_pairs(config, problem);
  return config;
}

// Whether warps copy the rows of pages themselves, since boxes would have so few that asking for
// them takes longer than the products. Boxes of 8 rows and rows by themselves: d 64 286 us and 301,
// d 128 399 and 409, d 256 383 and 368; boxes of 4 at d 128 569 and 409 (2,048 rows over 8k keys,
// H200, 2026-11-29).
bool gathers_rows(const Problem& problem, const ForwardSm90Config& config) {
  const bool is_wide = max(config.d_qk, config.d_v) > 128 && problem.dim_qk % kElements == 0;
  return config.paged &&
         key_box_rows(attention_params(problem), config.kv_rows) < (is_wide ? 16 : 8);
}

void leave_out(ForwardSm90Config& config, const Problem& problem) {
  const auto keeps = [&problem](Optimisation each) { return !leaves_out(problem, each); };
  if (!keeps(Optimisation::kPipeline)) config.stages = 1;
  if (!keeps(Optimisation::kLazyRescale)) config.shift_rule = ShiftRule::kEveryBlock;
  config.specialised &= config.paged || config.paired || keeps(Optimisation::kWarpSpecialisation);
  config.swizzle &= config.paged || keeps(Optimisation::kSwizzle);
  config.overlap &= keeps(Optimisation::kOverlap);
  config.ping_pong &= keeps(Optimisation::kPingPong);
  config.folded_scale &= keeps(Optimisation::kFoldedScale);
  config.longest_first &= keeps(Optimisation::kBlockOrder);
  config.skip_full_masks &= keeps(Optimisation::kFullBlocks);
}

}  // namespace

ForwardSm90Config forward_sm90_config(const Problem& problem, const Gpu& gpu,
                                      std::vector<TileCandidate>* compared) {
  ++config_derivations();
  ForwardSm90Config config = with_tile(options_of(problem), problem, gpu, compared);
  config.gathers = gathers_rows(problem, config);
  leave_out(config, problem);
  return config;
}

u32 forward_sm90_switches(const Problem& problem, const Gpu& gpu) {
  Problem each = problem;
  each.without = 0;
  const ForwardSm90Config whole = forward_sm90_config(each, gpu);
  u32 switches = 0;
  for (u32 bit = 1; bit <= kAllOptimisations; bit *= 2) {
    each.without = bit;
    if (forward_sm90_config(each, gpu) != whole) switches |= bit;
  }
  return switches;
}

size_t num_key_ranges(const Problem& problem, const ForwardSm90Config& config) {
  return static_cast<size_t>(fulmen::num_key_ranges(problem.kv_rows, problem.num_sequences,
                                                    problem.packed.kv, config.kv_rows));
}

i32 heads_per_group(const Problem& problem, const ForwardSm90Config& config, const Gpu& gpu) {
  const i32 chosen = problem.tile.heads_per_group;
  if (chosen != TileChoice::kOfTable) return chosen;
  const bool masked = config.score.may_be_causal();
  const bool varlen = config.score.varlen;
  if (!masked && !varlen && problem.max_kv > kShortRows) return 1;
  const i64 rows =
      problem.packed.kv || !varlen ? problem.kv_rows : problem.kv_rows * problem.num_sequences;
  const i64 bytes = max<i64>(rows * (problem.dim_qk + problem.dim_v) * 2 / problem.group_size(), 1);
  const i64 fitting = static_cast<i64>(gpu.l2_bytes) * 2 / 3 / bytes;
  const i64 most = clamp<i64>(fitting, 1, masked ? 16 : 2);
  // Groups of one size: a last one of few heads would leave multiprocessors idle (d 256 causal, 8k,
  // 16 heads as 5 + 5 + 5 + 1: 716 TFLOP/s on an H200; as 4 x 4: 808 on an H100, 2026-11-28).
  const i64 heads =
      max<i64>(problem.heads_q, 1) * (varlen ? 1 : max<i64>(problem.num_sequences, 1));
  for (i64 size = most; 2 * size >= most; --size) {
    if (heads % size == 0) return static_cast<i32>(size);
  }
  return static_cast<i32>(ceil_div(heads, ceil_div(heads, most)));
}

i64 max_work_tiles(const Problem& problem, const ForwardSm90Config& config) {
  if (problem.q_rows == 0) return 0;  // also when packed: nothing is launched
  const i64 rows = config.q_rows();
  const i64 of_a_head = problem.packed.q ? problem.q_rows / rows + problem.num_sequences
                                         : ceil_div(problem.q_rows, rows) * problem.num_sequences;
  return of_a_head * problem.heads_q / config.heads_per_tile;
}

ForwardParams forward_sm90_params(const Problem& problem, const ForwardSm90Config& config,
                                  const Gpu& gpu) {
  const auto count = [](i64 rows) { return static_cast<i32>(rows); };
  const i64 shift =
      problem.alignment == Alignment::kBottomRight ? problem.kv_rows - problem.q_rows : 0;
  const double scale = problem.score_map.scale;
  ForwardParams params{};
  params.batch = count(problem.num_sequences);
  params.heads_q = count(problem.heads_q);
  params.heads_kv = count(problem.heads_kv);
  params.shape = {count(problem.q_rows), count(problem.kv_rows), count(shift)};
  params.mask = problem.mask;
  params.scale_log2 = static_cast<float>(scale * kLog2E<double>);
  params.num_q_blocks = count(ceil_div(problem.q_rows, config.q_rows()));
  params.heads_per_group = heads_per_group(problem, config, gpu);
  params.scale = static_cast<float>(scale);
  params.score_mod = score_mod_of(problem.score_map);
  params.kept_scale = static_cast<float>(problem.dropout.kept_scale());
  params.attention = attention_params(problem);
  return params;
}

// Few rows of heads that share keys over long keys, and over caches, whose lengths differ; else
// where heads and sequences do not fill the card, or must not be counted; unless these kernels were
// asked for by name. With a full card this kernel took 256 us where decode_sm80 took 247 (32 x 8k),
// 497 and 482 (128 x 4k, H200, 2026-11-29).
static bool leaves_to_decode(const Problem& problem, const Gpu& gpu) {
  constexpr i64 kFewRows = 16, kManyKeys = 1024;
  const i64 rows = problem.max_q * problem.group_size();
  const bool is_read_bound = rows <= kFewRows && problem.max_kv >= kManyKeys;
  const bool fills_card = problem.num_sequences * problem.heads_kv >= gpu.num_multiprocessors;
  return problem.implementation != Implementation::kSm90 && !problem.has(Array::kBlocks) &&
         !problem.accumulate &&
         (is_read_bound || problem.has_caches() || !problem.may_plan_by_lengths() || !fills_card) &&
         prefers_decode_sm80(problem, gpu);
}

namespace {

// Chunks of prompts and single rows in one call. Each request belongs to one of two kernels by its
// number of rows, which both read on the device: decode_sm80, bound by the memory, begins on a part
// of the card; forward_sm90, bound by the tensor cores, fills the rest at once and the part when
// that is done, since its blocks take work tiles as they come. Neither waits for the other but at
// the end, so that what follows in the stream waits for both.

// Of the multiprocessors, for decode_sm80. Its speed goes with their number nearly to the last:
// with 3/8 of them 128 decodes and a chunk took 2,332 us, with 6/8 1,482, one after the other 1,528
// (H200, 2026-11-29).
constexpr i64 kDecodeShare[] = {6, 8};

Problem of_few_rows(Problem problem) {
  problem.max_q = kFewRows / problem.group_size();
  return problem;
}

class MixedPlan final : public GpuPlan {
 public:
  MixedPlan(std::unique_ptr<GpuPlan> decodes, std::unique_ptr<GpuPlan> chunks)
      : decodes_(std::move(decodes)), chunks_(std::move(chunks)) {
    tile = chunks_->tile;
    compared = chunks_->compared;
    alignment_bytes = max(decodes_->alignment_bytes, chunks_->alignment_bytes);
    zeroed_bytes = chunks_->zeroed_bytes;
    decodes_at_ = (chunks_->workspace_bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
                  kWorkspaceAlignment;
    workspace_bytes = decodes_at_ + decodes_->workspace_bytes;
    launches = decodes_->launches;
    launches.insert(launches.end(), chunks_->launches.begin(), chunks_->launches.end());
  }

  void run(const Call& call) const override {
    const size_t of_decodes = decodes_->launches.size();
    decodes_->run({call.problem, call.driver, call.kernels.first(of_decodes),
                   call.workspace + decodes_at_, call.faults, call.stream});
    chunks_->run({call.problem, call.driver, call.kernels.subspan(of_decodes), call.workspace,
                  call.faults, call.stream});
  }

 private:
  std::unique_ptr<GpuPlan> decodes_;
  std::unique_ptr<GpuPlan> chunks_;
  size_t decodes_at_;  // of the workspace
};

// Whether requests of few rows are computed by decode_sm80 beside the others.
bool mixes_with_decode(const Problem& problem, const Gpu& gpu) {
  return problem.implementation == Implementation::kAuto && problem.packed.q &&
         problem.has_caches() && problem.num_sequences > 1 &&
         prefers_decode_sm80(of_few_rows(problem), gpu);
}

// The plan of such a problem; `chunks`: that of the others.
std::unique_ptr<GpuPlan> beside_decode(std::unique_ptr<GpuPlan> chunks, const Problem& problem,
                                       const Gpu& gpu) {
  const i64 share = gpu.num_multiprocessors * kDecodeShare[0] / kDecodeShare[1];
  return std::make_unique<MixedPlan>(
      plan_decode_beside(of_few_rows(problem), gpu, static_cast<int>(share)), std::move(chunks));
}

}  // namespace

// The kernel that fills lists of tiles, and their place in the workspace, the last.
static void add_tile_lists(ForwardSm90Plan& plan, const Problem& problem) {
  const TileShape shape{plan.config.q_rows(), plan.config.kv_rows, false};
  plan.tile_lists = tile_lists_params(problem, shape);
  plan.tile_lists_at = max(plan.workspace_bytes, ForwardSm90Plan::kKeyRangesOffset);
  plan.workspace_bytes =
      plan.tile_lists_at + static_cast<size_t>(tile_lists_bytes(problem, plan.tile_lists));
  plan.launches.push_back(fill_tile_lists(problem, plan.config.score, plan.tile_lists, shape));
}

PlanOrRefusal plan_forward_sm90(const Problem& problem, const Gpu& gpu) {
  if (problem.precision == Precision::kFp8) return plan_fp8_sm90(problem, gpu);
  if (!user_terms_of(problem).any() && !problem.has(Array::kBlocks) && !problem.accumulate &&
      prefers_mla_sm90(problem, gpu)) {
    const bool is_gathered = problem.slots || problem.has_records();
    PlanOrRefusal otherwise = (is_gathered ? plan_simt : plan_forward_sm80)(problem, gpu);
    if (otherwise.plan == nullptr) return otherwise;
    return plan_mla_sm90(problem, gpu, std::move(otherwise.plan));
  }
  if (problem.slots) return "takes a page_table of slots for latent attention alone";
  return plan_tiles_sm90(problem, gpu, false);
}

PlanOrRefusal plan_tiles_sm90(const Problem& problem, const Gpu& gpu, bool conditional) {
  std::string why_not = forward_sm90_refusal(problem, gpu);
  if (why_not.empty() && leaves_to_decode(problem, gpu)) {
    why_not = "few query rows and long keys: sm80 divides the keys among all multiprocessors";
  }
  if (!why_not.empty()) return why_not;
  auto plan = std::make_unique<ForwardSm90Plan>();
  ForwardSm90Config config = forward_sm90_config(problem, gpu, &plan->compared);
  config.mixed = mixes_with_decode(problem, gpu);
  config.conditional = conditional;
  why_not = forward_sm90_refusal(problem, config);
  if (!why_not.empty()) return why_not;
  const i64 work_tiles = max_work_tiles(problem, config);
  if (work_tiles > kMaxCount) return "counts blocks of queries in 31 bits";
  plan->config = config;
  plan->params = forward_sm90_params(problem, config, gpu);
  plan->tile = {config.q_rows(), config.kv_rows};
  plan->alignment_bytes = 16;
  const unsigned cluster = static_cast<unsigned>(config.blocks_of_tile());
  const i64 most_at_once = gpu.num_multiprocessors / config.blocks_of_tile();  // work tiles
  plan->counts_tiles = work_tiles > most_at_once;
  if (plan->counts_tiles) plan->workspace_bytes = sizeof(u32);
  if (conditional) plan->workspace_bytes = ForwardSm90Plan::kConditionOffset + sizeof(u32);
  plan->zeroed_bytes = plan->workspace_bytes;
  if (config.skips_documents) {
    plan->num_key_ranges = num_key_ranges(problem, config);
    plan->workspace_bytes =
        ForwardSm90Plan::kKeyRangesOffset + plan->num_key_ranges * sizeof(IdRange);
    plan->launches.push_back({sm90_key_ranges_spec(config),
                              ceil_div(static_cast<i64>(plan->num_key_ranges), kKeyRangeThreads)});
  }
  if (config.score.has_tile_lists()) add_tile_lists(*plan, problem);
  KernelLaunch launch{forward_sm90_spec(config)};
  launch.num_blocks = min(work_tiles, most_at_once) * cluster;
  launch.cluster_size = cluster;
  if (config.has_8_bits()) add_transposed_values(*plan, problem);
  launch.overlap_previous = true;  // as far as it sets up its barriers
  plan->launches.push_back(std::move(launch));
  if (config.mixed) return beside_decode(std::move(plan), problem, gpu);
  return plan;
}

void ForwardSm90Plan::run(const Call& call) const {
  if (launches.back().num_blocks == 0) return;
  const Arrays& arrays = call.problem.arrays;
  ForwardArguments arguments{{}, params};
  const auto map = [&](Array array, i32 box_rows, bool swizzle, TensorMap& map) {
    TensorBox box = tensor_box(arrays[array], box_rows);
    box.swizzle = swizzle;
    if (!swizzle) box.box_dims = 8;
    encode(call.driver, box, map);
  };
  map(Array::kQ, config.tile_rows(), config.swizzle, arguments.maps.q);
  const i32 page_rows = config.paged ? key_box_rows(params.attention, config.kv_rows) : 0;
  map(Array::kK, config.paged ? page_rows : config.own_keys(), config.swizzle, arguments.maps.k);
  if (config.has_8_bits()) {
    arguments.params.values = reinterpret_cast<u8*>(call.workspace) + kKeyRangesOffset;
    encode(call.driver, value_box(*this, arguments.params.values), arguments.maps.v);
  } else {
    map(Array::kV, config.paged ? page_rows : config.kv_rows, config.swizzle, arguments.maps.v);
  }
  if (config.stage_output) {
    TensorBox box = tensor_box(arrays[Array::kO], 64);
    box.swizzle = config.swizzle;
    encode(call.driver, box, arguments.maps.o);
  }
  encode_pairs(call, config, config.q_rows(), 64, arguments.maps);
  bind_params(arguments.params.attention, call.problem, call.faults);
  arguments.params.kept_scale = static_cast<float>(call.problem.dropout.kept_scale());
  if (config.conditional) arguments.params.condition = condition(call.workspace);
  if (counts_tiles) arguments.params.next_block = reinterpret_cast<u32*>(call.workspace);
  size_t next = 0;
  if (num_key_ranges > 0) {
    arguments.params.key_ranges = reinterpret_cast<IdRange*>(call.workspace + kKeyRangesOffset);
    call.launch(next++, arguments);
  }
  if (config.score.has_tile_lists()) {
    TileListsParams lists = tile_lists;
    bind_params(lists.attention, call.problem, call.faults);
    lists.lists.words = reinterpret_cast<u32*>(call.workspace + tile_lists_at);
    arguments.params.tile_lists = lists.lists;
    call.launch(next++, lists);
  }
  if (config.has_8_bits()) call.launch(next++, arguments);
  call.launch(call.kernels.size() - 1, arguments);
}

}  // namespace fulmen::gpu
