// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernel tables, the one in use and the baseline: conversions bit by bit, products against sums
// in the same order, panels, and the softmax law of softmax_state.cuh lane by lane.

#include "cpu/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/libm_math.h"
#include "kernels/attention/softmax_state.cuh"

namespace fulmen::cpu {
namespace {

class KernelTable : public testing::TestWithParam<const Kernels<float>*> {};

TEST_P(KernelTable, WidensEvery16BitNumberExactly) {
  std::vector<u16> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<u16>(i);
  std::vector<float> wide(bits.size());
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    GetParam()->load_rows({bits.data(), dtype, 0, 1}, 1, 65536, wide.data(), 65536);
    for (size_t i = 0; i < bits.size(); ++i) {
      const float expected =
          dtype == DType::kFloat16 ? to_float(f16{bits[i]}) : to_float(bf16{bits[i]});
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(wide[i])) << i;
      } else {
        EXPECT_EQ(__builtin_bit_cast(u32, wide[i]), __builtin_bit_cast(u32, expected)) << i;
      }
    }
  }
}

TEST_P(KernelTable, WidensEvery8BitNumberExactly) {
  std::vector<u8> bits(256);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<u8>(i);
  std::vector<float> wide(bits.size());
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
    GetParam()->load_rows({bits.data(), dtype, 0, 1}, 1, 256, wide.data(), 256);
    for (size_t i = 0; i < bits.size(); ++i) {
      const double expected = load_real(&bits[i], dtype);
      EXPECT_TRUE(static_cast<double>(wide[i]) == expected ||
                  (std::isnan(wide[i]) && std::isnan(expected)))
          << name(dtype) << " " << i;
      EXPECT_EQ(std::signbit(wide[i]), std::signbit(expected)) << name(dtype) << " " << i;
    }
  }
}

TEST_P(KernelTable, MultipliesQuantisedRowsByTheirScales) {
  const std::vector<u8> bits{0x38, 0xb8, 0x40, 0x01, 0x7f, 0x30};  // 1, -1, 2, 2^-9, NaN, 0.5
  const float scales[] = {2, -8, 0.5f};
  std::vector<float> wide(2 * 64);
  GetParam()->load_rows(
      {bits.data(), DType::kFloat8E4M3, 3, 1, reinterpret_cast<const char*>(scales), 1}, 2, 3,
      wide.data(), 64);
  EXPECT_EQ(wide[0], 2);
  EXPECT_EQ(wide[1], -2);
  EXPECT_EQ(wide[2], 4);
  EXPECT_EQ(wide[64], -0x1p-6f);
  EXPECT_TRUE(std::isnan(wide[65]));
  EXPECT_EQ(wide[66], -4);
}

TEST_P(KernelTable, NarrowsLikeBase) {
  std::vector<float> wide;
  for (u32 i = 0; i < 65536; ++i) {  // every exponent, and fractions around every rounding
    for (const u32 low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      wide.push_back(__builtin_bit_cast(float, i << 16 | low));
    }
  }
  const i64 size = static_cast<i64>(wide.size());
  std::vector<u16> narrow(wide.size());
  const float one = 1;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    GetParam()->store_rows({wide.data(), 0}, 1, size, &one, 0, {narrow.data(), dtype, 0, 1});
    for (size_t i = 0; i < wide.size(); ++i) {
      const u16 expected = dtype == DType::kFloat16 ? to_f16(wide[i]).bits : to_bf16(wide[i]).bits;
      if (std::isnan(wide[i])) {
        const float back =
            dtype == DType::kFloat16 ? to_float(f16{narrow[i]}) : to_float(bf16{narrow[i]});
        EXPECT_TRUE(std::isnan(back)) << i;
      } else {
        EXPECT_EQ(narrow[i], expected) << wide[i];
      }
    }
  }
}

TEST_P(KernelTable, LoadsStridedRowsAndClearsThePadding) {
  std::vector<float> from(400);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i);
  for (i64 dims = 0; dims <= 40; ++dims) {
    std::vector<float> to(3 * 64, -1);
    GetParam()->load_rows({from.data(), DType::kFloat32, 7, 3}, 3, dims, to.data(), 64);
    const i64 padded = ceil_div(dims, GetParam()->lanes) * GetParam()->lanes;
    for (i64 row = 0; row < 3; ++row) {
      for (i64 d = 0; d < 64; ++d) {
        const float expected = d < dims     ? static_cast<float>(row * 7 + d * 3)
                               : d < padded ? 0.0f
                                            : -1.0f;
        EXPECT_EQ(to[static_cast<size_t>(row * 64 + d)], expected);
      }
    }
  }
}

