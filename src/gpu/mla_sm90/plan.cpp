// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plans of mla_sm90.

#include "gpu/mla_sm90/plan.h"

#include <algorithm>

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/decode_sm80/plan.h"
#include "gpu/forward_sm80/plan.h"
#include "gpu/forward_sm90/plan.h"
#include "gpu/params.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {
namespace {

constexpr double kSmallestScale = 0x1p-60;
constexpr size_t kSpillBytes = 640;  // of the path for rows that met something hidden
constexpr i64 kFewestBoxRows = 8;    // of pages: for less the copy engine is asked too often
constexpr i64 kMostBlocks = i64{1} << 30;
constexpr i64 kMostSlots = 0xffffffff;  // which kernels count in 32 bits

i64 rows_of_group(const Problem& problem) { return problem.max_q * problem.group_size(); }

i64 num_blocks(const Problem& problem) {
  return ceil_div(problem.max_kv, i64{mla_schedule().block_keys()}) * problem.num_sequences *
         problem.heads_kv;
}

i64 num_row_tiles(const Problem& problem) {
  return max<i64>(1, ceil_div(rows_of_group(problem), i64{MlaSm90Config::kRows}));
}

// Whether K's elements and V's are in the same places once their pointers are equal.
bool has_values_in_keys(const Problem& problem) {
  const Tensor& k = problem.arrays[Array::kK];
  const Tensor& v = problem.arrays[Array::kV];
  return k.dtype == v.dtype && std::equal(k.shape, k.shape + 3, v.shape) &&
         std::equal(std::begin(k.strides), std::end(k.strides), v.strides);
}

// Whether the copy engine finds a block of keys in boxes that lie whole in a page.
bool has_boxes(const Problem& problem) {
  if (problem.slots || problem.has_records()) return false;
  return !problem.is_paged() ||
         (!problem.has(Array::kKvStart) && problem.page_rows % kFewestBoxRows == 0);
}

// What a row of the cache has in bytes, if rows are records.
i32 record_bytes(const Problem& problem) {
  return problem.has_records() ? static_cast<i32>(record_layout(problem.dim_qk).bytes) : 0;
}

// Whether every record and its parts lie at multiples of 16 bytes.
bool has_aligned_records(const Problem& problem) {
  const Tensor& k = problem.arrays[Array::kK];
  if (!problem.has_records() || problem.dtype != DType::kBFloat16) return false;
  if (record_layout(problem.dim_qk).has_page_scales() && problem.dim_qk != 512) return false;
  for (const int axis : {0, 1, 2}) {
    if (axis == 2 && record_bytes(problem) == 584) continue;  // rows are 576 bytes apart
    if (k.shape[axis] > 1 && k.strides[axis] % 16 != 0) return false;
  }
  return problem.pointer_alignment >= 16;
}

KernelSpec main_spec(const MlaSm90Config& config, const std::string& distinction) {
  return on_tensor_cores(
      spec_of<MlaSm90Arguments>("mla_sm90/mla_sm90", "mla_sm90", distinction, config), config,
      kSpillBytes);
}

KernelSpec combine_spec(const MlaSm90Config& config, const std::string& distinction) {
  KernelSpec spec =
      spec_of<MlaSm90Arguments>("mla_sm90/combine", "combine_mla", distinction, config);
  spec.num_threads = MlaSm90Config::combine_threads();
  spec.min_blocks = 1;
  spec.shared_bytes = static_cast<size_t>(config.combine_bytes());
  return spec;
}

std::string distinction_of(const MlaSm90Config& config) {
  const DecodeSm80Config& schedule = config.schedule;
  return sentence(name(schedule.dtype), name_suffix(schedule.score),
                  schedule.ragged ? "_ragged" : "", schedule.paged ? "_paged" : "",
                  config.record != 0 ? sentence("_", config.record)
                                     : std::string(config.gathers ? "_gathers" : ""),
                  config.several ? "" : "_one");
}

// Blocks of the grid that a row tile has.
i64 num_workers(const Problem& problem, const Gpu& gpu) {
  return clamp<i64>(gpu.num_multiprocessors / num_row_tiles(problem), 1,
                    max<i64>(1, num_blocks(problem)));
}

class MlaSm90Plan final : public LatentPlan {
 public:
  MlaSm90Plan(const Problem& problem, const Gpu& gpu, std::unique_ptr<GpuPlan> otherwise)
      : LatentPlan(mla_sm90_arguments(problem, num_workers(problem, gpu)), std::move(otherwise)) {
    const MlaSm90Config config = mla_sm90_config(problem);
    gathers_ = config.gathers;
    const i64 row_tiles = arguments().row_tiles, workers = arguments().workers;
    const i64 grid = workers * row_tiles;
    tile = {MlaSm90Config::kRows, config.keys()};
    const bool is_empty = problem.num_sequences == 0 && !problem.packed.q;
    const std::string distinction = distinction_of(config);
    launches.push_back({main_spec(config, distinction), is_empty ? 0 : grid});
    const i64 combined =
        arguments().by_sequence ? problem.num_sequences * problem.heads_kv : workers;
    launches.push_back({combine_spec(config, distinction),
                        workers > 1 && !is_empty ? combined * row_tiles * arguments().slices : 0});
    launches.back().overlap_previous = true;
    add_otherwise(static_cast<size_t>(2 * grid * MlaSm90Config::part_floats()) * 4);
  }

