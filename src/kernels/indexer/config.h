// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The compile-time half of the indexer's kernel.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

struct IndexerConfig {
  DType q = DType::kBFloat16;
  DType k = DType::kBFloat16;
  i32 capacity = 4096;  // of ranked keys in shared memory: a power of 2, topk and a tile at least
  i32 num_threads = 256;

  static constexpr i32 kTileKeys = 128;
  static constexpr i32 kTileDims = 32;
  static constexpr i32 kHeadsOfThread = 16;
  // Threads side by side along the keys of a tile, then along groups of heads.
  constexpr i32 head_groups() const { return num_threads / kTileKeys; }
  constexpr i32 tile_heads() const { return head_groups() * kHeadsOfThread; }
  // Ranked keys, where the keys of a tile lie, tiles of q and k, and partial scores.
  constexpr i32 shared_bytes() const {
    return 8 * (capacity + kTileKeys + 2) + 16 * kTileKeys +
           4 * (tile_heads() * kTileDims + kTileKeys * (kTileDims + 1) + head_groups() * kTileKeys);
  }
};

// topk, at most, on a GPU.
inline constexpr i32 kMostChosen = 4096;

// The capacity for a topk.
constexpr i32 indexer_capacity(i64 topk) {
  i32 capacity = 2 * IndexerConfig::kTileKeys;
  while (capacity < topk + topk / 4 + IndexerConfig::kTileKeys) capacity *= 2;
  return capacity;
}

template <class Each>
constexpr void for_each_field(const IndexerConfig& config, Each each) {
  each("q", config.q);
  each("k", config.k);
  each("capacity", config.capacity);
  each("num_threads", config.num_threads);
}

}  // namespace fulmen
