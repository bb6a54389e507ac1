// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Bias and boolean mask of a block of pairs in shared memory, 64 keys wide, as the copy engine
// leaves them: rows of 128 bytes, of the mask 64, swizzled, so that the eight rows of which a warp
// reads together meet different banks. Of float32 the first 32 keys of all rows come first.
// Called by forward_sm90, backward_dq_sm90 and backward_sm90.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/work_tile_sm90.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Asks for the boxes of an array over pairs, kRows rows and kKeys keys of kBytes each from (row,
// key) on; their bytes count towards `full`.
template <i32 kRows, i32 kKeys, i32 kBytes>
inline void load_pairs(const TensorMap& map, const ArrayView& array, u32 tile, u32 full,
                       i32 sequence, i32 head, i32 row, i32 key) {
  constexpr i32 kBoxKeys = min(kKeys, 128 / kBytes);
  if (array.strides[0] == 0) sequence = 0;
  if (array.strides[1] == 0) head = 0;
#pragma unroll
  for (i32 k = 0; k < kKeys; k += kBoxKeys) {
    ptx::tma_load(tile + k * kBytes * kRows, map, full, key + k, row, head, sequence);
  }
}

// Both arrays of a block of queries and a block of keys.
template <ForwardSm90Config kConfig>
inline void load_pair_tiles(const TensorMap& bias, const TensorMap& mask,
                            const AttentionParams& arrays, u32 tile, u32 full,
                            const QueryBlock& block, i32 key_block) {
  constexpr i32 kRows = kConfig.q_rows();
  const i32 row = block.q_block * kRows, key = key_block * 64;
  if constexpr (kConfig.tiled_bias) {
    load_pairs<kRows, 64, i32(size_bytes(kConfig.score.bias))>(bias, arrays.bias, tile, full,
                                                               block.batch, block.head, row, key);
  }
  if constexpr (kConfig.tiled_mask) {
    load_pairs<kRows, 64, 1>(mask, arrays.mask, tile + kConfig.bias_bytes(), full, block.batch,
                             block.head, row, key);
  }
}

// A thread's part of such tiles, for a fragment of scores.
template <ForwardSm90Config kConfig>
struct PairTile {
  u32 bias = 0;  // addresses of its first elements
  u32 mask = 0;

  PairTile() = default;
  // row: of the tile, the thread's first.
  PairTile(u32 tile, i32 row) {
    const u32 lane = ptx::thread_index() % 32;
    const u32 r = u32(row);
    if constexpr (kConfig.score.bias == DType::kFloat32) {
      bias = tile + r * 128 + ((r % 8 ^ lane % 4 / 2) << 4) + lane % 2 * 8;
    } else {
      bias = tile + r * 128 + (r % 8 << 4) + lane % 4 * 4;
    }
    mask = tile + kConfig.bias_bytes() + r * 64 + (r / 2 % 4 << 4) + lane % 4 / 2 * 4;
  }

  // Of keys 8 group + (0, 1) behind the thread's first, of its row r.
  ptx::F32x2 bias_of(i32 group, i32 r) const {
    if constexpr (kConfig.score.bias == DType::kFloat32) {
      const u32 half = u32(group / 4 * kConfig.q_rows() * 128);
      return ptx::load_shared_f32x2((bias ^ u32(group % 4 * 32)) + half + u32(r * 1024));
    } else {
      return ptx::unpack<kConfig.score.bias>(
          ptx::load_shared((bias ^ u32(group * 16)) + u32(r * 1024)));
    }
  }
  // Their two bytes, with others in between.
  u32 mask_of(i32 group, i32 r) const {
    return ptx::load_shared((mask ^ u32(group / 2 * 16)) + u32(group % 2 * 8 + r * 512));
  }
  static bool hides(u32 bytes, i32 c) {
    const u32 first = ptx::thread_index() % 2 == 0 ? 0xffu : 0xff0000u;
    return (bytes & first << c * 8) == 0;
  }
};

// A consumer's place in the ring of tiles; nothing where there is none.
template <ForwardSm90Config kConfig>
struct PairTileReader {
  ForwardStorage<kConfig> shared;
  typename ForwardStorage<kConfig>::PairState at;

  // Of a warpgroup's 64 rows, when it has landed.
  PairTile<kConfig> tile(u32 warpgroup) const {
    if constexpr (!kConfig.pair_tiles()) return {};
    shared.pairs().consumer_wait(at);
    const i32 thread = i32(ptx::thread_index() % 128);
    return {shared.pairs().address(at),
            64 * q_tile<kConfig>(warpgroup) + thread / 32 * 16 + thread % 32 / 4};
  }
  // By all lanes of every warp, when they have read it.
  void release() {
    if constexpr (kConfig.pair_tiles()) {
      ptx::warp_sync();
      if (ptx::thread_index() % 32 == 0) shared.pairs().consumer_release(at);
      at.advance();
    }
  }
  void skip() {
    if constexpr (kConfig.pair_tiles()) shared.pairs().consumer_wait(at);
    release();
  }
};

}  // namespace fulmen
