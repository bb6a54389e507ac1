// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels for few query rows: dot products and weighted sums over rows that lie anywhere,
// against sums in float64, for every number of rows and keys around whole vectors; and that nothing
// outside is touched.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/tensor.h"
#include "cpu/kernels.h"
#if defined(__x86_64__)
#include "emulated_tiles.h"
#endif

namespace fulmen::cpu {
namespace {

constexpr i64 kStride = 96;  // of scores
constexpr float kPoison = -1234.5f;

// Rows in some order of memory, each behind the one before it by more than its dims.
struct Rows {
  Rows(DType dtype, i64 count, i64 dims) : dtype(dtype), dims(dims) {
    const i64 size = size_bytes(dtype);
    bytes.resize(static_cast<size_t>((count * (dims + 3) + 1) * size));
    for (i64 row = 0; row < count; ++row) {
      list.push_back(bytes.data() + ((row * 7) % count * (dims + 3) + 1) * size);
      for (i64 d = 0; d < dims; ++d) {
        store_real(bytes.data() + ((row * 7) % count * (dims + 3) + 1 + d) * size, dtype,
                   std::sin(static_cast<double>(row * 31 + d * 7)));
      }
    }
  }

  double at(i64 row, i64 d) const {
    return load_real(
        static_cast<const char*>(list[static_cast<size_t>(row)]) + d * size_bytes(dtype), dtype);
  }

  // As two heads of a token would have it: listed are rows some bytes before them. Others, here
  // the same, are asked for meanwhile.
  KeyList keys(i64 count) {
    constexpr i64 kOffset = 24;
    listed.clear();
    for (const void* row : list) listed.push_back(static_cast<const char*>(row) - kOffset);
    return {listed.data(), dtype, count, kOffset, list.data(), count % 2 == 0 ? 0 : count, 0};
  }

