// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of the sm80 implementation: mma.sync kernels for Ampere and later, every option
// of the library for 16-bit inputs, and for float32 where precision permits. Which tile a head
// dimension gets on a card is decided here. Pure.
#pragma once

#include <optional>
#include <vector>

#include "gpu/gpu_plan.h"
#include "kernels/forward_sm80/config.h"

namespace fulmen::gpu {

PlanOrRefusal plan_forward_sm80(const Problem& problem, const Gpu& gpu);

// The optimisations that kernels can be made without.
u32 forward_sm80_switches(const Problem& problem, const Gpu& gpu);

// What plan_forward_sm80 compiles for; nothing where no tile fits the card. `compared`, unless
// null, takes the tiles that were compared.
std::optional<ForwardSm80Config> forward_sm80_config(
    const Problem& problem, const Gpu& gpu, std::vector<TileCandidate>* compared = nullptr);

// The kernel of a config.
KernelSpec forward_sm80_spec(const ForwardSm80Config& config);

// One kernel for each set of options, each in the tiles of a card for several head dimensions, in
// both dtypes: what CI compiles.
std::vector<std::vector<KernelSpec>> forward_sm80_specs(const Gpu& gpu);

// Those of e4m3, of a card whose tensor cores multiply it.
std::vector<KernelSpec> forward_sm80_e4m3_specs(const Gpu& gpu);

// Why neither pass of sm80 takes inputs of this dtype and precision, this card, or dropout where it
// is drawn by positions; or "".
std::string sm80_refusal(const Problem& problem, const Gpu& gpu);

}  // namespace fulmen::gpu
