// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From dot(q, k) to the score of a visible pair, and back through it: scale, softcap, then bias and
// ALiBi, in this order (Gemma 2 for the cap; Press et al. 2022 for ALiBi). Math supplies tanh.
// Called by every backend. What kernels and plans ask is whether a score is modified, and by which
// function with which slope; that it is softcap is known here, in the options of a call, and where
// a backend has a tanh of its own.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

// s = softcap(scale x), x = dot(q, k); softcap(y) = cap tanh(y / cap), off when cap = 0.
template <class Real>
struct ScoreMap {
  Real scale;
  Real softcap;

  // Whether the score before bias and ALiBi is more than scale x.
  constexpr bool is_modified() const { return softcap != Real(0); }

  template <class To>
  constexpr ScoreMap<To> as() const {
    return {static_cast<To>(scale), static_cast<To>(softcap)};
  }

  template <class Math>
  Real score(Real dot) const {
    const Real scaled = scale * dot;
    return softcap == Real(0) ? scaled : softcap * Math::tanh(scaled / softcap);
  }

  // d score / d (scale x), from the modified score itself, before bias and ALiBi.
  Real slope(Real modified) const {
    if (softcap == Real(0)) return Real(1);
    const Real t = modified / softcap;
    return Real(1) - t * t;
  }

  // A modified score is outer() tanh(scale x / outer()).
  constexpr Real outer() const { return softcap; }
};

// What modifies scores in kernels whose scores are in log2: common/fast_score_mod.cuh.
struct ScoreMod {
  float inner;  // 2 scale / softcap * log2(e): twice the argument of tanh, in log2, of a dot of 1
  float outer;  // softcap * log2(e)
};

// 0 where nothing is modified.
constexpr ScoreMod score_mod_of(const ScoreMap<double>& map) {
  if (!map.is_modified()) return {};
  return {static_cast<float>(2 * map.scale / map.softcap * kLog2E<double>),
          static_cast<float>(map.softcap * kLog2E<double>)};
}

// What ALiBi adds: -slope |position - kv_row|.
template <class Real>
constexpr Real alibi_bias(Real slope, i64 position, i64 kv_row) {
  const i64 distance = position - kv_row;
  return -slope * static_cast<Real>(distance < 0 ? -distance : distance);
}

}  // namespace fulmen
