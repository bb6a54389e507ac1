// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What masks make of blocks of pairs, without looking at every pair: of a box of query rows and
// keys, whether all its pairs are hidden, all visible, or some of each. Where that cannot be said
// from the ends of the box, it counts as partial: never wrong, only slower. The tiled kernels ask
// box by box; fulmen_block_map asks for all.
#pragma once

#include "core/problem.h"

namespace fulmen {

enum class BlockKind : u8 { kEmpty = 0, kPartial = 1, kFull = 2 };

// Of what must hold beside each other.
constexpr BlockKind both(BlockKind a, BlockKind b) {
  if (a == BlockKind::kEmpty || b == BlockKind::kEmpty) return BlockKind::kEmpty;
  return a == BlockKind::kFull ? b : a;
}

// Keys that some row of a block sees lie in `some`; all rows see those in `all`, a part of it. By
// the masks that speak of positions alone.
struct SeenKeys {
  Interval some;
  Interval all;
};

// rows: not empty, within q_len.
SeenKeys seen_keys(const Problem& problem, const CacheSequence& sequence, Interval rows);

// A head of a sequence; its rows and keys below are not empty and within the sequence's lengths.
struct HeadOfSequence {
  const Problem& problem;
  const CacheSequence& sequence;
  i64 index;
  i64 head;
};

// What lists of blocks leave of a box; full without lists.
BlockKind kind_by_lists(const HeadOfSequence& at, Interval rows, Interval keys);

// What the caller's mask leaves of it; full without one. scratch: expression::scratch_bytes of the
// program, at a multiple of 8.
BlockKind kind_by_expression(const HeadOfSequence& at, Interval rows, Interval keys, char* scratch);

// Kinds of all blocks of block_q rows and block_kv keys, counted in their sequence, into kinds
// (batch, head, q_block, kv_block) int8: of the pairs within the lengths, by every mask; beyond
// them empty. exact: partial ones are looked at pair by pair. problem: of validate_dense_mask.
// Throws Error, before anything is written, when kinds does not fit.
struct BlockSizes {
  i64 rows;
  i64 keys;
};
void block_map(const Problem& problem, BlockSizes sizes, bool exact, const Tensor& kinds);

}  // namespace fulmen
