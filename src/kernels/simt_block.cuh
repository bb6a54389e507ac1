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

// Options that act pair by pair; without them a score is scale * dot, or its cap.
inline bool has_pair_terms(const AttentionParams& p) {
  return p.mask.present() || p.q_ids.present() || p.bias.present() || p.alibi_slopes.present();
}

// The score of a visible pair from its dot product; -inf for a hidden one. `capped` is what ScoreMap
// made of the dot product, before bias and ALiBi.
template <DType kDType, class Real>
struct PairScore {
  Real capped;
  Real score;
};

template <DType kDType, class Real>
PairScore<kDType, Real> pair_score(const Head<kDType>& head, Real dot, i64 i, i64 j,
                                   const Interval& columns, bool check_interval, bool pair_terms) {
  using Math = typename Head<kDType>::Math;
  const bool inside = !check_interval || columns.contains(j);
  const Real capped = head.map.template score<Math>(dot);
  if (!pair_terms) return {capped, inside ? capped : -Math::kInfinity};
  const bool visible = inside && head.sees(i, j);
  return {capped, visible ? capped + head.added(i, j) : -Math::kInfinity};
}

}  // namespace fulmen
