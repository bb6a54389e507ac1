// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The vector type of the instruction set that this translation unit is compiled for: g++ and clang
// vector extensions for all that the language can say, and one intrinsic each for what it cannot
// (fused multiply-add, the maximum instruction, float16). Multiply-adds are fused only here, by
// name: these files are compiled with -ffp-contract=off like the rest, so that softmax's exact
// differences (s - max = 0) hold in every compiler.
//
// And elements of memory as vectors.
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

#if defined(__AVX512BF16__)
// a and b of two bf16 numbers a lane: a0 b0 + a1 b1 + c.
[[gnu::always_inline]] inline FloatVector multiply_add(Vector<u32> a, Vector<u32> b,
                                                       FloatVector c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}

typedef Half HalvesOfFloats __attribute__((vector_size(kVectorBytes / 2)));
[[gnu::always_inline]] inline HalvesOfFloats rounded_halves(FloatVector values) {
  return (HalvesOfFloats)_mm512_cvtneps_pbh(values);
}

// Lane by lane, rounded to nearest: `first` in the low half, `second` in the high one.
[[gnu::always_inline]] inline Vector<u32> pairs_of(FloatVector first, FloatVector second) {
  const auto one = (Vector<u32>)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
  const auto other = (Vector<u32>)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
  return one | other << 16;
}
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

// Bytes of quantised elements, one in the low end of each lane.
[[gnu::always_inline]] inline WordVector widen_bytes(const u8* in) {
  typedef u8 ByteVector __attribute__((vector_size(kVectorBytes / 4)));
  ByteVector few;
  __builtin_memcpy(&few, in, sizeof(few));
  return __builtin_convertvector(few, WordVector);
}

struct Float8E4M3Element {
  using Stored = u8;
  static FloatVector widen(const u8* in, float) {
    const WordVector bits = widen_bytes(in);
    const WordVector magnitude = bits & 0x7fu;
    const WordVector normal = (magnitude << 20) + 0x3c000000u;
    // Below 2^-6, a number of that exponent without its leading 1.
    const FloatVector subnormal = (FloatVector)(normal + 0x00800000u) - 0x1p-6f;
    const WordVector number = magnitude < 8u ? (WordVector)subnormal : normal;
    const WordVector nan = WordVector{} + 0x7fc00000u;
    return (FloatVector)((magnitude == 0x7fu ? nan : number) | (bits & 0x80u) << 24);
  }
};

struct Float8E5M2Element {
  using Stored = u8;
  static FloatVector widen(const u8* in, float) {
    const HalfVector halves = __builtin_convertvector(widen_bytes(in) << 8, HalfVector);
    Half few[kWidth<float>];
    __builtin_memcpy(few, &halves, sizeof(few));
    return widen_f16(few);
  }
};

struct Int8Element {
  using Stored = u8;
  static FloatVector widen(const u8* in, float) {
    typedef int IntVector __attribute__((vector_size(kVectorBytes)));
    const IntVector signed_ones = (IntVector)(widen_bytes(in) << 24) >> 24;
    return __builtin_convertvector(signed_ones, FloatVector);
  }
};

// Quantised elements have scales, and nothing is stored in them.
template <class Element>
constexpr bool kIsQuantised = sizeof(typename Element::Stored) == 1;

// call(Element()) for the element type of that name; of nothing else can Real be computed.
template <class Real, class Call>
[[gnu::always_inline]] inline void with_element(DType dtype, const Call& call) {
  if constexpr (sizeof(Real) == sizeof(double)) {
    dtype == DType::kFloat64 ? call(Float64Element()) : call(Float32Element());
  } else if (dtype == DType::kFloat32) {
    call(Float32Element());
  } else if (dtype == DType::kFloat16) {
    call(Float16Element());
  } else if (dtype == DType::kBFloat16) {
    call(BFloat16Element());
  } else if (dtype == DType::kFloat8E4M3) {
    call(Float8E4M3Element());
  } else if (dtype == DType::kFloat8E5M2) {
    call(Float8E5M2Element());
  } else if (dtype == DType::kInt8) {
    call(Int8Element());
  }
}

}  // namespace
}  // namespace fulmen::cpu
