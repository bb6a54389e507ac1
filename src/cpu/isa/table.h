// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels on rows and panels for this translation unit's instruction set, and its table.
//
// Forward softmax of a block of scores, a query row per lane: SoftmaxState (softmax_state.cuh) with
// every number a vector of rows, natural logarithms. Plain blocks (all visible, no terms beyond the
// scale) take two passes over the scores; the others one more.
#pragma once

#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

template <class Real, class Element>
void load_rows_of(const Source& source, i64 rows, i64 dims, Real* out, i64 out_stride) {
  using Stored = typename Element::Stored;
  constexpr i64 kStep = kWidth<Real>;
  constexpr i64 kSize = sizeof(Stored);
  const i64 padded = (dims + kLanes<Real> - 1) / kLanes<Real> * kLanes<Real>;
  for (i64 row = 0; row < rows; ++row) {
    const char* in = static_cast<const char*>(source.data) + row * source.row_stride * kSize;
    Real* to = out + row * out_stride;
    i64 d = 0;
    if (source.dim_stride == 1) {
      for (; d + kStep <= dims; d += kStep) {
        Stored few[kStep];
        __builtin_memcpy(few, in + d * kSize, sizeof(few));
        store(to + d, Element::widen(few, Real()));
      }
    }
    for (; d < padded; d += kStep) {
      Stored few[kStep] = {};
      for (i64 i = 0; i < kStep && d + i < dims; ++i) {
        __builtin_memcpy(few + i, in + (d + i) * source.dim_stride * kSize, sizeof(Stored));
      }
      store(to + d, Element::widen(few, Real()));
    }
  }
}

template <class Real, class Element>
void store_rows_of(View<Real> in, i64 rows, i64 dims, const Real* factor, i64 factor_stride,
                   const Destination& destination) {
  using Stored = typename Element::Stored;
  constexpr i64 kStep = kWidth<Real>;
  constexpr i64 kSize = sizeof(Stored);
  for (i64 row = 0; row < rows; ++row) {
    char* to = static_cast<char*>(destination.data) + row * destination.row_stride * kSize;
    const Vector<Real> by = broadcast(factor[row * factor_stride]);
    for (i64 d = 0; d < dims; d += kStep) {
      Stored few[kStep];
      Element::narrow(load(in.data + row * in.stride + d) * by, few);
      if (destination.dim_stride == 1 && d + kStep <= dims) {
        __builtin_memcpy(to + d * kSize, few, sizeof(few));
        continue;
      }
      for (i64 i = 0; i < kStep && d + i < dims; ++i) {
        __builtin_memcpy(to + (d + i) * destination.dim_stride * kSize, few + i, sizeof(Stored));
      }
    }
  }
}

inline void load_rows(const Source& source, i64 rows, i64 dims, float* out, i64 out_stride) {
  switch (source.dtype) {
    case DType::kFloat32:
      return load_rows_of<float, Float32Element>(source, rows, dims, out, out_stride);
    case DType::kFloat16:
      return load_rows_of<float, Float16Element>(source, rows, dims, out, out_stride);
    case DType::kBFloat16:
      return load_rows_of<float, BFloat16Element>(source, rows, dims, out, out_stride);
    default:
      return;  // validation lets nothing else meet float32 arithmetic
  }
}

inline void load_rows(const Source& source, i64 rows, i64 dims, double* out, i64 out_stride) {
  if (source.dtype == DType::kFloat64) {
    return load_rows_of<double, Float64Element>(source, rows, dims, out, out_stride);
  }
  load_rows_of<double, Float32Element>(source, rows, dims, out, out_stride);
}

inline void store_rows(View<float> in, i64 rows, i64 dims, const float* factor, i64 factor_stride,
                       const Destination& to) {
  switch (to.dtype) {
    case DType::kFloat32:
      return store_rows_of<float, Float32Element>(in, rows, dims, factor, factor_stride, to);
    case DType::kFloat16:
      return store_rows_of<float, Float16Element>(in, rows, dims, factor, factor_stride, to);
    case DType::kBFloat16:
      return store_rows_of<float, BFloat16Element>(in, rows, dims, factor, factor_stride, to);
    default:
      return;
  }
}

inline void store_rows(View<double> in, i64 rows, i64 dims, const double* factor, i64 factor_stride,
                       const Destination& to) {
  if (to.dtype == DType::kFloat64) {
    return store_rows_of<double, Float64Element>(in, rows, dims, factor, factor_stride, to);
  }
  store_rows_of<double, Float32Element>(in, rows, dims, factor, factor_stride, to);
}

}  // namespace

