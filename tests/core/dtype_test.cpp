// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Loads and stores of single elements: float64 goes into 16 bits with one rounding, not two.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/tensor.h"
#include "support/nearest.h"

namespace fulmen::test {
namespace {

u16 stored(DType dtype, double value) {
  char memory[8] = {};
  store_real(memory, dtype, value);
  return load_bytes<u16>(memory);
}

void expect_nearest(DType dtype, const NearestSearch& nearest, double x) {
  ASSERT_EQ(stored(dtype, x), nearest.round(x)) << name(dtype) << " of " << std::hexfloat << x;
  ASSERT_EQ(stored(dtype, -x), nearest.round(-x)) << name(dtype) << " of -" << std::hexfloat << x;
}

class StoreReal : public testing::TestWithParam<DType> {
 protected:
  const NearestSearch& nearest() const {
    return GetParam() == DType::kFloat16 ? nearest_f16() : nearest_bf16();
  }
};

// Midpoints, and doubles so near to them that float32 rounds them onto the midpoint.
TEST_P(StoreReal, RoundsOnceAtEveryMidpoint) {
  for (u16 bits = 0; bits < nearest().infinity(); ++bits) {
    const double low = nearest().value(bits);
    const double middle = low + (nearest().value(static_cast<u16>(bits + 1)) - low) / 2;
    for (const double x : {middle, std::nextafter(middle, 0.0), std::nextafter(middle, HUGE_VAL),
                           middle * (1 + 1e-10), middle * (1 - 1e-10), low}) {
      expect_nearest(GetParam(), nearest(), x);
    }
  }
}

TEST_P(StoreReal, RoundsOnceAtRandom) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(-30, 18);
  std::uniform_real_distribution<double> significand(1, 2);
  for (int trial = 0; trial < 100000; ++trial) {
    expect_nearest(GetParam(), nearest(), std::exp2(exponent(random)) * significand(random));
  }
}

TEST_P(StoreReal, EndsOfTheRange) {
  for (const double x : {0.0, 1e-300, 1e300, std::numeric_limits<double>::denorm_min(), HUGE_VAL}) {
    expect_nearest(GetParam(), nearest(), x);
  }
  char memory[8] = {};
  store_real(memory, GetParam(), std::nan(""));
  EXPECT_TRUE(std::isnan(load_real(memory, GetParam())));
}

INSTANTIATE_TEST_SUITE_P(Narrow, StoreReal, testing::Values(DType::kFloat16, DType::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(LoadReal, ReadsBackWhatWasStored) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                            DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
    const double value = dtype == DType::kInt8 ? -3.0 : -1.5;
    alignas(8) char memory[16] = {};
    char* const unaligned = memory + 1;
    store_real(unaligned, dtype, value);
    EXPECT_EQ(load_real(unaligned, dtype), value) << name(dtype);
    EXPECT_EQ(unaligned[size_bytes(dtype)], 0) << name(dtype);
  }
}

TEST(RoundUp, IsTheNextFloatAtOrAbove) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal(0, 1e4);
  for (int trial = 0; trial < 10000; ++trial) {
    const double x = normal(random);
    const double up = round_up(x, DType::kFloat32);
    ASSERT_EQ(up, static_cast<double>(static_cast<float>(up)));
    ASSERT_GE(up, x);
    ASSERT_LT(static_cast<double>(std::nextafter(static_cast<float>(up), -HUGE_VALF)), x);
    ASSERT_EQ(round_up(x, DType::kFloat64), x);
  }
  for (const double x : {0.0, -2.5, -HUGE_VAL, HUGE_VAL}) {
    EXPECT_EQ(round_up(x, DType::kFloat32), x);
  }
  EXPECT_TRUE(std::isnan(round_up(std::nan(""), DType::kFloat32)));
}

TEST(LoadIndex, ReadsBothWidths) {
  const i32 narrow = -7;
  const i64 wide = i64{1} << 40;
  EXPECT_EQ(load_index(&narrow, DType::kInt32), -7);
  EXPECT_EQ(load_index(&wide, DType::kInt64), i64{1} << 40);
}

TEST(DTypes, AreWhatTheyAreCalled) {
  EXPECT_STREQ(name(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(size_bytes(DType::kBFloat16), 2);
  EXPECT_EQ(size_bytes(DType::kBool), 1);
  EXPECT_EQ(accumulator(DType::kFloat64), DType::kFloat64);
  EXPECT_EQ(accumulator(DType::kFloat16), DType::kFloat32);
  EXPECT_TRUE(is_float(DType::kFloat16));
  EXPECT_FALSE(is_float(DType::kBool));
  EXPECT_TRUE(is_index(DType::kInt64));
  EXPECT_FALSE(is_index(DType::kFloat64));
  EXPECT_STREQ(name(DType::kFloat8E4M3), "float8_e4m3fn");
  EXPECT_TRUE(is_quantised(DType::kInt8));
  EXPECT_FALSE(is_index(DType::kInt8));
  EXPECT_FALSE(is_float(DType::kFloat8E5M2));
}

}  // namespace
}  // namespace fulmen::test
