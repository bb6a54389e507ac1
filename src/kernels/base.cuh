// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The only prelude of the kernels: integers of known width, the 16-bit floating-point types, the
// 8-bit types of quantised keys and values, and their conversions to and from float32. Every file
// under src/kernels and src/core starts from it. Plain C++20 without a single #include, so that the
// same text compiles with g++, clang, NVRTC and nvcc. Narrow types are storage: arithmetic happens
// in float32 or float64.
#pragma once

namespace fulmen {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

// Element types of arrays, as the host names them and kernels are told.
enum class DType : u8 {
  kNone,
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kBool,
  kInt32,
  kInt64,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt8,
  kUint8,
};

// How products of float32 numbers are computed: as they are; of inputs rounded to tf32 (11
// significant bits); of inputs split into two tf32 numbers, three products for one.
enum class Precision : u8 { kFloat32, kTf32, k3xTf32, kFp8 };

constexpr i64 size_bytes(DType dtype) {
  constexpr i64 kSizes[] = {0, 8, 4, 2, 2, 1, 4, 8, 1, 1, 1, 1};
  return kSizes[static_cast<int>(dtype)];
}

// What only k and v may be: their values are these numbers times scales; bytes are records, which
// hold their own (attention/mla_record.cuh).
constexpr bool is_quantised(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2 || dtype == DType::kInt8 ||
         dtype == DType::kUint8;
}

struct f16 {
  u16 bits;
};

struct bf16 {
  u16 bits;
};

// The 8-bit types of the Open Compute Project (OFP8, revision 1.0): sign, exponent, fraction.
struct e4m3 {  // 4 and 3 bits: up to 448, NaN where all seven are set, no infinity
  u8 bits;
};

struct e5m2 {  // 5 and 2 bits: the upper half of an f16
  u8 bits;
};

struct int8 {
  signed char value;
};

// Real is float or double.
template <class Real>
inline constexpr Real kLog2E = static_cast<Real>(1.4426950408889634);
template <class Real>
inline constexpr Real kLn2 = static_cast<Real>(0.693147180559945309);
template <class Real>
inline constexpr Real kInfinity = static_cast<Real>(__builtin_bit_cast(float, 0x7f800000u));
inline constexpr float kLargestFloat = __builtin_bit_cast(float, 0x7f7fffffu);

template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

template <class T>
constexpr T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}

// ceil(a / b) for a >= 0, b > 0.
constexpr i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// floor(a / b) for b > 0; C++ rounds towards zero, masks of rows before the first key must not.
constexpr i64 floor_div(i64 a, i64 b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

constexpr float to_float(bf16 x) {
  return __builtin_bit_cast(float, static_cast<u32>(x.bits) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN, quiet.
constexpr bf16 to_bf16(float x) {
  const u32 bits = __builtin_bit_cast(u32, x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<u16>((bits >> 16) | 0x0040u)};
  return {static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

constexpr float to_float(f16 x) {
  const u32 sign = static_cast<u32>(x.bits & 0x8000u) << 16;
  const u32 magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf, NaN
    return __builtin_bit_cast(float, sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude < 0x0400u) {  // zero, subnormal: an integer multiple of 2^-24, exact in float32
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  return __builtin_bit_cast(float, sign | ((magnitude << 13) + 0x38000000u));
}

// Rounds to nearest, ties to even; overflows to inf from 65520 on; NaN stays NaN, quiet.
constexpr f16 to_f16(float x) {
  const u32 bits = __builtin_bit_cast(u32, x);
  const u16 sign = static_cast<u16>((bits >> 16) & 0x8000u);
  const u32 magnitude = bits & 0x7fffffffu;
  const auto with_sign = [sign](u32 value) { return f16{static_cast<u16>(sign | value)}; };
  if (magnitude > 0x7f800000u) return with_sign(0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return with_sign(0x7c00u);  // 65520 and beyond
  if (magnitude < 0x38800000u) {                            // below 2^-14: multiples of 2^-24
    if (magnitude < 0x33000000u) return with_sign(0);       // below 2^-25
    const u32 exponent = magnitude >> 23;
    const u32 significand = (magnitude & 0x007fffffu) | 0x00800000u;
    const u32 shift = 126u - exponent;  // 14 .. 24: bits to drop to reach multiples of 2^-24
    const u32 kept = significand >> shift;
    const u32 rest = significand & ((1u << shift) - 1u);
    const u32 half = 1u << (shift - 1u);
    return with_sign(kept + ((rest > half || (rest == half && (kept & 1u))) ? 1u : 0u));
  }
  const u32 rebased = magnitude - 0x38000000u;
  return with_sign((rebased + 0x0fffu + ((rebased >> 13) & 1u)) >> 13);
}

constexpr float to_float(e4m3 x) {
  const u32 sign = static_cast<u32>(x.bits & 0x80u) << 24;
  const u32 magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return __builtin_bit_cast(float, sign | 0x7fc00000u);
  if (magnitude < 0x08u) {  // zero, subnormal: an integer multiple of 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign ? -value : value;
  }
  return __builtin_bit_cast(float, sign | ((magnitude << 20) + 0x3c000000u));
}

constexpr float to_float(e5m2 x) {
  return to_float(f16{static_cast<u16>(static_cast<u32>(x.bits) << 8)});
}

constexpr float to_float(int8 x) { return static_cast<float>(x.value); }

// x in 8 bits: its sign, an exponent, kFraction bits. Rounds to nearest, ties to even; what is
// beyond kMost, the pattern of the largest number, becomes that, infinities too; NaN stays NaN.
template <int kFraction, u32 kMost>
constexpr u8 to_8_bits(float x) {
  constexpr u32 kBias = (1u << (6 - kFraction)) - 1u;
  constexpr u32 kDropped = 23 - kFraction;
  constexpr u32 kFirstNormal = (128u - kBias) << 23;
  const u32 bits = __builtin_bit_cast(u32, x);
  const u32 sign = bits >> 24 & 0x80u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<u8>(sign | 0x7fu);
  if (magnitude < kFirstNormal) {  // added to a number whose last bit is that of the result
    constexpr u32 kUnit = kFirstNormal + (kDropped << 23);
    const float sum = __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, kUnit);
    return static_cast<u8>(sign | (__builtin_bit_cast(u32, sum) - kUnit));
  }
  const u32 rebased = magnitude - kFirstNormal + 0x00800000u;
  const u32 half = (1u << (kDropped - 1)) - 1u;
  const u32 rounded = (rebased + half + (rebased >> kDropped & 1u)) >> kDropped;
  return static_cast<u8>(sign | min(rounded, kMost));
}

// How quantising writes numbers: the nearest that there is, so nothing overflows.
constexpr e4m3 to_e4m3(float x) { return {to_8_bits<3, 0x7eu>(x)}; }  // up to 448
constexpr e5m2 to_e5m2(float x) { return {to_8_bits<2, 0x7bu>(x)}; }  // up to 57344

// Up to 127 in magnitude, ties to even; NaN becomes 0: there is none.
constexpr int8 to_int8(float x) {
  constexpr float kUnit = 0x1.8p23f;  // the last bit of a float beside it is 1
  if (x != x) return {0};
  const float nearest = clamp(x, -127.0f, 127.0f) + kUnit;
  return {static_cast<signed char>(nearest - kUnit)};
}

}  // namespace fulmen
