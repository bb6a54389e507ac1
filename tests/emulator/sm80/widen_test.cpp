// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every 8-bit number, widened to float16.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/common/array_access.cuh"
#include "kernels/common/fragments.cuh"

namespace fulmen::test {
namespace {

float half_of(u32 pair, i32 half) { return to_float(f16{static_cast<u16>(pair >> 16 * half)}); }

template <DType kFrom, BytePairs kPairs, bool kConverts>
void expect_every_number() {
  using Element = typename ElementOf<kFrom>::Type;
  constexpr bool kLoses = kFrom == DType::kFloat8E4M3 && !kConverts;
  for (u32 x = 0; x < 256; ++x) {
    const u32 bytes = x | (x ^ 0x80) << 8 | (255 - x) << 16 | (x / 2) << 24;
    const WidenedPairs pairs = widen_bytes<kFrom, kPairs, kConverts>(bytes);
    const u32 words[] = {pairs.first, pairs.second};
    bool is_finite = true;
    for (i32 i = 0; i < 4; ++i) {
      const float exact = widen(__builtin_bit_cast(Element, static_cast<u8>(bytes >> 8 * i)));
      is_finite = is_finite && std::isfinite(exact);
      const bool is_next = kPairs == BytePairs::kNeighbours;
      const float found = is_next ? half_of(words[i / 2], i % 2) : half_of(words[i % 2], i / 2);
      if (std::isfinite(exact) || !kLoses) {
        EXPECT_TRUE(found == exact || (found != found && exact != exact)) << x << ", " << i;
      }
    }
    EXPECT_TRUE(!kLoses || ((lost_e4m3(bytes) & kLostBits) == 0) == is_finite) << x;
  }
}

template <DType kFrom, bool kConverts>
void expect_every_order() {
  expect_every_number<kFrom, BytePairs::kNeighbours, kConverts>();
  expect_every_number<kFrom, BytePairs::kAlternate, kConverts>();
}

TEST(Widen, EveryNumber) {
  expect_every_order<DType::kFloat8E4M3, false>();
  expect_every_order<DType::kFloat8E4M3, true>();
  expect_every_order<DType::kFloat8E5M2, false>();
  expect_every_order<DType::kInt8, false>();
}

}  // namespace
}  // namespace fulmen::test
