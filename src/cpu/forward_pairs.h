// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The operands and products of a forward task where numbers of 16 bits are multiplied as pairs
// (PairKernels): bf16 as it is, f16 as the sum of two numbers of bf16. By vectors outputs are O = P
// V, weights A and V's rows B. By tiles they are O^T = V^T P^T: softmax leaves the weights as tiles
// want a B, with their query rows side by side, and what is transposed is V, once for all rows of
// the task.
#pragma once

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/rows.h"
#include "plan/tiled_workspace.h"

namespace fulmen::cpu {

// The products of all terms of A and of B, so far apart.
inline TermOffsets products_of_terms(i64 terms, i64 A_stride, i64 B_stride) {
  TermOffsets products{.count = terms * terms};
  for (i64 i = 0; i < products.count; ++i) {
    products.A[i] = i / terms * A_stride;
    products.B[i] = i % terms * B_stride;
  }
  return products;
}

template <class Real>
class ForwardPairs {
 public:
  // kernels: null where numbers are widened to be multiplied.
  ForwardPairs(const Problem& problem, const TileSizes& sizes, const ForwardScratch<Real>& scratch,
               const PairKernels* kernels)
      : kernels_(kernels),
        working_(cpu::kernels<Real>()),
        sizes_(sizes),
        scratch_(scratch),
        dim_pairs_(ceil_div(problem.dim_qk, i64{2})),
        dim_qk_(problem.dim_qk),
        dim_v_(problem.dim_v) {}

  const PairKernels* kernels() const { return kernels_; }
  bool transposes_outputs() const { return kernels_ && kernels_->transposes_outputs; }

  // Rows that are worked on at once: their scores of a block of keys (32 or 48 KiB) are still in
  // the first cache, or nearly, when softmax and the second product read them.
  i64 strip_rows() const {
    if (!kernels_) return sizes_.padded_rows;
    return transposes_outputs() ? kTransposedStripRows : kStripRows;
  }

  // From one key's scores to the next's.
  i64 score_stride() const { return min(strip_rows(), sizes_.padded_rows); }

  // False where they are not all ordinary; likewise load_keys.
  bool load_queries(const Source& source, i64 rows) const {
    if (!kernels_->pack_columns(source, rows, dim_qk_, scratch_.Q_rows, row_of_pairs())) {
      return false;
    }
    for (i64 term = 0; term < kernels_->terms; ++term) {
      kernels_->transpose({scratch_.Q_rows + term * column_term(), row_of_pairs()}, rows,
                          dim_pairs_, scratch_.Q_pairs + term * lane_term(), panel_of_pairs(),
                          working_.lanes);
    }
    return true;
  }

  bool load_keys(const Source& K, const Source& V, i64 keys) const {
    if (!kernels_->pack_columns(K, keys, dim_qk_, scratch_.K_pairs, row_of_pairs())) return false;
    if (!kernels_->pack_rows(V, keys, dim_v_, scratch_.V_pairs, row_of_values())) return false;
    if (!transposes_outputs()) return true;
    for (i64 term = 0; term < kernels_->terms; ++term) {
      kernels_->transpose({scratch_.V_pairs + term * sizes_.padded_dim_v, row_of_values()},
                          ceil_div(keys, i64{2}), dim_v_,
                          scratch_.V_transposed + term * transposed_term(), working_.lanes,
                          row_of_transposed());
    }
    return true;
  }

  // S^T = K Q^T, of rows from `row` on within the task and keys from `key` on within the block.
  void multiply_scores(i64 row, i64 rows, i64 key, i64 keys) const {
    kernels_->multiply({.rows = keys,
                        .columns = rows,
                        .depth = dim_pairs_,
                        .A = scratch_.K_pairs + key * row_of_pairs(),
                        .A_row_stride = row_of_pairs(),
                        .A_depth_stride = 1,
                        .B = scratch_.Q_pairs + row * kernels_->terms * dim_pairs_,
                        .B_depth_stride = working_.lanes,
                        .B_panel_stride = panel_of_pairs(),
                        .C = scratch_.scores,
                        .C_row_stride = score_stride(),
                        .terms = products_of_terms(kernels_->terms, column_term(), lane_term())});
  }

