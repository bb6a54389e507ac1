// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How many blocks of keys and tiles of queries a group of key/value heads has in a backward call of
// sm80. The host fills Sm80Groups with it.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/common/tile_tasks.cuh"

namespace fulmen {

constexpr Sm80Groups sm80_groups(const AttentionParams& p, const Sm80BackwardConfig& config,
                                 i64 lines, i64 ahead) {
  const auto count = [](i64 x) { return static_cast<u32>(x); };
  const i64 blocks = lines * num_tile_slots(p, p.kv_rows, config.columns);
  const i64 row_tiles = lines * p.group_size() * num_tile_slots(p, p.q_rows, config.rows);
  return {count(lines),
          count(blocks),
          count(row_tiles),
          count(ceil_div(row_tiles, max<i64>(blocks, 1))),
          count(num_q_tiles(p, config.rows)),
          count(ahead)};
}

}  // namespace fulmen
