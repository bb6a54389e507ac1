// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's tensors as a kernel of its dispatcher holds them, and memory for results, by the part
// of PyTorch's stable C ABI that this takes: declared by ourselves and found in the PyTorch that
// the process has loaded. Nothing is linked, no header of PyTorch is needed. Documented there in
// torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h; whole since PyTorch 2.10.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "ffi/abi.h"
#include "ffi/arrays.h"

namespace fulmen::ffi {

using TorchTensor = struct TorchTensorOpaque*;
using TorchList = struct TorchListOpaque*;
using TorchLibrary = struct TorchLibraryOpaque*;
using TorchValue = uint64_t;  // an argument or result: a number, or a handle, owned by its receiver
using TorchKernel = void (*)(TorchValue* stack, uint64_t num_arguments, uint64_t num_results);

inline constexpr uint64_t kTorchVersion = uint64_t{2} << 56 | uint64_t{10} << 48;

// Where an int32_t is returned, 0 is success.
struct TorchAbi {
  int32_t (*library_init_impl)(const char* name_space, const char* key, const char* file,
                               uint32_t line, TorchLibrary* library);
  int32_t (*library_impl)(TorchLibrary library, const char* name, TorchKernel kernel,
                          uint64_t version);
  int32_t (*call_dispatcher)(const char* name, const char* overload, TorchValue* stack,
                             uint64_t version);
  int32_t (*list_size)(TorchList list, size_t* size);
  int32_t (*list_get_item)(TorchList list, size_t index, TorchValue* item);
  int32_t (*delete_list)(TorchList list);

  int32_t (*get_data_ptr)(TorchTensor tensor, void** data);
  int32_t (*get_dim)(TorchTensor tensor, int64_t* rank);
  int32_t (*get_sizes)(TorchTensor tensor, int64_t** shape);
  int32_t (*get_strides)(TorchTensor tensor, int64_t** strides);
  int32_t (*get_dtype)(TorchTensor tensor, int32_t* dtype);
  int32_t (*get_device_type)(TorchTensor tensor, int32_t* type);
  int32_t (*get_device_index)(TorchTensor tensor, int32_t* index);
  int32_t (*is_defined)(TorchTensor tensor, bool* is_defined);
  int32_t (*new_undefined)(TorchTensor* tensor);
  int32_t (*delete_tensor)(TorchTensor tensor);
  int32_t (*empty_strided)(int64_t rank, const int64_t* shape, const int64_t* strides,
                           int32_t dtype, int32_t device_type, int32_t device_index,
                           TorchTensor* tensor);
  int32_t (*fill_with_zeros)(TorchTensor tensor);
  bool (*is_grad_enabled)();
  int32_t (*get_cuda_stream)(int32_t device_index, void** stream);  // null: PyTorch without CUDA

  int32_t dtypes[kNumDTypes];  // its numbers of those of kDTypes
  int32_t cpu, cuda;           // and of kinds of devices
};

// Null where the process has loaded no PyTorch that has all of it.
const TorchAbi* torch_abi();

inline constexpr int32_t kSameDtype = -1;

// A reference to a tensor; it may be undefined, or none at all: not given.
class TorchArray {
 public:
  TorchArray() = default;
  explicit TorchArray(TorchTensor owned) : owned_(owned) {}
  explicit TorchArray(TorchValue owned) : TorchArray(reinterpret_cast<TorchTensor>(owned)) {}
  TorchArray(TorchArray&& other) noexcept : owned_(other.owned_) { other.owned_ = nullptr; }
  TorchArray& operator=(TorchArray&& other) noexcept {
    std::swap(owned_, other.owned_);
    return *this;
  }
  ~TorchArray();

  bool is_given() const { return owned_ != nullptr; }
  bool is_defined() const;
  // Throws Refusal for a dtype or a device that no call takes.
  DLTensor dlpack() const;
  TorchValue released();  // as a result, or for a call

 private:
  friend TorchArray zero_beside(const DLTensor& x);

  TorchTensor owned_ = nullptr;
};

TorchArray undefined();

// Each throws Refusal where PyTorch has no memory left.
// Of the dtype, device and extents of x, but for the last one; in memory its axes are in the order
// of those of x, as torch.empty_like has them, and its rows are dense.
TorchArray empty_like(const DLTensor& x, int64_t last_extent, int32_t dtype = kSameDtype);
inline TorchArray empty_like(const DLTensor& x) {
  return empty_like(x, x.ndim == 0 ? 1 : x.shape[x.ndim - 1]);
}
// As fulmen.h wants lse of q, or stats: contiguous, float64 of float64, float32 of all else.
enum class Sums { kLse, kStats };
TorchArray empty_sums(const DLTensor& q, bool rows_before_heads, Sums kind);
// One zero, of the dtype and on the device of x.
TorchArray zero_beside(const DLTensor& x);

}  // namespace fulmen::ffi
