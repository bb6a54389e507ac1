// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Conversions of f16 and bf16, exhaustively: every 16-bit pattern up and back, and down from every
// midpoint between neighbours and from the floats beside it, against a search for the nearest
// value.
#include "kernels/base.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/nearest.h"

namespace fulmen::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Half {
  static constexpr int kExponentBits = 5;
  static constexpr int kFractionBits = 10;
  static float up(u16 bits) { return to_float(f16{bits}); }
  static u16 down(float x) { return to_f16(x).bits; }
  static const NearestSearch& nearest() { return nearest_f16(); }
};

struct Brain {
  static constexpr int kExponentBits = 8;
  static constexpr int kFractionBits = 7;
  static float up(u16 bits) { return to_float(bf16{bits}); }
  static u16 down(float x) { return to_bf16(x).bits; }
  static const NearestSearch& nearest() { return nearest_bf16(); }
};

template <class Type>
class Conversion : public testing::Test {};
using Types = testing::Types<Half, Brain>;
TYPED_TEST_SUITE(Conversion, Types);

TYPED_TEST(Conversion, UpIsExact) {
  for (u32 pattern = 0; pattern < 65536; ++pattern) {
    const u16 bits = static_cast<u16>(pattern);
    const double expected = decode(bits, TypeParam::kExponentBits, TypeParam::kFractionBits);
    const float got = TypeParam::up(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << pattern;
    } else {
      ASSERT_EQ(static_cast<double>(got), expected) << pattern;
      ASSERT_EQ(std::signbit(got), (bits & 0x8000u) != 0) << pattern;
    }
  }
}

TYPED_TEST(Conversion, RoundTripKeepsEveryPattern) {
  for (u32 pattern = 0; pattern < 65536; ++pattern) {
    const u16 bits = static_cast<u16>(pattern);
    const u16 back = TypeParam::down(TypeParam::up(bits));
    if (std::isnan(TypeParam::up(bits))) {
      const u16 quiet = static_cast<u16>(1u << (TypeParam::kFractionBits - 1));
      ASSERT_TRUE(std::isnan(TypeParam::up(back))) << pattern;
      ASSERT_EQ(back, bits | quiet) << pattern;
    } else {
      ASSERT_EQ(back, bits) << pattern;
    }
  }
}

// Midpoints of neighbours are floats: one bit more than the 16-bit type, and float32 has it.
TYPED_TEST(Conversion, DownIsToNearestTiesToEven) {
  const NearestSearch& nearest = TypeParam::nearest();
  for (u16 bits = 0; bits < nearest.infinity(); ++bits) {
    const double low = nearest.value(bits);
    const double high = nearest.value(static_cast<u16>(bits + 1));
    const float middle = static_cast<float>(low + (high - low) / 2);
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInf),
                          std::nextafter(static_cast<float>(low), kInf)}) {
      ASSERT_EQ(TypeParam::down(x), nearest.round(static_cast<double>(x))) << x;
      ASSERT_EQ(TypeParam::down(-x), nearest.round(static_cast<double>(-x))) << -x;
    }
  }
}

TYPED_TEST(Conversion, EndsOfTheRange) {
  const u16 infinity = TypeParam::nearest().infinity();
  EXPECT_EQ(TypeParam::down(kInf), infinity);
  EXPECT_EQ(TypeParam::down(-kInf), infinity | 0x8000);
  EXPECT_EQ(TypeParam::down(std::numeric_limits<float>::max()), infinity);
  EXPECT_EQ(TypeParam::down(0.0f), 0);
  EXPECT_EQ(TypeParam::down(-0.0f), 0x8000);
  EXPECT_EQ(TypeParam::down(1.0f), TypeParam::nearest().round(1.0));
  EXPECT_EQ(TypeParam::down(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_TRUE(std::isnan(TypeParam::up(TypeParam::down(std::nanf("")))));
  // A NaN whose high bits are all zero must not become an infinity.
  const float low_nan = __builtin_bit_cast(float, 0x7f800001u);
  EXPECT_TRUE(std::isnan(TypeParam::up(TypeParam::down(low_nan))));
}

#if defined(__FLT16_MAX__)
#if defined(__aarch64__)
using CompilersHalf = __fp16;
#else
using CompilersHalf = _Float16;
#endif

TEST(HalfConversion, AgreesWithTheCompiler) {
  for (u32 pattern = 0; pattern < 65536; ++pattern) {
    const u16 bits = static_cast<u16>(pattern);
    const float theirs = static_cast<float>(__builtin_bit_cast(CompilersHalf, bits));
    const float ours = to_float(f16{bits});
    if (std::isnan(theirs)) {
      ASSERT_TRUE(std::isnan(ours)) << pattern;
    } else {
      ASSERT_EQ(ours, theirs) << pattern;
    }
  }
  for (u32 pattern = 0; pattern < 0x7f800000u; pattern += 9973) {  // a prime: all low bits occur
    const float x = __builtin_bit_cast(float, pattern);
    const u16 theirs = __builtin_bit_cast(u16, static_cast<CompilersHalf>(x));
    ASSERT_EQ(to_f16(x).bits, theirs) << x;
  }
}
#endif

TEST(FloorDiv, RoundsDown) {
  for (i64 a = -20; a <= 20; ++a) {
    for (i64 b = 1; b <= 7; ++b) {
      const double exact = static_cast<double>(a) / static_cast<double>(b);
      EXPECT_EQ(floor_div(a, b), static_cast<i64>(std::floor(exact))) << a << " / " << b;
      if (a >= 0) {
        EXPECT_EQ(ceil_div(a, b), static_cast<i64>(std::ceil(exact))) << a << " / " << b;
      }
    }
  }
}

TEST(MinMaxClamp, OrderTheirArguments) {
  EXPECT_EQ(min(2, 3), 2);
  EXPECT_EQ(max(2, 3), 3);
  EXPECT_EQ(clamp(5, 0, 3), 3);
  EXPECT_EQ(clamp(-5, 0, 3), 0);
  EXPECT_EQ(clamp(2, 0, 3), 2);
  // A NaN block maximum leaves the running maximum alone (softmax_state.cuh relies on it).
  EXPECT_EQ(max(1.0, std::nan("")), 1.0);
}

}  // namespace
}  // namespace fulmen::test