 private:
  void attend(const Call& call, MlaSm90Arguments& arguments) const override {
    arguments.parts = reinterpret_cast<float*>(call.workspace);
    if (!gathers_) {
      const i32 keys = mla_schedule().block_keys();
      const i32 box_rows = call.problem.is_paged() ? key_box_rows(arguments.attention, keys) : keys;
      encode(call.driver, tensor_box(call.problem.arrays[Array::kK], box_rows), arguments.kv);
    }
    call.launch(0, arguments);
    call.launch(1, arguments);
  }

  bool gathers_;
};

}  // namespace

void LatentPlan::run(const Call& call) const {
  const Arrays& arrays = call.problem.arrays;
  if (arrays[Array::kK].data != arrays[Array::kV].data) {
    const size_t own = launches.size() - otherwise_->launches.size();
    return otherwise_->run({call.problem, call.driver, call.kernels.subspan(own), call.workspace,
                            call.faults, call.stream});
  }
  MlaSm90Arguments arguments = arguments_;
  bind_params(arguments.attention, call.problem, call.faults);
  attend(call, arguments);
}

LatentPlan::LatentPlan(const MlaSm90Arguments& arguments, std::unique_ptr<GpuPlan> otherwise)
    : arguments_(arguments), otherwise_(std::move(otherwise)) {
  alignment_bytes = max<i64>(16, otherwise_->alignment_bytes);
  zeroed_bytes = otherwise_->zeroed_bytes;
  workspace_bytes = otherwise_->workspace_bytes;
}

void LatentPlan::add_otherwise(size_t own_workspace) {
  workspace_bytes = max(workspace_bytes, own_workspace);
  launches.insert(launches.end(), otherwise_->launches.begin(), otherwise_->launches.end());
}

MlaSm90Config mla_sm90_config(const Problem& problem) {
  ++config_derivations();
  MlaSm90Config config;
  DecodeSm80Config& schedule = config.schedule;
  schedule.dtype = problem.dtype;
  schedule.score = score_options_of(problem);
  schedule.score.sinks = false;  // looked up when kernels run
  schedule.score.varlen |= problem.has_caches();
  schedule.ragged = schedule.score.varlen && is_ragged(problem);
  schedule.paged = problem.is_paged();
  config.gathers = !has_boxes(problem);
  config.several = problem.num_sequences > 1;
  if (problem.has_records()) {
    config.record = record_bytes(problem);
    schedule.quantised = problem.kv_dtype();
    schedule.d_qk = static_cast<i32>(problem.dim_qk);
  }
  if (is_last_row(problem) && problem.mask.is_at_most_causal())
    schedule.score.mask_kind = MaskKind::kNone;
  return config;
}

