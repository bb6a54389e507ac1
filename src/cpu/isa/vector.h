// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The vector type of the instruction set that this translation unit is compiled for: g++ and clang
// vector extensions for all that the language can say, and one intrinsic each for what it cannot
// (fused multiply-add, the maximum instruction, float16). Multiply-adds are fused only here, by
// name: these files are compiled with -ffp-contract=off like the rest, so that softmax's exact
// differences (s - max = 0) hold in every compiler.
//
// Everything under isa/ has internal linkage, and calls no inline function of a shared header: a
// copy of such a function compiled for AVX-512 could otherwise be the one that the linker keeps for
// all.
#pragma once

#include "kernels/base.cuh"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace fulmen::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kTileRows = 12;  // x 2 vectors = 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kTileRows = 6;  // x 2 vectors = 12 accumulators of 16 registers
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kTileRows = 12;
#else
constexpr int kVectorBytes = 16;
constexpr int kTileRows = 6;
#endif
constexpr int kTileVectors = 2;

template <class Real>
struct VectorOf;

template <>
struct VectorOf<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  typedef unsigned Bits __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorOf<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  typedef unsigned long long Bits __attribute__((vector_size(kVectorBytes)));
};

template <class Real>
using Vector = typename VectorOf<Real>::Type;

using FloatVector = Vector<float>;
using DoubleVector = Vector<double>;

template <class Real>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(Real));

template <class Real>
constexpr i64 kLanes = kTileVectors * kWidth<Real>;

template <class Real>
[[gnu::always_inline]] inline Vector<Real> load(const Real* address) {
  return *reinterpret_cast<const typename VectorOf<Real>::Unaligned*>(address);
}

template <class Real>
[[gnu::always_inline]] inline void store(Real* address, Vector<Real> value) {
  *reinterpret_cast<typename VectorOf<Real>::Unaligned*>(address) = value;
}

template <class Real>
[[gnu::always_inline]] inline Vector<Real> broadcast(Real value) {
  return value - Vector<Real>{};
}

// a b + c, rounded once where the instruction set can.
// The larger of a and b as fulmen::max takes it: a where either is NaN.
#if defined(__AVX512F__)
[[gnu::always_inline]] inline FloatVector multiply_add(FloatVector a, FloatVector b,
                                                       FloatVector c) {
  return _mm512_fmadd_ps(a, b, c);
}
[[gnu::always_inline]] inline DoubleVector multiply_add(DoubleVector a, DoubleVector b,
                                                        DoubleVector c) {
  return _mm512_fmadd_pd(a, b, c);
}
[[gnu::always_inline]] inline FloatVector larger(FloatVector a, FloatVector b) {
  return _mm512_max_ps(b, a);
}
[[gnu::always_inline]] inline DoubleVector larger(DoubleVector a, DoubleVector b) {
  return _mm512_max_pd(b, a);
}
#elif defined(__AVX2__)
[[gnu::always_inline]] inline FloatVector multiply_add(FloatVector a, FloatVector b,
                                                       FloatVector c) {
  return _mm256_fmadd_ps(a, b, c);
}
[[gnu::always_inline]] inline DoubleVector multiply_add(DoubleVector a, DoubleVector b,
                                                        DoubleVector c) {
  return _mm256_fmadd_pd(a, b, c);
}
[[gnu::always_inline]] inline FloatVector larger(FloatVector a, FloatVector b) {
  return _mm256_max_ps(b, a);
}
[[gnu::always_inline]] inline DoubleVector larger(DoubleVector a, DoubleVector b) {
  return _mm256_max_pd(b, a);
}
#elif defined(__aarch64__)
[[gnu::always_inline]] inline FloatVector multiply_add(FloatVector a, FloatVector b,
                                                       FloatVector c) {
  return (FloatVector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
[[gnu::always_inline]] inline DoubleVector multiply_add(DoubleVector a, DoubleVector b,
                                                        DoubleVector c) {
  return (DoubleVector)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
template <class AnyVector>
[[gnu::always_inline]] inline AnyVector larger(AnyVector a, AnyVector b) {
  return a < b ? b : a;
}
#else
template <class AnyVector>
[[gnu::always_inline]] inline AnyVector multiply_add(AnyVector a, AnyVector b, AnyVector c) {
  return a * b + c;
}
#if defined(__SSE2__)
[[gnu::always_inline]] inline FloatVector larger(FloatVector a, FloatVector b) {
  return _mm_max_ps(b, a);
}
[[gnu::always_inline]] inline DoubleVector larger(DoubleVector a, DoubleVector b) {
  return _mm_max_pd(b, a);
}
#else
template <class AnyVector>
[[gnu::always_inline]] inline AnyVector larger(AnyVector a, AnyVector b) {
  return a < b ? b : a;
}
#endif
#endif

// Whether any lane of a comparison holds.
template <class Mask>
[[gnu::always_inline]] inline bool any(Mask mask) {
  typedef long long Words __attribute__((vector_size(kVectorBytes)));
  const Words words = (Words)mask;
  long long all = 0;
  for (unsigned word = 0; word < kVectorBytes / sizeof(long long); ++word) all |= words[word];
  return all != 0;
}

}  // namespace
}  // namespace fulmen::cpu
