// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Products of bf16, by emulated tiles everywhere and by what the processor has (AMX, bfmmla,
// vectors): every number of rows, columns and pairs around whole tiles, both orders of A, sums that
// go on and rows that are scaled, against sums in float64; and that nothing outside is written.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cpu/kernels.h"
#if defined(__x86_64__)
#include "emulated_tiles.h"
#endif

namespace fulmen::cpu {
namespace {

float sine(i64 i) { return to_float(to_bf16(std::sin(static_cast<float>(i)))); }

// Pairs, and what they stand for.
struct Pairs {
  Pairs(i64 count, i64 step) {
    for (i64 i = 0; i < 2 * count; ++i) numbers.push_back(static_cast<double>(sine(step * i)));
    for (size_t i = 0; i < numbers.size(); i += 2) pairs.push_back(bits(i) | bits(i + 1) << 16);
  }
  Pair bits(size_t i) const { return to_bf16(static_cast<float>(numbers[i])).bits; }
  const double* of(i64 pair) const { return numbers.data() + 2 * pair; }

  std::vector<double> numbers;
  std::vector<Pair> pairs;
};

struct Shape {
  i64 rows, columns, depth;
  i64 A_row_stride, A_depth_stride;
  bool accumulates, scales;
};

void check(const PairKernels& kernels, i64 lanes, const Shape& shape) {
  constexpr float kPoison = -77.0f;
  const i64 panels = ceil_div(shape.columns, lanes);
  const i64 C_stride = panels * lanes + 5;
  const i64 panel_stride = shape.depth * lanes;
  const Pairs A(shape.rows * shape.A_row_stride + shape.depth * shape.A_depth_stride, 1);
  const Pairs B(panels * panel_stride, 3);
  std::vector<float> C(static_cast<size_t>((shape.rows + 1) * C_stride), kPoison), scale;
  for (i64 i = 0; i < shape.rows; ++i) {
    scale.push_back(0.25f * static_cast<float>(i % 5));
    for (i64 n = 0; n < panels * lanes; ++n) {
      C[static_cast<size_t>(i * C_stride + n)] = sine(i + 7 * n);
    }
  }
  const std::vector<float> before = C;
  kernels.multiply({.rows = shape.rows,
                    .columns = shape.columns,
                    .depth = shape.depth,
                    .A = A.pairs.data(),
                    .A_row_stride = shape.A_row_stride,
                    .A_depth_stride = shape.A_depth_stride,
                    .B = B.pairs.data(),
                    .B_depth_stride = lanes,
                    .B_panel_stride = panel_stride,
                    .C = C.data(),
                    .C_row_stride = C_stride,
                    .accumulates = shape.accumulates,
                    .row_scale = shape.scales ? scale.data() : nullptr});
  for (i64 i = 0; i < shape.rows; ++i) {
    for (i64 n = 0; n < shape.columns; ++n) {
      const size_t at = static_cast<size_t>(i * C_stride + n);
      double sum = shape.accumulates ? static_cast<double>(before[at]) : 0.0;
      if (shape.scales) sum *= static_cast<double>(scale[static_cast<size_t>(i)]);
      for (i64 k = 0; k < shape.depth; ++k) {
        const double* const a = A.of(i * shape.A_row_stride + k * shape.A_depth_stride);
        const double* const b = B.of(n / lanes * panel_stride + k * lanes + n % lanes);
        sum += a[0] * b[0] + a[1] * b[1];
      }
      ASSERT_NEAR(C[at], sum, 3e-5 * std::sqrt(static_cast<double>(shape.depth)))
          << shape.rows << "x" << shape.columns << "x" << shape.depth << " at " << i << ", " << n;
    }
    for (i64 n = panels * lanes; n < C_stride; ++n) {
      ASSERT_EQ(C[static_cast<size_t>(i * C_stride + n)], kPoison);
    }
  }
  for (i64 n = 0; n < C_stride; ++n) {
    ASSERT_EQ(C[static_cast<size_t>(shape.rows * C_stride + n)], kPoison);
  }
}

void check(const PairKernels& kernels, i64 lanes) {
  const PairTask task(&kernels);
  for (const i64 rows : {1, 15, 16, 17, 32, 33, 48, 63}) {
    for (const i64 columns : {1, 16, 17, 32, 40, 64}) {
      for (const i64 depth : {1, 15, 16, 32, 50, 64, 65, 130}) {
        const bool accumulates = (rows + columns + depth) % 2 == 0;
        check(kernels, lanes, {rows, columns, depth, depth + 3, 1, accumulates, false});
        check(kernels, lanes, {rows, columns, depth, 1, rows + 1, !accumulates, false});
      }
    }
  }
  for (const bool scales : {false, true}) {
    check(kernels, lanes, {50, 40, 70, 73, 1, true, scales});
    check(kernels, lanes, {50, 40, 70, 1, 53, true, scales});
    check(kernels, lanes, {50, 40, 33, 70, 2, true, scales});  // neither order
  }
}

#if defined(__x86_64__)
TEST(TileProducts, EmulatedBesideVectorsOfAvx2) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP();
  check(kEmulatedTilesAvx2, 16);
}

TEST(TileProducts, EmulatedBesideVectorsOfAvx512) {
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) {
    GTEST_SKIP() << "the processor has no AVX-512";
  }
  check(kEmulatedTilesAvx512, 32);
}
#endif

TEST(TileProducts, OfTheTableInUse) {
  if (!pair_kernels(DType::kBFloat16))
    GTEST_SKIP() << "the instruction set in use has no products of bf16";
  check(*pair_kernels(DType::kBFloat16), kernels<float>().lanes);
}

}  // namespace
}  // namespace fulmen::cpu
