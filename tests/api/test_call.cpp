// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How the arrays of a TestCall are made and looked at.
#include "api/test_call.h"

#include <algorithm>
#include <random>

#include "core/tensor.h"

namespace fulmen::test {
namespace {

constexpr char kPoison = '\xff';  // a NaN in every floating-point type

void fill_normal(const fulmen_tensor& tensor, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const size_t element = size_of(tensor.dtype);
  char* const data = static_cast<char*>(tensor.data);
  for (size_t at = 0; at < size_of(tensor); at += element) {
    store_real(data + at, static_cast<DType>(tensor.dtype), normal(random));
  }
}

}  // namespace

size_t size_of(fulmen_dtype dtype) {
  return static_cast<size_t>(size_bytes(static_cast<DType>(dtype)));
}

size_t size_of(const fulmen_tensor& tensor) {
  size_t bytes = size_of(tensor.dtype);
  for (int axis = 0; axis < tensor.rank; ++axis) bytes *= static_cast<size_t>(tensor.shape[axis]);
  return bytes;
}

TestCall::TestCall(const Sizes& s, fulmen_dtype t) : sizes(s), dtype(t) {
  fulmen_problem_init(&problem);
  fulmen_tensors_init(&tensors);
  absent_ = tensors.q;
  const fulmen_dtype wide = t == FULMEN_FLOAT64 ? FULMEN_FLOAT64 : FULMEN_FLOAT32;
  input(&fulmen_tensors::q, t, {s.batch, s.heads, s.q_rows, s.dim_qk});
  input(&fulmen_tensors::k, t, {s.batch, s.kv_heads, s.kv_rows, s.dim_qk});
  input(&fulmen_tensors::v, t, {s.batch, s.kv_heads, s.kv_rows, s.dim_v});
  output(&fulmen_tensors::o, t, {s.batch, s.heads, s.q_rows, s.dim_v});
  output(&fulmen_tensors::lse, wide, {s.batch, s.heads, s.q_rows});
  output(&fulmen_tensors::stats, wide, {s.batch, s.heads, s.q_rows, 2});
}

void TestCall::add_backward() {
  const Sizes& s = sizes;
  const fulmen_dtype wide = dtype == FULMEN_FLOAT64 ? FULMEN_FLOAT64 : FULMEN_FLOAT32;
  input(&fulmen_tensors::dout, dtype, {s.batch, s.heads, s.q_rows, s.dim_v});
  input(&fulmen_tensors::dlse, wide, {s.batch, s.heads, s.q_rows});
  output(&fulmen_tensors::dq, dtype, {s.batch, s.heads, s.q_rows, s.dim_qk});
  output(&fulmen_tensors::dk, dtype, {s.batch, s.kv_heads, s.kv_rows, s.dim_qk});
  output(&fulmen_tensors::dv, dtype, {s.batch, s.kv_heads, s.kv_rows, s.dim_v});
}

fulmen_tensor& TestCall::add(Member member, fulmen_dtype type, const Shape& shape) {
  fulmen_tensor& tensor = tensors.*member;
  EXPECT_EQ(
      fulmen_tensor_init(&tensor, nullptr, type, static_cast<int32_t>(shape.size()), shape.data()),
      FULMEN_OK);
  memory_.emplace_back(size_of(tensor));
  tensor.data = memory_.back().data();
  return tensor;
}

fulmen_tensor& TestCall::input(Member member, fulmen_dtype type, const Shape& shape) {
  fulmen_tensor& tensor = add(member, type, shape);
  fill_normal(tensor, seed_++);
  return tensor;
}

fulmen_tensor& TestCall::output(Member member, fulmen_dtype type, const Shape& shape) {
  fulmen_tensor& tensor = add(member, type, shape);
  std::memset(tensor.data, kPoison, size_of(tensor));
  outputs_.emplace_back(static_cast<const char*>(tensor.data), size_of(tensor));
  return tensor;
}

fulmen_tensor& TestCall::indices(Member member, const std::vector<int64_t>& values) {
  fulmen_tensor& tensor = add(member, FULMEN_INT64, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(tensor.data, values.data(), values.size() * sizeof(int64_t));
  return tensor;
}

bool TestCall::outputs_untouched() const {
  return std::all_of(outputs_.begin(), outputs_.end(), [](const auto& range) {
    const auto& [data, bytes] = range;
    return std::all_of(data, data + bytes, [](char byte) { return byte == kPoison; });
  });
}

std::string TestCall::bytes(Member member) const {
  const fulmen_tensor& tensor = tensors.*member;
  return {static_cast<const char*>(tensor.data), size_of(tensor)};
}

std::vector<float> TestCall::floats(Member member) const {
  const fulmen_tensor& tensor = tensors.*member;
  std::vector<float> values(size_of(tensor) / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), tensor.data, size_of(tensor));
  return values;
}

}  // namespace fulmen::test
