// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic that C++ cannot name: approximate exp2, log2 and reciprocal, maximum, fused
// multiply-add, packing of two floats into one register of 16-bit numbers, for 16-bit kernels; and
// exp, log, tanh, sqrt to full precision, for float32 and float64 ones.
#pragma once

#include "kernels/base.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

// prmt: byte i of the result is byte number (selector >> 4 i & 7) of a, then b.
inline u32 permute(u32 a, u32 b, u32 selector) {
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
}

// cvt.rn.f16x2.e4m3x2, since Ada: bytes 0 and 1, bytes 2 and 3, exactly; NaN too.
inline U32x2 widen_e4m3(u32 bytes) {
  U32x2 y;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
      "cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(y.word[0]), "=r"(y.word[1])
      : "r"(bytes));
  return y;
}

// cvt.rn.satfinite.e4m3x2.f32: four numbers as bytes, the first one lowest; up to 448, NaN 0x7f.
inline u32 pack_e4m3(float a, float b, float c, float d) {
  u32 bytes;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
}

// ex2.approx.ftz: 2^x, relative error 2^-22; 2^-inf = 0; results below 2^-126 become 0.
inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same, kept between the waits and barriers where it is written: a plain exp2 is moved past
// them, away from the products that it should hide under.
inline float exp2_volatile(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz: absolute error 2^-22 near 1, else relative; log2(0) = -inf.
inline float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz: 1 / x, error 1 ulp.
inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max: the larger number; NaN only when both are NaN.
inline float max(float a, float b) {
  float y;
  asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// abs: |x|
inline float abs(float x) {
  float y;
  asm("abs.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// fma.rn: a b + c, rounded once.
inline float fma(float a, float b, float c) {
  float y;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}

// mul.rn: a b, never contracted into a multiply-add.
inline float mul(float a, float b) {
  float y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// cvt.rn.bf16x2 / f16x2: `low` in the lower half of the register.
template <DType kDType>
inline u32 pack(float low, float high) {
  u32 packed;
  if constexpr (kDType == DType::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The reverse: two numbers of 16 bits as floats, the lower first.
template <DType kDType>
inline F32x2 unpack(u32 packed) {
  F32x2 x;
  if constexpr (kDType == DType::kBFloat16) {
    x.word[0] = __builtin_bit_cast(float, packed << 16);
    x.word[1] = __builtin_bit_cast(float, packed & 0xffff0000u);
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; "
        "cvt.f32.f16 %1, high;}"
        : "=f"(x.word[0]), "=f"(x.word[1])
        : "r"(packed));
  }
  return x;
}

// mul.rn.f16x2 / fma.rn.bf16x2, add.rn.f16x2 / fma.rn.bf16x2: both halves of a register, subnormal
// numbers kept.
template <DType kDType>
inline u32 multiply_pairs(u32 a, u32 b) {
  u32 y;
  if constexpr (kDType == DType::kBFloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}
template <DType kDType>
inline u32 add_pairs(u32 a, u32 b) {
  u32 y;
  if constexpr (kDType == DType::kBFloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(0x3f803f80u), "r"(b));
  } else {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

// The C library's functions, which NVRTC knows without a header (CUDA C++ Programming Guide,
// mathematical functions: at most 2 ulp here).
inline float accurate_exp(float x) { return ::expf(x); }
inline double accurate_exp(double x) { return ::exp(x); }
inline float accurate_log(float x) { return ::logf(x); }
inline double accurate_log(double x) { return ::log(x); }
inline float accurate_tanh(float x) { return ::tanhf(x); }
inline double accurate_tanh(double x) { return ::tanh(x); }
inline float accurate_sqrt(float x) { return ::sqrtf(x); }
inline double accurate_sqrt(double x) { return ::sqrt(x); }
inline float magnitude(float x) { return ::fabsf(x); }
inline double magnitude(double x) { return ::fabs(x); }

// max.f32, max.f64: NaN only when both are.
inline float larger(float a, float b) { return ::fmaxf(a, b); }
inline double larger(double a, double b) { return ::fmax(a, b); }

// mul.rn: never contracted into a multiply-add.
inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

}  // namespace fulmen::ptx
