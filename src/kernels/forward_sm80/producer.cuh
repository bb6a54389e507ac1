// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How keys reach the warps of a block of forward_sm80: tiles of K and V in shared memory, with them
// what belongs to their pairs with the block's queries, block after block from the last towards the
// first, by cp.async. Either some stages ahead of their use, or with a single buffer: V
// arrives under Q K^T, the next K under P V. All threads of the block together.
#pragma once

#include "kernels/common/pair_tiles_sm80.cuh"
#include "kernels/common/tile_copy_sm80.cuh"
#include "kernels/forward_sm80/mask.cuh"

namespace fulmen {

template <ForwardSm80Config kConfig>
struct ForwardProducerSm80 {
  using KTile = SwizzledTile<kConfig.words(kConfig.d_qk), kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.words(kConfig.d_v), kConfig.swizzle>;
  template <i32 kRows, i32 kDims, bool kInterleaved = kConfig.interleaved>
  using Copy = TileCopy<kConfig.aligned, kRows, kConfig.threads(), kConfig.words(kDims),
                        kConfig.swizzle, kConfig.element_bytes(), kInterleaved>;
  using HeadType = HeadOf<kConfig>;
  template <i32 kDims>
  using KeyCopy =
      typename KeyCopyKind<kConfig.caches>::template Type<Copy<kConfig.stage_columns(), kDims>,
                                                          HeadType, kConfig.aligned>;
  static constexpr i32 kStageBlocks = kConfig.stage_blocks;
  static constexpr i32 kStageColumns = kConfig.stage_columns();
  static constexpr i32 kAhead = kConfig.stages - 1;
  static constexpr bool kPredicated = kConfig.predicates_copies;

  const HeadType& head;
  u32 shared;  // Q's tile
  i32 first_row;
  KeyCopy<kConfig.d_qk> k_copy;
  KeyCopy<kConfig.d_v> v_copy;
  PairTiles<kConfig.pairs()> pairs;
  DocumentMaskSm80<kConfig> documents;
  i32 begin = 0;       // the block of keys that comes last
  i32 next_block = 0;  // of K, with a single buffer

  // Blocks are not neighbours.
  static constexpr bool kListed = kConfig.score.mask_tiles;

  // For queries from `first_row` on, dims of V from `first_dim` on.
  ForwardProducerSm80(const HeadOf<kConfig>& head_, i32 first_row_, i32 first_dim, u32 shared_)
      : head(head_),
        shared(shared_),
        first_row(first_row_),
        k_copy(key_copy<kConfig.d_qk>(head.p.k, 0, dim_qk(), 0)),
        v_copy(key_copy<kConfig.d_v>(head.p.v, first_dim,
                                     kConfig.even_k ? kConfig.d_v : head.p.dim_v - first_dim,
                                     kValueOfNoPage)),
        pairs(head.p, head.sequence.shape, head.index, head.head, first_row),
        documents(head_, first_row, pair_tile(0) + kConfig.pairs().bytes(), kConfig.pair_bytes(),
                  shared + kConfig.own_ids_at()) {}

  // Of the block of keys in slot `slot`, or of those from there to the end of its stage.
  KTile k_tile(i32 slot) const {
    return {shared + kConfig.q_bytes() + slot * (kConfig.k_bytes() / kStageBlocks)};
  }
  VTile v_tile(i32 slot) const {
    return {shared + kConfig.q_bytes() + kConfig.stages * kConfig.k_bytes() +
            slot * (kConfig.v_bytes() / kStageBlocks)};
  }
  u32 pair_tile(i32 stage) const {
    return shared + kConfig.pairs_at() + stage * kConfig.pair_bytes();
  }

  // Q, in the group of the first K.
  void fetch_q() const {
    Copy<kConfig.q_rows(), kConfig.d_qk, false>(head.p.q, head.q_row(head.p.q, 0),
                                                head.sequence.shape.q_len, dim_qk())
        .start({shared}, first_row);
  }