  DType dtype;
  i64 dims;
  std::vector<char> bytes;
  std::vector<const void*> list;
  std::vector<const void*> listed;
};

// Numbers that bf16 has, so that they are the same in every lane type.
float number(i64 i) { return to_float(to_bf16(std::cos(static_cast<float>(i)))); }

// As rows of Lane: float32, or two numbers of bf16.
std::vector<float> lanes_of(const std::vector<float>& numbers, float) { return numbers; }
std::vector<Pair> lanes_of(const std::vector<float>& numbers, Pair) {
  std::vector<Pair> pairs(numbers.size() / 2);
  for (size_t i = 0; i < pairs.size(); ++i) {
    pairs[i] = static_cast<Pair>(to_bf16(numbers[2 * i]).bits) |
               static_cast<Pair>(to_bf16(numbers[2 * i + 1]).bits) << 16;
  }
  return pairs;
}

template <class Lane>
void check_dot(const FewRowsKernels<float, Lane>& kernels, Rows& keys, i64 rows, i64 count) {
  const i64 dims = keys.dims;
  std::vector<float> Q(static_cast<size_t>(rows * dims));
  for (size_t i = 0; i < Q.size(); ++i) Q[i] = number(static_cast<i64>(i));
  const std::vector<Lane> lanes = lanes_of(Q, Lane());
  const i64 row_lanes = static_cast<i64>(lanes.size()) / rows;
  std::vector<Lane> arranged(static_cast<size_t>(16 * row_lanes));
  kernels.arrange(lanes.data(), row_lanes, rows, row_lanes, arranged.data());
  std::vector<float> scores(static_cast<size_t>((rows + 1) * kStride), kPoison);
  kernels.dot(arranged.data(), rows, keys.keys(count), dims, scores.data(), kStride);
  for (i64 row = 0; row < rows; ++row) {
    for (i64 key = 0; key < count; ++key) {
      double sum = 0;
      for (i64 d = 0; d < dims; ++d) {
        sum += static_cast<double>(Q[static_cast<size_t>(row * dims + d)]) * keys.at(key, d);
      }
      ASSERT_NEAR(scores[static_cast<size_t>(row * kStride + key)], sum, 2e-4)
          << rows << " rows, " << count << " keys, row " << row << " key " << key;
    }
    for (i64 past = ceil_div(count, i64{16}) * 16; past < kStride; ++past) {
      ASSERT_EQ(scores[static_cast<size_t>(row * kStride + past)], kPoison);
    }
  }
  ASSERT_EQ(scores[static_cast<size_t>(rows * kStride)], kPoison);
}

template <class Lane>
void check_add(const FewRowsKernels<float, Lane>& kernels, Rows& values, i64 rows, i64 count) {
  const i64 dims = values.dims;
  std::vector<float> weights(static_cast<size_t>(rows * kStride), 0.0f);
  for (i64 row = 0; row < rows; ++row) {
    for (i64 key = 0; key < count; ++key) {
      weights[static_cast<size_t>(row * kStride + key)] = number(row * 5 + key);
    }
  }
  const std::vector<Lane> lanes = lanes_of(weights, Lane());
  std::vector<float> O(static_cast<size_t>((rows + 1) * dims), 0.5f);
  kernels.add(lanes.data(), static_cast<i64>(lanes.size()) / rows, rows, values.keys(count), dims,
              O.data(), dims);
  for (i64 row = 0; row < rows; ++row) {
    for (i64 d = 0; d < dims; ++d) {
      double sum = 0.5;
      for (i64 key = 0; key < count; ++key) {
        sum += static_cast<double>(weights[static_cast<size_t>(row * kStride + key)]) *
               values.at(key, d);
      }
      ASSERT_NEAR(O[static_cast<size_t>(row * dims + d)], sum, 2e-4)
          << rows << " rows, " << count << " keys, row " << row << " dim " << d;
    }
  }
  ASSERT_EQ(O[static_cast<size_t>(rows * dims)], 0.5f);
}

template <class Lane>
void check(const FewRowsKernels<float, Lane>& kernels, DType dtype) {
  for (const i64 dims : {32, 64, 160}) {
    Rows keys(dtype, 70, dims);
    for (i64 rows = 1; rows <= 16; ++rows) {
      for (const i64 count : {1, 2, 15, 16, 17, 33, 70}) {
        check_dot(kernels, keys, rows, count);
        check_add(kernels, keys, rows, count);
      }
    }
  }
}

class FewRows : public testing::TestWithParam<DType> {};

TEST_P(FewRows, OfTheTableInUse) { check(kernels<float>().few_rows, GetParam()); }

TEST_P(FewRows, OfTheBaseline) { check(kTablesBaseline.float32.few_rows, GetParam()); }

INSTANTIATE_TEST_SUITE_P(Types, FewRows,
                         testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16));

TEST(FewRowsInPairs, AsTheyLie) {
  if (!pair_kernels(DType::kBFloat16))
    GTEST_SKIP() << "the instruction set in use has no products of bf16";
  const PairTask task(pair_kernels(DType::kBFloat16));
  check(pair_kernels(DType::kBFloat16)->few_rows, DType::kBFloat16);
}

#if defined(__x86_64__)
void check_tiles(const PairKernels& kernels) {
  const PairTask task(&kernels);
  check(kernels.few_rows, DType::kBFloat16);
}

TEST(FewRowsInPairs, ByEmulatedTilesBesideVectorsOfAvx2) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP();
  check_tiles(kEmulatedTilesAvx2);
}

TEST(FewRowsInPairs, ByEmulatedTilesBesideVectorsOfAvx512) {
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) {
    GTEST_SKIP() << "the processor has no AVX-512";
  }
  check_tiles(kEmulatedTilesAvx512);
}
#endif

TEST(FewRowsInPairs, KnowSumsThatLostNothing) {
  if (!pair_kernels(DType::kBFloat16))
    GTEST_SKIP() << "the instruction set in use has no products of bf16";
  std::vector<float> sums(3 * 64, 1.0f);
  const auto are_ordinary = [&] {
    return pair_kernels(DType::kBFloat16)->are_ordinary({sums.data(), 64}, 3, 64);
  };
  EXPECT_TRUE(are_ordinary());
  for (const float odd : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    sums[64 + 63] = odd;
    EXPECT_FALSE(are_ordinary()) << odd;
    sums[64 + 63] = 1.0f;
  }
  for (size_t d = 0; d < 64; ++d) sums[128 + d] = 0x1p-81f;
  EXPECT_FALSE(are_ordinary());
  sums[128 + 40] = -0x1p-80f;
  EXPECT_TRUE(are_ordinary());
}

}  // namespace
}  // namespace fulmen::cpu
