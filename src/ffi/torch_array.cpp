// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Between PyTorch's handles and DLPack's words.

#include "ffi/torch_array.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "ffi/refusal.h"

namespace fulmen::ffi {
namespace {

using Axes = std::array<int64_t, FULMEN_MAX_RANK>;

DLDataType dlpack_dtype(int32_t dtype) {
  const TorchAbi& torch = *torch_abi();
  if (dtype == torch.bfloat16) return {kDLBfloat, 16, 1};
  if (dtype == torch.float16) return {kDLFloat, 16, 1};
  if (dtype == torch.float32) return {kDLFloat, 32, 1};
  if (dtype == torch.float64) return {kDLFloat, 64, 1};
  throw Refusal{FULMEN_ERROR_DTYPE, "a tensor is not of float64, float32, float16 or bfloat16"};
}

int32_t torch_dtype(DLDataType dtype) {
  const TorchAbi& torch = *torch_abi();
  if (dtype.code == kDLBfloat) return torch.bfloat16;
  if (dtype.bits == 16) return torch.float16;
  return dtype.bits == 32 ? torch.float32 : torch.float64;
}

void expect_rank(const DLTensor& x) {
  if (x.ndim >= 1 && x.ndim <= FULMEN_MAX_RANK) return;
  throw Refusal{FULMEN_ERROR_SHAPE, "a tensor has not 1 to 4 axes"};
}

TorchArray empty(int32_t rank, const Axes& shape, const Axes& strides, int32_t dtype,
                 DLDevice device) {
  const TorchAbi& torch = *torch_abi();
  const bool on_gpu = device.device_type == kDLCUDA;
  TorchTensor made = nullptr;
  if (torch.empty_strided(rank, shape.data(), strides.data(), dtype,
                          on_gpu ? torch.cuda : torch.cpu, on_gpu ? device.device_id : -1,
                          &made) != 0) {
    throw Refusal{FULMEN_ERROR_OUT_OF_MEMORY,
                  std::string(on_gpu ? "CUDA" : "host") +
                      " out of memory. PyTorch has none for a result of fulmen.attention"};
  }
  return TorchArray(made);
}

}  // namespace

TorchArray::~TorchArray() {
  if (owned_ != nullptr) torch_abi()->delete_tensor(owned_);
}

bool TorchArray::is_defined() const {
  bool defined = false;
  torch_abi()->is_defined(owned_, &defined);
  return defined;
}

DLTensor TorchArray::dlpack() const {
  const TorchAbi& torch = *torch_abi();
  DLTensor found = {};
  int64_t rank = 0;
  int32_t dtype = 0, device_type = 0;
  torch.get_dtype(owned_, &dtype);
  found.dtype = dlpack_dtype(dtype);
  torch.get_dim(owned_, &rank);
  found.ndim = static_cast<int32_t>(rank);
  torch.get_sizes(owned_, &found.shape);
  torch.get_strides(owned_, &found.strides);
  torch.get_data_ptr(owned_, &found.data);
  torch.get_device_type(owned_, &device_type);
  torch.get_device_index(owned_, &found.device.device_id);
  found.device.device_type = device_type == torch.cuda ? kDLCUDA : kDLCPU;
  return found;
}

TorchValue TorchArray::released() {
  return reinterpret_cast<TorchValue>(std::exchange(owned_, nullptr));
}

TorchArray undefined() {
  TorchTensor made = nullptr;
  torch_abi()->new_undefined(&made);
  return TorchArray(made);
}

TorchArray empty_like(const DLTensor& x, int64_t last_extent) {
  expect_rank(x);
  const int last = x.ndim - 1;
  Axes shape = {}, strides = {}, order = {0, 1, 2, 3};
  std::copy_n(x.shape, last, shape.begin());
  shape[static_cast<size_t>(last)] = last_extent;
  if (x.strides[last] == 1) {
    std::stable_sort(order.begin(), order.begin() + last,
                     [&](int64_t a, int64_t b) { return x.strides[a] > x.strides[b]; });
  }
  int64_t stride = 1;
  for (int i = last; i >= 0; --i) {
    const auto axis = static_cast<size_t>(order[static_cast<size_t>(i)]);
    strides[axis] = stride;
    stride *= std::max<int64_t>(shape[axis], 1);
  }
  return empty(x.ndim, shape, strides, torch_dtype(x.dtype), x.device);
}

TorchArray empty_stats(const DLTensor& q, bool rows_before_heads) {
  expect_rank(q);
  const auto last = static_cast<size_t>(q.ndim - 1);
  Axes shape = {}, strides = {};
  std::copy_n(q.shape, last, shape.begin());
  if (rows_before_heads && last >= 2) std::swap(shape[last - 2], shape[last - 1]);
  shape[last] = 2;
  int64_t stride = 1;
  for (size_t axis = last + 1; axis-- > 0;) {
    strides[axis] = stride;
    stride *= std::max<int64_t>(shape[axis], 1);
  }
  const TorchAbi& torch = *torch_abi();
  return empty(q.ndim, shape, strides, q.dtype.bits == 64 ? torch.float64 : torch.float32,
               q.device);
}

}  // namespace fulmen::ffi