  // The first copies of a main loop from block `last` to block `first`: K of the last block before
  // all others.
  void start(i32 first, i32 last) {
    begin = first;
    const bool has_keys = first <= last;
    if constexpr (kPredicated) {
      k_copy.seek(last * kStageColumns);
      v_copy.seek(last * kStageColumns);
      if (has_keys) fetch_k(last, 0);
    } else {
      if (has_keys) fetch_last_k(last);
    }
    ptx::cp_async_commit();
    if (!kConfig.single_buffer) {
      if (has_keys) fetch_last_v(last);
      ptx::cp_async_commit();
    }
#pragma unroll
    for (i32 stage = 1; stage < kAhead; ++stage) fetch(last - stage, stage);
  }

  // One block, if it is one of the main loop.
  void fetch(i32 block, i32 stage) {
    if (block >= begin) {
      fetch_k(block, stage);
      fetch_v(block, stage);
    }
    ptx::cp_async_commit();
  }

  static void await_first_k() { ptx::cp_async_wait<(kAhead > 0 ? kAhead : 1)>(); }
  static void await_first_v() {
    ptx::cp_async_wait<kAhead>();
    ptx::block_sync();  // cp.async -> V of the first block
  }
  static void await_next() { ptx::cp_async_wait<(kAhead > 0 ? kAhead - 1 : 0)>(); }

  // Waits until K_j has arrived and all warps have read V_j+1; starts the copy of V_j. next: the
  // block that follows.
  void wait_k_fetch_v(i32 block, i32 next, bool is_first) {
    ptx::cp_async_wait<0>();
    ptx::block_sync();
    if (is_first && !kPredicated) {
      fetch_last_v(block);
    } else {
      fetch_v(block, 0);
    }
    ptx::cp_async_commit();
    next_block = next;
  }
  // Waits until V_j has arrived and all warps have read K_j; starts the copy of K_j-1.
  void wait_v_fetch_k() {
    ptx::cp_async_wait<0>();
    ptx::block_sync();
    if (next_block >= begin) fetch_k(next_block, 0);
    ptx::cp_async_commit();
  }

 private:
  // Of the keys' rows, dims from `first_dim` on; of_no_page: words in place of those without.
  template <i32 kDims>
  KeyCopy<kDims> key_copy(const ArrayView& array, i32 first_dim, i64 dims, u32 of_no_page) const {
    const i64 num_rows = head.sequence.shape.kv_len;
    if constexpr (kConfig.caches) {
      return {head, array, first_dim, num_rows, dims, of_no_page};
    } else {
      return {array, head.kv_row(array, 0) + first_dim * array.strides[3], num_rows, dims};
    }
  }

  i64 dim_qk() const { return kConfig.even_k ? kConfig.d_qk : head.p.dim_qk; }

  void fetch_last_k(i32 block) {
    k_copy.start_last(k_tile(0), block * kStageColumns);
    pairs.start_last(pair_tile(0), block * kStageColumns);
    documents.start(0, block * kStageColumns);
  }
  void fetch_last_v(i32 block) { v_copy.start_last(v_tile(0), block * kStageColumns); }
  void fetch_k(i32 block, i32 stage) {
    const KTile tile = k_tile(stage * kStageBlocks);
    if constexpr (kListed) {
      k_copy.start(tile, block * kStageColumns);
      pairs.start(pair_tile(stage), block * kStageColumns);
    } else {
      k_copy.template start_next<kPredicated>(tile);
      pairs.start_next(pair_tile(stage));
    }
    documents.start(stage, block * kStageColumns);
  }
  void fetch_v(i32 block, i32 stage) {
    const VTile tile = v_tile(stage * kStageBlocks);
    if constexpr (kListed) {
      v_copy.start(tile, block * kStageColumns);
    } else {
      v_copy.template start_next<kPredicated>(tile);
    }
  }
};

}  // namespace fulmen
