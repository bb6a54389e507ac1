// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention over a latent cache, a form of the sm90 implementation: keys of 576 numbers whose first
// 512 are the values. Which problems it is for is decided here. Pure.
#pragma once

#include <vector>

#include "gpu/gpu_plan.h"
#include "kernels/mla_sm90/config.h"

namespace fulmen::gpu {

// Whether v may be the first columns of k, by all but its pointer, and mla_sm90 computes that.
bool prefers_mla_sm90(const Problem& problem, const Gpu& gpu);

// Of such a problem. A run whose v lies elsewhere is computed by `otherwise`.
std::unique_ptr<GpuPlan> plan_mla_sm90(const Problem& problem, const Gpu& gpu,
                                       std::unique_ptr<GpuPlan> otherwise);

// What plan_mla_sm90 compiles for.
MlaSm90Config mla_sm90_config(const Problem& problem);

// Everything but pointers and the tensor map.
MlaSm90Arguments mla_sm90_arguments(const Problem& problem, i64 num_workers);

// What CI compiles.
std::vector<KernelSpec> mla_sm90_specs();

}  // namespace fulmen::gpu
