// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// exp, log and tanh to full precision: the C library's functions, which NVRTC knows without a
// header (CUDA C++ Programming Guide, mathematical functions: at most 2 ulp here), and two
// operations that must not be rewritten. Used by float32 and float64 kernels.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

inline float accurate_exp(float x) { return ::expf(x); }
inline double accurate_exp(double x) { return ::exp(x); }
inline float accurate_log(float x) { return ::logf(x); }
inline double accurate_log(double x) { return ::log(x); }
inline float accurate_tanh(float x) { return ::tanhf(x); }
inline double accurate_tanh(double x) { return ::tanh(x); }

// max.f32, max.f64: NaN only when both are.
inline float larger(float a, float b) { return ::fmaxf(a, b); }
inline double larger(double a, double b) { return ::fmax(a, b); }

// mul.rn: never contracted into a multiply-add.
inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

}  // namespace fulmen::ptx
