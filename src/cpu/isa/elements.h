// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Elements of memory as vectors, and back: one type for each element type, which widens kWidth of
// them and, where results are stored in them, narrows.
#pragma once

#include "cpu/isa/vector.h"

namespace fulmen::cpu {
namespace {

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
// g++ makes scalar code of the conversion.
[[gnu::always_inline]] inline WordVector widen_bytes(const u8* in) {
#if defined(__AVX512F__)
  return (WordVector)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
#elif defined(__AVX2__)
  return (WordVector)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
#else
  typedef u8 ByteVector __attribute__((vector_size(kVectorBytes / 4)));
  ByteVector few;
  __builtin_memcpy(&few, in, sizeof(few));
  return __builtin_convertvector(few, WordVector);
#endif
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
    const WordVector bits = widen_bytes(in);
    const WordVector magnitude = bits & 0x7fu;
    const WordVector normal = (magnitude << 21) + 0x38000000u;
    const FloatVector subnormal = (FloatVector)(normal + 0x00800000u) - 0x1p-14f;
    const WordVector number = magnitude < 4u ? (WordVector)subnormal : normal;
    const WordVector special = (magnitude << 21) + 0x70000000u;  // infinity, NaN
    return (FloatVector)((magnitude >= 0x7cu ? special : number) | (bits & 0x80u) << 24);
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