namespace {

// Columns [0, dims) of kWidth rows into kWidth lanes of a panel; whole squares only. Returns the
// columns done.
template <class Real>
i64 transpose_squares(View<Real> in, i64 dims, Real* out, i64 depth_stride) {
  constexpr i64 kStep = kWidth<Real>;
  i64 d = 0;
  for (; d + kStep <= dims; d += kStep) {
    Vector<Real> square[kStep];
#pragma GCC unroll 16
    for (i64 lane = 0; lane < kStep; ++lane) square[lane] = load(in.data + lane * in.stride + d);
    transpose_square<Real>(square);
#pragma GCC unroll 16
    for (i64 i = 0; i < kStep; ++i) store(out + (d + i) * depth_stride, square[i]);
  }
  return d;
}

template <class Real>
void transpose(View<Real> in, i64 rows, i64 dims, Real* out, i64 panel_stride, i64 depth_stride) {
  constexpr i64 kPanel = kLanes<Real>;
  constexpr i64 kStep = kWidth<Real>;
  for (i64 first = 0; first < rows; first += kPanel, out += panel_stride) {
    const i64 present = rows - first < kPanel ? rows - first : kPanel;
    for (i64 lane = 0; lane < kPanel; lane += kStep) {
      const View<Real> some{in.data + (first + lane) * in.stride, in.stride};
      const i64 count = present - lane < kStep ? present - lane : kStep;
      i64 d = count == kStep ? transpose_squares(some, dims, out + lane, depth_stride) : 0;
      for (; d < dims; ++d) {
        Real* const to = out + d * depth_stride + lane;
        for (i64 i = 0; i < kStep; ++i) to[i] = i < count ? some.data[i * in.stride + d] : Real(0);
      }
    }
  }
}

// x - x is 0 for finite x, NaN for all else.
template <class Real>
bool all_finite(View<Real> in, i64 rows, i64 dims) {
  constexpr i64 kStep = kWidth<Real>;
  Vector<Real> sum{};
  for (i64 row = 0; row < rows; ++row) {
    const Real* from = in.data + row * in.stride;
    i64 d = 0;
    for (; d + kStep <= dims; d += kStep) sum += load(from + d) - load(from + d);
    for (; d < dims; ++d) sum[0] += from[d] - from[d];
  }
  return !any(sum != 0);
}

}  // namespace

namespace {

template <int kVectors, int kRows, class Real, class Element>
[[gnu::noinline]] void multiply_tile(const Product<Real, Element>& product, i64 row, i64 panel) {
  constexpr int kStep = kWidth<Real>;
  Vector<Real> sum[kRows][kVectors];
  Real* const C = product.C + row * product.C_row_stride + panel * kLanes<Real>;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = Vector<Real>{};
      if (product.accumulates) sum[i][v] = load(C + i * product.C_row_stride + v * kStep);
      if (product.row_scale) sum[i][v] *= product.row_scale[row + i];
    }
  }
  const Element* A = product.A + row * product.A_row_stride;
  const Element* B = product.B + panel * product.B_panel_stride;
  for (i64 k = 0; k < product.depth; ++k) {
    Vector<Element> b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b[v] = load(B + v * kStep);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vector<Element> a = broadcast(A[i * product.A_row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = multiply_add(a, b[v], sum[i][v]);
    }
    A += product.A_depth_stride;
    B += product.B_depth_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      store(C + i * product.C_row_stride + v * kStep, sum[i][v]);
    }
  }
}

// The last rows, fewer than kTileRows.
template <int kVectors, int kRows, class Real, class Element>
void multiply_rest(const Product<Real, Element>& product, i64 row, i64 panel) {
  if constexpr (kRows > 0) {
    if (product.rows - row == kRows) {
      return multiply_tile<kVectors, kRows>(product, row, panel);
    }
    multiply_rest<kVectors, kRows - 1>(product, row, panel);
  }
}

template <int kVectors, class Real, class Element>
void multiply_panel(const Product<Real, Element>& product, i64 panel) {
  i64 row = 0;
  for (; row + kTileRows <= product.rows; row += kTileRows) {
    multiply_tile<kVectors, kTileRows>(product, row, panel);
  }
  multiply_rest<kVectors, kTileRows - 1>(product, row, panel);
}

// A last panel of which one vector is wanted is computed only that far.
template <class Real, class Element = Real>
void multiply(const Product<Real, Element>& product) {
  for (i64 panel = 0; panel * kLanes<Real> < product.columns; ++panel) {
    if (product.columns - panel * kLanes<Real> > kWidth<Real>) {
      multiply_panel<kTileVectors>(product, panel);
    } else {
      multiply_panel<1>(product, panel);
    }
  }
}

}  // namespace

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

// The state of kWidth rows.
template <class Real>
struct SoftmaxLanes {
  Vector<Real> row_max;
  Vector<Real> row_sum;

  Vector<Real> shift() const { return row_max == -kInfinity<Real> ? Vector<Real>{} : row_max; }

  Vector<Real> weight(Vector<Real> s) const { return exponential<Real>(s - shift()); }

