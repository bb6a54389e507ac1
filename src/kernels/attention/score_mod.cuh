// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From dot(q, k) to the score of a visible pair, and back through it: scale, softcap, then bias and
// ALiBi, in this order (Gemma 2 for the cap; Press et al. 2022 for ALiBi). Math supplies tanh.
// Called by every backend.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

// s = softcap(scale x), x = dot(q, k); softcap(y) = cap tanh(y / cap), off when cap = 0.
template <class Real>
struct ScoreMap {
  Real scale;
  Real softcap;

  template <class Math>
  Real score(Real dot) const {
    const Real scaled = scale * dot;
    return softcap == Real(0) ? scaled : softcap * Math::tanh(scaled / softcap);
  }

  // d score / d (scale x), from the capped score itself, before bias and ALiBi.
  Real slope(Real capped) const {
    if (softcap == Real(0)) return Real(1);
    const Real t = capped / softcap;
    return Real(1) - t * t;
  }
};

// What ALiBi adds: -slope |position - kv_row|.
template <class Real>
constexpr Real alibi_bias(Real slope, i64 position, i64 kv_row) {
  const i64 distance = position - kv_row;
  return -slope * static_cast<Real>(distance < 0 ? -distance : distance);
}

}  // namespace fulmen
