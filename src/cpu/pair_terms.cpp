// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Addend and dropout tiles, row by row.

#include "cpu/pair_terms.h"

#include <algorithm>
#include <limits>

#include "cpu/rows.h"

namespace fulmen::cpu {
namespace {

template <class Real>
constexpr Real kHidden = -std::numeric_limits<Real>::infinity();

}  // namespace

template <class Real>
PairTerms<Real>::PairTerms(const Problem& problem, i64 sequence_index,
                           const CacheSequence& sequence, i64 head, char* steps)
    : problem_(problem),
      kernels_(kernels<Real>()),
      sequence_(sequence),
      index_(sequence_index),
      head_(head),
      steps_(steps),
      alibi_slope_(0),
      adds_everywhere_(adds_everywhere(problem, sequence)) {
  if (problem.adds_alibi()) {
    const Tensor& slopes = problem.arrays[Array::kAlibiSlopes];
    alibi_slope_ = static_cast<Real>(slopes.real(sequence_index, head, 0, 0));
  }
}

template <class Real>
BlockKind PairTerms<Real>::kind(Interval rows, Interval columns) const {
  const HeadOfSequence at{problem_, sequence_, index_, head_};
  const BlockKind by_lists = kind_by_lists(at, rows, columns);
  if (by_lists == BlockKind::kEmpty) return by_lists;
  return both(by_lists, kind_by_expression(at, rows, columns, steps_));
}

template <class Real>
void PairTerms<Real>::fill_addend(Interval rows, Interval columns, Real* out, i64 stride) const {
  Real* const first = out;
  const Tensor& bias = problem_.arrays[Array::kBias];
  for (i64 i = rows.begin; i < rows.end; ++i, out += stride) {
    if (bias.present()) {
      const Tensor row = bias;
      kernels_.load_rows({row.address(index_, head_, i, sequence_.first_key + columns.begin),
                          row.dtype, 0, row.strides[3]},
                         1, columns.size(), out, stride);
    } else {
      std::fill_n(out, columns.size(), Real(0));
    }
    if (problem_.adds_alibi()) {
      const bool has_tree = problem_.has(Array::kTree);
      const i64 position = problem_.position(sequence_, i);
      for (i64 j = columns.begin; j < columns.end; ++j) {
        const i64 key = has_tree ? problem_.key_position(sequence_, j) : j;
        out[j - columns.begin] += alibi_bias(alibi_slope_, position, key);
      }
    }
    if (problem_.has(Array::kMask)) hide_masked(i, columns, out);
    if (problem_.has(Array::kQIds)) hide_other_documents(i, columns, out);
    hide_by_position(i, columns, out);
    if (problem_.has(Array::kBlocks)) hide_by_lists(i, columns, out);
  }
  const HeadOfSequence at{problem_, sequence_, index_, head_};
  if (kind_by_expression(at, rows, columns, steps_) != BlockKind::kFull) {
    ExpressionTile<Real>(problem_, sequence_, index_, head_, steps_)
        .hide(rows, columns, first, stride);
  }
}

template <class Real>
ScoreTerms<Real> PairTerms<Real>::map_scores(const ScoreBlock<Real>& block, Interval rows,
                                             Interval columns, Lanes lanes,
                                             bool wants_slope) const {
  kernels_.start_scores(block);
  ExpressionTile<Real>(problem_, sequence_, index_, head_, steps_)
      .map(rows, columns, lanes, block.scores, wants_slope ? block.slope : nullptr, block.stride);
  return {{Real(1), Real(0)}, block.addend, block.terms.keep};
}

template <class Real>
void PairTerms<Real>::hide_by_position(i64 row, Interval columns, Real* out) const {
  if (problem_.has(Array::kTree) || problem_.slots) {
    for (i64 j = columns.begin; j < columns.end; ++j) {
      if (!problem_.sees(sequence_, row, j)) out[j - columns.begin] = kHidden<Real>;
    }
    return;
  }
  const Interval seen = seen_columns(row, columns);
  std::fill(out, out + (seen.begin - columns.begin), kHidden<Real>);
  std::fill(out + (seen.end - columns.begin), out + columns.size(), kHidden<Real>);
}

template <class Real>
Interval PairTerms<Real>::seen_columns(i64 row, Interval columns) const {
  const Interval seen =
      visible_columns_at(problem_.mask, sequence_.shape.kv_len, problem_.position(sequence_, row));
  const i64 begin = clamp(seen.begin, columns.begin, columns.end);
  return {begin, clamp(seen.end, begin, columns.end)};
}

template <class Real>
SeenByRows<Real> PairTerms<Real>::seen_by(Interval rows, Interval columns,
                                          Count<Real>* counts) const {
  Count<Real>* const first = counts;
  Count<Real>* const count = counts + rows.size();
  for (i64 i = 0; i < rows.size(); ++i) {
    const Interval seen = seen_columns(rows.begin + i, columns);
    first[i] = static_cast<Count<Real>>(seen.begin - columns.begin);
    count[i] = static_cast<Count<Real>>(seen.size());
  }
  return {first, count};
}

template <class Real>
void PairTerms<Real>::hide_by_lists(i64 row, Interval columns, Real* out) const {
  for (i64 j = columns.begin; j < columns.end;) {
    const i64 block = j / problem_.block_kv;
    const i64 end = min((block + 1) * problem_.block_kv, columns.end);
    if (!problem_.lists_block(index_, head_, row / problem_.block_q, block)) {
      std::fill(out + (j - columns.begin), out + (end - columns.begin), kHidden<Real>);
    }
    j = end;
  }
}

template <class Real>
void PairTerms<Real>::hide_masked(i64 row, Interval columns, Real* out) const {
  const Tensor& mask = problem_.arrays[Array::kMask];
  const char* visible = mask.address(index_, head_, row, sequence_.first_key + columns.begin);
  for (i64 j = 0; j < columns.size(); ++j, visible += mask.strides[3]) {
    out[j] = *visible != 0 ? out[j] : kHidden<Real>;
  }
}

template <class Real>
void PairTerms<Real>::hide_other_documents(i64 row, Interval columns, Real* out) const {
  const Tensor& q_ids = problem_.arrays[Array::kQIds];
  const Tensor& kv_ids = problem_.arrays[Array::kKvIds];
  const i64 document = q_ids.index(sequence_.batch, 0, 0, sequence_.q_begin + row);
  for (i64 j = columns.begin; j < columns.end; ++j) {
    const i64 other = kv_ids.index(sequence_.kv_batch, 0, 0, sequence_.kv_begin + j);
    if (other != document) out[j - columns.begin] = kHidden<Real>;
  }
}

template <class Real>
void PairTerms<Real>::fill_keep(Interval rows, Interval columns, Real* out, i64 stride) const {
  const Dropout& dropout = problem_.dropout;
  const Real kept = static_cast<Real>(dropout.kept_scale());
  const u32 batch_head = problem_.batch_head(index_, head_);
  if (problem_.has_segments()) return fill_keep_by_segments(rows, columns, out, stride);
  for (i64 i = rows.begin; i < rows.end; ++i, out += stride) {
    for (i64 group = columns.begin / 8; group * 8 < columns.end; ++group) {
      const Philox4x32 drawn =
          dropout.draw(static_cast<u32>(group), static_cast<u32>(i), batch_head);
      const i64 begin = max(group * 8, columns.begin);
      const i64 end = min(group * 8 + 8, columns.end);
      for (i64 j = begin; j < end; ++j) {
        out[j - columns.begin] = dropout.keeps(drawn, static_cast<u32>(j % 8)) ? kept : Real(0);
      }
    }
  }
}

template <class Real>
void PairTerms<Real>::fill_keep_by_segments(Interval rows, Interval columns, Real* out,
                                            i64 stride) const {
  const Dropout& dropout = problem_.dropout;
  const Real kept = static_cast<Real>(dropout.kept_scale());
  for (i64 i = rows.begin; i < rows.end; ++i, out += stride) {
    DropoutRow row(dropout, problem_.q_position(index_, i), problem_.batch_head(index_, head_));
    for (i64 j = columns.begin; j < columns.end; ++j) {
      out[j - columns.begin] = row.keeps(problem_.kv_position(index_, j)) ? kept : Real(0);
    }
  }
}

template class PairTerms<float>;
template class PairTerms<double>;

}  // namespace fulmen::cpu
