// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// exp and tanh of a whole vector with the errors that attention needs: exp within 1.5 ulp and
// exactly 1 at 0, tanh within 3 ulp. NaN stays NaN, exp(-inf) = 0. Arguments of exp are at most 43
// (354): those of softmax are a score minus a maximum. exp(x) = 2^n exp(r), n = round(x / ln 2),
// |r| <= ln(2) / 2, a polynomial for exp(r).
#pragma once

#include "cpu/isa/vector.h"

namespace fulmen::cpu {
namespace {

// What is below kLowest becomes 0 without being computed: on Intel processors a result below the
// normal numbers takes 160 cycles, and a vector of a causal mask's corner always has hidden pairs.
// Adding kRound and taking it off rounds to an integer, which the sum's low bits also hold.
// ln 2 in two parts: n * kLn2High is exact.
template <class Real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float kLog2E = 0x1.715476p+0f;
  static constexpr float kRound = 0x1.8p23f;
  static constexpr float kLn2High = 0x1.63p-1f;
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr float kLowest = -104.0f;  // exp is below half the least number there is: 0
  static constexpr int kMantissaBits = 23;
  static constexpr unsigned kRaised = 0x5f800000;  // the bits of 2^64
  static constexpr float kLower = 0x1p-64f;
  // exp(r) = 1 + r + r^2 (c0 + c1 r + ...): minimax fit, relative error 3.1e-9 on |r| <= 0.347.
  static constexpr float kPolynomial[] = {4.999999341e-1f, 1.666652011e-1f, 4.166839422e-2f,
                                          8.368780515e-3f, 1.381446694e-3f};
};

template <>
struct ExpConstants<double> {
  static constexpr double kLog2E = 0x1.71547652b82fep+0;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42fefap-1;
  static constexpr double kLn2Low = 0x1.cf79abc9e3b3ap-40;
  static constexpr double kLowest = -745.2;
  static constexpr int kMantissaBits = 52;
  static constexpr unsigned long long kRaised = 0x5ff0000000000000;  // the bits of 2^512
  static constexpr double kLower = 0x1p-512;
  // 1 / n!: the rest of the series is below 2^-57 of the sum.
  static constexpr double kPolynomial[] = {1.0 / 2,          1.0 / 6,           1.0 / 24,
                                           1.0 / 120,        1.0 / 720,         1.0 / 5040,
                                           1.0 / 40320.0,    1.0 / 362880.0,    1.0 / 3628800.0,
                                           1.0 / 39916800.0, 1.0 / 479001600.0, 1.0 / 6227020800.0};
};

// p 2^n, rounded once, also below the normal numbers. The low bits of `rounded` hold n.
#if defined(__AVX512F__)
template <class Real>
[[gnu::always_inline]] inline Vector<Real> scaled_by_power(Vector<Real> p, Vector<Real> n,
                                                           Vector<Real>) {
  if constexpr (sizeof(Real) == sizeof(float)) {
    return _mm512_scalef_ps(p, n);
  } else {
    return _mm512_scalef_pd(p, n);
  }
}
#else
template <class Real>
[[gnu::always_inline]] inline Vector<Real> scaled_by_power(Vector<Real> p, Vector<Real>,
                                                           Vector<Real> rounded) {
  using Constants = ExpConstants<Real>;
  using Bits = typename VectorOf<Real>::Bits;
  // In two factors, so that results below the normal numbers are rounded, not lost.
  const Bits power = ((Bits)rounded << Constants::kMantissaBits) + Constants::kRaised;
  return p * (Vector<Real>)power * Constants::kLower;
}
#endif

template <class Real>
[[gnu::always_inline]] inline Vector<Real> exponential(Vector<Real> x) {
  using Constants = ExpConstants<Real>;
  constexpr int kTerms = sizeof(Constants::kPolynomial) / sizeof(Real);
  const Vector<Real> bounded = larger(x, broadcast(Constants::kLowest));  // NaN stays
  const Vector<Real> rounded =
      multiply_add(bounded, broadcast(Constants::kLog2E), broadcast(Constants::kRound));
  const Vector<Real> n = rounded - Constants::kRound;
  Vector<Real> r = multiply_add(n, broadcast(-Constants::kLn2High), bounded);
  r = multiply_add(n, broadcast(-Constants::kLn2Low), r);
  Vector<Real> p = broadcast(Constants::kPolynomial[kTerms - 1]);
#pragma GCC unroll 16
  for (int term = kTerms - 2; term >= 0; --term) {
    p = multiply_add(p, r, broadcast(Constants::kPolynomial[term]));
  }
  const Vector<Real> power = multiply_add(p * r, r, r) + Real(1);
  return scaled_by_power<Real>(x < Constants::kLowest ? Vector<Real>{} : power, n, rounded);
}

// The same by a table, two instructions less: n is a multiple of 1/16, whose sixteenths are the low
// bits of `rounded`, which a permutation takes as they are; |r| <= ln(2) / 32. Source: Tang, "Table
// driven implementation of the exponential function in IEEE floating-point arithmetic" (1989).
#if defined(__AVX512F__)
template <>
[[gnu::always_inline]] inline FloatVector exponential<float>(FloatVector x) {
  using Constants = ExpConstants<float>;
  constexpr float kRound = 0x1.8p19f;
  // 2^(i / 16)
  constexpr FloatVector kPowers = {1.0f,          1.0442737824f, 1.0905077327f, 1.1387886348f,
                                   1.1892071150f, 1.2418578121f, 1.2968395547f, 1.3542555469f,
                                   1.4142135624f, 1.4768261459f, 1.5422108254f, 1.6104903319f,
                                   1.6817928305f, 1.7562521604f, 1.8340080864f, 1.9152065614f};
  const __mmask16 is_seen =  // or NaN
      _mm512_cmp_ps_mask(x, broadcast(Constants::kLowest), _CMP_NLT_UQ);
  const FloatVector rounded = multiply_add(x, broadcast(Constants::kLog2E), broadcast(kRound));
  const FloatVector n = rounded - kRound;
  FloatVector r = multiply_add(n, broadcast(-Constants::kLn2High), x);
  r = multiply_add(n, broadcast(-Constants::kLn2Low), r);
  // exp(r) - 1 = r + r^2 (1/2 + r/6), relative error 1e-8 of exp(r)
  const FloatVector p = multiply_add(r, broadcast(1.0f / 6), broadcast(0.5f));
  const FloatVector above_1 = multiply_add(r * r, p, r);
  const FloatVector power = _mm512_permutexvar_ps((__m512i)rounded, kPowers);
  return _mm512_maskz_scalef_ps(is_seen, multiply_add(power, above_1, power), n);
}
#endif

// 2^t within 1.5e-7 of itself, exactly 1 at 0 and 0 at -inf. f = t - floor(t) is one instruction,
// and scalef takes floor(t) itself. For weights that become bf16: exponential loses nothing to the
// rounding of t, but takes 5 instructions more.
#if defined(__AVX512F__)
[[gnu::always_inline]] inline FloatVector power_of_2(FloatVector t) {
  constexpr int kFractionAboveFloor = 0x09;
  // 1 + f (c0 + c1 f + ...): minimax fit on [0, 1), relative error 8.3e-8.
  constexpr float kPolynomial[] = {0.6931512951850891f, 0.24016444385051727f, 0.05579991266131401f,
                                   0.009017029777169228f, 0.0018671301659196615f};
  const FloatVector f = _mm512_reduce_ps(t, kFractionAboveFloor);
  FloatVector p = broadcast(kPolynomial[4]);
#pragma GCC unroll 4
  for (int term = 3; term >= 0; --term) p = multiply_add(p, f, broadcast(kPolynomial[term]));
  return _mm512_scalef_ps(multiply_add(p, f, broadcast(1.0f)), t);
}
#endif

// tanh(x) = x + x^3 q(x^2) near 0, where 1 - 2 / (exp(2x) + 1) would cancel. q: minimax fit,
// relative error 2.6e-10 on |x| <= 0.65.
[[gnu::always_inline]] inline FloatVector hyperbolic_tangent(FloatVector x) {
  constexpr float kPolynomial[] = {-3.333332944e-1f, 1.333315218e-1f,  -5.393994246e-2f,
                                   2.166340264e-2f,  -8.085625484e-3f, 2.059580041e-3f};
  const FloatVector magnitude = x < 0.0f ? -x : x;
  const FloatVector bounded = magnitude > 20.0f ? broadcast(20.0f) : magnitude;
  const FloatVector z = bounded * bounded;
  FloatVector q = broadcast(kPolynomial[5]);
#pragma GCC unroll 8
  for (int term = 4; term >= 0; --term) q = multiply_add(q, z, broadcast(kPolynomial[term]));
  const FloatVector near_zero = multiply_add(q * z, bounded, bounded);
  const FloatVector far = 1.0f - 2.0f / (exponential<float>(bounded + bounded) + 1.0f);
  const FloatVector value = bounded < 0.6f ? near_zero : far;
  return x < 0.0f ? -value : value;
}

[[gnu::always_inline]] inline DoubleVector hyperbolic_tangent(DoubleVector x) {
  for (int lane = 0; lane < kWidth<double>; ++lane) x[lane] = __builtin_tanh(x[lane]);
  return x;
}

}  // namespace
}  // namespace fulmen::cpu