MlaSm90Arguments mla_sm90_arguments(const Problem& problem, i64 num_workers) {
  MlaSm90Arguments arguments{};
  arguments.attention = attention_params(problem);
  arguments.unit = score_unit(mla_schedule(), problem.score_map.scale);
  arguments.group = static_cast<i32>(problem.group_size());
  arguments.row_tiles = static_cast<i32>(num_row_tiles(problem));
  arguments.workers = static_cast<i32>(num_workers);
  const i64 sequences = max<i64>(1, problem.num_sequences * problem.heads_kv);
  arguments.by_sequence = sequences < num_workers;
  // As many blocks as an H200 has multiprocessors, where they have as much to add.
  const i64 tiles = min(sequences, num_workers) * arguments.row_tiles;
  arguments.slices = 1;
  // Of 8 dims, or the 32 in which rows are computed again.
  const i64 most = mla_sm90_config(problem).schedule.may_recompute() ? 16 : 64;
  while (arguments.slices < most && arguments.slices * tiles < 128) arguments.slices *= 2;
  return arguments;
}

bool prefers_mla_sm90(const Problem& problem, const Gpu& gpu) {
  if (gpu.compute_capability != 90 || problem.without != 0 || problem.tile.given()) return false;
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) return false;
  constexpr DecodeSm80Config kSchedule = mla_schedule();
  const bool has_dims = problem.dim_qk == kSchedule.d_qk || problem.has_records();
  if (!has_dims || problem.dim_v != kSchedule.d_v) return false;
  for (const Array array : {Array::kMask, Array::kBias, Array::kQIds, Array::kAlibiSlopes,
                            Array::kPositions, Array::kTree}) {
    if (problem.has(array)) return false;
  }
  if (problem.dropout.enabled() || problem.score_map.is_modified() || problem.batch_invariant ||
      (problem.is_quantised() && !problem.has_records()) ||
      !(problem.score_map.scale > kSmallestScale)) {
    return false;
  }
  if (rows_of_group(problem) == 0 || num_blocks(problem) >= kMostBlocks) return false;
  if (problem.kv_rows <= 0 || problem.kv_rows >= 0x7fffff00) return false;
  if (problem.is_paged() &&
      (problem.num_pages <= 0 || problem.num_pages * problem.page_rows >= kMostSlots)) {
    return false;
  }
  if (!has_values_in_keys(problem) || !has_aligned_o(problem) || problem.has_quantised_q()) {
    return false;
  }
  if (problem.has_records()) return has_aligned_records(problem);
  return has_aligned_rows(problem, Array::kV) &&
         (!has_boxes(problem) || sm90_layout_refusal(problem, Array::kK).empty());
}

std::unique_ptr<GpuPlan> plan_mla_sm90(const Problem& problem, const Gpu& gpu,
                                       std::unique_ptr<GpuPlan> otherwise) {
  if (mla_cluster_of_few_rows(problem, gpu) > 0) {
    return plan_mla_few_rows(problem, gpu, std::move(otherwise));
  }
  return std::make_unique<MlaSm90Plan>(problem, gpu, std::move(otherwise));
}

std::vector<KernelSpec> mla_sm90_specs() {
  std::vector<KernelSpec> specs;
  const auto add = [&specs](const MlaSm90Config& config) {
    specs.push_back(main_spec(config, distinction_of(config)));
    specs.push_back(combine_spec(config, distinction_of(config)));
  };
  MlaSm90Config config;
  config.several = false;
  add(config);
  config.several = true;
  config.schedule.dtype = DType::kFloat16;
  config.schedule.score.varlen = config.schedule.paged = true;
  add(config);
  config.schedule.dtype = DType::kBFloat16;
  config.gathers = true;
  add(config);
  config.schedule.quantised = DType::kUint8;
  for (const i32 record : {656, 584}) {
    config.record = record;
    add(config);
    specs.push_back(mla_few_rows_spec(MlaFewRowsConfig::of(config, record == 656 ? 8 : 1)));
    specs.push_back(mla_few_rows_spec(MlaFewRowsConfig::of(config, 16)));
  }
  config.schedule.score.mask_kind = MaskKind::kRight;  // of records that rows see some of
  add(config);
  config.gathers = false;
  config.schedule.quantised = DType::kNone;
  config.record = 0;
  config.schedule.ragged = config.schedule.score.stats = config.schedule.score.fp32_out = true;
  add(config);
  return specs;
}

}  // namespace fulmen::gpu
