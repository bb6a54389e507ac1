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
  // pairs: for products of bf16 as it is, which leave dS in no scratch.dS; null: never those. dO
  // may be float32.
  BackwardTile(const Problem& problem, const TileSizes& sizes, const BackwardShared<Real>& shared,
               const BackwardScratch<Real>& scratch, i64 sequence_index, const PairKernels* pairs)
      : problem_(problem),
        kernels_(cpu::kernels<Real>()),
        pairs_(problem.dtype == DType::kBFloat16 &&
                       problem.arrays[Array::kDOut].dtype == problem.dtype
                   ? pairs
                   : nullptr),
        sizes_(sizes),
        shared_(shared),
        scratch_(scratch),
        index_(sequence_index),
        sequence_(problem.sequence(sequence_index)) {}

  const Kernels<Real>& kernels() const { return kernels_; }
  const PairKernels* pairs() const { return pairs_; }  // null where there are none
  const CacheSequence& sequence() const { return sequence_; }
  const Real* addend() const { return addend_; }  // of the tile, -inf where hidden; null: nowhere

  void load_keys(i64 kv_head, Interval keys, bool wants_dS) {
    kv_head_ = kv_head;
    keys_ = keys;
    wants_dS_ = wants_dS;
    has_key_lanes_ = false;
    keys_fit_pairs_ = pairs_ && load_key_pairs();
    if (!keys_fit_pairs_) load_key_lanes();
  }

  // Whether the lists of blocks or the mask of an expression hide all of these pairs.
  bool is_empty(i64 head, Interval rows, Interval keys) const {
    const PairTerms<Real> terms(problem_, index_, sequence_, head, scratch_.steps);
    return terms.kind(rows, keys) == BlockKind::kEmpty;
  }

  // seen: those of the loaded keys that the rows are weighed against; from a multiple of
  // kMostLanes of them on.
  void load_queries(i64 head, Interval rows, Interval seen) {
    head_ = head;
    rows_ = rows;
    seen_ = seen;
    in_pairs_ = keys_fit_pairs_ && load_query_pairs();
    if (in_pairs_) return;
    if (!has_key_lanes_) load_key_lanes();
    Q_ = load(Array::kQ, Reads::kPanels, scratch_.Q, sizes_.padded_dim_qk);
    dO_ = load(Array::kDOut, Reads::kPanels, scratch_.dO, sizes_.padded_dim_v);
  }

  // What dS is the gradient of: scale dot(q, k), the score that bias is part of, or what the user's
  // expression makes of that. Of the last, s is left in scratch.slope.
  enum class Of { kDot, kScore, kMapped };

  // P (with dropout's factor) into scratch.P; dS, where wanted, into scratch.dS.
  // is_full: no interval mask hides a pair.
  void weigh(bool is_full, Of of) {
    // S = Q K^T
    multiply_rows({scratch_.Q_columns, sizes_.padded_dim_qk / 2}, Q_, problem_.dim_qk,
                  scratch_.K_pairs, scratch_.K_lanes, scratch_.P);
    // dP = dO V^T
    if (wants_dS_) {
      multiply_rows({scratch_.dO_columns, sizes_.padded_dim_v / 2}, dO_, problem_.dim_v,
                    scratch_.V_pairs, scratch_.V_lanes, scratch_.dS);
    }
    // P = exp(S - m) / l;  dS = P (dP - delta)
    const GradientBlock<Real> block = gradient_block(is_full, of);
    if constexpr (kHasPairs) {
      if (in_pairs_) {
        return pairs_->gradient(block, scratch_.dS_pairs, sizes_.padded_columns / 2);
      }
    }
    kernels_.gradient(block);
  }

  // dV += P^T dO
  void add_to_dV(Real* dV, bool accumulates) const {
    multiply_by_queries(scratch_.P, scratch_.dO_rows, dO_, problem_.dim_v, dV, sizes_.padded_dim_v,
                        accumulates);
  }

  // dK += dS^T Q
  void add_to_dK(Real* dK, bool accumulates) const {
    multiply_by_queries(scratch_.dS, scratch_.Q_rows, Q_, problem_.dim_qk, dK, sizes_.padded_dim_qk,
                        accumulates);
  }

  // dQ += dS K
  void add_to_dQ(Real* dQ, bool accumulates) const {
    const i64 stride = sizes_.padded_dim_qk;
    if constexpr (kHasPairs) {
      if (in_pairs_) {
        return pairs_->multiply({.rows = rows_.size(),
                                 .columns = problem_.dim_qk,
                                 .depth = half(seen_.size()),
                                 .A = scratch_.dS_pairs,
                                 .A_row_stride = sizes_.padded_columns / 2,
                                 .A_depth_stride = 1,
                                 .B = scratch_.K_rows + first_seen() / 2 * stride,
                                 .B_depth_stride = stride,
                                 .B_panel_stride = kernels_.lanes,
                                 .C = dQ,
                                 .C_row_stride = stride,
                                 .accumulates = accumulates});
      }
    }
    multiply_pairs(scratch_.dS, {rows_.size(), sizes_.padded_columns}, {seen_.size(), 1},
                   {K_.data + first_seen() * K_.stride, K_.stride}, problem_.dim_qk, dQ, stride,
                   accumulates);
  }

 private:
  static constexpr bool kHasPairs = kDTypeOf<Real> == DType::kFloat32;

  static i64 half(i64 size) { return ceil_div(size, i64{2}); }

  i64 first_seen() const { return seen_.begin - keys_.begin; }

  Source source(Array array) const {
    const bool is_key = array == Array::kK || array == Array::kV;
    return source_of(problem_.arrays[array], sequence_.batch, is_key ? kv_head_ : head_,
                     is_key ? sequence_.kv_begin + keys_.begin : sequence_.q_begin + rows_.begin);
  }

  i64 count(Array array) const {
    return array == Array::kK || array == Array::kV ? keys_.size() : rows_.size();
  }

  View<Real> load(Array array, Reads reads, Real* to, i64 stride) const {
    return rows_of(kernels_, source(array), count(array), problem_.arrays[array].shape[3], reads,
                   to, stride);
  }

  void load_key_lanes() {
    K_ = load(Array::kK, Reads::kPanels, scratch_.K, sizes_.padded_dim_qk);
    transpose(K_, problem_.dim_qk, scratch_.K_lanes);
    if (wants_dS_) {
      transpose(load(Array::kV, Reads::kElements, scratch_.V, sizes_.padded_dim_v), problem_.dim_v,
                scratch_.V_lanes);
    }
    has_key_lanes_ = true;
  }

  void transpose(View<Real> rows, i64 dim, Real* lanes) const {
    kernels_.transpose(rows, keys_.size(), dim, lanes, dim * kernels_.lanes, kernels_.lanes);
  }

  // False where they are not all ordinary; so below.
  bool pack_columns(Array array, i64 padded_dim, Pair* to) const {
    return pairs_->pack_columns(source(array), count(array), problem_.arrays[array].shape[3], to,
                                padded_dim / 2);
  }

  void pack_rows(Array array, i64 padded_dim, Pair* to) const {
    pairs_->pack_rows(source(array), count(array), problem_.arrays[array].shape[3], to, padded_dim);
  }

  void transpose_pairs(const Pair* columns, i64 padded_dim, i64 dim, Pair* lanes) const {
    pairs_->transpose({columns, padded_dim / 2}, keys_.size(), half(dim), lanes,
                      half(dim) * kernels_.lanes, kernels_.lanes);
  }

  bool load_key_pairs() {
    const i64 dim_qk = sizes_.padded_dim_qk, dim_v = sizes_.padded_dim_v;
    if (!pack_columns(Array::kK, dim_qk, scratch_.K_columns)) return false;
    transpose_pairs(scratch_.K_columns, dim_qk, problem_.dim_qk, scratch_.K_pairs);
    if (!wants_dS_) return true;
    if (!pack_columns(Array::kV, dim_v, scratch_.V_columns)) return false;
    transpose_pairs(scratch_.V_columns, dim_v, problem_.dim_v, scratch_.V_pairs);
    pack_rows(Array::kK, dim_qk, scratch_.K_rows);
    return true;
  }

  bool load_query_pairs() {
    const i64 dim_qk = sizes_.padded_dim_qk, dim_v = sizes_.padded_dim_v;
    if (!pack_columns(Array::kQ, dim_qk, scratch_.Q_columns)) return false;
    if (!pack_columns(Array::kDOut, dim_v, scratch_.dO_columns)) return false;
    if (wants_dS_) pack_rows(Array::kQ, dim_qk, scratch_.Q_rows);
    pack_rows(Array::kDOut, dim_v, scratch_.dO_rows);
    return true;
  }

  GradientBlock<Real> gradient_block(bool is_full, Of of) {
    const PairTerms<Real> terms(problem_, index_, sequence_, head_, scratch_.steps);
    const BlockKind kind = terms.kind(rows_, seen_);
    const bool has_intervals = !is_full && of == Of::kDot && terms.hides_by_intervals(kind);
    const bool has_addend = (!is_full && !has_intervals) || terms.adds(kind);
    const bool has_keep = problem_.dropout.enabled();
    if (has_addend) terms.fill_addend(rows_, seen_, scratch_.addend, sizes_.padded_columns);
    if (has_keep) terms.fill_keep(rows_, seen_, scratch_.keep, sizes_.padded_columns);
    addend_ = has_addend ? scratch_.addend : nullptr;
    hidden_ = has_intervals ? terms.seen_by(rows_, seen_, scratch_.seen) : SeenByRows<Real>();
    ScoreTerms<Real> score{problem_.score_map.as<Real>(), addend_,
                           has_keep ? scratch_.keep : nullptr, hidden_};
    if (terms.has_score()) score = map_scores(terms, score, of);
    const bool has_slope = terms.has_score() && of != Of::kMapped;
    const i64 row = shared_row(problem_, sequence_, head_, rows_.begin);
    return {.scores = scratch_.P,
            .dP = wants_dS_ ? scratch_.dS : nullptr,
            .stride = sizes_.padded_columns,
            .rows = rows_.size(),
            .keys = seen_.size(),
            .terms = score,
            .through_score_mod = of == Of::kDot,
            .row_max = shared_.row_max + row,
            .normalizer = shared_.normalizer + row,
            .delta = shared_.delta + row,
            .lse_term = shared_.lse_term ? shared_.lse_term + row : nullptr,
            .slope = has_slope ? scratch_.slope : nullptr};
  }

  ScoreTerms<Real> map_scores(const PairTerms<Real>& terms, const ScoreTerms<Real>& score, Of of) {
    const ScoreBlock<Real> block{.scores = scratch_.P,
                                 .addend = addend_,
                                 .slope = scratch_.slope,
                                 .stride = sizes_.padded_columns,
                                 .rows = rows_.size(),
                                 .columns = seen_.size(),
                                 .terms = score,
                                 .starts = of == Of::kDot     ? ScoreStart::kSlope
                                           : of == Of::kScore ? ScoreStart::kOne
                                                              : ScoreStart::kScore};
    return terms.map_scores(block, rows_, seen_, Lanes::kKeys, of != Of::kMapped);
  }

  // C[i][j] = dot(row i, key j), of pairs or of rows and lanes.
  void multiply_rows(View<Pair> pair_rows, View<Real> rows, i64 dim, const Pair* pair_lanes,
                     const Real* lanes, Real* C) const {
    if constexpr (kHasPairs) {
      if (in_pairs_) {
        return pairs_->multiply({.rows = rows_.size(),
                                 .columns = seen_.size(),
                                 .depth = half(dim),
                                 .A = pair_rows.data,
                                 .A_row_stride = pair_rows.stride,
                                 .A_depth_stride = 1,
                                 .B = pair_lanes + first_seen() * half(dim),
                                 .B_depth_stride = kernels_.lanes,
                                 .B_panel_stride = half(dim) * kernels_.lanes,
                                 .C = C,
                                 .C_row_stride = sizes_.padded_columns});
      }
    }
    kernels_.multiply({.rows = rows_.size(),
                       .columns = seen_.size(),
                       .depth = dim,
                       .A = rows.data,
                       .A_row_stride = rows.stride,
                       .A_depth_stride = 1,
                       .B = lanes + first_seen() * dim,
                       .B_depth_stride = kernels_.lanes,
                       .B_panel_stride = dim * kernels_.lanes,
                       .C = C,
                       .C_row_stride = sizes_.padded_columns});
  }

  // C += weights^T B, a row of C per loaded key.
  void multiply_by_queries(const Real* weights, const Pair* pair_rows, View<Real> rows, i64 dim,
                           Real* C, i64 C_stride, bool accumulates) const {
    C += first_seen() * C_stride;
    if constexpr (kHasPairs) {
      if (in_pairs_) {
        return pairs_->multiply({.rows = seen_.size(),
                                 .columns = dim,
                                 .depth = half(rows_.size()),
                                 .A = reinterpret_cast<const Pair*>(weights),
                                 .A_row_stride = 1,
                                 .A_depth_stride = sizes_.padded_columns,
                                 .B = pair_rows,
                                 .B_depth_stride = C_stride,
                                 .B_panel_stride = kernels_.lanes,
                                 .C = C,
                                 .C_row_stride = C_stride,
                                 .accumulates = accumulates});
      }
    }
    multiply_pairs(weights, {seen_.size(), 1}, {rows_.size(), sizes_.padded_columns}, rows, dim, C,
                   C_stride, accumulates);
  }

  // Queries or keys of the tile, as an axis of (q_row, key).
  struct Side {
    i64 size;
    i64 stride;
  };

  // C[i] += sum over j of weights[i, j] B[j], i along `kept` and j along `summed`, hidden pairs
  // aside.
  void multiply_pairs(const Real* weights, Side kept, Side summed, View<Real> B, i64 dim, Real* C,
                      i64 C_stride, bool accumulates) const {
    multiply_visible<Real>(kernels_,
                           {.rows = kept.size,
                            .columns = dim,
                            .depth = summed.size,
                            .A = weights,
                            .A_row_stride = kept.stride,
                            .A_depth_stride = summed.stride,
                            .B = B.data,
                            .B_depth_stride = B.stride,
                            .B_panel_stride = kernels_.lanes,
                            .C = C,
                            .C_row_stride = C_stride,
                            .accumulates = accumulates},
                           {addend_, kept.stride, summed.stride, hidden_, summed.stride == 1},
                           scratch_.finite_rows, C_stride);
  }

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  const PairKernels* pairs_;
  const TileSizes& sizes_;
  const BackwardShared<Real>& shared_;
  const BackwardScratch<Real>& scratch_;
  i64 index_;
  CacheSequence sequence_;
  i64 head_ = 0;
  i64 kv_head_ = 0;
  Interval rows_{0, 0};
  Interval keys_{0, 0};
  Interval seen_{0, 0};  // of them
  View<Real> Q_{}, K_{}, dO_{};
  Real* addend_ = nullptr;
  SeenByRows<Real> hidden_{};
  bool wants_dS_ = true;
  bool keys_fit_pairs_ = false;  // all keys are ordinary
  bool in_pairs_ = false;        // and so are the queries
  bool has_key_lanes_ = false;
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

// Gradients of what an expression reads: a pass of its own too, in tiled_captures.cpp. The first
// returns the number of its tasks, which then add one after the other.
template <class Real>
i64 start_captures(const Problem& problem, const TileSizes& sizes,
                   const BackwardShared<Real>& shared);

template <class Real>
void add_captures_tile(const Problem& problem, const TileSizes& sizes,
                       const BackwardShared<Real>& shared, const BackwardScratch<Real>& scratch,
                       i64 task);

template <class Real>
void store_captures(const Problem& problem, const BackwardShared<Real>& shared);

}  // namespace fulmen::cpu