  Vector<Real> update(Vector<Real> block_max) {
    const Vector<Real> new_max = larger(row_max, block_max);
    const Vector<Real> rescale =
        new_max == row_max ? broadcast(Real(1)) : exponential<Real>(row_max - new_max);
    row_max = new_max;
    row_sum *= rescale;
    return rescale;
  }
};

// Where weights go: over the scores.
template <class Real>
struct StoresWeights {
  static constexpr i64 kKeys = 1;  // at once
  static void store_keys(const SoftmaxBlock<Real>& block, i64 lane, i64 j,
                         const Vector<Real>* weights) {
    store(block.scores + lane + j * block.stride, weights[0]);
  }
};

// Rows [lane, lane + kWidth) of a block. Returns whether a rescale is not 1.
template <class Weights, bool kPlain, class Real>
[[gnu::always_inline]] inline bool softmax_lanes(const SoftmaxBlock<Real>& block, i64 lane) {
  const ScoreTerms<Real>& terms = block.terms;
  Real* const scores = block.scores + lane;
  const Vector<Real> scale = broadcast(terms.map.scale);
  // s = softcap(scale dot) + addend;  max over j
  Vector<Real> block_max = broadcast(-kInfinity<Real>);
  for (i64 j = 0; j < block.keys; ++j) {
    const i64 at = j * block.stride;
    Vector<Real> s = load(scores + at);
    if constexpr (!kPlain) {
      s = modified(s * scale, terms.map.softcap);
      if (terms.addend) s = with_addend<Real>(s, load(terms.addend + lane + at));
      store(scores + at, s);
    }
    block_max = larger(block_max, s);
  }
  if constexpr (kPlain) block_max *= scale;  // rounding keeps the order
  // m, l <- m, l of the union
  SoftmaxLanes<Real> state{load(block.row_max + lane), load(block.row_sum + lane)};
  const Vector<Real> rescale = state.update(block_max);
  // P = exp(s - m);  l += rowsum P
  const Vector<Real> shift = state.shift();
  Vector<Real> sum{};
  for (i64 j = 0; j < block.keys; j += Weights::kKeys) {
    Vector<Real> weights[Weights::kKeys];
#pragma GCC unroll 2
    for (i64 some = 0; some < Weights::kKeys; ++some) {
      weights[some] = Vector<Real>{};
      if (some > 0 && j + some >= block.keys) break;
      const i64 at = (j + some) * block.stride;
      const Vector<Real> s = kPlain ? load(scores + at) * scale : load(scores + at);
      weights[some] = exponential<Real>(s - shift);
      sum += weights[some];
      if constexpr (!kPlain) {
        if (terms.keep) weights[some] *= load(terms.keep + lane + at);
      }
    }
    Weights::store_keys(block, lane, j, weights);
  }
  state.row_sum += sum;
  store(block.row_max + lane, state.row_max);
  store(block.row_sum + lane, state.row_sum);
  store(block.rescale + lane, rescale);
  return any(rescale != Real(1));
}

template <class Weights, class Real>
bool softmax_block(const SoftmaxBlock<Real>& block) {
  const bool plain = block.terms.map.softcap == Real(0) && block.terms.map.scale > Real(0) &&
                     !block.terms.addend && !block.terms.keep;
  bool rescales = false;
  for (i64 lane = 0; lane < block.rows; lane += kWidth<Real>) {
    const bool changed = plain ? softmax_lanes<Weights, true>(block, lane)
                               : softmax_lanes<Weights, false>(block, lane);
    rescales = rescales || changed;
  }
  return rescales;
}

template <class Real>
bool softmax(const SoftmaxBlock<Real>& block) {
  return softmax_block<StoresWeights<Real>>(block);
}

}  // namespace

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
  const Vector<Real> s =
      modified(load(block.scores + at) * terms.map.scale, kPlain ? 0 : terms.map.softcap);
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
    if (terms.map.softcap != Real(0) && block.through_score_mod) {
      const Vector<Real> tangent = s / terms.map.softcap;
      dS *= Real(1) - tangent * tangent;
    }
    dS = hidden ? Vector<Real>{} : dS;  // a hidden v may have made dP NaN
  }
  store(block.dP + at, dS);
}

template <class Real>
void gradient(const GradientBlock<Real>& block) {
  const ScoreTerms<Real>& terms = block.terms;
  const bool plain =
      terms.map.softcap == Real(0) && !terms.addend && !terms.keep && !block.lse_term;
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

namespace {

template <class Real>
constexpr Kernels<Real> table(const char* isa) {
  return {isa,           kVectorBytes,    kLanes<Real>,         load_rows,
          store_rows,    transpose<Real>, multiply<Real, Real>, all_finite<Real>,
          softmax<Real>, gradient<Real>};
}

}  // namespace

}  // namespace fulmen::cpu
