// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How a tensor core adds: bit for bit what mma.sync and wgmma give on an H200
// (tests/emulator/probes compares them). Exact products and the accumulator are aligned to the
// largest exponent among them, a product's being the sum of its factors', and cut off, towards
// zero, 25 bits behind that; their sum is exact, and cut off to float32.
// Of e4m3 it is 13 bits, and the sum is cut off there too, behind its own leading bit: 14 bits of
// an accumulator count, whatever is added to it.
#pragma once

#include <array>

#include "kernels/base.cuh"

namespace fulmen::emulator {

// The right factor of products: 16 rows (8 of TF32, 32 of e4m3) of at most 256 columns, numbers
// widened.
class TensorCoreMatrix {
 public:
  // dtype: kFloat32 is TF32.
  TensorCoreMatrix(u32 columns, DType dtype)
      : columns_(columns),
        depth_(32 / static_cast<u32>(size_bytes(dtype))),
        kept_bits_(dtype == DType::kFloat8E4M3 ? 13 : 25),
        sum_mask_(dtype == DType::kFloat8E4M3 ? 0xfffffc00u : 0xffffffffu),
        least_exponent_(dtype == DType::kFloat16      ? -14
                        : dtype == DType::kFloat8E4M3 ? -6
                                                      : -126) {}

  void set(u32 k, u32 column, float x);

  // d[n] = a . column n + c[n], of `depth` numbers a. c and d may be the same.
  void row(const float* a, const float* c, float* d) const;

 private:
  static constexpr u32 kMostColumns = 256;
  static constexpr u32 kMostDepth = 32;

  bool is_ordinary(const float* a, const float* c, std::array<short, kMostColumns>& largest) const;
  float exact_sum(const float* a, u32 column, float c) const;

  u32 columns_;
  u32 depth_;
  i32 kept_bits_;         // behind the largest exponent
  u32 sum_mask_;          // of a sum in float32
  short least_exponent_;  // of a factor: numbers without a leading bit count as if they had one
  std::array<std::array<float, kMostColumns>, kMostDepth> numbers_;
  std::array<std::array<short, kMostColumns>, kMostDepth> exponents_;
};

}  // namespace fulmen::emulator
