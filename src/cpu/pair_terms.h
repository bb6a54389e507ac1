// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What acts on the scores of one head pair by pair, as a tile of numbers: the addend (bias + ALiBi,
// -inf where the pair is hidden, by whatever mask) and dropout's factor. The one place where the
// tiled backend knows masks entry by entry; which blocks need it at all is block_range.cuh's word.
#pragma once

#include "core/problem.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {

template <class Real>
class PairTerms {
 public:
  PairTerms(const Problem& problem, i64 sequence_index, const Sequence& sequence, i64 head);

  // Whether even blocks that interval masks leave fully visible have an addend.
  bool adds_everywhere() const { return adds_everywhere_; }

  // out[i - rows.begin][j - columns.begin], row-major; within the sequence's lengths.
  void fill_addend(Interval rows, Interval columns, Real* out, i64 stride) const;
  void fill_keep(Interval rows, Interval columns, Real* out, i64 stride) const;

 private:
  void hide_masked(i64 row, Interval columns, Real* out) const;
  void hide_other_documents(i64 row, Interval columns, Real* out) const;

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  Sequence sequence_;
  i64 index_;
  i64 head_;
  Real alibi_slope_;
  bool adds_everywhere_;
};

extern template class PairTerms<float>;
extern template class PairTerms<double>;

}  // namespace fulmen::cpu
