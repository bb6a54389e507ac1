// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels on rows and panels for this translation unit's instruction set, and its table.
#pragma once

#include "cpu/isa/softmax.h"
#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

using Half = u16;  // the 16 bits of an f16 or a bf16

typedef Half HalfVector __attribute__((vector_size(kVectorBytes / 2)));
typedef u32 WordVector __attribute__((vector_size(kVectorBytes)));

// bf16 is the upper half of a float32; rounding adds just under half of what is cut off, or just
// half where the kept part is odd.
[[gnu::always_inline]] inline FloatVector widen_bf16(const Half* in) {
  HalfVector half;
  __builtin_memcpy(&half, in, sizeof(half));
  return (FloatVector)(__builtin_convertvector(half, WordVector) << 16);
}

[[gnu::always_inline]] inline void narrow_bf16(FloatVector value, Half* out) {
  const WordVector bits = (WordVector)value;
  const WordVector rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const WordVector quiet_nan = (bits >> 16) | 0x0040u;
  const WordVector chosen = (bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded;
  const HalfVector half = __builtin_convertvector(chosen, HalfVector);
  __builtin_memcpy(out, &half, sizeof(half));
}

#if defined(__AVX512F__)
[[gnu::always_inline]] inline FloatVector widen_f16(const Half* in) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}
[[gnu::always_inline]] inline void narrow_f16(FloatVector value, Half* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
[[gnu::always_inline]] inline FloatVector widen_f16(const Half* in) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
[[gnu::always_inline]] inline void narrow_f16(FloatVector value, Half* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(value, 0));
}
#else
// The baseline shares its flags with the rest of the library, so the shared functions may be
// called.
inline FloatVector widen_f16(const Half* in) {
  FloatVector value;
  for (int lane = 0; lane < kWidth<float>; ++lane) value[lane] = to_float(f16{in[lane]});
  return value;
}
inline void narrow_f16(FloatVector value, Half* out) {
  for (int lane = 0; lane < kWidth<float>; ++lane) out[lane] = to_f16(value[lane]).bits;
}
#endif

// kWidth<Real> elements at `in`, of the element type that the tag names.
struct Float64Element {
  using Stored = double;
  static DoubleVector widen(const double* in, double) { return load(in); }
  static void narrow(DoubleVector value, double* out) { store(out, value); }
};

struct Float32Element {
  using Stored = float;
  static FloatVector widen(const float* in, float) { return load(in); }
  static void narrow(FloatVector value, float* out) { store(out, value); }
  static DoubleVector widen(const float* in, double) {
    DoubleVector value;
    for (int lane = 0; lane < kWidth<double>; ++lane) value[lane] = static_cast<double>(in[lane]);
    return value;
  }
  static void narrow(DoubleVector value, float* out) {
    for (int lane = 0; lane < kWidth<double>; ++lane) out[lane] = static_cast<float>(value[lane]);
  }
};

struct Float16Element {
  using Stored = Half;
  static FloatVector widen(const Half* in, float) { return widen_f16(in); }
  static void narrow(FloatVector value, Half* out) { narrow_f16(value, out); }
};

struct BFloat16Element {
  using Stored = Half;
  static FloatVector widen(const Half* in, float) { return widen_bf16(in); }
  static void narrow(FloatVector value, Half* out) { narrow_bf16(value, out); }
};

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

template <class Real>
void transpose(View<Real> in, i64 rows, i64 dims, Real* out, i64 panel_stride, i64 depth_stride) {
  constexpr i64 kPanel = kLanes<Real>;
  for (i64 first = 0; first < rows; first += kPanel, out += panel_stride) {
    const i64 present = rows - first < kPanel ? rows - first : kPanel;
    for (i64 lane = 0; lane < present; ++lane) {
      const Real* from = in.data + (first + lane) * in.stride;
      for (i64 d = 0; d < dims; ++d) out[d * depth_stride + lane] = from[d];
    }
    for (i64 lane = present; lane < kPanel; ++lane) {
      for (i64 d = 0; d < dims; ++d) out[d * depth_stride + lane] = Real(0);
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

template <class Real, int kRows>
[[gnu::noinline]] void multiply_tile(const Product<Real>& product, i64 row, i64 panel) {
  constexpr int kStep = kWidth<Real>;
  Vector<Real> sum[kRows][kTileVectors];
  Real* const C = product.C + row * product.C_row_stride + panel * kLanes<Real>;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      sum[i][v] = Vector<Real>{};
      if (product.accumulates) sum[i][v] = load(C + i * product.C_row_stride + v * kStep);
      if (product.row_scale) sum[i][v] *= product.row_scale[row + i];
    }
  }
  const Real* A = product.A + row * product.A_row_stride;
  const Real* B = product.B + panel * product.B_panel_stride;
  for (i64 k = 0; k < product.depth; ++k) {
    Vector<Real> b[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) b[v] = load(B + v * kStep);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vector<Real> a = broadcast(A[i * product.A_row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) sum[i][v] = multiply_add(a, b[v], sum[i][v]);
    }
    A += product.A_depth_stride;
    B += product.B_depth_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      store(C + i * product.C_row_stride + v * kStep, sum[i][v]);
    }
  }
}

// The last rows, fewer than kTileRows.
template <class Real, int kRows>
void multiply_rest(const Product<Real>& product, i64 row, i64 panel) {
  if constexpr (kRows > 0) {
    if (product.rows - row == kRows) return multiply_tile<Real, kRows>(product, row, panel);
    multiply_rest<Real, kRows - 1>(product, row, panel);
  }
}

template <class Real>
void multiply(const Product<Real>& product) {
  for (i64 panel = 0; panel * kLanes<Real> < product.columns; ++panel) {
    i64 row = 0;
    for (; row + kTileRows <= product.rows; row += kTileRows) {
      multiply_tile<Real, kTileRows>(product, row, panel);
    }
    multiply_rest<Real, kTileRows - 1>(product, row, panel);
  }
}

}  // namespace

namespace {

template <class Real>
constexpr Kernels<Real> table(const char* isa) {
  return {isa,           kVectorBytes,    kLanes<Real>,   load_rows,
          store_rows,    transpose<Real>, multiply<Real>, all_finite<Real>,
          softmax<Real>, gradient<Real>};
}

}  // namespace

}  // namespace fulmen::cpu
