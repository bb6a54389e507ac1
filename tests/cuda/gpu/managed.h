// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays of a request in memory that host and device share, so that the oracle, the kernels and the
// comparison read the same request.
#pragma once

#include <cstring>
#include <vector>

#include "../../cpu/random_problem.h"
#include "cuda/device.h"

namespace fulmen::test {

class ManagedMemory {
 public:
  explicit ManagedMemory(const cuda::Device& device)
      : device_(device), library_(cuda::SharedLibrary::open("libcuda.so.1")) {
    library_.bind(allocate_, "cuMemAllocManaged");
  }
  ManagedMemory(const ManagedMemory&) = delete;
  ManagedMemory& operator=(const ManagedMemory&) = delete;
  ~ManagedMemory() {
    const cuda::CurrentContext current(device_);
    for (const cuda::CUdeviceptr pointer : owned_) device_.driver()->cuMemFree_v2(pointer);
  }

  // The same array elsewhere, with the same contents, `misalignment` bytes past a multiple of 256.
  Tensor copy(const Tensor& tensor, std::size_t misalignment = 0) {
    if (!tensor.present() || tensor.data == nullptr) return tensor;
    const std::size_t bytes = span_bytes(tensor);
    Tensor other = tensor;
    other.data = allocate(bytes + misalignment) + misalignment;
    std::memcpy(other.data, tensor.data, bytes);
    return other;
  }

  Request copy(const Request& request) {
    Request other = request;
    for (Tensor& tensor : other.arrays.tensors) tensor = copy(tensor);
    return other;
  }

  char* allocate(std::size_t bytes) {
    const cuda::CurrentContext current(device_);
    cuda::CUdeviceptr pointer = 0;
    constexpr unsigned kAttachGlobal = 1;
    device_.driver().check(allocate_(&pointer, bytes + 1, kAttachGlobal), "allocate for a test");
    owned_.push_back(pointer);
    return reinterpret_cast<char*>(pointer);
  }

 private:
  static std::size_t span_bytes(const Tensor& tensor) {
    i64 last = 0;
    for (int axis = 0; axis < tensor.rank; ++axis) {
      last += max<i64>(tensor.shape[axis] - 1, 0) * tensor.strides[axis];
    }
    return static_cast<std::size_t>((last + 1) * size_bytes(tensor.dtype));
  }

  const cuda::Device& device_;
  cuda::SharedLibrary library_;
  cuda::CUresult (*allocate_)(cuda::CUdeviceptr*, std::size_t, unsigned) = nullptr;
  std::vector<cuda::CUdeviceptr> owned_;
};

}  // namespace fulmen::test
