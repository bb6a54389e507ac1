// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which rows of which sequence a block works on, from its slot (tile_tasks.cuh): for packed arrays
// the offsets say, and they are in device memory.
#pragma once

#include "kernels/common/sequences.cuh"
#include "kernels/common/tile_tasks.cuh"

namespace fulmen {

// A block's sequence, and the first of its rows there.
struct TilePlace {
  i64 index;
  i64 first_row;
};

inline TilePlace find_tile(const AttentionParams& p, const ArrayView& offsets, const TileTask& task,
                           i64 tile_rows) {
  if (!p.packed) return {task.batch, task.slot * tile_rows};
  i64 low = 0;
  i64 high = p.num_sequences - 1;
  while (low < high) {  // the last sequence whose first slot is not beyond ours
    const i64 middle = (low + high + 1) / 2;
    const i64 offset = load_index(offsets, middle * offsets.strides[3]);
    if (first_slot(offset, middle, tile_rows) <= task.slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const i64 offset = load_index(offsets, low * offsets.strides[3]);
  return {low, (task.slot - first_slot(offset, low, tile_rows)) * tile_rows};
}

// Number of a tile of queries among all, and of its slot.
inline i64 row_tile_number(const AttentionParams& p, i64 batch, i64 head, i64 slot, i64 num_slots) {
  return (batch * p.heads_q + head) * num_slots + slot;
}

}  // namespace fulmen
