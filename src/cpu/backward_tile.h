// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One block of query rows against one block of keys in the backward pass: the weights P again, and
// the gradient dS of the scores, (q_row, key) with a key per lane. Every pass of tiled_backward.cpp
// stands on it.
#pragma once

#include "cpu/pair_terms.h"
#include "cpu/rows.h"
#include "plan/tiled_workspace.h"

namespace fulmen::cpu {

// Index of a query row in the arrays of BackwardShared.
inline i64 shared_row(const Problem& problem, const Sequence& sequence, i64 head, i64 q_row) {
  return (sequence.batch * problem.heads_q + head) * problem.q_rows + sequence.q_begin + q_row;
}

template <class Real>
class BackwardTile {
 public:
  BackwardTile(const Problem& problem, const TileSizes& sizes, const BackwardShared<Real>& shared,
               const BackwardScratch<Real>& scratch, i64 sequence_index)
      : problem_(problem),
        kernels_(cpu::kernels<Real>()),
        sizes_(sizes),
        shared_(shared),
        scratch_(scratch),
        index_(sequence_index),
        sequence_(problem.sequence(sequence_index)) {}

  const Kernels<Real>& kernels() const { return kernels_; }
  const CacheSequence& sequence() const { return sequence_; }
  const View<Real>& Q() const { return Q_; }
  const View<Real>& K() const { return K_; }
  const View<Real>& dO() const { return dO_; }

  void load_keys(i64 kv_head, Interval keys, bool wants_dS) {
    keys_ = keys;
    const i64 row = sequence_.kv_begin + keys.begin;
    K_ = load(Array::kK, kv_head, row, keys.size(), Reads::kPanels, scratch_.K,
              sizes_.padded_dim_qk);
    transpose(K_, problem_.dim_qk, scratch_.K_lanes);
    if (!wants_dS) return;
    const View<Real> V = load(Array::kV, kv_head, row, keys.size(), Reads::kElements, scratch_.V,
                              sizes_.padded_dim_v);
    transpose(V, problem_.dim_v, scratch_.V_lanes);
  }

  void load_queries(i64 head, Interval rows) {
    head_ = head;
    rows_ = rows;
    const i64 row = sequence_.q_begin + rows.begin;
    Q_ = load(Array::kQ, head, row, rows.size(), Reads::kPanels, scratch_.Q, sizes_.padded_dim_qk);
    dO_ = load(Array::kDOut, head, row, rows.size(), Reads::kPanels, scratch_.dO,
               sizes_.padded_dim_v);
  }

  // P (with dropout's factor) into scratch.P; dS, where wanted, into scratch.dS.
  void weigh(bool is_full, bool wants_dS, bool through_score_mod) {
    // S = Q K^T
    multiply_rows(Q_, problem_.dim_qk, scratch_.K_lanes, scratch_.P);
    // dP = dO V^T
    if (wants_dS) multiply_rows(dO_, problem_.dim_v, scratch_.V_lanes, scratch_.dS);
    // P = exp(S - m) / l;  dS = P (dP - delta)
    const PairTerms<Real> pairs(problem_, index_, sequence_, head_);
    const bool has_addend = !is_full || pairs.adds_everywhere();
    const bool has_keep = problem_.dropout.enabled();
    if (has_addend) pairs.fill_addend(rows_, keys_, scratch_.addend, sizes_.padded_columns);
    if (has_keep) pairs.fill_keep(rows_, keys_, scratch_.keep, sizes_.padded_columns);
    addend_ = has_addend ? scratch_.addend : nullptr;
    const i64 row = shared_row(problem_, sequence_, head_, rows_.begin);
    kernels_.gradient(
        {.scores = scratch_.P,
         .dP = wants_dS ? scratch_.dS : nullptr,
         .stride = sizes_.padded_columns,
         .rows = rows_.size(),
         .keys = keys_.size(),
         .terms = {problem_.score_map.as<Real>(), addend_, has_keep ? scratch_.keep : nullptr},
         .through_score_mod = through_score_mod,
         .row_max = shared_.row_max + row,
         .normalizer = shared_.normalizer + row,
         .delta = shared_.delta + row,
         .lse_term = shared_.lse_term ? shared_.lse_term + row : nullptr});
  }

