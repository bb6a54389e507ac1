// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a forward pass writes for the rows of one head: o, lse and stats, from the unnormalised
// output and the softmax state of each row, or from the parts that splits of the keys leave.
#pragma once

#include <algorithm>

#include "cpu/libm_math.h"
#include "cpu/rows.h"
#include "kernels/attention/softmax_state.cuh"
#include "plan/tiled_workspace.h"

namespace fulmen::cpu {

// A finished row's few numbers cost nothing, so they are computed in float64.
using RowState = SoftmaxState<LibmMath<double>>;

// What the forward pass kept of a row: stats, or the lse alone.
inline RowState saved_state(const Problem& problem, i64 batch, i64 head, i64 row) {
  if (problem.has(Array::kStats)) {
    const Tensor& stats = problem.arrays[Array::kStats];
    return {stats.real(batch, head, row, 0), stats.real(batch, head, row, 1)};
  }
  const double lse = problem.arrays[Array::kLse].real(batch, head, row, 0);
  return {lse, lse == -LibmMath<double>::kInfinity ? 0.0 : 1.0};
}

template <class Real>
class RowResults {
 public:
  RowResults(const Problem& problem, const CacheSequence& sequence, i64 head)
      : problem_(problem), kernels_(kernels<Real>()), sequence_(sequence), head_(head) {}

  // o = O / l_total;  lse = m + log l;  stats = (m, l).  O may be changed; factor: scratch of as
  // many as there are rows.
  void store(Interval rows, bool saw_keys, View<Real> O, const Real* row_max, const Real* row_sum,
             Real* factor) const {
    if (problem_.accumulate) return merge(rows, O, row_max, row_sum);
    for (i64 i = 0; i < rows.size(); ++i) {
      const RowState state{static_cast<double>(row_max[i]), static_cast<double>(row_sum[i])};
      save(rows.begin + i, state);
      double normalizer = state.normalizer(sink());
      if (normalizer != 0) scale_channels(const_cast<Real*>(O.data) + i * O.stride);
      // Under a sink far above all scores, the factor itself would lose bits below the normal
      // numbers.
      constexpr double kTiny = 0x1p-100;
      if (saw_keys && normalizer != 0 && normalizer < kTiny) {
        scale_row(const_cast<Real*>(O.data) + i * O.stride, static_cast<Real>(normalizer / kTiny));
        normalizer = kTiny;
      }
      factor[i] = static_cast<Real>(normalizer);
    }
    const Destination to = o_from(rows.begin);
    if (!saw_keys) return clear_rows(kernels_, to, rows.size(), problem_.dim_v);
    kernels_.store_rows(O, rows.size(), problem_.dim_v, factor, 1, to);
  }

  // Of rows past the length: those that saw nothing.
  void clear(Interval rows) const {
    if (rows.size() <= 0 || problem_.accumulate) return;
    for (i64 i = rows.begin; i < rows.end; ++i) save(i, RowState{});
    clear_rows(kernels_, o_from(rows.begin), rows.size(), problem_.dim_v);
  }

 private:
  // The parts that o and stats hold, and these: by the one law. Rows that saw nothing stay, but for
  // what a sink takes.
  void merge(Interval rows, View<Real> O, const Real* row_max, const Real* row_sum) const {
    const Tensor& o = problem_.arrays[Array::kO];
    for (i64 i = 0; i < rows.size(); ++i) {
      RowState state{static_cast<double>(row_max[i]), static_cast<double>(row_sum[i])};
      if (state.row_sum == 0 && !problem_.has(Array::kSinks)) continue;
      Real* const own = const_cast<Real*>(O.data) + i * O.stride;
      scale_channels(own);
      const i64 row = sequence_.q_begin + rows.begin + i;
      const RowState before = saved_state(problem_, sequence_.batch, head_, row);
      const RowState::MergeFactors share = state.join(before, sink());
      for (i64 d = 0; d < problem_.dim_v; ++d) {
        double sum = static_cast<double>(own[d]) * share.mine;
        if (share.other != 0) sum += o.real(sequence_.batch, head_, row, d) * share.other;
        o.set_real(sequence_.batch, head_, row, d, sum);
      }
      save(rows.begin + i, state);
    }
  }

  Destination o_from(i64 row) const {
    return destination_of(problem_.arrays[Array::kO], sequence_.batch, head_,
                          sequence_.q_begin + row);
  }

  void scale_row(Real* row, Real factor) const {
    for (i64 d = 0; d < problem_.dim_v; ++d) row[d] *= factor;
  }

  // The scales of v where they are of its dims.
  void scale_channels(Real* row) const {
    if (!problem_.has_channel_scales()) return;
    const KeyRow any{sequence_.kv_batch, 0};
    for (i64 d = 0; d < problem_.dim_v; ++d) {
      row[d] *= static_cast<Real>(problem_.kv_scale(Array::kV, any, problem_.kv_head(head_), d));
    }
  }

  double sink() const {
    if (!problem_.has(Array::kSinks)) return -LibmMath<double>::kInfinity;
    return problem_.arrays[Array::kSinks].real(0, head_, 0, 0);
  }

  void save(i64 row_of_sequence, const RowState& state) const {
    const i64 row = sequence_.q_begin + row_of_sequence;
    const Tensor& lse = problem_.arrays[Array::kLse];
    const Tensor& stats = problem_.arrays[Array::kStats];
    if (lse.present()) lse.set_real(sequence_.batch, head_, row, 0, state.lse());
    if (stats.present()) {
      stats.set_real(sequence_.batch, head_, row, 0, state.row_max);
      stats.set_real(sequence_.batch, head_, row, 1, state.row_sum);
    }
  }

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  CacheSequence sequence_;
  i64 head_;
};

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
