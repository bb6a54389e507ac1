// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Conversions of the 8-bit types: every pattern up, against the value that its bits have by the
// definition; and down from every midpoint between neighbours and from the floats beside it,
// against a search for the nearest of all values.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/base.cuh"

namespace fulmen::test {
namespace {

constexpr float kEndless = std::numeric_limits<float>::infinity();

// OFP8, table 1. `most`: the pattern of the largest number.
double decode_8_bits(u32 bits, int fraction_bits, u32 most) {
  const u32 magnitude = bits & 0x7fu;
  const double sign = bits & 0x80u ? -1.0 : 1.0;
  if (magnitude > most) return fraction_bits == 2 && magnitude == 0x7cu ? sign * HUGE_VAL : NAN;
  const int bias = (1 << (6 - fraction_bits)) - 1;
  const int exponent = static_cast<int>(magnitude >> fraction_bits);
  const double fraction = std::ldexp(magnitude & ((1u << fraction_bits) - 1u), -fraction_bits);
  return sign * std::ldexp(fraction + (exponent ? 1.0 : 0.0), (exponent ? exponent : 1) - bias);
}

struct E4M3 {
  static constexpr u32 kMost = 0x7e;
  static double value(u32 bits) { return decode_8_bits(bits, 3, kMost); }
  static float up(u32 bits) { return to_float(e4m3{static_cast<u8>(bits)}); }
  static u32 down(float x) { return to_e4m3(x).bits; }
};

struct E5M2 {
  static constexpr u32 kMost = 0x7b;
  static double value(u32 bits) { return decode_8_bits(bits, 2, kMost); }
  static float up(u32 bits) { return to_float(e5m2{static_cast<u8>(bits)}); }
  static u32 down(float x) { return to_e5m2(x).bits; }
};

struct Int8 {
  static constexpr u32 kMost = 127;
  static double value(u32 bits) { return bits < 128 ? bits : bits - 256.0; }
  static float up(u32 bits) { return to_float(int8{static_cast<signed char>(bits)}); }
  static u32 down(float x) { return static_cast<u8>(to_int8(x).value); }
};

template <class Type>
class QuantisedType : public testing::Test {};
using Types = testing::Types<E4M3, E5M2, Int8>;
TYPED_TEST_SUITE(QuantisedType, Types);

TYPED_TEST(QuantisedType, UpIsExact) {
  for (u32 bits = 0; bits < 256; ++bits) {
    const double expected = TypeParam::value(bits);
    const float got = TypeParam::up(bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      EXPECT_EQ(static_cast<double>(got), expected) << bits;
      EXPECT_EQ(std::signbit(got), std::signbit(expected)) << bits;
    }
  }
}

// Patterns up to kMost rise with their values; ties go to the even pattern, which is the even
// fraction.
TYPED_TEST(QuantisedType, DownIsToNearestTiesToEven) {
  for (u32 bits = 0; bits < TypeParam::kMost; ++bits) {
    const float low = TypeParam::up(bits), high = TypeParam::up(bits + 1);
    const float middle = low + (high - low) / 2;
    for (const float sign : {1.0f, -1.0f}) {
      const auto expect = [&](float x, u32 magnitude) {
        EXPECT_EQ(TypeParam::up(TypeParam::down(sign * x)), sign * TypeParam::up(magnitude)) << x;
      };
      expect(low, bits);
      expect(std::nextafter(low, kEndless), bits);
      expect(std::nextafter(middle, 0.0f), bits);
      expect(middle, bits % 2 == 0 ? bits : bits + 1);
      expect(std::nextafter(middle, kEndless), bits + 1);
      expect(std::nextafter(high, 0.0f), bits + 1);
    }
  }
}

TYPED_TEST(QuantisedType, SaturatesAndKeepsNaN) {
  const float most = TypeParam::up(TypeParam::kMost);
  for (const float x : {most, std::nextafter(most, kEndless), 2 * most, 1e30f, kEndless}) {
    EXPECT_EQ(TypeParam::up(TypeParam::down(x)), most) << x;
    EXPECT_EQ(TypeParam::up(TypeParam::down(-x)), -most) << x;
  }
  EXPECT_EQ(TypeParam::down(0.0f), 0u);
  EXPECT_EQ(TypeParam::up(TypeParam::down(std::numeric_limits<float>::denorm_min())), 0.0f);
  for (const u32 pattern : {0x7fc00000u, 0x7f800001u, 0xffffffffu}) {
    const float back = TypeParam::up(TypeParam::down(__builtin_bit_cast(float, pattern)));
    if (std::is_same_v<TypeParam, Int8>) {
      EXPECT_EQ(back, 0.0f);
    } else {
      EXPECT_TRUE(std::isnan(back)) << pattern;
    }
  }
}

TEST(QuantisedTypes, HaveTheRangesThatTheyAreKnownFor) {
  EXPECT_EQ(to_float(to_e4m3(kEndless)), 448.0f);
  EXPECT_EQ(to_float(e4m3{0x01}), 0x1p-9f);
  EXPECT_EQ(to_float(to_e5m2(kEndless)), 57344.0f);
  EXPECT_EQ(to_float(e5m2{0x01}), 0x1p-16f);
  EXPECT_EQ(to_float(e5m2{0xfc}), -kEndless);
  EXPECT_EQ(to_int8(-kEndless).value, -127);
}

}  // namespace
}  // namespace fulmen::test
