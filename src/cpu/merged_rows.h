// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What comes of the parts that splits of the keys leave: the rows of a head, merged in the order of
// the splits.
#pragma once

#include <algorithm>

#include "cpu/row_results.h"
#include "cpu/rows.h"
#include "plan/tiled_workspace.h"

namespace fulmen::cpu {

// Of a split, counted over all sequences, and a key/value head: its first row among the parts.
inline i64 first_part(const Problem& problem, const TileSizes& sizes, i64 split, i64 kv_head) {
  return (split * problem.heads_kv + kv_head) * sizes.rows;
}

// The rows of one head of one sequence from their parts, in the order of the splits.
template <class Real>
class MergedRows {
 public:
  MergedRows(const Problem& problem, const TileSizes& sizes, const SplitShared<Real>& shared,
             const SplitScratch<Real>& scratch, i64 index, i64 head)
      : problem_(problem),
        sizes_(sizes),
        shared_(shared),
        O_(scratch.loaded),
        index_(index),
        head_(head),
        sequence_(problem.sequence(index)),
        results_(problem, sequence_, head) {}

  void run() {
    const i64 q_len = sequence_.shape.q_len;
    bool saw_keys = false;
    for (i64 i = 0; i < q_len; ++i) saw_keys = merge_row(i) || saw_keys;
    Real factor[kMostSplitRows];
    results_.store({0, q_len}, saw_keys, {O_, sizes_.padded_dim_v}, row_max_, row_sum_, factor);
    results_.clear({q_len, sequence_.q_slot});
  }

 private:
  // Whether some split saw keys of row i.
  bool merge_row(i64 i) {
    Real* const O = O_ + i * sizes_.padded_dim_v;
    std::fill_n(O, sizes_.padded_dim_v, Real(0));
    RowState state;
    for (i64 split = shared_.splits[index_]; split < shared_.splits[index_ + 1]; ++split) {
      const i64 part = first_part(problem_, sizes_, split, problem_.kv_head(head_)) +
                       head_ % problem_.group_size() * sequence_.shape.q_len + i;
      const RowState other{static_cast<double>(shared_.row_max[part]),
                           static_cast<double>(shared_.row_sum[part])};
      if (other.row_sum == 0) continue;  // saw nothing, and wrote no O
      const RowState::MergeFactors factors = state.merge(other);
      const Real mine = static_cast<Real>(factors.mine);
      const Real theirs = static_cast<Real>(factors.other);
      const Real* const from = shared_.O + part * sizes_.padded_dim_v;
      for (i64 d = 0; d < problem_.dim_v; ++d) O[d] = O[d] * mine + from[d] * theirs;
    }
    row_max_[i] = static_cast<Real>(state.row_max);
    row_sum_[i] = static_cast<Real>(state.row_sum);
    return state.row_sum != 0;
  }

  const Problem& problem_;
  const TileSizes& sizes_;
  const SplitShared<Real>& shared_;
  Real* O_;
  i64 index_;
  i64 head_;
  CacheSequence sequence_;
  RowResults<Real> results_;
  Real row_max_[kMostSplitRows];
  Real row_sum_[kMostSplitRows];
};

}  // namespace fulmen::cpu