  // C += pairs^T B, a row of C per key: dV = P^T dO, dK = dS^T Q.
  void multiply_by_queries(const Real* pairs, View<Real> B, i64 dim, Real* C, i64 C_stride,
                           bool accumulates) const {
    const Side keys{keys_.size(), 1};
    const Side queries{rows_.size(), sizes_.padded_columns};
    multiply_pairs(pairs, keys, queries, B, dim, C, C_stride, accumulates);
  }

  // C += pairs B, a row of C per query: dQ = dS K.
  void multiply_by_keys(const Real* pairs, View<Real> B, i64 dim, Real* C, i64 C_stride,
                        bool accumulates) const {
    const Side keys{keys_.size(), 1};
    const Side queries{rows_.size(), sizes_.padded_columns};
    multiply_pairs(pairs, queries, keys, B, dim, C, C_stride, accumulates);
  }

 private:
  // Queries or keys of the tile, as an axis of (q_row, key).
  struct Side {
    i64 size;
    i64 stride;
  };

  // C[i] += sum over j of pairs[i, j] B[j], i along `kept` and j along `summed`, hidden pairs
  // aside.
  void multiply_pairs(const Real* pairs, Side kept, Side summed, View<Real> B, i64 dim, Real* C,
                      i64 C_stride, bool accumulates) const {
    multiply_visible<Real>(kernels_,
                           {.rows = kept.size,
                            .columns = dim,
                            .depth = summed.size,
                            .A = pairs,
                            .A_row_stride = kept.stride,
                            .A_depth_stride = summed.stride,
                            .B = B.data,
                            .B_depth_stride = B.stride,
                            .B_panel_stride = kernels_.lanes,
                            .C = C,
                            .C_row_stride = C_stride,
                            .accumulates = accumulates},
                           {addend_, kept.stride, summed.stride}, scratch_.finite_rows, C_stride);
  }

  View<Real> load(Array array, i64 head, i64 row, i64 rows, Reads reads, Real* to,
                  i64 stride) const {
    const Tensor& tensor = problem_.arrays[array];
    return rows_of(kernels_, source_of(tensor, sequence_.batch, head, row), rows, tensor.shape[3],
                   reads, to, stride);
  }

  void transpose(View<Real> rows, i64 dim, Real* lanes) const {
    kernels_.transpose(rows, keys_.size(), dim, lanes, dim * kernels_.lanes, kernels_.lanes);
  }

  // pairs[i][j] = dot(rows[i], lanes[j])
  void multiply_rows(View<Real> rows, i64 dim, const Real* lanes, Real* pairs) const {
    kernels_.multiply({.rows = rows_.size(),
                       .columns = keys_.size(),
                       .depth = dim,
                       .A = rows.data,
                       .A_row_stride = rows.stride,
                       .A_depth_stride = 1,
                       .B = lanes,
                       .B_depth_stride = kernels_.lanes,
                       .B_panel_stride = dim * kernels_.lanes,
                       .C = pairs,
                       .C_row_stride = sizes_.padded_columns});
  }

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  const TileSizes& sizes_;
  const BackwardShared<Real>& shared_;
  const BackwardScratch<Real>& scratch_;
  i64 index_;
  CacheSequence sequence_;
  i64 head_ = 0;
  Interval rows_{0, 0};
  Interval keys_{0, 0};
  View<Real> Q_{}, K_{}, dO_{};
  const Real* addend_ = nullptr;
};

// The gradient of a bias, reduced to the bias's own extents: a pass of its own, only where it is
// asked for. A task is a tile of dbias and sums dS over every (sequence, head, row, key) that
// shares it, in a fixed order; it costs two more products (S and dP), and no memory beyond the
// tile. See tiled_dbias.cpp.
//
// Indices into dbias; an axis of extent 1 stands for all there is along it.
struct DBiasTile {
  Interval sequences;
  Interval heads;
  Interval rows;  // of dbias
  Interval columns;
  bool sums_rows;  // over the axis, extent 1
  bool sums_columns;
};

class DBiasTiles {
 public:
  DBiasTiles(const Problem& problem, const TileSizes& sizes);

  i64 size() const;
  DBiasTile at(i64 task) const;

 private:
  const Problem& problem_;
  const TileSizes& sizes_;
  i64 row_blocks_;
  i64 column_blocks_;
};

template <class Real>
void sum_dbias_tile(const Problem& problem, const TileSizes& sizes,
                    const BackwardShared<Real>& shared, const BackwardScratch<Real>& scratch,
                    const DBiasTile& at);

}  // namespace fulmen::cpu
