// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lists of tiles (kernels/tile_lists/config.h), of lists of blocks or of a user's mask: the kernel
// that fills them before a run, and the room that they take.
#pragma once

#include "gpu/gpu_plan.h"
#include "kernels/tile_lists/config.h"

namespace fulmen::gpu {

// The tiles of a kernel, and whether its lines are tiles of keys.
struct TileShape {
  i64 q_rows;
  i64 kv_rows;
  bool by_keys;
};

// Whether a user's mask says which tiles are met. Where lists of blocks do, it is asked pair by
// pair in those; and with fewer keys than two tiles have.
bool has_mask_tiles(const Problem& problem);

// Everything but pointers.
TileListsParams tile_lists_params(const Problem& problem, const TileShape& shape);

i64 tile_lists_bytes(const Problem& problem, const TileListsParams& params);

// The launch that fills them, with `params`; score: of the kernel that reads them.
KernelLaunch fill_tile_lists(const Problem& problem, const ScoreOptions& score,
                             const TileListsParams& params, const TileShape& shape);

// Whether each part of a tile lies in one block of lists.
bool fits_blocks(const Problem& problem, const TileShape& shape);

}  // namespace fulmen::gpu
