// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// list_tiles: lists of blocks become bits of tiles (kernels/tile_lists/config.h), a warp a
// list, in time linear in the entries. By queries a warp owns the lines of its list and clears them
// first; by keys many lists meet in a line, which must be 0 before.
#pragma once

#include "kernels/common/faults.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/tile_lists/config.h"

namespace fulmen {

template <TileListsConfig kConfig>
struct TileLister {
  const TileListsParams& params;
  i32 q_block;
  u32* words;  // of the head
  u32 lane;

  // Parts of lines, or tiles across them, of `size` rows, that blocks of block_rows have.
  static constexpr Interval within(i64 block, i64 block_rows, i64 size, i64 most) {
    const i64 first = block * (block_rows / size);
    return {min(first, most), min(first + block_rows / size, most)};
  }
  i64 num_parts() const {
    return i64{params.lists.lines} *
           ((kConfig.by_keys ? params.kv_rows : params.q_rows) / kPartRows);
  }
  u32* word(i64 part, i64 tile) const {
    const u32 parts = u32(kConfig.by_keys ? params.kv_rows : params.q_rows) / kPartRows;
    const u32 line = u32(part) / parts;
    return words + (i64{line} * params.lists.groups + tile / 32) * 2 + (u32(part) - line * parts);
  }

  // Lines past the last list hold nothing.
  void clear() const {
    const i64 block_q = params.attention.block_q;
    Interval own = within(q_block, block_q, kPartRows, num_parts());
    if (q_block + 1 == params.q_blocks) own.end = num_parts();
    for (i64 part = own.begin; part < own.end; ++part) {
      for (i64 group = lane; group < params.lists.groups; group += 32) *word(part, 32 * group) = 0;
    }
    ptx::warp_sync();
  }

  void mark(i64 block) const {
    const AttentionParams& p = params.attention;
    const i64 tiles = i64{params.lists.groups} * 32;
    const Interval parts = kConfig.by_keys ? within(block, p.block_kv, kPartRows, num_parts())
                                           : within(q_block, p.block_q, kPartRows, num_parts());
    const Interval across = kConfig.by_keys ? within(q_block, p.block_q, params.q_rows, tiles)
                                            : within(block, p.block_kv, params.kv_rows, tiles);
    for (i64 part = parts.begin; part < parts.end; ++part) {
      for (i64 tile = across.begin; tile < across.end; ++tile) {
        ptx::set_bits(word(part, tile), 1u << tile % 32);
      }
    }
  }

  void run(i64 first_entry) const {
    const AttentionParams& p = params.attention;
    if constexpr (!kConfig.by_keys) clear();
    for (i64 entry = lane; entry < p.list_entries; entry += 32) {
      const i64 block = load_index(p.blocks, first_entry + entry * p.blocks.strides[3]);
      if (is_bad_block(block, p.num_key_blocks)) {
        report(p.faults, kFaultBlocks);
      } else if (block >= 0) {
        mark(block);
      }
    }
  }
};

template <TileListsConfig kConfig>
inline void list_tiles(const TileListsParams& params) {
  const AttentionParams& p = params.attention;
  const u32 list = ptx::block_index() * (TileListsConfig::kThreads / 32) + ptx::thread_index() / 32;
  if (list >= u32(params.num_lists)) return;
  const u32 head_and_index = list / u32(params.q_blocks);
  const u32 q_block = list - head_and_index * u32(params.q_blocks);
  const u32 index = head_and_index / u32(p.list_heads);
  const u32 head = head_and_index - index * u32(p.list_heads);
  u32* const words =
      params.lists.words + i64{head_and_index} * params.lists.lines * params.lists.groups * 2;
  TileLister<kConfig>{params, i32(q_block), words, ptx::thread_index() % 32}.run(
      p.blocks.offset(index, head, q_block, 0));
}

}  // namespace fulmen
