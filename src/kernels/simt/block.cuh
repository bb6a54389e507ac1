// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the simt passes share beside tiles: the scores of a block of pairs, of which hidden ones are
// -inf. Most blocks are plain: every pair visible, a score scale * dot and nothing more. What all
// other blocks need is rolled into loops and calls, once for each kernel, so that the text of the
// options stays out of the unrolled loops.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/tile_place.cuh"
#include "kernels/simt/rows.cuh"

namespace fulmen {

template <DType kDType>
HeadRows q_rows_of(const Head<kDType>& head, const ArrayView& array, i64 dim) {
  return {array, head.q_row(array, 0), static_cast<i32>(dim)};
}
template <DType kDType>
HeadRows kv_rows_of(const Head<kDType>& head, const ArrayView& array, i64 dim) {
  return {array, head.kv_row(array, 0), static_cast<i32>(dim)};
}

// Options that act pair by pair, so that a score is more than scale * dot.
inline bool has_pair_terms(const AttentionParams& p) {
  return p.mask.present() || p.q_ids.present() || p.bias.present() || p.alibi_slopes.present() ||
         p.score_map.softcap != 0;
}

// The general path from a dot product to a score, -inf where hidden.
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

template <DType kDType>
__attribute__((noinline)) typename Head<kDType>::Real pair_keep(const Head<kDType>& head, i64 i,
                                                                i64 j) {
  return head.keep(i, j);
}

// Keys that row i sees, counted from `first`; none where it is no row of the sequence.
struct Limits {
  i32 begin;
  i32 end;
  bool contains(i32 column) const { return begin <= column && column < end; }
};
template <DType kDType>
__attribute__((noinline)) Limits row_limits(const Head<kDType>& head, i64 i, i64 first) {
  if (i >= head.sequence.shape.q_len) return {0, 0};
  const Interval columns = head.columns(i);
  return {static_cast<i32>(columns.begin - first), static_cast<i32>(columns.end - first)};
}

// Query rows that see key j, counted from `first`; none where it is no row of the sequence.
template <DType kDType>
__attribute__((noinline)) Limits query_limits(const Head<kDType>& head, i64 j, i64 first) {
  if (j >= head.sequence.shape.kv_len) return {0, 0};
  const Interval rows = visible_rows(head.p.mask_options, head.sequence.shape, j);
  return {static_cast<i32>(rows.begin - first), static_cast<i32>(rows.end - first)};
}

}  // namespace fulmen
