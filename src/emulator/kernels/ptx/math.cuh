// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic on the host, correctly rounded or nearly so where the instruction is approximate:
// what src/kernels/ptx/math.cuh declares. Results below 2^-126 become 0 where the instruction says
// ftz.
#pragma once

#include <cmath>

#include "emulator/accesses.h"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

inline float accurate_exp(float x) { return std::exp(x); }
inline double accurate_exp(double x) { return std::exp(x); }
inline float accurate_log(float x) { return std::log(x); }
inline double accurate_log(double x) { return std::log(x); }
inline float accurate_tanh(float x) { return std::tanh(x); }
inline double accurate_tanh(double x) { return std::tanh(x); }
inline float accurate_sqrt(float x) { return std::sqrt(x); }
inline double accurate_sqrt(double x) { return std::sqrt(x); }
inline float magnitude(float x) { return std::fabs(x); }
inline double magnitude(double x) { return std::fabs(x); }

// A NaN of either kind counts as missing, and -0 as below 0.
template <class Real>
Real larger(Real a, Real b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
inline float rounded_product(float a, float b) { return a * b; }
inline double rounded_product(double a, double b) { return a * b; }

inline float flush_subnormal(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x;
}

inline float exp2(float x) {
  emulator::count(&emulator::Counters::exponentials);
  return flush_subnormal(std::exp2(flush_subnormal(x)));
}
inline float exp2_volatile(float x) { return exp2(x); }
inline float log2(float x) { return std::log2(flush_subnormal(x)); }
inline float reciprocal(float x) { return flush_subnormal(1.f / flush_subnormal(x)); }
inline float max(float a, float b) { return larger(a, b); }
inline float fma(float a, float b, float c) {
  emulator::count(&emulator::Counters::multiply_adds);
  return std::fma(a, b, c);
}
inline float mul(float a, float b) { return a * b; }

template <DType kDType>
u32 converted(float x) {
  if (std::isnan(x)) return 0x7fff;
  return kDType == DType::kBFloat16 ? to_bf16(x).bits : to_f16(x).bits;
}
template <DType kDType>
inline u32 pack(float low, float high) {
  emulator::count(&emulator::Counters::conversions);
  return converted<kDType>(high) << 16 | converted<kDType>(low);
}

template <DType kDType>
float half_of(u32 pair, i32 half) {
  const u16 bits = static_cast<u16>(pair >> 16 * half);
  return kDType == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(f16{bits});
}
template <DType kDType>
inline u32 multiply_pairs(u32 a, u32 b) {
  return converted<kDType>(half_of<kDType>(a, 1) * half_of<kDType>(b, 1)) << 16 |
         converted<kDType>(half_of<kDType>(a, 0) * half_of<kDType>(b, 0));
}
template <DType kDType>
inline u32 add_pairs(u32 a, u32 b) {
  return converted<kDType>(half_of<kDType>(a, 1) + half_of<kDType>(b, 1)) << 16 |
         converted<kDType>(half_of<kDType>(a, 0) + half_of<kDType>(b, 0));
}

inline u32 permute(u32 a, u32 b, u32 selector) {
  u32 y = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 number = selector >> 4 * i & 7;
    y |= ((number < 4 ? a >> 8 * number : b >> 8 * (number - 4)) & 0xff) << 8 * i;
  }
  return y;
}
inline U32x2 widen_e4m3(u32 bytes) {
  emulator::count(&emulator::Counters::conversions, 2);
  U32x2 y{};
  for (u32 i = 0; i < 4; ++i) {
    const e4m3 x{static_cast<u8>(bytes >> 8 * i)};
    y.word[i / 2] |= converted<DType::kFloat16>(to_float(x)) << 16 * (i % 2);
  }
  return y;
}

inline u32 pack_e4m3(float a, float b, float c, float d) {
  emulator::count(&emulator::Counters::conversions, 2);
  u32 bytes = 0;
  for (const float x : {d, c, b, a}) bytes = bytes << 8 | (x != x ? 0x7fu : to_e4m3(x).bits);
  return bytes;
}

inline float abs(float x) { return __builtin_fabsf(x); }

template <DType kDType>
inline F32x2 unpack(u32 packed) {
  const u16 low = static_cast<u16>(packed), high = static_cast<u16>(packed >> 16);
  if constexpr (kDType == DType::kBFloat16) return {{to_float(bf16{low}), to_float(bf16{high})}};
  return {{to_float(f16{low}), to_float(f16{high})}};
}

}  // namespace fulmen::ptx
