// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Backward through a block of scores, a key per lane: the weights again from the statistics of the
// forward pass, and the gradient of the scores.
//   w = exp(min(s - m, 0))       clamped: s comes from another order of rounding than m
//   P = w normalizer
//   dS = (P (dP keep - delta) + w dlse / l) (d capped / d scaled)
#pragma once

#include "cpu/isa/softmax.h"

namespace fulmen::cpu {
namespace {

template <class Real>
[[gnu::always_inline]] inline Vector<Real> at_most_zero(Vector<Real> x) {
  return x > Real(0) ? Vector<Real>{} : x;  // NaN stays
}

// Keys [lane, lane + kWidth) of row i.
template <class Real, bool kPlain>
[[gnu::always_inline]] inline void gradient_lanes(const GradientBlock<Real>& block, i64 i,
                                                  i64 lane) {
  const ScoreTerms<Real>& terms = block.terms;
  const i64 at = i * block.stride + lane;
  const Vector<Real> s = capped(load(block.scores + at) * terms.scale, kPlain ? 0 : terms.softcap);
  const Vector<Real> addend = !kPlain && terms.addend ? load(terms.addend + at) : Vector<Real>{};
  const Vector<Real> t = (kPlain ? s : with_addend<Real>(s, addend)) - block.row_max[i];
  const Vector<Real> weight = exponential<Real>(at_most_zero<Real>(t));
  Vector<Real> P = weight * block.normalizer[i];
  // Hidden pairs are 0 even in rows whose statistics are NaN.
  const auto hidden = addend == -kInfinity<Real>;
  if constexpr (!kPlain) P = hidden ? Vector<Real>{} : P;
  const Vector<Real> keep = !kPlain && terms.keep ? load(terms.keep + at) : broadcast(Real(1));
  store(block.scores + at, kPlain ? P : P * keep);
  if (!block.dP) return;
  const Vector<Real> dP = kPlain ? load(block.dP + at) : load(block.dP + at) * keep;
  Vector<Real> dS = P * (dP - block.delta[i]);
  if constexpr (!kPlain) {
    if (block.lse_term) dS += weight * block.lse_term[i];
    if (terms.softcap != Real(0) && block.through_cap) {
      const Vector<Real> tangent = s / terms.softcap;
      dS *= Real(1) - tangent * tangent;
    }
    dS = hidden ? Vector<Real>{} : dS;  // a hidden v may have made dP NaN
  }
  store(block.dP + at, dS);
}

template <class Real>
void gradient(const GradientBlock<Real>& block) {
  const ScoreTerms<Real>& terms = block.terms;
  const bool plain = terms.softcap == Real(0) && !terms.addend && !terms.keep && !block.lse_term;
  for (i64 i = 0; i < block.rows; ++i) {
    for (i64 lane = 0; lane < block.keys; lane += kWidth<Real>) {
      if (plain) {
        gradient_lanes<Real, true>(block, i, lane);
      } else {
        gradient_lanes<Real, false>(block, i, lane);
      }
    }
  }
}

}  // namespace
}  // namespace fulmen::cpu
