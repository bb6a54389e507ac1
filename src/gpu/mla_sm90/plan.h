// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention over a latent cache, a form of the sm90 implementation: keys of 576 numbers whose first
// 512 are the values. Which problems it is for is decided here. Pure.
#pragma once

#include <vector>

#include "gpu/gpu_plan.h"
#include "kernels/mla_sm90/few_rows_config.h"

namespace fulmen::gpu {

// Whether v may be the first columns of k, by all but its pointer, and mla_sm90 computes that.
bool prefers_mla_sm90(const Problem& problem, const Gpu& gpu);

// Of such a problem. A run whose v lies elsewhere is computed by `otherwise`.
std::unique_ptr<GpuPlan> plan_mla_sm90(const Problem& problem, const Gpu& gpu,
                                       std::unique_ptr<GpuPlan> otherwise);

// What plan_mla_sm90 compiles for.
MlaSm90Config mla_sm90_config(const Problem& problem);

// What its plans have in common: a run whose v lies elsewhere is left to another plan, whose
// kernels are compiled beside.
class LatentPlan : public GpuPlan {
 public:
  void run(const Call& call) const final;

 protected:
  // arguments: but for pointers, which a run fills in.
  LatentPlan(const MlaSm90Arguments& arguments, std::unique_ptr<GpuPlan> otherwise);

  // At the end of a constructor, behind its own launches; own_workspace: of those.
  void add_otherwise(size_t own_workspace = 0);
  const MlaSm90Arguments& arguments() const { return arguments_; }

 private:
  virtual void attend(const Call& call, MlaSm90Arguments& arguments) const = 0;

  MlaSm90Arguments arguments_;
  std::unique_ptr<GpuPlan> otherwise_;
};

// Everything but pointers and the tensor map.
MlaSm90Arguments mla_sm90_arguments(const Problem& problem, i64 num_workers);

// Blocks of a cluster that takes 16 query rows whole (kernels/mla_sm90/few_rows.cuh), where such
// clusters are the better way; 0: they are not.
i32 mla_cluster_of_few_rows(const Problem& problem, const Gpu& gpu);
MlaFewRowsConfig mla_few_rows_config(const Problem& problem, i32 cluster);
MlaSm90Arguments mla_few_rows_arguments(const Problem& problem);
std::unique_ptr<GpuPlan> plan_mla_few_rows(const Problem& problem, const Gpu& gpu,
                                           std::unique_ptr<GpuPlan> otherwise);
KernelSpec mla_few_rows_spec(const MlaFewRowsConfig& config);

// What CI compiles.
std::vector<KernelSpec> mla_sm90_specs();

}  // namespace fulmen::gpu
