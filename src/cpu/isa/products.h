// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of callers' arrays to and from the working type, rearranged into panels, and multiplied in
// register tiles.
#pragma once

#include <type_traits>

#include "cpu/isa/elements.h"
#include "cpu/isa/vector.h"
#include "cpu/kernels.h"
#include "kernels/attention/kv_scale.cuh"

namespace fulmen::cpu {
namespace {

// What the elements of a quantised row are multiplied by.
inline float scale_of(const Source& source, i64 row) {
  float scale = 1;
  const i64 at = row * source.scale_stride * static_cast<i64>(sizeof(float));
  if (source.scales) __builtin_memcpy(&scale, source.scales + at, sizeof(scale));
  return kv_scale(scale);
}

// kWidth values of a row, from their elements.
template <class Real, class Element>
[[gnu::always_inline]] inline Vector<Real> values_of(const typename Element::Stored* few,
                                                     [[maybe_unused]] float scale) {
  const Vector<Real> elements = Element::widen(few, Real());
  if constexpr (kIsQuantised<Element>) return elements * scale;
  return elements;
}

template <class Real, class Element>
void load_rows_of(const Source& source, i64 rows, i64 dims, Real* out, i64 out_stride) {
  using Stored = typename Element::Stored;
  constexpr i64 kStep = kWidth<Real>;
  constexpr i64 kSize = sizeof(Stored);
  const i64 padded = (dims + kLanes<Real> - 1) / kLanes<Real> * kLanes<Real>;
  for (i64 row = 0; row < rows; ++row) {
    const char* in = static_cast<const char*>(source.data) + row * source.row_stride * kSize;
    Real* to = out + row * out_stride;
    const float scale = kIsQuantised<Element> ? scale_of(source, row) : 1.0f;
    i64 d = 0;
    if (source.dim_stride == 1) {
      for (; d + kStep <= dims; d += kStep) {
        Stored few[kStep];
        __builtin_memcpy(few, in + d * kSize, sizeof(few));
        store(to + d, values_of<Real, Element>(few, scale));
      }
    }
    for (; d < padded; d += kStep) {
      Stored few[kStep] = {};
      for (i64 i = 0; i < kStep && d + i < dims; ++i) {
        __builtin_memcpy(few + i, in + (d + i) * source.dim_stride * kSize, sizeof(Stored));
      }
      store(to + d, values_of<Real, Element>(few, scale));
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

template <class Real>
void load_rows(const Source& source, i64 rows, i64 dims, Real* out, i64 out_stride) {
  with_element<Real>(source.dtype, [&]<class Element>(Element) {
    load_rows_of<Real, Element>(source, rows, dims, out, out_stride);
  });
}

template <class Real>
void store_rows(View<Real> in, i64 rows, i64 dims, const Real* factor, i64 factor_stride,
                const Destination& to) {
  with_element<Real>(to.dtype, [&]<class Element>(Element) {
    if constexpr (!kIsQuantised<Element>) {
      store_rows_of<Real, Element>(in, rows, dims, factor, factor_stride, to);
    }
  });
}

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
      if (count <= 0) {
        for (i64 d = 0; d < dims; ++d) store(out + d * depth_stride + lane, Vector<Real>{});
        continue;
      }
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
  constexpr bool kHasTerms = std::is_same_v<Element, Pair>;
  for (i64 term = 0; term < (kHasTerms ? product.terms.count : 1); ++term) {
    const Element* A = product.A + row * product.A_row_stride + product.terms.A[term];
    const Element* B = product.B + panel * product.B_panel_stride + product.terms.B[term];
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
}  // namespace fulmen::cpu
