// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the backward simt passes share: what a query row brings to every pair of its own, and from
// S = Q K^T and dP = dO V^T of a thread's pairs
//   e  = exp(s - m), P = e / l_total,
//   dX = e G,  G = ((dP keep - D) / l_total + dL / l_keys) d s / d dot(q, k).
// Which of the two axes of a tile are queries differs: `Pass` says so.
#pragma once

#include "kernels/simt/block.cuh"
#include "kernels/simt/tile.cuh"

namespace fulmen {

// Element (batch, head, q_row) of row_terms, made by backward_simt_rows.
template <class Real>
struct alignas(16) SavedRow {
  Real shift;       // subtracted from scores
  Real normalizer;  // 1 / l_total; 0 for a row that saw nothing
  Real lse_factor;  // dL / l_keys
  Real D;           // dot(dO, O)
};

template <class HeadType>
SavedRow<typename HeadType::Real>* saved_rows(const HeadType& head) {
  using Real = typename HeadType::Real;
  const i64 first = head.q_row(head.p.row_terms, 0);
  return reinterpret_cast<SavedRow<Real>*>(head.p.row_terms.data) + first / 4;
}

template <FmaConfig kConfig>
struct SimtGradient : Simt<kConfig> {
  using Base = Simt<kConfig>;
  using typename Base::Pairs;
  using typename Base::Real;
  using HeadType = BackwardHead<kConfig>;
  using Math = typename HeadType::Math;

  typename Base::Weights factors;  // P or dX, by which rows of a tile are multiplied

  // exp(s - m), whose exponent never exceeds 0; NaN stays NaN.
  static Real weight(Real score, Real shift) { return Math::exp(min(score - shift, Real(0))); }

  // G *= d s' / d s, where s' is the user's score.
  template <class Pass>
  void chain_user(const HeadType& head, const Pass& pass, const Pairs& dots, Pairs& G) const {
    Pairs slope;
    Base::each_pair([&](i32 r, i32 c) { slope[r][c] = dots[r][c]; });
    Base::change_pairs(factors, slope, [&](Real dot, i32 r, i32 c) {
      return pass.limits(r).contains(Base::column(c))
                 ? pair_user_slope(head, dot, pass.query(r, c), pass.key(r, c))
                 : Real(0);
    });
    Base::each_pair([&](i32 r, i32 c) { G[r][c] *= slope[r][c]; });
  }

  // G *= d s / d dot.
  void chain(const HeadType& head, const Pairs& dots, Pairs& G) const {
    if (!head.map.is_modified()) {
      Base::each_pair([&](i32 r, i32 c) { G[r][c] *= head.map.scale; });
      return;
    }
    Pairs slope;
    Base::each_pair([&](i32 r, i32 c) { slope[r][c] = dots[r][c]; });
    Base::change_pairs(factors, slope, [&](Real dot, i32, i32) { return pair_slope(head, dot); });
    Base::each_pair([&](i32 r, i32 c) { G[r][c] *= slope[r][c]; });
  }

  // From dP to G without d s / d dot.
  template <class Pass>
  void to_gradients(const HeadType& head, const Pass& pass, Pairs& dP) const {
    if (head.dropout.enabled()) {
      Base::change_pairs(factors, dP, [&](Real value, i32 r, i32 c) {
        return value * pair_keep(head, pass.query(r, c), pass.key(r, c));
      });
    }
    Base::each_pair([&](i32 r, i32 c) {
      const SavedRow<Real>& row = pass.saved(r, c);
      dP[r][c] = (dP[r][c] - row.D) * row.normalizer + row.lse_factor;
    });
  }

  // From dP to G, and from dots to scores, -inf where hidden. Pass: query(r, c) and key(r, c), rows
  // of the sequence; normalizer(r, c), lse_factor(r, c), D(r, c) of the query; limits(r), the
  // columns that structured masks leave to row r.
  // kChained: G has d s / d dot in it; without, e G is dS, of the score before a user's.
  template <bool kChained, class Pass>
  void prepare(const HeadType& head, const Pass& pass, bool is_full, bool pair_terms, Pairs& S,
               Pairs& dP) const {
    to_gradients(head, pass, dP);
    if constexpr (kConfig.user.score) chain_user(head, pass, S, dP);
    if constexpr (kChained) chain(head, S, dP);
    if (pair_terms) {
      Base::change_pairs(factors, S, [&](Real dot, i32 r, i32 c) {
        return pass.limits(r).contains(Base::column(c))
                   ? pair_score(head, dot, pass.query(r, c), pass.key(r, c))
                   : -Math::kInfinity;
      });
      return;
    }
    Base::each_pair([&](i32 r, i32 c) { S[r][c] = Math::product(S[r][c], head.map.scale); });
    if (!is_full) Base::hide_outside(S, [&](i32 r) { return pass.limits(r); });
  }
};

}  // namespace fulmen
