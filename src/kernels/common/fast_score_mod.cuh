// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The function that modifies scores, and its slope, as the tensor-core kernels compute them: a tanh
// that is right relatively, since a cap of 10000 multiplies whatever error it has near 0, where the
// scores are. attention/score_mod.cuh defines the function.
#pragma once

#include "kernels/attention/score_mod.cuh"
#include "kernels/ptx/math.cuh"

namespace fulmen {

// tanh(y) from 2 y log2(e). 1 - 2 / (exp(2 y) + 1) would cancel near 0: there, up to 0.6, a
// polynomial (least squares, relative error 9e-8).
inline float tanh_log2(float twice) {
  const float y = twice * (0.5f * kLn2<float>);
  const float square = y * y;
  float tail = ptx::fma(square, 0.0156078190f, -0.0522077642f);
  tail = ptx::fma(square, tail, 0.1331300884f);
  tail = ptx::fma(square, tail, -0.3333258927f);
  const float small = ptx::fma(y * square, tail, y);
  const float large = ptx::fma(-2.f, ptx::reciprocal(ptx::exp2(twice) + 1.f), 1.f);
  return square < 0.36f ? small : large;
}

// The Math of a user's expression on tensor cores: float32 by approximate instructions.
template <class T>
struct FastMath {
  using Real = T;
  static float exp(float x) { return ptx::exp2(x * kLog2E<float>); }
  static float log(float x) { return ptx::log2(x) * kLn2<float>; }
  static float tanh(float x) { return tanh_log2(x * (2 * kLog2E<float>)); }
  static float sqrt(float x) { return ptx::accurate_sqrt(x); }
  static float abs(float x) { return ptx::abs(x); }
  static float quotient(float a, float b) { return a * ptx::reciprocal(b); }
};

// The modified score, in log2, of a dot product.
inline float modified_log2(const ScoreMod& mod, float dot) {
  return tanh_log2(dot * mod.inner) * mod.outer;
}
// The same; slope is d score / d (scale dot).
inline float modified_log2(const ScoreMod& mod, float dot, float& slope) {
  const float t = tanh_log2(dot * mod.inner);
  slope = 1 - t * t;
  return t * mod.outer;
}
inline float slope_of(const ScoreMod& mod, float dot) {
  const float t = tanh_log2(dot * mod.inner);
  return 1 - t * t;
}

// linear tanh(inner x) / (inner x) for |inner x| <= 1/4, |x| <= 2^60 (minimax, relative error
// 5e-7).
struct TanhSlope {
  float linear, cubic, quintic;

  TanhSlope(float inner, float linear_) : linear(linear_) {
    const float square = inner * inner;
    cubic = -0.3332457f * linear * square;
    quintic = 0.12876397f * linear * square * square;
  }
  float operator()(float x) const {
    const float square = x * x;
    return ptx::fma(square, ptx::fma(square, quintic, cubic), linear);
  }
};

// outer tanh(inner x) for |inner x| <= 1/2, |x| <= 2^60: half the instructions (minimax, relative
// error 7e-7).
struct TanhNearZero {
  float linear, cubic, quintic, septic;

  TanhNearZero(float inner, float outer) : linear(inner * outer) {
    const float square = inner * inner;
    cubic = -0.33328159f * linear * square;
    quintic = 0.13205360f * linear * square * square;
    septic = -0.04475064f * linear * square * square * square;
  }
  float operator()(float x) const {
    const float square = x * x;
    float factor = ptx::fma(square, septic, quintic);
    factor = ptx::fma(square, factor, cubic);
    return x * ptx::fma(square, factor, linear);
  }
};

}  // namespace fulmen