  // O = rescale O + P V, or if it does not accumulate P V. rescale: of these rows; null: 1. keys
  // from an even one on.
  void add_values(i64 row, i64 rows, i64 key, i64 keys, bool accumulates,
                  const Real* rescale) const {
    const Pair* const weights = reinterpret_cast<const Pair*>(scratch_.scores);
    if (transposes_outputs()) {
      Real* const O = transposed_outputs(row);
      if (rescale) kernels_->scale_columns(O, kTransposedStripRows, dim_v_, rows, rescale);
      return kernels_->multiply({.rows = dim_v_,
                                 .columns = rows,
                                 .depth = ceil_div(keys, i64{2}),
                                 .A = scratch_.V_transposed + key / 2,
                                 .A_row_stride = row_of_transposed(),
                                 .A_depth_stride = 1,
                                 .B = weights,
                                 .B_depth_stride = kernels_->terms * score_stride(),
                                 .B_panel_stride = working_.lanes,
                                 .C = O,
                                 .C_row_stride = kTransposedStripRows,
                                 .accumulates = accumulates,
                                 .terms = products_of_values(transposed_term(), score_stride())});
    }
    kernels_->multiply({.rows = rows,
                        .columns = dim_v_,
                        .depth = ceil_div(keys, i64{2}),
                        .A = weights,
                        .A_row_stride = 1,
                        .A_depth_stride = kernels_->terms * score_stride(),
                        .B = scratch_.V_pairs + key / 2 * row_of_values(),
                        .B_depth_stride = row_of_values(),
                        .B_panel_stride = working_.lanes,
                        .C = scratch_.O + row * sizes_.padded_dim_v,
                        .C_row_stride = sizes_.padded_dim_v,
                        .accumulates = accumulates,
                        .row_scale = rescale,
                        .terms = products_of_values(score_stride(), sizes_.padded_dim_v)});
  }

  // O^T from O, or back, of a strip's rows.
  void transpose_outputs(i64 row, i64 rows, bool to_transposed) const {
    Real* const O = scratch_.O + row * sizes_.padded_dim_v;
    Real* const transposed = transposed_outputs(row);
    if (to_transposed) {
      working_.transpose({O, sizes_.padded_dim_v}, rows, dim_v_, transposed, working_.lanes,
                         kTransposedStripRows);
    } else {
      working_.transpose({transposed, kTransposedStripRows}, dim_v_, rows, O, working_.lanes,
                         sizes_.padded_dim_v);
    }
  }

  // O^T of a strip.
  void clear_outputs(i64 row) const {
    std::fill_n(transposed_outputs(row), kTransposedStripRows * dim_v_, Real(0));
  }

 private:
  static constexpr i64 kStripRows = 96;  // whole register tiles and whole panels
  // From one term of a number to the next: in rows of Q and K, in panels of Q, in rows of V^T.
  i64 column_term() const { return sizes_.padded_dim_qk / 2; }
  i64 lane_term() const { return dim_pairs_ * working_.lanes; }
  i64 transposed_term() const { return sizes_.transposed_pairs; }
  i64 row_of_pairs() const { return kernels_->terms * column_term(); }
  i64 panel_of_pairs() const { return kernels_->terms * lane_term(); }
  i64 row_of_values() const { return kernels_->terms * sizes_.padded_dim_v; }
  i64 row_of_transposed() const { return kernels_->terms * transposed_term(); }

  // The product of the last terms is left out: weights have no digits for it.
  TermOffsets products_of_values(i64 A_stride, i64 B_stride) const {
    TermOffsets products = products_of_terms(kernels_->terms, A_stride, B_stride);
    if (kernels_->terms > 1) --products.count;
    return products;
  }

  // (strip, dim_v, kTransposedStripRows), from a row on.
  Real* transposed_outputs(i64 row) const {
    return scratch_.O_transposed + row / kTransposedStripRows * kTransposedStripRows * dim_v_ +
           row % kTransposedStripRows;
  }

  const PairKernels* kernels_;
  const Kernels<Real>& working_;
  const TileSizes& sizes_;
  const ForwardScratch<Real>& scratch_;
  i64 dim_pairs_;
  i64 dim_qk_;
  i64 dim_v_;
};

}  // namespace fulmen::cpu
