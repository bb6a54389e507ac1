// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What causal, window, prefix and chunk mean, pair by pair: the definition that mask.cuh and
// block_range.cuh are tested against. Written without them on purpose.
#pragma once

#include "kernels/attention/mask.cuh"

namespace fulmen::test {

// Whether query row i of a sequence sees key j, by these options alone.
inline bool is_visible(const IntervalMask& mask, const SequenceShape& shape, i64 q_row,
                       i64 kv_row) {
  const i64 level = q_row + shape.shift;  // the key that the row is level with
  const bool causal = !mask.causal || kv_row <= level;
  const bool prefix = kv_row < mask.prefix;
  const bool left = mask.window_left == kNoLimit || kv_row >= level - mask.window_left;
  const bool right = mask.window_right == kNoLimit || kv_row <= level + mask.window_right;
  const bool chunk =
      mask.chunk == 0 || floor_div(level, mask.chunk) == floor_div(kv_row, mask.chunk);
  return (causal || prefix) && left && right && chunk;
}

}  // namespace fulmen::test
