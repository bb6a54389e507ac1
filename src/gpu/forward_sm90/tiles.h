// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which tile of kernels/forward_sm90/forward_sm90.cuh a problem gets on a card: the first rule of a
// list that suits, with members replaced that the caller names. Pure.
#pragma once

#include "gpu/gpu_plan.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::gpu {

inline constexpr i64 kShortRows = 1024;  // lengths up to this take the configs with a quick start

// The config with a tile, from one that has the options of the problem. compared: what was looked
// at, if not null.
ForwardSm90Config with_tile(const ForwardSm90Config& options, const Problem& problem,
                            const Gpu& gpu, std::vector<TileCandidate>* compared);

}  // namespace fulmen::gpu
