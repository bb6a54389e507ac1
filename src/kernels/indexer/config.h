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
  i32 dim = 0;  // on tensor cores: dims, rounded up to 64 or 128; 0: on CUDA cores

  static constexpr i32 kTileKeys = 128;
  static constexpr i32 kTileDims = 32;
  static constexpr i32 kHeadsOfThread = 16;
  static constexpr i32 kPadding = 8;  // numbers behind each row of a tile of 16 bits
  // On CUDA cores threads side by side along the keys of a tile, then along groups of heads.
  constexpr i32 head_groups() const { return dim > 0 ? 1 : num_threads / kTileKeys; }
  constexpr i32 tile_heads() const { return dim > 0 ? 64 : head_groups() * kHeadsOfThread; }
  // In which 16 bits tensor cores have the numbers.
  constexpr DType product() const {
    return q == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  }
  // Tiles of q and k, and the weights of tensor cores.
  constexpr i32 tile_bytes() const {
    if (dim > 0) return 2 * (tile_heads() + kTileKeys) * (dim + kPadding) + 4 * tile_heads();
    return 4 * (tile_heads() * kTileDims + kTileKeys * (kTileDims + 1));
  }
  // Ranked keys, where the keys of a tile lie, tiles, and partial scores.
  constexpr i32 shared_bytes() const {
    return 8 * (capacity + kTileKeys + 2) + 16 * kTileKeys + tile_bytes() +
           4 * head_groups() * kTileKeys;
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
  each("dim", config.dim);
}

}  // namespace fulmen