TEST_P(KernelTable, MultipliesAnyNumberOfRowsInTheSameOrder) {
  const i64 lanes = GetParam()->lanes;
  constexpr i64 kRows = 30;
  constexpr i64 kDepth = 9;
  std::vector<float> A(kRows * kDepth), B(static_cast<size_t>(kDepth * lanes));
  for (size_t i = 0; i < A.size(); ++i) A[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < B.size(); ++i) B[i] = std::cos(static_cast<float>(i));
  std::vector<float> all(static_cast<size_t>(kRows * lanes), 0.5f);
  const auto product = [&](i64 first, i64 rows, float* C) {
    Product<float> p{};
    p.rows = rows;
    p.columns = lanes;
    p.depth = kDepth;
    p.A = A.data() + first * kDepth;
    p.A_row_stride = kDepth;
    p.A_depth_stride = 1;
    p.B = B.data();
    p.B_depth_stride = lanes;
    p.C = C;
    p.C_row_stride = lanes;
    p.accumulates = true;
    GetParam()->multiply(p);
  };
  product(0, kRows, all.data());
  for (i64 row = 0; row < kRows; ++row) {
    for (i64 n = 0; n < lanes; ++n) {
      double sum = 0.5;
      for (i64 k = 0; k < kDepth; ++k) {
        sum += static_cast<double>(A[static_cast<size_t>(row * kDepth + k)]) *
               static_cast<double>(B[static_cast<size_t>(k * lanes + n)]);
      }
      EXPECT_NEAR(all[static_cast<size_t>(row * lanes + n)], sum, 1e-5);
    }
  }
  for (i64 rows = 1; rows < kRows; ++rows) {  // the bits of a row do not depend on its neighbours
    std::vector<float> part(static_cast<size_t>(rows * lanes), 0.5f);
    product(kRows - rows, rows, part.data());
    EXPECT_TRUE(std::equal(part.begin(), part.end(), all.end() - rows * lanes)) << rows;
  }
}

TEST_P(KernelTable, FindsTheOneNumberThatIsNotFinite) {
  for (i64 dims = 1; dims <= 40; ++dims) {
    std::vector<float> rows(static_cast<size_t>(3 * dims), 1e38f);
    EXPECT_TRUE(GetParam()->all_finite({rows.data(), dims}, 3, dims));
    for (float& x : rows) {
      for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
        x = bad;
        EXPECT_FALSE(GetParam()->all_finite({rows.data(), dims}, 3, dims));
      }
      x = -1e38f;
    }
  }
}

TEST_P(KernelTable, SoftmaxFollowsTheStateOfOneRow) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr i64 kKeys = 3;
  const float blocks[][kKeys] = {{-kInf, -kInf, -kInf}, {1, 2, -3}, {5, -kInf, 0}, {4, 4, 4}};
  const i64 lanes = GetParam()->lanes;
  std::vector<float> row_max(static_cast<size_t>(lanes), -kInf), row_sum(row_max.size(), 0.0f),
      rescale(row_max.size()), scores(static_cast<size_t>(kKeys * lanes)), none(scores.size());
  SoftmaxState<LibmMath<float>> state;
  for (const auto& block : blocks) {
    for (i64 j = 0; j < kKeys; ++j) {
      std::fill_n(scores.begin() + j * lanes, lanes, block[j] == -kInf ? kInf : block[j]);
      std::fill_n(none.begin() + j * lanes, lanes, block[j] == -kInf ? -kInf : 0.0f);  // hidden
    }
    GetParam()->softmax({scores.data(),
                         lanes,
                         kKeys,
                         lanes,
                         {{1, 0}, none.data(), nullptr},
                         row_max.data(),
                         row_sum.data(),
                         rescale.data()});
    const float expected_rescale = state.update(max(max(block[0], block[1]), block[2]));
    for (i64 j = 0; j < kKeys; ++j) state.row_sum += state.weight(block[j]);
    for (const size_t lane : {size_t{0}, row_max.size() - 1}) {
      EXPECT_EQ(row_max[lane], state.row_max);
      EXPECT_NEAR(row_sum[lane], state.row_sum, 1e-6);
      EXPECT_NEAR(rescale[lane], expected_rescale, 1e-6);
      for (i64 j = 0; j < kKeys; ++j) {
        EXPECT_NEAR(scores[static_cast<size_t>(j * lanes) + lane], state.weight(block[j]), 1e-6);
      }
    }
  }
}

// Wherever it is; NaN is none, and its weight NaN.
TEST_P(KernelTable, SoftmaxFindsTheLargestScore) {
  const i64 lanes = GetParam()->lanes;
  const size_t width = static_cast<size_t>(lanes);
  for (i64 keys = 1; keys <= 11; ++keys) {
    for (i64 largest = 0; largest < keys; ++largest) {
      const i64 odd = (largest + 1) % keys;
      std::vector<float> scores(static_cast<size_t>(keys * lanes), -2.0f), rescale(width),
          row_max(width, -std::numeric_limits<float>::infinity()), row_sum(width, 0.0f);
      const auto row = [&](i64 key) { return scores.begin() + key * lanes; };
      std::fill_n(row(odd), lanes, std::nanf(""));
      std::fill_n(row(largest), lanes, 3.0f);
      GetParam()->softmax({.scores = scores.data(),
                           .stride = lanes,
                           .keys = keys,
                           .rows = lanes,
                           .terms = {{0.5f, 0}, nullptr, nullptr},
                           .row_max = row_max.data(),
                           .row_sum = row_sum.data(),
                           .rescale = rescale.data()});
      for (size_t lane = 0; lane < width; ++lane) {
        ASSERT_EQ(row_max[lane], 1.5f) << keys << " keys, " << largest;
        ASSERT_EQ(row(largest)[static_cast<i64>(lane)], 1.0f);
        ASSERT_TRUE(odd == largest || std::isnan(row(odd)[static_cast<i64>(lane)]));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, KernelTable,
                         testing::Values(&kTablesBaseline.float32, &kernels<float>()),
                         [](const auto& table) {
                           return std::string(table.index == 0 ? "baseline_" : "in_use_") +
                                  table.param->isa;
                         });

}  // namespace
}  // namespace fulmen::cpu
