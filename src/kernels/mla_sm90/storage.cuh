// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of mla_sm90: Q, a block of keys in two halves, P, and what says that they are
// there. A tile is 64 rows of 64 columns, of 16 bits, swizzled as wgmma and the copy engine have
// it.
#pragma once

#include "kernels/mla_sm90/config.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

struct MlaTile {
  u32 base;

  // Address of 8 columns of a row.
  constexpr u32 unit(u32 row, u32 unit) const { return base + row * 128 + ((unit ^ row % 8) << 4); }
  // As 64 rows of an operand, columns from 16 k on.
  constexpr u32 rows(i32 k) const { return ptx::wgmma_descriptor(base, 16) + 2 * k; }
  // This and the three tiles behind it as a transposed B, rows from 16 k on.
  constexpr u32 columns(i32 k) const {
    return ptx::wgmma_descriptor(base, MlaSm90Config::kTileBytes) + 128 * k;
  }
};

struct MlaStorage {
  using Config = MlaSm90Config;
  u32 base;

  constexpr MlaTile q(i32 tile) const { return {base + tile * Config::kTileBytes}; }
  constexpr MlaTile keys(i32 half, i32 tile) const {
    return {base + Config::keys_at() + (half * Config::kTiles + tile) * Config::kTileBytes};
  }
  constexpr MlaTile p() const { return {base + Config::p_at()}; }
  // Of P's rows: what its exponents are relative to.
  constexpr u32 reference(i32 row) const { return base + Config::references_at() + row * 4; }
  // Of the warps that made P of a half: whether a reference grew.
  constexpr u32 grew(i32 half) const { return base + Config::grew_at() + half * 16; }
  constexpr u32 sum(i32 warpgroup, i32 row) const {
    return base + Config::sums_at() + (warpgroup * Config::kRows + row) * 4;
  }
  constexpr u32 words() const { return base + Config::words_at(); }
  // Producer -> consumers, with the keys: some key of row tile number `count` of this block has no
  // page.
  constexpr u32 bad(u32 count) const { return base + Config::bad_at() + count % 4 * 4; }

  // Copy engine -> consumers: a tile of a half has landed.
  constexpr u32 full(i32 half, i32 tile) const {
    return base + Config::barriers_at() + (half * Config::kTiles + tile) * 8;
  }
  // Consumers -> producer: tiles of a half were read: 0 and 1: the four that a warpgroup sums; 2:
  // the last, which is of keys alone.
  constexpr u32 empty(i32 half, i32 group) const {
    return base + Config::barriers_at() + (2 * Config::kTiles + half * 3 + group) * 8;
  }

  // The order in which the tiles of a half come and are read: in that in which they become free.
  // The last; those that its own warpgroup sums; the others.
  static constexpr i32 tile_at(i32 half, i32 n) {
    if (n == 0) return Config::kTiles - 1;
    return n <= Config::kHalfTiles ? half * Config::kHalfTiles + n - 1
                                   : (1 - half) * Config::kHalfTiles + n - 1 - Config::kHalfTiles;
  }
  static constexpr i32 group_of(i32 tile) { return tile / Config::kHalfTiles; }

  void init() const {
    for (i32 half = 0; half < 2; ++half) {
      for (i32 tile = 0; tile < Config::kTiles; ++tile) ptx::mbarrier_init(full(half, tile), 1);
      for (i32 group = 0; group < 3; ++group) ptx::mbarrier_init(empty(half, group), 4);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace fulmen
