// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the simt passes share beside tiles: where a block's rows are, and the scores of a block of
// pairs, of which hidden ones are -inf.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/head.cuh"
#include "kernels/simt_tile.cuh"
#include "kernels/tile_tasks.cuh"

namespace fulmen {

// A block's sequence, and the first of its rows there.
struct TilePlace {
  i64 index;
  i64 first_row;
};

inline TilePlace find_tile(const AttentionParams& p, const ArrayView& offsets, const TileTask& task,
                           i64 tile_rows) {
  if (!p.packed) return {task.batch, task.slot * tile_rows};
  i64 low = 0;
  i64 high = p.num_sequences - 1;
  while (low < high) {  // the last sequence whose first slot is not beyond ours
    const i64 middle = (low + high + 1) / 2;
    const i64 offset = load_index(offsets, middle * offsets.strides[3]);
    if (first_slot(offset, middle, tile_rows) <= task.slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const i64 offset = load_index(offsets, low * offsets.strides[3]);
  return {low, (task.slot - first_slot(offset, low, tile_rows)) * tile_rows};
}

// Options that act pair by pair, so that a score is more than scale * dot.
inline bool has_pair_terms(const AttentionParams& p) {
  return p.mask.present() || p.q_ids.present() || p.bias.present() || p.alibi_slopes.present() ||
         p.score_map.softcap != 0;
}

// The general path from a dot product to a score, -inf where hidden. Calls, so that unrolled loops
// hold them once: the text of all options together is long.
template <DType kDType, class Real>
__attribute__((noinline)) Real pair_score(const Head<kDType>& head, Real dot, i64 i, i64 j) {
  const Real capped = head.map.template score<typename Head<kDType>::Math>(dot);
  return head.sees(i, j) ? capped + head.added(i, j) : -Head<kDType>::Math::kInfinity;
}

// d score / d dot, from the dot product itself.
template <DType kDType, class Real>
__attribute__((noinline)) Real pair_slope(const Head<kDType>& head, Real dot) {
  return head.map.slope(head.map.template score<typename Head<kDType>::Math>(dot)) * head.map.scale;
}

// The score of a pair of a tile, -inf where hidden. inside: the structured masks leave it visible.
template <DType kDType, class Real>
Real tile_score(const Head<kDType>& head, Real dot, i64 i, i64 j, bool inside, bool pair_terms) {
  if (!inside) return -Head<kDType>::Math::kInfinity;
  return pair_terms ? pair_score(head, dot, i, j) : dot * head.map.scale;
}

template <DType kDType>
__attribute__((noinline)) auto pair_keep(const Head<kDType>& head, i64 i, i64 j) {
  return head.keep(i, j);
}

}  // namespace fulmen
