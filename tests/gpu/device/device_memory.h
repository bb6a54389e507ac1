// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Arrays of a request in device memory, for kernels, and their contents back on the host, for the
// comparison with the oracle.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../../cpu/random_problem.h"
#include "gpu/driver/device.h"
#include "gpu/jit/compiler.h"

namespace fulmen::test {

struct FoundDevice {
  const gpu::Device* device = nullptr;  // null: tests are skipped, and `reason` says why
  std::string reason;
};

// A GPU and a compiler for it, if there are any.
inline FoundDevice find_device(int ordinal = 0) {
  try {
    const gpu::Device* device = &gpu::device(ordinal);
    gpu::nvrtc();
    return {device, ""};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

class DeviceMemory {
 public:
  explicit DeviceMemory(const gpu::Device& device)
      : device_(device), library_(gpu::SharedLibrary::open("libcuda.so.1")) {
    library_.bind(to_device_, "cuMemcpyHtoD_v2");
    library_.bind(to_host_, "cuMemcpyDtoH_v2");
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    const gpu::CurrentContext current(device_);
    for (const gpu::CUdeviceptr pointer : owned_) device_.driver()->cuMemFree_v2(pointer);
  }

  // The same array on the device, with the same contents, `misalignment` bytes past a multiple of
  // 256.
  Tensor copy(const Tensor& tensor, std::size_t misalignment = 0) {
    if (!tensor.present() || tensor.data == nullptr) return tensor;
    const gpu::CurrentContext current(device_);
    const std::size_t bytes = span_bytes(tensor);
    Tensor other = tensor;
    other.data = allocate(bytes + misalignment) + misalignment;
    check(to_device_(reinterpret_cast<gpu::CUdeviceptr>(other.data), tensor.data, bytes));
    return other;
  }

  // On a multiple of 256; nothing written.
  u8* allocate(std::size_t bytes) {
    const gpu::CurrentContext current(device_);
    gpu::CUdeviceptr pointer = 0;
    check(device_.driver()->cuMemAlloc_v2(&pointer, max<std::size_t>(bytes, 1)));
    owned_.push_back(pointer);
    return reinterpret_cast<u8*>(pointer);
  }

  Request copy(const Request& request, std::size_t misalignment = 0) {
    Request other = request;
    for (Tensor& tensor : other.arrays.tensors) tensor = copy(tensor, misalignment);
    return other;
  }

  // An array of the device on the host; waits for what runs there.
  Tensor fetch(const Tensor& tensor) {
    if (!tensor.present() || tensor.data == nullptr) return tensor;
    const gpu::CurrentContext current(device_);
    const std::size_t bytes = span_bytes(tensor);
    fetched_.push_back(std::make_unique<char[]>(bytes));
    check(to_host_(fetched_.back().get(), reinterpret_cast<gpu::CUdeviceptr>(tensor.data), bytes));
    Tensor other = tensor;
    other.data = fetched_.back().get();
    return other;
  }

  Request fetch(const Request& request) {
    Request other = request;
    for (Tensor& tensor : other.arrays.tensors) tensor = fetch(tensor);
    return other;
  }

 private:
  static std::size_t span_bytes(const Tensor& tensor) {
    i64 last = 0;
    for (int axis = 0; axis < tensor.rank; ++axis) {
      last += max<i64>(tensor.shape[axis] - 1, 0) * tensor.strides[axis];
    }
    return static_cast<std::size_t>((last + 1) * size_bytes(tensor.dtype));
  }

  void check(gpu::CUresult result) const {
    device_.driver().check(result, "move an array of a test");
  }

  const gpu::Device& device_;
  gpu::SharedLibrary library_;
  gpu::CUresult (*to_device_)(gpu::CUdeviceptr, const void*, std::size_t) = nullptr;
  gpu::CUresult (*to_host_)(void*, gpu::CUdeviceptr, std::size_t) = nullptr;
  std::vector<gpu::CUdeviceptr> owned_;
  std::vector<std::unique_ptr<char[]>> fetched_;
};

}  // namespace fulmen::test
