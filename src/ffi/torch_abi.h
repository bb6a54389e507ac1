// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The part of PyTorch's stable C ABI that torch_sdpa_node.cpp speaks, declared by ourselves and
// found in the PyTorch that the process has loaded: nothing is linked, no header of PyTorch is
// needed. Documented there in torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h; whole since PyTorch 2.10.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace fulmen::ffi
