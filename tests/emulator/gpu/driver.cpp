// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// libcuda's functions of devices, contexts and memory, as far as fulmen binds them. Everything is
// done when a call returns, so streams mean nothing.
#include "gpu/driver/driver.h"

#include <cstdio>
#include <cstring>
#include <vector>

#include "emulator/gpu/gpu.h"

using namespace fulmen::gpu;  // NOLINT: the types of the interface under their own names
namespace emulator = fulmen::emulator;

namespace fulmen::gpu {
struct CUctx_st {};
}  // namespace fulmen::gpu

namespace {

constexpr int kVersion = 13000;
CUctx_st the_context;
thread_local std::vector<CUcontext> contexts;

void* pointer_of(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult allocate(CUdeviceptr* pointer, std::size_t bytes) {
  void* const memory = emulator::allocate(bytes, "workspace");
  *pointer = reinterpret_cast<CUdeviceptr>(memory);
  return memory != nullptr ? kCudaSuccess : kCudaOutOfMemory;
}

CUresult release(CUdeviceptr pointer) {
  emulator::release(pointer_of(pointer));
  return kCudaSuccess;
}

// A Hopper or an older card, as in plan/gpu.cpp's table.
int attribute_of(int attribute) {
  const int capability = emulator::capability();
  switch (attribute) {
    case kAttributeComputeMajor:
      return capability / 10;
    case kAttributeComputeMinor:
      return capability % 10;
    case kAttributeNumMultiprocessors:
      return emulator::setting("FULMEN_EMULATOR_MULTIPROCESSORS", 4);
    case kAttributeL2Bytes:
      return 50 << 20;
    case kAttributeRegistersPerMultiprocessor:
      return 65536;
    case kAttributeSharedBytesPerBlock:
      return capability >= 90   ? 232448
             : capability == 80 ? 166912
             : capability > 80  ? 101376
                                : 65536;
    case kAttributeSharedBytesPerMultiprocessor:
      return capability >= 90   ? 233472
             : capability == 80 ? 167936
             : capability > 80  ? 102400
                                : 65536;
    default:
      return 0;
  }
}

}  // namespace

FULMEN_DRIVER(cuInit, unsigned) { return kCudaSuccess; }
FULMEN_DRIVER(cuDriverGetVersion, int* version) {
  *version = kVersion;
  return kCudaSuccess;
}
FULMEN_DRIVER(cuDeviceGetCount, int* count) {
  *count = 1;
  return kCudaSuccess;
}
FULMEN_DRIVER(cuDeviceGet, CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? kCudaSuccess : kCudaInvalidDevice;
}
FULMEN_DRIVER(cuDeviceGetName, char* name, int capacity, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(capacity), "emulated GPU");
  return kCudaSuccess;
}
FULMEN_DRIVER(cuDeviceGetAttribute, int* value, int attribute, CUdevice) {
  *value = attribute_of(attribute);
  return kCudaSuccess;
}
FULMEN_DRIVER(cuDeviceTotalMem_v2, std::size_t* bytes, CUdevice) {
  *bytes = std::size_t{80} << 30;
  return kCudaSuccess;
}
FULMEN_DRIVER(cuDevicePrimaryCtxRetain, CUcontext* context, CUdevice) {
  *context = &the_context;
  return kCudaSuccess;
}
FULMEN_DRIVER(cuDevicePrimaryCtxRelease_v2, CUdevice) { return kCudaSuccess; }
FULMEN_DRIVER(cuCtxGetCurrent, CUcontext* context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return kCudaSuccess;
}
FULMEN_DRIVER(cuCtxPushCurrent_v2, CUcontext context) {
  contexts.push_back(context);
  return kCudaSuccess;
}
FULMEN_DRIVER(cuCtxPopCurrent_v2, CUcontext* context) {
  cuCtxGetCurrent(context);
  if (!contexts.empty()) contexts.pop_back();
  return kCudaSuccess;
}
FULMEN_DRIVER(cuCtxSynchronize) {
  emulator::wait_for_kernels();
  return kCudaSuccess;
}

FULMEN_DRIVER(cuPointerGetAttributes, unsigned count, const int* attributes, void** values,
              CUdeviceptr) {
  for (unsigned i = 0; i < count; ++i) {
    const unsigned answer = attributes[i] == kPointerMemoryType  ? kMemoryDevice
                            : attributes[i] == kPointerIsManaged ? 1
                                                                 : 0;
    std::memcpy(values[i], &answer, sizeof(answer));
  }
  return kCudaSuccess;
}
FULMEN_DRIVER(cuMemAlloc_v2, CUdeviceptr* pointer, std::size_t bytes) {
  return allocate(pointer, bytes);
}
FULMEN_DRIVER(cuMemcpyHtoD_v2, CUdeviceptr to, const void* from, std::size_t bytes) {
  emulator::wait_for_kernels();
  std::memcpy(pointer_of(to), from, bytes);
  return kCudaSuccess;
}
FULMEN_DRIVER(cuMemcpyDtoH_v2, void* to, CUdeviceptr from, std::size_t bytes) {
  emulator::wait_for_kernels();
  std::memcpy(to, pointer_of(from), bytes);
  return kCudaSuccess;
}
FULMEN_DRIVER(cuMemFree_v2, CUdeviceptr pointer) { return release(pointer); }
FULMEN_DRIVER(cuMemPoolCreate, CUmemoryPool* pool, const CUmemPoolProps*) {
  *pool = reinterpret_cast<CUmemoryPool>(&the_context);
  return kCudaSuccess;
}
FULMEN_DRIVER(cuMemPoolSetAttribute, CUmemoryPool, int, void*) { return kCudaSuccess; }
FULMEN_DRIVER(cuMemAllocFromPoolAsync, CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool,
              CUstream) {
  return allocate(pointer, bytes);
}
FULMEN_DRIVER(cuMemFreeAsync, CUdeviceptr pointer, CUstream) { return release(pointer); }
FULMEN_DRIVER(cuMemHostAlloc, void** pointer, std::size_t bytes, unsigned) {
  *pointer = emulator::allocate(bytes, "pinned memory");
  return *pointer != nullptr ? kCudaSuccess : kCudaOutOfMemory;
}
FULMEN_DRIVER(cuMemsetD8Async, CUdeviceptr pointer, unsigned char value, std::size_t bytes,
              CUstream) {
  emulator::wait_for_kernels();
  std::memset(pointer_of(pointer), value, bytes);
  return kCudaSuccess;
}
