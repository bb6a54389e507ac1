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

#include <utility>

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

using Half = u16;  // the 16 bits of an f16 or a bf16

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

template <>
struct VectorOf<u32> {
  typedef u32 Type __attribute__((vector_size(kVectorBytes)));
  typedef u32 Unaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
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

template <int kOffset, class AnyVector, int... kLane>
[[gnu::always_inline]] inline AnyVector interleaved(AnyVector a, AnyVector b,
                                                    std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  return __builtin_shufflevector(a, b, (kOffset + kLane / 2 + kLane % 2 * kCount)...);
}

// Lanes 0, 2, 4, ... of a, then those of b; and lanes 1, 3, 5, ...
template <class AnyVector, int... kLane>
[[gnu::always_inline]] inline AnyVector every_other(AnyVector a, AnyVector b, int offset,
                                                    std::integer_sequence<int, kLane...>) {
  return offset == 0 ? __builtin_shufflevector(a, b, (2 * kLane)...)
                     : __builtin_shufflevector(a, b, (2 * kLane + 1)...);
}
template <class Real>
[[gnu::always_inline]] inline Vector<Real> evens(Vector<Real> a, Vector<Real> b) {
  return every_other(a, b, 0, std::make_integer_sequence<int, kWidth<Real>>());
}
template <class Real>
[[gnu::always_inline]] inline Vector<Real> odds(Vector<Real> a, Vector<Real> b) {
  return every_other(a, b, 1, std::make_integer_sequence<int, kWidth<Real>>());
}

// kCount lanes of memory, over and over; any alignment. A load alone does it.
template <int kCount, class Lane>
[[gnu::always_inline]] inline Vector<Lane> repeated(const void* address) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(Lane));
  if constexpr (kBytes == kVectorBytes) {
    return load(static_cast<const Lane*>(address));
  } else if constexpr (kBytes == 4) {
    u32 few;
    __builtin_memcpy(&few, address, sizeof(few));
    typedef u32 Words __attribute__((vector_size(kVectorBytes)));
    return (Vector<Lane>)(few - Words{});
  } else if constexpr (kBytes == 8) {
    unsigned long long few;
    __builtin_memcpy(&few, address, sizeof(few));
    typedef unsigned long long Words __attribute__((vector_size(kVectorBytes)));
    return (Vector<Lane>)(few - Words{});
#if defined(__AVX512F__)
  } else if constexpr (kBytes == 16) {
    return (Vector<Lane>)_mm512_broadcast_i32x4(
        _mm_loadu_si128(static_cast<const __m128i*>(address)));
  } else {
    return (Vector<Lane>)_mm512_broadcast_i64x4(
        _mm256_loadu_si256(static_cast<const __m256i*>(address)));
#elif defined(__AVX2__)
  } else {
    return (Vector<Lane>)_mm256_broadcastsi128_si256(
        _mm_loadu_si128(static_cast<const __m128i*>(address)));
#endif
  }
}

// rows[i][j] <-> rows[j][i]. Each step interleaves row i with row i + kWidth / 2 (a perfect
// shuffle of the whole square), which turns one bit of the column into one bit of the row.
template <class Real>
[[gnu::always_inline]] inline void transpose_square(Vector<Real> (&rows)[kWidth<Real>]) {
  constexpr int kSize = kWidth<Real>;
  constexpr auto kAll = std::make_integer_sequence<int, kSize>();
#pragma GCC unroll 4
  for (int step = 1; step < kSize; step *= 2) {
    Vector<Real> next[kSize];
#pragma GCC unroll 8
    for (int i = 0; i < kSize / 2; ++i) {
      next[2 * i] = interleaved<0>(rows[i], rows[i + kSize / 2], kAll);
      next[2 * i + 1] = interleaved<kSize / 2>(rows[i], rows[i + kSize / 2], kAll);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) rows[i] = next[i];
  }
}

// Two bf16 numbers a lane: a b + c of both; and float32 lanes rounded to nearest, alone or as
// pairs, `first` in the low half and `second` in the high one. What has no instruction for them is
// for tests.
typedef Half HalvesOfFloats __attribute__((vector_size(kVectorBytes / 2)));
typedef Half HalvesOfVector __attribute__((vector_size(kVectorBytes)));
#if defined(__AVX512BF16__)
[[gnu::always_inline]] inline FloatVector multiply_add(Vector<u32> a, Vector<u32> b,
                                                       FloatVector c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
[[gnu::always_inline]] inline HalvesOfFloats rounded_halves(FloatVector values) {
  return (HalvesOfFloats)_mm512_cvtneps_pbh(values);
}
[[gnu::always_inline]] inline HalvesOfVector rounded_halves(FloatVector first, FloatVector second) {
  return (HalvesOfVector)_mm512_cvtne2ps_pbh(second, first);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
[[gnu::always_inline]] inline FloatVector multiply_add(Vector<u32> a, Vector<u32> b,
                                                       FloatVector c) {
  return (FloatVector)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
[[gnu::always_inline]] inline HalvesOfFloats rounded_halves(FloatVector values) {
  return (HalvesOfFloats)vcvt_bf16_f32((float32x4_t)values);
}
[[gnu::always_inline]] inline HalvesOfVector rounded_halves(FloatVector first, FloatVector second) {
  return (HalvesOfVector)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first),
                                             (float32x4_t)second);
}
#else
[[gnu::always_inline]] inline FloatVector multiply_add(Vector<u32> a, Vector<u32> b,
                                                       FloatVector c) {
  const FloatVector low = multiply_add((FloatVector)(a << 16), (FloatVector)(b << 16), c);
  return multiply_add((FloatVector)(a & 0xffff0000u), (FloatVector)(b & 0xffff0000u), low);
}
[[gnu::always_inline]] inline Vector<u32> rounded_words(FloatVector values) {  // none is NaN
  const auto bits = (Vector<u32>)values;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
[[gnu::always_inline]] inline HalvesOfFloats rounded_halves(FloatVector values) {
  return __builtin_convertvector(rounded_words(values), HalvesOfFloats);
}
#endif

// Lanes of the two halves of a vector in turn.
template <int... kLane>
[[gnu::always_inline]] inline HalvesOfVector interleaved_halves(
    HalvesOfVector all, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  return __builtin_shufflevector(all, all, (kLane / 2 + kLane % 2 * (kCount / 2))...);
}

[[gnu::always_inline]] inline Vector<u32> pairs_of(FloatVector first, FloatVector second) {
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Vector<u32>)interleaved_halves(rounded_halves(first, second),
                                         std::make_integer_sequence<int, 2 * kWidth<float>>());
#else
  return rounded_words(first) | rounded_words(second) << 16;
#endif
}

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
