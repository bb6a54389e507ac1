// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Loops over columns in integers of 16 and 32 bits, which the compiler turns into vector
// instructions; rows with numbers beyond their range, infinities or NaN one column at a time.
#include "emulator/tensor_core.h"

#include <algorithm>
#include <cmath>

namespace fulmen::emulator {
namespace {

constexpr short kNoExponent = -1000;                         // of 0, which aligns nothing
constexpr short kNotFinite = 8000;                           // of infinity and NaN, times 0 too
constexpr short kLeastExponent = -100, kMostExponent = 120;  // that the short way takes

// Of a number's leading bit, at least `least`.
short exponent(float x, short least = -126) {
  const u32 field = __builtin_bit_cast(u32, x) >> 23 & 0xff;
  if (field == 0xff) return kNotFinite;
  const short exact = static_cast<short>(static_cast<i32>(field) - 127);
  return x == 0 ? kNoExponent : std::max(exact, least);
}

// To float32, towards zero, and of that to the bits of a mask.
float cut_off(double x, u32 mask) {
  const float nearest = static_cast<float>(x);
  const u32 bits = __builtin_bit_cast(u32, nearest);
  const bool beyond = std::fabs(static_cast<double>(nearest)) > std::fabs(x);
  return __builtin_bit_cast(float, (bits - (beyond ? 1u : 0u)) & mask);
}

}  // namespace

void TensorCoreMatrix::set(u32 k, u32 column, float x) {
  numbers_[k][column] = x;
  exponents_[k][column] = exponent(x, least_exponent_);
}

// The largest exponent of each column's terms; whether all of them can be aligned in 32 bits.
bool TensorCoreMatrix::is_ordinary(const float* a, const float* c,
                                   std::array<short, kMostColumns>& largest) const {
  for (u32 n = 0; n < columns_; ++n) largest[n] = exponent(c[n]);
  for (u32 k = 0; k < depth_; ++k) {
    const short left = exponent(a[k], least_exponent_);
    const short* const right = exponents_[k].data();
    for (u32 n = 0; n < columns_; ++n) {
      largest[n] = std::max<short>(largest[n], static_cast<short>(left + right[n]));
    }
  }
  u32 beyond = 0;
  for (u32 n = 0; n < columns_; ++n) {
    const bool has_terms = largest[n] > kNoExponent / 2;
    beyond += has_terms & (largest[n] < kLeastExponent || largest[n] > kMostExponent);
  }
  return beyond == 0;
}

float TensorCoreMatrix::exact_sum(const float* a, u32 column, float c) const {
  i32 largest = exponent(c);
  double plain = c;
  for (u32 k = 0; k < depth_; ++k) {
    plain += static_cast<double>(a[k]) * numbers_[k][column];
    largest = std::max(largest, exponent(a[k], least_exponent_) + exponents_[k][column]);
  }
  if (!std::isfinite(plain)) return static_cast<float>(plain);
  if (largest < kNoExponent / 2) return c;  // all are 0
  const auto aligned = [this, largest](double x) {
    return std::trunc(std::ldexp(x, kept_bits_ - largest));
  };
  double sum = aligned(c);
  for (u32 k = 0; k < depth_; ++k) {
    sum += aligned(static_cast<double>(a[k]) * numbers_[k][column]);
  }
  return cut_off(std::ldexp(sum, largest - kept_bits_), sum_mask_);
}

void TensorCoreMatrix::row(const float* a, const float* c, float* d) const {
  std::array<short, kMostColumns> largest;
  if (!is_ordinary(a, c, largest)) {
    for (u32 n = 0; n < columns_; ++n) d[n] = exact_sum(a, n, c[n]);
    return;
  }
  // Eight products below 2^27 and the accumulator fit an integer of 32 bits.
  std::array<float, kMostColumns> scale;
  std::array<i32, kMostColumns> first, second;
  for (u32 n = 0; n < columns_; ++n) {
    const i32 aligned = std::max<i32>(largest[n], kLeastExponent);
    scale[n] = __builtin_bit_cast(float, static_cast<u32>(127 + kept_bits_ - aligned) << 23);
    first[n] = static_cast<i32>(c[n] * scale[n]);
    second[n] = 0;
  }
  for (u32 k = 0; k < depth_ / 2; ++k) {
    const float* const low = numbers_[k].data();
    const float* const high = numbers_[k + depth_ / 2].data();
    const float left = a[k], right = a[k + depth_ / 2];
    for (u32 n = 0; n < columns_; ++n) {
      first[n] += static_cast<i32>(left * low[n] * scale[n]);
      second[n] += static_cast<i32>(right * high[n] * scale[n]);
    }
  }
  for (u32 n = 0; n < columns_; ++n) {
    d[n] = cut_off((static_cast<double>(first[n]) + second[n]) / static_cast<double>(scale[n]),
                   sum_mask_);
  }
}

}  // namespace fulmen::emulator
