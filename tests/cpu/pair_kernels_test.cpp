// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels on pairs of bf16 numbers: where each element goes, which blocks are ordinary,
// products against sums in float64, and that softmax writes the rounded weights of its usual law.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

class PairKernelTable : public testing::Test {
 protected:
  void SetUp() override {
    if (!pairs_) GTEST_SKIP() << "the instruction set in use has no products of bf16";
  }

  const PairKernels* pairs_ = pair_kernels(DType::kBFloat16);
  const Kernels<float>& kernels_ = kernels<float>();
};

std::vector<u16> numbered(i64 count) {
  std::vector<u16> bits(static_cast<size_t>(count));
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = to_bf16(std::cos(static_cast<float>(i))).bits;
  return bits;
}

Pair pair_of(u16 low, u16 high) { return static_cast<Pair>(low) | static_cast<Pair>(high) << 16; }

TEST_F(PairKernelTable, PackAnyStridesAndFillWithZeros) {
  constexpr i64 kRows = 5, kStride = 128;
  const std::vector<u16> bits = numbered(4000);
  for (const i64 dim_stride : {1, 3}) {
    for (const i64 dims : {1, 2, 31, 32, 33, 63, 64}) {
      const Source source{bits.data(), DType::kBFloat16, 200, dim_stride};
      const auto at = [&](i64 row, i64 d) {
        const size_t i = static_cast<size_t>(row * 200 + d * dim_stride);
        return row < kRows && d < dims ? bits[i] : u16{0};
      };
      std::vector<Pair> columns(kRows * kStride, ~0u), rows(kRows * kStride, ~0u);
      EXPECT_TRUE(pairs_->pack_columns(source, kRows, dims, columns.data(), kStride));
      EXPECT_TRUE(pairs_->pack_rows(source, kRows, dims, rows.data(), kStride));
      const i64 padded = ceil_div(dims, kernels_.lanes) * kernels_.lanes;
      for (i64 row = 0; row < kRows; ++row) {
        for (i64 d = 0; d < padded; d += 2) {
          EXPECT_EQ(columns[static_cast<size_t>(row * kStride + d / 2)],
                    pair_of(at(row, d), at(row, d + 1)));
        }
        for (i64 d = 0; d < padded; ++d) {
          EXPECT_EQ(rows[static_cast<size_t>(row / 2 * kStride + d)],
                    pair_of(at(row / 2 * 2, d), at(row / 2 * 2 + 1, d)));
        }
      }
    }
  }
}

TEST_F(PairKernelTable, KnowOrdinaryNumbers) {
  std::vector<u16> row(64, 0);
  std::vector<Pair> out(64);
  for (u32 bits = 0; bits < 65536; ++bits) {
    row[bits % 64] = static_cast<u16>(bits);
    const float magnitude = std::fabs(to_float(bf16{static_cast<u16>(bits)}));
    const bool expected = magnitude == 0 || (magnitude >= 0x1p-64f && magnitude <= 0x1p64f);
    const Source source{row.data(), DType::kBFloat16, 64, 1};
    EXPECT_EQ(pairs_->pack_columns(source, 1, 64, out.data(), 32), expected) << bits;
    EXPECT_EQ(pairs_->pack_rows(source, 1, 64, out.data(), 64), expected) << bits;
    row[bits % 64] = 0;
  }
}

TEST_F(PairKernelTable, MultiplyTwoNumbersAStep) {
  const i64 lanes = kernels_.lanes;
  constexpr i64 kRows = 17, kDepth = 9;
  const std::vector<u16> a = numbered(kRows * kDepth * 2), b = numbered(kDepth * lanes * 2);
  std::vector<Pair> A(kRows * kDepth), B(static_cast<size_t>(kDepth * lanes));
  for (size_t i = 0; i < A.size(); ++i) A[i] = pair_of(a[2 * i], a[2 * i + 1]);
  for (size_t i = 0; i < B.size(); ++i) B[i] = pair_of(b[2 * i], b[2 * i + 1]);
  std::vector<float> C(static_cast<size_t>(kRows * lanes), 0.5f);
  Product<float, Pair> product{};
  product.rows = kRows;
  product.columns = lanes;
  product.depth = kDepth;
  product.A = A.data();
  product.A_row_stride = kDepth;
  product.A_depth_stride = 1;
  product.B = B.data();
  product.B_depth_stride = lanes;
  product.C = C.data();
  product.C_row_stride = lanes;
  product.accumulates = true;
  pairs_->multiply(product);
  const auto value = [](const std::vector<u16>& bits, i64 i) {
    return static_cast<double>(to_float(bf16{bits[static_cast<size_t>(i)]}));
  };
  for (i64 row = 0; row < kRows; ++row) {
    for (i64 n = 0; n < lanes; ++n) {
      double sum = 0.5;
      for (i64 k = 0; k < 2 * kDepth; ++k) {
        sum += value(a, row * 2 * kDepth + k) * value(b, (k / 2 * lanes + n) * 2 + k % 2);
      }
      EXPECT_NEAR(C[static_cast<size_t>(row * lanes + n)], sum, 1e-5);
    }
  }
}

// Its exponential is within 2.1e-7 of itself, and a score within a rounding.
constexpr float kCoarse = 5e-7f;

void expect_rounded(u32 bits, float weight) {
  if (bits == to_bf16(weight * (1 - kCoarse)).bits) return;
  EXPECT_EQ(bits, to_bf16(weight * (1 + kCoarse)).bits) << weight;
}

TEST_F(PairKernelTable, SoftmaxWritesTheRoundedWeights) {
  const i64 lanes = kernels_.lanes;
  const size_t size = static_cast<size_t>(lanes);
  for (const i64 keys : {1, 2, 7, 8}) {
    std::vector<float> scores(static_cast<size_t>(keys) * size), row_max(2 * size, -1.0f);
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = 3 * std::sin(static_cast<float>(i));
    scores[size - 1] = -HUGE_VALF;
    std::vector<float> weights = scores, row_sum(2 * size, 1.0f), rescale(2 * size);
    const auto block = [&](float* in, size_t state) {
      SoftmaxBlock<float> softmax{};
      softmax.scores = in;
      softmax.stride = lanes;
      softmax.keys = keys;
      softmax.rows = lanes;
      softmax.terms.map = {0.5f, 0.0f};
      softmax.row_max = row_max.data() + state;
      softmax.row_sum = row_sum.data() + state;
      softmax.rescale = rescale.data() + state;
      return softmax;
    };
    kernels_.softmax(block(weights.data(), 0));
    pairs_->softmax(block(scores.data(), size));
    for (size_t lane = 0; lane < size; ++lane) {
      EXPECT_EQ(row_max[lane], row_max[size + lane]);
      EXPECT_NEAR(row_sum[lane], row_sum[size + lane], kCoarse * row_sum[lane]);
      EXPECT_EQ(rescale[lane], rescale[size + lane]);
      for (size_t j = 0; j < static_cast<size_t>(keys); j += 2) {
        const bool is_last = j + 1 == static_cast<size_t>(keys);
        const Pair pair = __builtin_bit_cast(Pair, scores[j / 2 * size + lane]);
        expect_rounded(pair & 0xffffu, weights[j * size + lane]);
        expect_rounded(pair >> 16, is_last ? 0.0f : weights[(j + 1) * size + lane]);
      }
    }
  }
}

}  // namespace
}  // namespace fulmen::cpu
