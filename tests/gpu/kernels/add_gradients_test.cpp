// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernel that adds the gradients of a part to those that are there, run in the emulator: rows
// of any strides, whole vectors and what is left of a row, and memory between that must stay.
#include "kernels/simt/add_gradients.cuh"

#include <gtest/gtest.h>

#include <vector>

#include "core/tensor.h"
#include "emulator/launch.h"
#include "gpu/gradient_plans.h"
#include "gpu/params.h"

namespace fulmen::test {
namespace {

constexpr i64 kBatch = 2, kHeads = 3, kRows = 5;

// An array (batch, head, row, dim) with rows of `row` elements and `step` from one to the next.
struct Rows {
  std::vector<u64> memory;
  Tensor tensor;

  Rows(DType dtype, i64 dim, i64 row, i64 step, i64 first = 0)
      : memory(
            static_cast<std::size_t>((kBatch * kHeads * kRows * row + first) * size_bytes(dtype)) /
                    8 +
                1,
            0x7ff8'7fc0'7fc0'7fc0),  // NaN in every type
        tensor{reinterpret_cast<char*>(memory.data()) + first * size_bytes(dtype),
               dtype,
               4,
               {kBatch, kHeads, kRows, dim},
               {kHeads * kRows * row, kRows * row, row, step}} {}

  template <class Take>
  void for_each(const Take& take) const {
    for (i64 b = 0; b < kBatch; ++b) {
      for (i64 h = 0; h < kHeads; ++h) {
        for (i64 i = 0; i < kRows; ++i) {
          for (i64 d = 0; d < tensor.shape[3]; ++d) take(b, h, i, d);
        }
      }
    }
  }
};

double number(i64 b, i64 h, i64 i, i64 d) { return static_cast<double>(b * 64 + h * 16 + i + d); }

AddedGradient added(const Rows& sums, const Rows& part) {
  const i64 dim = sums.tensor.shape[3], vectors = ceil_div(dim, kAddedElements);
  return {gpu::view_of(sums.tensor),
          gpu::view_of(part.tensor),
          static_cast<u32>(kHeads),
          static_cast<u32>(kRows),
          static_cast<u32>(dim),
          static_cast<u32>(vectors),
          static_cast<u32>(kBatch * kHeads * kRows * vectors)};
}

template <DType kDType>
void expect_added(i64 dim, i64 row, i64 step, i64 first) {
  const DType wide = kDType == DType::kFloat64 ? kDType : DType::kFloat32;
  const Rows sums[2] = {{wide, dim, row, step, first}, {wide, dim, dim, 1}};
  const Rows part(kDType, dim, ceil_div(dim, i64{8}) * 8, 1);
  part.for_each([&](i64 b, i64 h, i64 i, i64 d) {
    part.tensor.set_real(b, h, i, d, number(b, h, i, d));
    for (const Rows& of : sums) of.tensor.set_real(b, h, i, d, 1000);
  });
  std::vector<u64> gaps = sums[0].memory;
  const AddedGradients all{{added(sums[0], part), added(sums[1], part), {}}, 2};
  const auto launch =
      gpu::add_gradients(kDType, i64{all.gradients[0].num_vectors} + all.gradients[1].num_vectors);
  emulator::launch(
      {.blocks = launch.num_blocks, .threads = launch.spec.num_threads, .kernel = "add"},
      [&] { add_gradients<FmaConfig{.dtype = kDType, .num_threads = 256}>(all); });
  part.for_each([&](i64 b, i64 h, i64 i, i64 d) {
    for (const Rows& of : sums) {
      EXPECT_EQ(of.tensor.real(b, h, i, d), 1000 + number(b, h, i, d)) << b << h << i << " " << d;
    }
    sums[0].tensor.set_real(b, h, i, d, 1000);
  });
  EXPECT_EQ(sums[0].memory, gaps);
}

TEST(AddGradients, AddsToRowsOfAnyStrides) {
  for (const i64 dim : {8, 20, 40}) {
    for (const i64 first : {0, 1, 4}) {
      expect_added<DType::kBFloat16>(dim, dim + 4, 1, first);
      expect_added<DType::kFloat16>(dim, dim + 3, 1, first);
      expect_added<DType::kFloat16>(dim, 2 * dim, 2, first);
      expect_added<DType::kFloat32>(dim, dim, 1, first);
      expect_added<DType::kFloat64>(dim, dim + 1, 1, first);
    }
  }
}

}  // namespace
}  // namespace fulmen::test
