// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of 16-bit numbers in shared memory, rows of any even number of 16-byte units one after the
// other without gaps. Units are exchanged within groups of 2, 4 or 8 by the number of the row, so
// that the same unit of eight neighbouring rows lies in eight different groups of four banks: then
// ldmatrix and 16-byte copies never wait for a bank.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

template <i32 kDims, bool kSwizzled>
struct SwizzledTile {
  static constexpr u32 kUnits = kDims / 8;
  static constexpr u32 kRowBytes = kUnits * 16;
  // Units that change places with each other. Rows begin 0, 2 or 4 groups of banks apart: 8, 4 or 2
  // rows meet the same banks.
  static constexpr u32 kGroup = kUnits % 8 == 0 ? 8 : kUnits % 4 == 0 ? 4 : 2;
  static constexpr u32 kBits = !kSwizzled ? 0 : kGroup == 8 ? 3 : kGroup == 4 ? 2 : 1;
  static constexpr u32 kMask = (1u << kBits) - 1;

  u32 base;

  static constexpr u32 exchange(u32 row) { return row >> (3 - kBits) & kMask; }
  constexpr u32 address(u32 row, u32 unit) const {
    return base + row * kRowBytes + ((unit ^ exchange(row)) << 4);
  }
};

// One lane's way through a tile for ldmatrix: row `row` (of its first matrices; others are
// multiples of 8 rows on) and, of every pair of units 2 k, 2 k + 1, number `half`.
template <i32 kDims, bool kSwizzled>
struct LaneRow {
  using Tile = SwizzledTile<kDims, kSwizzled>;
  u32 start;

  constexpr LaneRow(const Tile& tile, u32 row, u32 half)
      : start(tile.base + row * Tile::kRowBytes +
              ((Tile::exchange(row) ^ half % (Tile::kMask + 1)) << 4) +
              (half & ~Tile::kMask) * 16) {}

  // Unit pair k, rows further down by `rows`, a multiple of 8.
  constexpr u32 at(u32 k, u32 rows) const {
    const u32 unit = 2 * k;
    return (start ^ (unit & Tile::kMask) << 4) + (unit & ~Tile::kMask) * 16 +
           rows * Tile::kRowBytes;
  }
};

}  // namespace fulmen
