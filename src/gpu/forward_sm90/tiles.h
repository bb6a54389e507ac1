// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which tile of kernels/forward_sm90/forward_sm90.cuh a problem gets: what the caller names, else
// what a search has found (sm90_forward_tuned.h), else what the rules say. Called by
// sm90_forward.cpp. Pure.
#pragma once

#include "core/problem.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen {

inline constexpr i64 kShortRows = 1024;  // lengths up to this take the configs with a quick start

// Fills in the tile of a config that has its options.
void set_sm90_forward_tile(AttentionConfig& config, const Problem& problem);

// What replaces the rules' tile, member by member. options: the problem's config without a tile.
TileChoice sm90_forward_tile_choice(const Problem& problem, const AttentionConfig& options);

}  // namespace fulmen
