// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of plain problems that are faster than those of the rules in sm90_forward_tiles.cpp.
// Written by `fulmen bench --tune`: NVIDIA H200, 2026-11-28, commit 29fd897faa84.
#pragma once

#include <array>

#include "core/tile_choice.h"

namespace fulmen {

// Of a class of problems: head dimension, causal, sequences of at most 1024 rows.
struct TunedTile {
  i64 dim;
  bool causal;
  bool is_short;
  TileChoice tile;
};

inline constexpr std::array<TunedTile, 0> kTunedTiles{};

}  // namespace fulmen
