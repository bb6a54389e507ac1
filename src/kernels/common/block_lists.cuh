// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Lists of blocks in device memory, as kernels read them; what they mean is in
// attention/sequence.cuh. An entry that names no block is recorded by whoever reads it.
#pragma once

#include "kernels/common/faults.cuh"
#include "kernels/common/sequences.cuh"

namespace fulmen {

// The list of a block of query rows, as far as `step` entries apart from `first` on names a block
// of keys.
inline bool list_names(const AttentionParams& p, i64 index, i64 head, i64 q_block, i64 kv_block,
                       i64 first, i64 step) {
  const i64 list = list_of_head(head, p.heads_q, p.list_heads);
  const i64 at = p.blocks.offset(index, list, q_block, 0);
  bool is_named = false;
  for (i64 entry = first; entry < p.list_entries; entry += step) {
    const i64 id = load_index(p.blocks, at + entry * p.blocks.strides[3]);
    if (is_bad_block(id, p.num_key_blocks)) report(p.faults, kFaultBlocks);
    is_named |= id == kv_block;
  }
  return is_named;
}

// Whether a pair is in a listed block. By one thread.
inline bool lists_pair(const AttentionParams& p, i64 index, i64 head, i64 i, i64 j) {
  return list_names(p, index, head, i / p.block_q, j / p.block_kv, 0, 1);
}

// The same by the threads of a warp together, who share the list.
inline bool warp_lists_pair(const AttentionParams& p, i64 index, i64 head, i64 i, i64 j) {
  const i64 lane = ptx::thread_index() % 32;
  return ptx::any(list_names(p, index, head, i / p.block_q, j / p.block_kv, lane, 32));
}

// A tile of pairs lies in one block of lists: rows and columns of tiles divide 64 there. The first
// tile from number `at` on, of kWidth keys beside row i or of kWidth rows beside key j, that lists
// leave; end: none. By all threads of a warp together.
template <i32 kWidth, class HeadType>
i64 next_key_tile(const HeadType& head, i64 i, i64 at, i64 end) {
  if (!head.p.blocks.present()) return at;
  while (at < end && !warp_lists_pair(head.p, head.index, head.head, i, at * kWidth)) ++at;
  return at;
}
template <i32 kWidth, class HeadType>
i64 next_row_tile(const HeadType& head, i64 j, i64 at, i64 end) {
  if (!head.p.blocks.present()) return at;
  while (at < end && !warp_lists_pair(head.p, head.index, head.head, at * kWidth, j)) ++at;
  return at;
}

}  // namespace fulmen
