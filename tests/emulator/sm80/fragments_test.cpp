// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Swizzled tiles and the fragments that warps read from them: every element at one address of its
// own, no two of eight neighbouring rows in the same banks, and products equal to sums by hand.
#include <gtest/gtest.h>

#include <set>

#include "emulator/launch.h"
#include "emulator/shared_memory.h"
#include "kernels/common/warp_mma_sm80.cuh"

namespace fulmen::test {
namespace {

template <i32 kDims>
void expect_clean_tile() {
  constexpr u32 kVectors = kDims / 8;
  const SwizzledTile<kDims, true> tile{1024};
  std::set<u32> places;
  for (u32 row = 0; row < 32; ++row) {
    for (u32 vector = 0; vector < kVectors; ++vector) places.insert(tile.address(row, vector));
  }
  EXPECT_EQ(places.size(), 32 * kVectors);
  EXPECT_EQ(*places.begin(), 1024u);
  EXPECT_EQ(*places.rbegin(), 1024 + (32 * kVectors - 1) * 16);
  for (u32 row = 0; row < 32; row += 8) {
    for (u32 vector = 0; vector < kVectors; ++vector) {
      std::set<u32> banks;
      for (u32 i = 0; i < 8; ++i) banks.insert(tile.address(row + i, vector) / 16 % 8);
      EXPECT_EQ(banks.size(), 8u) << "dims " << kDims << ", row " << row << ", vector " << vector;
    }
  }
}

TEST(SwizzledTile, RowsOfAnyLengthMeetAllBanks) {
  expect_clean_tile<16>();
  expect_clean_tile<32>();
  expect_clean_tile<48>();
  expect_clean_tile<64>();
  expect_clean_tile<80>();
  expect_clean_tile<96>();
  expect_clean_tile<128>();
  expect_clean_tile<192>();
  expect_clean_tile<256>();
}

template <i32 kDims, bool kSwizzled>
void expect_lane_rows() {
  const SwizzledTile<kDims, kSwizzled> tile{2048};
  for (u32 row = 0; row < 16; ++row) {
    for (u32 half = 0; half < 2; ++half) {
      const LaneRow<kDims, kSwizzled> lane(tile, row, half);
      for (u32 k = 0; k < kDims / 16; ++k) {
        EXPECT_EQ(lane.at(k, 16), tile.address(row + 16, 2 * k + half));
      }
    }
  }
}

TEST(LaneRow, FindsEveryUnit) {
  expect_lane_rows<16, true>();
  expect_lane_rows<32, true>();
  expect_lane_rows<80, true>();
  expect_lane_rows<96, true>();
  expect_lane_rows<128, true>();
  expect_lane_rows<80, false>();
}

constexpr i32 kDims = 48;
constexpr i32 kRows = 32;
constexpr i32 kColumns = 16;
constexpr ForwardSm80Config kConfig = [] {
  ForwardSm80Config config;
  config.dtype = DType::kFloat16;
  config.warps = 1;
  config.row_tiles = 2;
  return config;
}();

float element(i32 row, i32 column) { return static_cast<float>((row * 5 + column * 3) % 11 - 5); }

// One warp: S = A B^T, then O = S' B with S' = S rounded, each against its sum.
void multiply() {
  const SwizzledTile<kDims, true> A{emulator::kSharedBase};
  const SwizzledTile<kDims, true> B{emulator::kSharedBase + kRows * kDims * 2};
  const auto fill = [](const auto& tile, i32 rows, i32 seed) {
    for (i32 at = static_cast<i32>(lane_index()); at < rows * kDims; at += 32) {
      const u32 row = static_cast<u32>(at / kDims), d = static_cast<u32>(at % kDims);
      emulator::store_shared(tile.address(row, d / 8) + d % 8 * 2,
                             to_f16(element(at / kDims + seed, at % kDims)).bits);
    }
  };
  fill(A, kRows, 0);
  fill(B, kColumns, 7);
  ptx::warp_sync();

  float S[2][kColumns / 2];
  const auto rows = left_rows(A, 0);
  multiply_rows<kConfig, kDims>(
      S, [&](i32 k, i32 tile) { return ptx::ldmatrix_x4(rows.at(k, 16 * tile)); }, right_rows(B));
  u32 P[2][kColumns / 4];
  float O[2][kDims / 2] = {};
  const auto row_of = [](i32 t, i32 i) {
    return 16 * t + static_cast<i32>(lane_index() / 4) + 8 * (i / 2 % 2);
  };
  const auto column_of = [](i32 i) {
    return 8 * (i / 4) + 2 * static_cast<i32>(lane_index() % 4) + i % 2;
  };
  const auto dot = [](i32 row, i32 column) {
    float sum = 0;
    for (i32 d = 0; d < kDims; ++d) sum += element(row, d) * element(column + 7, d);
    return sum;
  };
  for (i32 t = 0; t < 2; ++t) {
    for (i32 i = 0; i < kColumns / 2; ++i) {
      ASSERT_EQ(S[t][i], dot(row_of(t, i), column_of(i))) << t << " " << i;
    }
    for (i32 i = 0; i < kColumns / 4; ++i) {
      P[t][i] = to_f16(S[t][2 * i]).bits | static_cast<u32>(to_f16(S[t][2 * i + 1]).bits) << 16;
    }
  }
  const auto left = [&](i32 k, i32 tile) {
    return ptx::U32x4{{P[tile][4 * k], P[tile][4 * k + 1], P[tile][4 * k + 2], P[tile][4 * k + 3]}};
  };
  multiply_columns<kConfig, kColumns, 1>(O, left, right_columns(B));
  for (i32 t = 0; t < 2; ++t) {
    for (i32 i = 0; i < kDims / 2; ++i) {
      float sum = 0;
      for (i32 j = 0; j < kColumns; ++j) {
        sum += dot(row_of(t, i), j) * element(j + 7, column_of(i));
      }
      ASSERT_EQ(O[t][i], sum) << t << " " << i;
    }
  }
}

TEST(WarpProducts, EqualSums) {
  emulator::launch({1, 32, (kRows + kColumns) * kDims * 2, 1}, [] { multiply(); });
}

}  // namespace
}  // namespace fulmen::test
