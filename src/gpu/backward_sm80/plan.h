// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of the sm80 implementation: every option of the library for 16-bit inputs, and
// for float32 where precision permits. Its launches: backward_preprocess_sm80, the kernel that
// computes dq, dk and dv, backward_postprocess_sm80, backward_dbias_sm80 before or after them, and
// simt's kernels for gradients that these do not make. Pure.
#pragma once

#include <optional>
#include <vector>

#include "core/problem.h"
#include "gpu/gpu_plan.h"
#include "gpu/jit/kernel_spec.h"
#include "kernels/backward_sm80/config.h"

namespace fulmen::gpu {

PlanOrRefusal plan_backward_sm80(const Problem& problem, const Gpu& gpu);

// The optimisations that kernels can be made without.
u32 backward_sm80_switches(const Problem& problem, const Gpu& gpu);

// What plan_backward_sm80 compiles the main kernel for; nothing where no tile fits the card.
// `compared`, unless null, takes the tiles that were compared.
std::optional<BackwardSm80Config> backward_sm80_config(
    const Problem& problem, const Gpu& gpu, std::vector<TileCandidate>* compared = nullptr);

// Kernels that CI compiles, for several head dimensions in the tiles of a card and both dtypes: the
// main one for several sets of gradients, then of options; then those before and after it.
std::vector<std::vector<KernelSpec>> backward_sm80_specs(const Gpu& gpu);

// Whether dbias comes from these kernels; else it does from simt's.
bool sm80_makes_dbias(const Problem& problem);
// Whether one element of it belongs to the pairs of several heads.
bool sm80_shares_dbias(const Problem& problem);

// Whether no structured mask hides anything.
bool is_unmasked(const Problem& problem);

KernelSpec backward_sm80_spec(const BackwardSm80Config& config);

// The others are compiled for those parts of the config that they depend on.
KernelSpec backward_preprocess_sm80_spec(const Problem& problem, const BackwardSm80Config& config);
KernelSpec backward_postprocess_sm80_spec(const BackwardSm80Config& config);
KernelSpec backward_dbias_sm80_spec(const BackwardSm80Config& config);

}  // namespace fulmen::gpu
