// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What happens to a block of scores between its products.
//
// Forward softmax, a query row per lane: SoftmaxState (softmax_state.cuh) with every number a
// vector of rows, natural logarithms. Plain blocks (all visible, no terms beyond a positive scale)
// read the scores twice and write them once; the others write them twice, those with hidden pairs
// alone the first time as they are or -inf.
#pragma once

#include "cpu/isa/exponential.h"
#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

template <class Real>
[[gnu::always_inline]] inline Vector<Real> modified(Vector<Real> scaled, Real softcap) {
  return softcap == Real(0) ? scaled : softcap * hyperbolic_tangent(scaled / softcap);
}

// s + addend; an addend of -inf hides, whatever s is.
template <class Real>
[[gnu::always_inline]] inline Vector<Real> with_addend(Vector<Real> s, Vector<Real> addend) {
  return addend == -kInfinity<Real> ? addend : s + addend;
}

// What a block's scores have beside a positive scale: hidden pairs alone (ScoreTerms::seen), or all
// there may be.
enum class Beside { kNothing, kHidden, kAnything };

template <class Real, class Block>
Beside beside_scale(const Block& block, bool has_more) {
  const ScoreTerms<Real>& terms = block.terms;
  if (has_more || terms.map.softcap != Real(0) || terms.addend || terms.keep) {
    return Beside::kAnything;
  }
  return terms.seen.first ? Beside::kHidden : Beside::kNothing;
}

// The state of kWidth rows.
template <class Real>
struct SoftmaxLanes {
  Vector<Real> row_max;
  Vector<Real> row_sum;

  Vector<Real> shift() const { return row_max == -kInfinity<Real> ? Vector<Real>{} : row_max; }

  Vector<Real> update(Vector<Real> block_max) {
    const Vector<Real> new_max = larger(row_max, block_max);
    const Vector<Real> rescale =
        new_max == row_max ? broadcast(Real(1)) : exponential<Real>(row_max - new_max);
    row_max = new_max;
    row_sum *= rescale;
    return rescale;
  }
};

// What weights are, exp(scale s - shift), and where they go: over the scores.
template <class Real>
struct StoresWeights {
  StoresWeights(Vector<Real> scale, Vector<Real> shift) : scale(scale), shift(shift) {}
  Vector<Real> of(Vector<Real> s) const { return exponential<Real>(s * scale - shift); }
  Vector<Real> scale;
  Vector<Real> shift;

  static constexpr i64 kKeys = 1;  // at once
  static void store_keys(const SoftmaxBlock<Real>& block, i64 lane, i64 j,
                         const Vector<Real>* weights) {
    store(block.scores + lane + j * block.stride, weights[0]);
  }
  static void store_lanes(Real* row, i64 j, Vector<Real> weights) { store(row + j, weights); }
};

// max over j of score(j), which NaN is no part of. A maximum waits for the one before it, 4 cycles
// on some processors, so that several are found side by side where scores are only read.
template <class Real, i64 kChains, class Score>
[[gnu::always_inline]] inline Vector<Real> largest_of_keys(i64 keys, const Score& score) {
  Vector<Real> largest[kChains];
  for (Vector<Real>& of_chain : largest) of_chain = broadcast(-kInfinity<Real>);
  i64 j = 0;
  for (; kChains > 1 && j + kChains <= keys; j += kChains) {
#pragma GCC unroll 4
    for (i64 chain = 0; chain < kChains; ++chain) {
      largest[chain] = larger(largest[chain], score(j + chain));
    }
  }
  for (; j < keys; ++j) largest[0] = larger(largest[0], score(j));
  for (i64 chain = 1; chain < kChains; ++chain) largest[0] = larger(largest[0], largest[chain]);
  return largest[0];
}

// Which of kWidth rows see a key.
template <class Real>
struct SeenLanes {
  using Counts = typename VectorOf<Real>::Bits;
  SeenLanes() = default;
  SeenLanes(const SeenByRows<Real>& seen, i64 lane) {
    __builtin_memcpy(&first, seen.first + lane, sizeof(first));
    __builtin_memcpy(&count, seen.count + lane, sizeof(count));
  }
  Vector<Real> hidden_as_infinity(Vector<Real> s, i64 key) const {
    const Counts after_first = static_cast<Count<Real>>(key) - first;
    return after_first >= count ? broadcast(-kInfinity<Real>) : s;
  }
  Counts first{};
  Counts count{};
};

