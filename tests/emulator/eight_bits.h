// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Requests of e4m3 with scales of heads, of v of dims, and what kernels that multiply them by
// tensor cores may be off.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <random>
#include <vector>

#include "core/validate.h"
#include "cpu/backend.h"

namespace fulmen::test {

template <class T>
Tensor tensor_of(std::vector<T>& memory, DType dtype, std::initializer_list<i64> shape) {
  Tensor tensor{memory.data(), dtype, static_cast<int>(shape.size())};
  std::copy(shape.begin(), shape.end(), tensor.shape);
  i64 stride = 1;
  for (int axis = tensor.rank; axis-- > 0;) {
    tensor.strides[axis] = stride;
    stride *= tensor.shape[axis];
  }
  memory.resize(static_cast<size_t>(stride) + 16);  // of which the first is at a multiple of 16
  tensor.data = memory.data() + (16 - reinterpret_cast<u64>(memory.data()) % 16) % 16 / sizeof(T);
  return tensor;
}

// A request of 4 query heads over 2 key heads, or with `cu` packed.
struct EightBits {
  std::vector<u8> q, k, v;
  std::vector<float> q_scale, k_scale, v_scale, sinks, lse, stats, o_wide;
  std::vector<u16> o;
  std::vector<i32> cu_q, cu_kv;
  Request request;
  std::mt19937 random{7};

  EightBits(i64 batch, i64 q_rows, i64 kv_rows, i64 dim, bool is_packed, float q_sign) {
    const auto array = [&](auto& memory, DType dtype, i64 heads, i64 rows, i64 last) {
      return is_packed ? tensor_of(memory, dtype, {heads, rows, last})
                       : tensor_of(memory, dtype, {batch, heads, rows, last});
    };
    Arrays& arrays = request.arrays;
    arrays[Array::kQ] = array(q, DType::kFloat8E4M3, 4, q_rows, dim);
    arrays[Array::kK] = array(k, DType::kFloat8E4M3, 2, kv_rows, dim);
    arrays[Array::kV] = array(v, DType::kFloat8E4M3, 2, kv_rows, dim);
    arrays[Array::kO] = array(o_wide, DType::kFloat32, 4, q_rows, dim);
    arrays[Array::kQScale] = tensor_of(q_scale, DType::kFloat32, {4, 1, 1});
    arrays[Array::kKScale] = tensor_of(k_scale, DType::kFloat32, {2, 1, 1});
    arrays[Array::kVScale] = tensor_of(v_scale, DType::kFloat32, {2, 1, dim});
    for (const Array each : {Array::kQ, Array::kK, Array::kV}) {
      fill(arrays[each], [&] { return normal() * 2; });
    }
    for (const Array each : {Array::kQScale, Array::kKScale, Array::kVScale}) {
      fill(arrays[each], [&] { return 0.3 + 0.1 * normal(); });
    }
    fill(arrays[Array::kQScale], [&, head = 0]() mutable { return ++head % 2 ? q_sign : 0.5; });
  }

  // Of 90 rows and 300 keys, packed: four sequences, under a causal window, with sinks and stats.
  void pack_with_sinks() {
    request.options.causal = true;
    request.options.window_left = 140;
    Arrays& arrays = request.arrays;
    arrays[Array::kCuQ] = tensor_of(cu_q, DType::kInt32, {5});
    arrays[Array::kCuKv] = tensor_of(cu_kv, DType::kInt32, {5});
    const i32 offsets[2][5] = {{0, 1, 1, 70, 88}, {0, 33, 33, 250, 299}};
    std::copy_n(offsets[0], 5, static_cast<i32*>(arrays[Array::kCuQ].data));
    std::copy_n(offsets[1], 5, static_cast<i32*>(arrays[Array::kCuKv].data));
    // NaN behind the last key of a sequence: the next one's first, and what is nobody's.
    u8* const values = static_cast<u8*>(arrays[Array::kV].data);
    const i64 dim = arrays[Array::kV].shape[2];
    values[33 * dim + 5] = 0x7f;
    std::fill_n(values + 299 * dim, dim, u8{0x7f});
    arrays[Array::kSinks] = tensor_of(sinks, DType::kFloat32, {4});
    fill(arrays[Array::kSinks], [&] { return normal(); });
    arrays[Array::kLse] = tensor_of(lse, DType::kFloat32, {4, 90});
    arrays[Array::kStats] = tensor_of(stats, DType::kFloat32, {4, 90, 2});
  }

  double normal() {
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>(random() >> 8) * 0x1p-24 - 0.5;
    return 1.7 * sum;
  }

  template <class Draw>
  static void fill(const Tensor& tensor, Draw draw) {
    const i64 count = std::accumulate(tensor.shape, tensor.shape + tensor.rank, i64{1},
                                      [](i64 a, i64 b) { return a * b; });
    for (i64 i = 0; i < count; ++i) {
      store_real(static_cast<char*>(tensor.data) + i * size_bytes(tensor.dtype), tensor.dtype,
                 draw());
    }
  }
};

// The problem with o in 16 bits.
inline Problem with_output_of_16_bits(EightBits& given, DType dtype = DType::kBFloat16) {
  Request narrow = given.request;
  Tensor& o = narrow.arrays[Array::kO];
  given.o.resize(given.o_wide.size() + 8);
  o.data = given.o.data() + (16 - reinterpret_cast<u64>(given.o.data()) % 16) % 16 / 2;
  o.dtype = dtype;
  return validate(narrow, Pointers::kChecked);
}

// |o - oracle| <= 2^-4 sum p |v|, which is the most that weights of 4 bits are off, and a little.
template <class Run>
void expect_close_of_8_bits(EightBits& given, DType o_dtype, u32 seed, const Run& run) {
  const Problem problem = with_output_of_16_bits(given, o_dtype);
  const Tensor& o = problem.arrays[Array::kO];
  run(problem);
  std::vector<double> got;
  const i64 count = static_cast<i64>(given.o_wide.size()) - 16;
  for (i64 i = 0; i < count; ++i) {
    got.push_back(load_real(static_cast<char*>(o.data) + 2 * i, o_dtype));
  }
  const std::vector<float> lse = given.lse;
  cpu::scalar_forward(validate(given.request, Pointers::kChecked));
  const float* const wide = static_cast<float*>(given.request.arrays[Array::kO].data);
  const std::vector<float> expected(wide, wide + count);
  for (size_t i = 0; i < lse.size(); ++i) {
    if (std::isfinite(given.lse[i])) {
      ASSERT_NEAR(lse[i], given.lse[i], 2e-3) << "seed " << seed << ", row " << i;
    } else {
      ASSERT_EQ(lse[i], given.lse[i]) << "seed " << seed << ", row " << i;
    }
  }
  for (u8& byte : given.v) byte &= 0x7f;
  for (float& scale : given.v_scale) scale = std::fabs(scale);
  cpu::scalar_forward(validate(given.request, Pointers::kChecked));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::isnan(got[i]), std::isnan(expected[i])) << "seed " << seed << ", " << i;
    if (std::isnan(got[i])) continue;
    ASSERT_NEAR(got[i], static_cast<double>(expected[i]),
                0.07 * static_cast<double>(wide[i]) + 1e-3)
        << "seed " << seed << ", " << i;
  }
}

}  // namespace fulmen::test
