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
  for (size_t i = 0; i < kNumDTypes; ++i) {
    if (torch.dtypes[i] == dtype) return kDTypes[i].dlpack;
  }
  throw Refusal{FULMEN_ERROR_DTYPE, "a tensor is of none of " + known_dtypes()};
}

// PyTorch's number of a dtype that came from there.
int32_t torch_dtype(DLDataType dtype) {
  const TorchAbi& torch = *torch_abi();
  size_t i = 0;
  while (kDTypes[i].dlpack.code != dtype.code || kDTypes[i].dlpack.bits != dtype.bits) ++i;
  return torch.dtypes[i];
}

DLDevice dlpack_device(TorchTensor tensor) {
  const TorchAbi& torch = *torch_abi();
  int32_t type = 0, index = 0;
  torch.get_device_type(tensor, &type);
  torch.get_device_index(tensor, &index);
  if (type == torch.cuda) return {kDLCUDA, index};
  if (type == torch.cpu) return {kDLCPU, 0};
  throw Refusal{FULMEN_ERROR_ARGUMENT, "a tensor is neither in host memory nor on an NVIDIA GPU"};
}

// Axes from the fastest to the slowest.
using Order = std::array<size_t, FULMEN_MAX_RANK>;

struct Extents {
  Axes shape = {};
  Order order = {};
  size_t rank = 0;

  // The first `count` of x, in the order of a C array.
  Extents(const DLTensor& x, size_t count) : rank(count) {
    if (x.ndim > FULMEN_MAX_RANK) {
      throw Refusal{FULMEN_ERROR_SHAPE, "a tensor has more than 4 axes"};
    }
    std::copy_n(x.shape, count, shape.begin());
    for (size_t i = 0; i < count; ++i) order[i] = count - 1 - i;
  }
};

// Whether a goes behind b when torch.empty_like orders axes, fastest first; it leaves where they
// are those that a broadcast has made.
bool goes_behind(const DLTensor& x, size_t a, size_t b) {
  if (x.strides[a] != x.strides[b]) return x.strides[a] > x.strides[b];
  return x.shape[a] > x.shape[b];
}

void order_as_torch(const DLTensor& x, Extents* made) {
  Order& order = made->order;
  for (size_t i = 1; i < made->rank; ++i) {
    size_t at = i;
    for (size_t other = i; other-- > 0;) {
      const size_t a = order[other], b = order[at];
      if (x.strides[a] == 0 || x.strides[b] == 0) continue;
      if (goes_behind(x, a, b)) {
        std::swap(order[other], order[at]);
        at = other;
      } else if (x.strides[a] < x.strides[b]) {
        break;
      }
    }
  }
}

TorchArray empty(const Extents& made, int32_t dtype, DLDevice device) {
  const TorchAbi& torch = *torch_abi();
  const bool on_gpu = device.device_type == kDLCUDA;
  Axes strides = {};
  int64_t stride = 1;
  for (size_t i = 0; i < made.rank; ++i) {
    strides[made.order[i]] = stride;
    stride *= std::max<int64_t>(made.shape[made.order[i]], 1);
  }
  TorchTensor result = nullptr;
  if (torch.empty_strided(static_cast<int64_t>(made.rank), made.shape.data(), strides.data(), dtype,
                          on_gpu ? torch.cuda : torch.cpu, on_gpu ? device.device_id : -1,
                          &result) != 0) {
    throw Refusal{FULMEN_ERROR_OUT_OF_MEMORY,
                  std::string(on_gpu ? "CUDA" : "host") +
                      " out of memory. PyTorch has none for a result of fulmen.attention"};
  }
  return TorchArray(result);
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
  int32_t dtype = 0;
  torch.get_dtype(owned_, &dtype);
  found.dtype = dlpack_dtype(dtype);
  torch.get_dim(owned_, &rank);
  found.ndim = static_cast<int32_t>(rank);
  torch.get_sizes(owned_, &found.shape);
  torch.get_strides(owned_, &found.strides);
  torch.get_data_ptr(owned_, &found.data);
  found.device = dlpack_device(owned_);
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

TorchArray empty_like(const DLTensor& x, int64_t last_extent, int32_t dtype) {
  Extents made(x, static_cast<size_t>(x.ndim));
  if (made.rank > 0) {
    const size_t last = made.rank - 1;
    made.shape[last] = last_extent;
    if (x.strides[last] == 1 && x.shape[last] == last_extent) {
      order_as_torch(x, &made);
    } else if (x.strides[last] == 1) {
      std::stable_sort(made.order.begin() + 1, made.order.begin() + made.rank,
                       [&](size_t a, size_t b) {
                         return x.strides[a] != x.strides[b] ? x.strides[a] < x.strides[b] : a > b;
                       });
    }
  }
  return empty(made, dtype == kSameDtype ? torch_dtype(x.dtype) : dtype, x.device);
}

TorchArray empty_sums(const DLTensor& q, bool rows_before_heads, Sums kind) {
  const auto axes = static_cast<size_t>(q.ndim);
  Extents made(q, kind == Sums::kStats ? axes : axes - 1);
  if (rows_before_heads && axes >= 3) std::swap(made.shape[axes - 3], made.shape[axes - 2]);
  if (kind == Sums::kStats) made.shape[axes - 1] = 2;
  const uint8_t bits = q.dtype.bits == 64 ? 64 : 32;
  return empty(made, torch_dtype({kDLFloat, bits, 1}), q.device);
}

TorchArray zero_beside(const DLTensor& x) {
  TorchArray made = empty(Extents(x, 0), torch_dtype(x.dtype), x.device);
  torch_abi()->fill_with_zeros(made.owned_);
  return made;
}

}  // namespace fulmen::ffi
