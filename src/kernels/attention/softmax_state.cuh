// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The one law of exact attention in pieces: a row's softmax over any set of keys is summarised by
// (row_max, row_sum) beside the unnormalised output sum_j exp(s_j - row_max) v_j, and two summaries
// over disjoint keys merge without error beyond rounding. Source: Milakov and Gimelshein, "Online
// normalizer calculation for softmax" (2018), used by FlashAttention (Dao et al. 2022),
// section 3.1. Every backend uses it: the tiled CPU kernels key block by key block, merge across
// splits.
//
// Math is a small policy of the backend: exp, log (inverse of each other, in a base of its choice)
// and kNatural, one unit of that base in nats. Scores, row_max and sinks are in that unit.
// A row that saw nothing is row_max = -inf, row_sum = 0. A NaN score ends in row_sum, never in
// row_max, so that it cannot be mistaken for an empty row.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

template <class Math>
struct SoftmaxState {
  using Real = typename Math::Real;

  Real row_max = -Math::kInfinity;
  Real row_sum = 0;

  // What is subtracted from scores: row_max, or 0 where that is -inf, so that a hidden score gives
  // exp(-inf - 0) = 0 instead of NaN.
  constexpr Real shift() const { return row_max == -Math::kInfinity ? Real(0) : row_max; }

  // exp(s - row_max) for a score that `update` has accounted for in row_max.
  Real weight(Real score) const { return Math::exp(score - shift()); }

  // Raises row_max to cover a block of scores. Returns exp(old max - new max), by which the caller
  // multiplies the unnormalised output; row_sum is rescaled here, and the caller then adds the sum
  // of the block's weights to it.
  Real update(Real block_max) {
    const Real new_max = max(row_max, block_max);
    if (new_max == row_max) return Real(1);
    const Real rescale = Math::exp(row_max - new_max);  // exp(-inf) = 0 for the first block
    row_max = new_max;
    row_sum *= rescale;
    return rescale;
  }

  // The law. `output` and `other_output` are multiplied by the two factors and added by the caller.
  struct MergeFactors {
    Real mine;
    Real other;
  };
  MergeFactors merge(const SoftmaxState& other) {
    const Real new_max = max(row_max, other.row_max);
    const Real top = new_max == -Math::kInfinity ? Real(0) : new_max;
    const MergeFactors factors{Math::exp(row_max - top), Math::exp(other.row_max - top)};
    row_sum = row_sum * factors.mine + other.row_sum * factors.other;
    row_max = new_max;
    return factors;
  }

  // Merges a part whose output is normalised: the factors of the unnormalised output so far, and of
  // that of the part, whose sum is the output of all. Where `other` is 0 the part says nothing.
  MergeFactors join(const SoftmaxState& part, Real sink) {
    const MergeFactors factors = merge(part);
    const Real norm = normalizer(sink);
    return {factors.mine * norm, part.row_sum * factors.other * norm};
  }

  // What the unnormalised output is multiplied by: 1 / row_sum, or with a sink
  // exp(row_max - top) / (row_sum exp(row_max - top) + exp(sink - top)), top = max(row_max, sink).
  // 0 for a row that saw nothing.
  Real normalizer(Real sink) const {
    if (row_sum == Real(0)) return Real(0);
    if (sink == -Math::kInfinity) return Real(1) / row_sum;
    const Real top = max(row_max, sink);
    const Real keys = Math::exp(row_max - top);
    return keys / (row_sum * keys + Math::exp(sink - top));
  }

  // The share of the sink in the row: exp(sink) / (sum_j exp(s_j) + exp(sink)).
  Real sink_share(Real sink) const {
    if (sink == -Math::kInfinity) return Real(0);
    const Real top = max(row_max, sink);
    const Real sink_weight = Math::exp(sink - top);
    return sink_weight / (row_sum * Math::exp(row_max - top) + sink_weight);
  }

  // Natural logarithm of sum_j exp(s_j), without the sink: -inf for a row that saw nothing.
  Real lse() const { return (row_max + Math::log(row_sum)) * Math::kNatural; }
};

}  // namespace fulmen
