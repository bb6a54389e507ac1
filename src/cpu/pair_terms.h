// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What acts on the scores of one head pair by pair, as a tile of numbers: the addend (bias + ALiBi,
// -inf where the pair is hidden, by whatever mask) and dropout's factor. The one file in which the
// tiled backend knows masks entry by entry; which blocks need it at all is block_range.cuh's word.
#pragma once

#include <cmath>
#include <limits>

#include "core/block_map.h"
#include "core/problem.h"
#include "cpu/expression_tile.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {

template <class Real>
class PairTerms {
 public:
  // steps: scratch of an expression; null without one.
  PairTerms(const Problem& problem, i64 sequence_index, const CacheSequence& sequence, i64 head,
            char* steps);

  // What the lists of blocks and the mask of an expression leave of a box.
  BlockKind kind(Interval rows, Interval columns) const;

  // Whether boxes that interval masks leave fully visible have an addend, if they are of that kind.
  bool adds(BlockKind kind) const { return adds_everywhere_ || kind != BlockKind::kFull; }
  static bool may_add(const Problem& problem, const CacheSequence& sequence) {  // of any kind
    return adds_everywhere(problem, sequence) || problem.has_kinds();
  }

  // Whether boxes of that kind are hidden from by intervals of keys at most, and nothing is added.
  bool hides_by_intervals(BlockKind kind) const {
    return !adds(kind) && !has_score() && !problem_.slots && !problem_.has(Array::kTree);
  }

  bool has_score() const { return problem_.has_score_expression(); }

  // What the user's score goes on from and what it makes of it, over dot products, so that nothing
  // but what hides is left to be added: terms to compute with from there.
  ScoreTerms<Real> map_scores(const ScoreBlock<Real>& block, Interval rows, Interval columns,
                              Lanes lanes, bool wants_slope) const;

  // out[i - rows.begin][j - columns.begin], row-major; within the sequence's lengths.
  void fill_addend(Interval rows, Interval columns, Real* out, i64 stride) const;
  void fill_keep(Interval rows, Interval columns, Real* out, i64 stride) const;
  // The columns that each row sees, where intervals hide; into counts (2, rows).
  SeenByRows<Real> seen_by(Interval rows, Interval columns, Count<Real>* counts) const;

 private:
  Interval seen_columns(i64 row, Interval columns) const;

  static bool adds_everywhere(const Problem& problem, const CacheSequence& sequence) {
    return problem.has(Array::kBias) || problem.has(Array::kMask) || problem.has(Array::kQIds) ||
           problem.adds_alibi() || problem.misses_slots(sequence);
  }

  void hide_masked(i64 row, Interval columns, Real* out) const;
  void hide_other_documents(i64 row, Interval columns, Real* out) const;
  void hide_by_position(i64 row, Interval columns, Real* out) const;
  void hide_by_lists(i64 row, Interval columns, Real* out) const;
  void fill_keep_by_segments(Interval rows, Interval columns, Real* out, i64 stride) const;

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  CacheSequence sequence_;
  i64 index_;
  i64 head_;
  char* steps_;
  Real alibi_slope_;
  bool adds_everywhere_;
};

extern template class PairTerms<float>;
extern template class PairTerms<double>;

// Whether lists of blocks and the mask of an expression leave some head a pair of all rows and
// these keys, which may be none.
template <class Real>
bool sees_some(const Problem& problem, i64 sequence_index, const CacheSequence& sequence,
               Interval kv_heads, Interval columns, char* steps) {
  if (!problem.has_kinds() || columns.size() <= 0) return true;
  const i64 group = problem.group_size();
  const Interval rows{0, sequence.shape.q_len};
  for (i64 head = kv_heads.begin * group; head < kv_heads.end * group; ++head) {
    const PairTerms<Real> pairs(problem, sequence_index, sequence, head, steps);
    if (pairs.kind(rows, columns) != BlockKind::kEmpty) return true;
  }
  return false;
}

// Which pairs of a product (row i of C, depth k) are hidden: addend[i * row_stride + k *
// depth_stride] = -inf, or `seen` hides them, whose rows are those of C or its depth. A null addend
// hides nothing.
template <class Real>
struct PairAddend {
  const Real* addend;
  i64 row_stride;
  i64 depth_stride;
  SeenByRows<Real> seen = {};
  bool has_queries_as_rows = true;

  bool hides_some() const { return addend || seen.first; }

  bool hides(i64 row, i64 k) const {
    if (has_queries_as_rows ? seen.hides(row, k) : seen.hides(k, row)) return true;
    return addend &&
           addend[row * row_stride + k * depth_stride] == -std::numeric_limits<Real>::infinity();
  }
};

template <class Real>
void add_nonfinite_terms(const Product<Real>& product, const PairAddend<Real>& pairs) {
  for (i64 k = 0; k < product.depth; ++k) {
    const Real* b = product.B + k * product.B_depth_stride;
    for (i64 n = 0; n < product.columns; ++n) {
      if (std::isfinite(b[n])) continue;
      for (i64 row = 0; row < product.rows; ++row) {
        if (pairs.hides(row, k)) continue;
        const Real a = product.A[row * product.A_row_stride + k * product.A_depth_stride];
        product.C[row * product.C_row_stride + n] += a * b[n];
      }
    }
  }
}

// B must be row-major (B_panel_stride = lanes). finite: scratch for depth rows of B.
template <class Real>
void multiply_visible(const Kernels<Real>& kernels, const Product<Real>& product,
                      const PairAddend<Real>& pairs, Real* finite, i64 finite_stride) {
  const View<Real> B{product.B, product.B_depth_stride};
  if (!pairs.hides_some() || kernels.all_finite(B, product.depth, product.columns)) {
    return kernels.multiply(product);
  }
  for (i64 k = 0; k < product.depth; ++k) {
    const Real* from = B.data + k * B.stride;
    Real* to = finite + k * finite_stride;
    for (i64 n = 0; n < finite_stride; ++n) {
      to[n] = n < product.columns && std::isfinite(from[n]) ? from[n] : Real(0);
    }
  }
  Product<Real> usual = product;
  usual.B = finite;
  usual.B_depth_stride = finite_stride;
  kernels.multiply(usual);
  add_nonfinite_terms(product, pairs);
}

}  // namespace fulmen::cpu