// Rows [lane, lane + kWidth) of a block. Returns whether a rescale is not 1.
template <class Weights, Beside kBeside, class Real>
[[gnu::always_inline]] inline bool softmax_lanes(const SoftmaxBlock<Real>& block, i64 lane) {
  constexpr bool kScaled = kBeside == Beside::kAnything;
  const ScoreTerms<Real>& terms = block.terms;
  Real* const scores = block.scores + lane;
  const Vector<Real> scale = broadcast(terms.map.scale);
  const bool hides = kBeside != Beside::kNothing && terms.seen.first;
  const SeenLanes<Real> seen = hides ? SeenLanes<Real>(terms.seen, lane) : SeenLanes<Real>();
  // s = softcap(scale dot) + addend;  max over j
  Vector<Real> block_max = largest_of_keys<Real, kScaled ? 1 : 4>(block.keys, [&](i64 j) {
    const i64 at = j * block.stride;
    Vector<Real> s = load(scores + at);
    if constexpr (kScaled) {
      s = modified(s * scale, terms.map.softcap);
      if (terms.addend) s = with_addend<Real>(s, load(terms.addend + lane + at));
    }
    if (kBeside == Beside::kHidden || hides) s = seen.hidden_as_infinity(s, j);
    if constexpr (kBeside != Beside::kNothing) store(scores + at, s);
    return s;
  });
  if constexpr (!kScaled) block_max *= scale;  // rounding keeps the order
  // m, l <- m, l of the union
  SoftmaxLanes<Real> state{load(block.row_max + lane), load(block.row_sum + lane)};
  const Vector<Real> rescale = state.update(block_max);
  // P = exp(s - m);  l += rowsum P
  const Weights weight(kScaled ? broadcast(Real(1)) : scale, state.shift());
  Vector<Real> sum{};
  for (i64 j = 0; j < block.keys; j += Weights::kKeys) {
    Vector<Real> weights[Weights::kKeys];
#pragma GCC unroll 2
    for (i64 some = 0; some < Weights::kKeys; ++some) {
      weights[some] = Vector<Real>{};
      if (some > 0 && j + some >= block.keys) break;
      const i64 at = (j + some) * block.stride;
      weights[some] = weight.of(load(scores + at));
      sum += weights[some];
      if constexpr (kScaled) {
        if (terms.keep) weights[some] *= load(terms.keep + lane + at);
      }
    }
    Weights::store_keys(block, lane, j, weights);
    if constexpr (Weights::kKeys == 2) {
      constexpr int kReads = 0, kIntoSecondCache = 2;
      if (block.ahead.first) {
        __builtin_prefetch(block.ahead.first + j / 2 * block.ahead.stride, kReads,
                           kIntoSecondCache);
      }
    }
  }
  state.row_sum += sum;
  store(block.row_max + lane, state.row_max);
  store(block.row_sum + lane, state.row_sum);
  store(block.rescale + lane, rescale);
  return any(rescale != Real(1));
}

template <class Weights, class Real>
bool softmax_block(const SoftmaxBlock<Real>& given) {
  SoftmaxBlock<Real> block = given;  // whose members no store of weights can change
  int asked = 0;                     // halves of what is wanted next
  const Beside beside = beside_scale<Real>(block, block.terms.map.scale <= Real(0));
  bool rescales = false;
  for (i64 lane = 0; lane < block.rows; lane += kWidth<Real>) {
    const bool changed =
        beside == Beside::kNothing  ? softmax_lanes<Weights, Beside::kNothing>(block, lane)
        : beside == Beside::kHidden ? softmax_lanes<Weights, Beside::kHidden>(block, lane)
                                    : softmax_lanes<Weights, Beside::kAnything>(block, lane);
    if (++asked == 2) block.ahead = {};
    block.ahead.first += block.keys / 2 * block.ahead.stride;
    rescales = rescales || changed;
  }
  return rescales;
}

template <class Real>
bool softmax(const SoftmaxBlock<Real>& block) {
  return softmax_block<StoresWeights<Real>>(block);
}

// s = softcap(scale dot) + addend over the dot products, and what hides apart: the addend becomes 0
// or -inf.
template <class Real>
void start_scores(const ScoreBlock<Real>& block) {
  const ScoreTerms<Real>& terms = block.terms;
  const Real cap = terms.map.softcap;
  for (i64 row = 0; row < block.rows; ++row) {
    for (i64 lane = 0; lane < block.columns; lane += kWidth<Real>) {
      const i64 at = row * block.stride + lane;
      const Vector<Real> capped = modified(load(block.scores + at) * terms.map.scale, cap);
      Vector<Real> addend{};
      if (block.addend) {
        addend = load(block.addend + at);
        const auto is_hidden = addend == -kInfinity<Real>;
        store(block.addend + at, is_hidden ? addend : Vector<Real>{});
        addend = is_hidden ? Vector<Real>{} : addend;
      }
      const Vector<Real> s = capped + addend;
      store(block.scores + at, s);
      if (!block.slope) continue;
      const bool is_capped = cap != Real(0) && block.starts == ScoreStart::kSlope;
      const Vector<Real> tangent = is_capped ? capped / cap : Vector<Real>{};
      const Vector<Real> slope = Real(1) - tangent * tangent;
      store(block.slope + at, block.starts == ScoreStart::kScore ? s : slope);
    }
  }
}

