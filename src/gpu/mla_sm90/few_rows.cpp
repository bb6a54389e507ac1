// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Plans of mla_few_rows: latent attention of few query rows over records.

#include "core/error.h"
#include "gpu/call.h"
#include "gpu/decode_sm80/plan.h"
#include "gpu/mla_sm90/plan.h"
#include "gpu/params.h"

namespace fulmen::gpu {
namespace {

using Config = MlaFewRowsConfig;

i64 row_tiles_of_group(const Problem& problem) {
  return max<i64>(1, ceil_div(problem.max_q * problem.group_size(), i64{Config::kRows}));
}

class MlaFewRowsPlan final : public LatentPlan {
 public:
  MlaFewRowsPlan(const Problem& problem, const Gpu& gpu, std::unique_ptr<GpuPlan> otherwise)
      : LatentPlan(mla_few_rows_arguments(problem), std::move(otherwise)) {
    const i32 cluster = mla_cluster_of_few_rows(problem, gpu);
    const i64 clusters = problem.num_sequences * problem.heads_kv * arguments().row_tiles;
    tile = {Config::kRows, Config::kKeys};
    launches = {{mla_few_rows_spec(mla_few_rows_config(problem, cluster)), clusters * cluster,
                 static_cast<unsigned>(cluster)}};
    add_otherwise();
  }

 private:
  void attend(const Call& call, MlaSm90Arguments& arguments) const override {
    call.launch(0, arguments);
  }
};

}  // namespace

// As many blocks as the card holds at once, if there are keys for them. More than 16 rows want
// more than one row tile, each of which reads all keys: for that they must be few.
i32 mla_cluster_of_few_rows(const Problem& problem, const Gpu& gpu) {
  constexpr i64 kMostTiles = 16;  // of more rows
  if (!problem.has_records() || problem.packed.q || !problem.is_paged()) return 0;
  const i64 of_group = row_tiles_of_group(problem);
  const i64 tiles = of_group * problem.num_sequences * problem.heads_kv;
  if (tiles == 0 || (of_group > 1 && tiles > kMostTiles)) return 0;
  if (mla_sm90_config(problem).schedule.score.mask_kind != MaskKind::kNone) return 0;
  // One row tile alone: 16.5 us instead of 21.8 with 2,048 records (an H200, 2026-11-30).
  constexpr i64 kLargest = 16;
  if (tiles == 1 && problem.max_kv > kLargest / 2 * Config::kKeys &&
      gpu.num_multiprocessors >= 132) {
    return kLargest;
  }
  for (const i64 size : {8, 4, 2}) {
    if (tiles <= clusters_at_once(gpu, size) && problem.max_kv > size / 2 * Config::kKeys) {
      return static_cast<i32>(size);
    }
  }
  return 1;
}

MlaFewRowsConfig mla_few_rows_config(const Problem& problem, i32 cluster) {
  MlaSm90Config config = mla_sm90_config(problem);
  config.several = true;  // which it does not ask for
  const i64 group = problem.group_size();
  config.schedule.one_query =
      problem.max_q == 1 && (group <= Config::kRows || group % Config::kRows == 0);
  return Config::of(config, cluster);
}

MlaSm90Arguments mla_few_rows_arguments(const Problem& problem) {
  MlaSm90Arguments arguments{};
  arguments.attention = attention_params(problem);
  arguments.unit = score_unit(mla_schedule(), problem.score_map.scale);
  arguments.group = static_cast<i32>(problem.group_size());
  arguments.row_tiles = static_cast<i32>(row_tiles_of_group(problem));
  return arguments;
}

KernelSpec mla_few_rows_spec(const MlaFewRowsConfig& config) {
  constexpr size_t kSpillBytes = 256;  // of the path for rows that are computed again
  const DecodeSm80Config& schedule = config.common.schedule;
  const std::string distinction =
      sentence(name(schedule.dtype), "_", config.common.record, name_suffix(schedule.score),
               schedule.ragged ? "_ragged" : "", schedule.one_query ? "_single" : "", "_cluster",
               schedule.cluster);
  return on_tensor_cores(
      spec_of<MlaSm90Arguments>("mla_sm90/few_rows", "mla_few_rows", distinction, config), config,
      kSpillBytes);
}

std::unique_ptr<GpuPlan> plan_mla_few_rows(const Problem& problem, const Gpu& gpu,
                                           std::unique_ptr<GpuPlan> otherwise) {
  return std::make_unique<MlaFewRowsPlan>(problem, gpu, std::move(otherwise));
}

}  // namespace fulmen::gpu
