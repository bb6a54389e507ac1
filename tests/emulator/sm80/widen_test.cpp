// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every 8-bit number, widened to both 16-bit types.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/common/array_access.cuh"
#include "kernels/common/fragments.cuh"

namespace fulmen::test {
namespace {

float half_of(u32 pair, i32 half, DType dtype) {
  const u16 bits = static_cast<u16>(pair >> 16 * half);
  return dtype == DType::kFloat16 ? to_float(f16{bits}) : to_float(bf16{bits});
}

template <DType kFrom, DType kTo>
void expect_every_number() {
  using Element = typename ElementOf<kFrom>::Type;
  for (u32 x = 0; x < 256; ++x) {
    const u32 bytes = x | (x ^ 0x80) << 8 | (255 - x) << 16 | (x / 2) << 24;
    const WidenedPairs pairs = widen_bytes<kFrom, kTo>(bytes);
    bool is_finite = true;
    for (i32 i = 0; i < 4; ++i) {
      const float exact = widen(__builtin_bit_cast(Element, static_cast<u8>(bytes >> 8 * i)));
      is_finite = is_finite && std::isfinite(exact);
      const float found = half_of(i % 2 == 0 ? pairs.even : pairs.odd, i / 2, kTo);
      if (std::isfinite(exact) || !may_lose<kFrom, kTo>()) {
        EXPECT_TRUE(found == exact || (found != found && exact != exact)) << x << ", " << i;
      }
    }
    if (may_lose<kFrom, kTo>()) {
      EXPECT_EQ((lost<kFrom, kTo>(bytes) & kLostBits) == 0, is_finite) << x;
    }
  }
}

TEST(Widen, EveryNumber) {
  expect_every_number<DType::kFloat8E4M3, DType::kFloat16>();
  expect_every_number<DType::kFloat8E4M3, DType::kBFloat16>();
  expect_every_number<DType::kFloat8E5M2, DType::kFloat16>();
  expect_every_number<DType::kFloat8E5M2, DType::kBFloat16>();
  expect_every_number<DType::kInt8, DType::kFloat16>();
  expect_every_number<DType::kInt8, DType::kBFloat16>();
}

}  // namespace
}  // namespace fulmen::test