template <class Real>
[[gnu::always_inline]] inline Vector<Real> at_most_zero(Vector<Real> x) {
  return x > Real(0) ? Vector<Real>{} : x;  // NaN stays
}

template <class Real>
struct GradientLanes {
  Vector<Real> P;   // times dropout's factor
  Vector<Real> dS;  // where it is wanted
};

// Which of keys [lane, lane + kWidth) row i does not see, as lanes of ones.
template <class Real>
[[gnu::always_inline]] inline auto hidden_lanes(const SeenByRows<Real>& seen, i64 i, i64 lane) {
  using Counts = typename VectorOf<Real>::Bits;
  Counts lanes;
#pragma GCC unroll 16
  for (int number = 0; number < kWidth<Real>; ++number) {
    lanes[number] = static_cast<Count<Real>>(number);
  }
  return lanes + (static_cast<Count<Real>>(lane) - seen.first[i]) >= seen.count[i] + Counts{};
}

// Keys [lane, lane + kWidth) of row i.
template <Beside kBeside, class Real>
[[gnu::always_inline]] inline GradientLanes<Real> gradient_lanes(const GradientBlock<Real>& block,
                                                                 i64 i, i64 lane) {
  constexpr bool kAnything = kBeside == Beside::kAnything;
  const ScoreTerms<Real>& terms = block.terms;
  const i64 at = i * block.stride + lane;
  const Vector<Real> s =
      modified(load(block.scores + at) * terms.map.scale, kAnything ? terms.map.softcap : 0);
  const Vector<Real> addend = kAnything && terms.addend ? load(terms.addend + at) : Vector<Real>{};
  const Vector<Real> t = (kAnything ? with_addend<Real>(s, addend) : s) - block.row_max[i];
  const Vector<Real> weight = exponential<Real>(at_most_zero<Real>(t));
  Vector<Real> P = weight * block.normalizer[i];
  // Hidden pairs are 0 even in rows whose statistics are NaN.
  auto hidden = addend == -kInfinity<Real>;
  if (kBeside == Beside::kHidden || (kAnything && terms.seen.first)) {
    hidden |= hidden_lanes<Real>(terms.seen, i, lane);
  }
  if constexpr (kBeside != Beside::kNothing) P = hidden ? Vector<Real>{} : P;
  const Vector<Real> keep = kAnything && terms.keep ? load(terms.keep + at) : broadcast(Real(1));
  const Vector<Real> kept = kAnything ? P * keep : P;
  if (!block.dP) return {kept, Vector<Real>{}};
  const Vector<Real> dP = kAnything ? load(block.dP + at) * keep : load(block.dP + at);
  Vector<Real> dS = P * (dP - block.delta[i]);
  if constexpr (kAnything) {
    if (block.lse_term) dS += weight * block.lse_term[i];
    if (terms.map.softcap != Real(0) && block.through_score_mod) {
      const Vector<Real> tangent = s / terms.map.softcap;
      dS *= Real(1) - tangent * tangent;
    }
    if (block.slope) dS *= load(block.slope + at);
  }
  // A hidden v may have made dP NaN.
  if constexpr (kBeside != Beside::kNothing) dS = hidden ? Vector<Real>{} : dS;
  return {kept, dS};
}

template <class Real>
Beside beside_scale(const GradientBlock<Real>& block) {
  return beside_scale<Real>(block, block.lse_term || block.slope);
}

template <Beside kBeside, class Real>
void gradient_rows(const GradientBlock<Real>& block) {
  for (i64 i = 0; i < block.rows; ++i) {
    for (i64 lane = 0; lane < block.keys; lane += kWidth<Real>) {
      const GradientLanes<Real> lanes = gradient_lanes<kBeside>(block, i, lane);
      store(block.scores + i * block.stride + lane, lanes.P);
      if (block.dP) store(block.dP + i * block.stride + lane, lanes.dS);
    }
  }
}

template <class Real>
void gradient(const GradientBlock<Real>& block) {
  switch (beside_scale(block)) {
    case Beside::kNothing:
      return gradient_rows<Beside::kNothing>(block);
    case Beside::kHidden:
      return gradient_rows<Beside::kHidden>(block);
    case Beside::kAnything:
      return gradient_rows<Beside::kAnything>(block);
  }
}

}  // namespace
}  // namespace fulmen::cpu
