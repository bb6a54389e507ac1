// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Numbers of f16 as sums of two of bf16, beside emulated tiles everywhere and in the instruction
// set in use where it has them: every number exactly, what is no number noticed, weights to 16
// digits.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cpu/kernels.h"
#if defined(__x86_64__)
#include "emulated_tiles.h"
#endif

namespace fulmen::cpu {
namespace {

float low_number(Pair pair) { return to_float(bf16{static_cast<u16>(pair & 0xffffu)}); }
float high_number(Pair pair) { return to_float(bf16{static_cast<u16>(pair >> 16)}); }

// Of element d of a row of pairs.
float split_number(const Pair* row, i64 d) {
  return d % 2 == 0 ? low_number(row[d / 2]) : high_number(row[d / 2]);
}

void expect_exact_sums(const PairKernels& kernels) {
  constexpr i64 kDims = 64, kColumns = kDims / 2, kRows = kDims;
  for (u32 first = 0; first < 65536; first += 2 * kDims) {
    std::vector<u16> bits(2 * kDims);
    bool is_ordinary = true;
    for (u32 i = 0; i < 2 * kDims; ++i) {
      bits[i] = static_cast<u16>(first + i);
      is_ordinary = is_ordinary && std::fabs(to_float(f16{bits[i]})) < 64;
    }
    const Source source{bits.data(), DType::kFloat16, kDims, 1};
    std::vector<Pair> columns(2 * 2 * kColumns), rows(2 * kRows);
    EXPECT_EQ(kernels.pack_columns(source, 2, kDims, columns.data(), 2 * kColumns), is_ordinary);
    EXPECT_EQ(kernels.pack_rows(source, 2, kDims, rows.data(), 2 * kRows), is_ordinary);
    if (!is_ordinary) continue;  // NaN and infinities, and what is widened
    for (i64 row = 0; row < 2; ++row) {
      for (i64 d = 0; d < kDims; ++d) {
        const float x = to_float(f16{bits[static_cast<size_t>(row * kDims + d)]});
        const Pair* const of_row = columns.data() + row * 2 * kColumns;
        EXPECT_EQ(split_number(of_row, d) + split_number(of_row + kColumns, d), x);
        const Pair high = rows[static_cast<size_t>(d)], low = rows[static_cast<size_t>(kRows + d)];
        EXPECT_EQ(
            row == 0 ? low_number(high) + low_number(low) : high_number(high) + high_number(low),
            x);
      }
    }
  }
}

void expect_weights_of_16_digits(const PairKernels& kernels, i64 lanes) {
  for (const i64 keys : {1, 2, 7, 8}) {
    const i64 rows = keys + keys % 2;
    std::vector<float> scores(static_cast<size_t>(rows * lanes));
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = 6 * std::sin(static_cast<float>(i));
    const std::vector<float> before = scores;
    const std::vector<float> empty(static_cast<size_t>(lanes), -HUGE_VALF);
    std::vector<float> row_max = empty, row_sum(empty.size()), rescale(empty.size());
    kernels.softmax({.scores = scores.data(),
                     .stride = lanes,
                     .keys = keys,
                     .rows = lanes,
                     .terms = {.map = {0.5f, 0.0f}, .addend = nullptr, .keep = nullptr},
                     .row_max = row_max.data(),
                     .row_sum = row_sum.data(),
                     .rescale = rescale.data()});
    for (i64 key = 0; key < rows; ++key) {
      for (i64 lane = 0; lane < lanes; ++lane) {
        const auto pair = [&](i64 term) {
          const i64 at = (key / 2 * 2 + term) * lanes + lane;
          return __builtin_bit_cast(Pair, scores[static_cast<size_t>(at)]);
        };
        const float sum = key % 2 == 0 ? low_number(pair(0)) + low_number(pair(1))
                                       : high_number(pair(0)) + high_number(pair(1));
        const float score = 0.5f * before[static_cast<size_t>(key * lanes + lane)];
        const float weight =
            key < keys ? std::exp(score - row_max[static_cast<size_t>(lane)]) : 0.0f;
        EXPECT_NEAR(sum, weight, weight * 0x1p-16f);
      }
    }
  }
}

void check_split(const PairKernels& kernels, i64 lanes) {
  ASSERT_EQ(kernels.terms, 2);
  expect_exact_sums(kernels);
  expect_weights_of_16_digits(kernels, lanes);
}

#if defined(__x86_64__)
TEST(SplitPairs, BesideVectorsOfAvx2) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP();
  check_split(kEmulatedSplitAvx2, 16);
}

TEST(SplitPairs, BesideVectorsOfAvx512) {
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) {
    GTEST_SKIP() << "the processor has no AVX-512";
  }
  check_split(kEmulatedSplitAvx512, 32);
}
#endif

TEST(SplitPairs, OfTheTableInUse) {
  if (!pair_kernels(DType::kFloat16)) GTEST_SKIP() << "the instruction set in use has no tiles";
  check_split(*pair_kernels(DType::kFloat16), kernels<float>().lanes);
}

}  // namespace
}  // namespace fulmen::cpu
