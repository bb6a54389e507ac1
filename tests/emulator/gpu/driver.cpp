// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// libcuda's functions, as far as fulmen binds them. Everything is done when a call returns, so
// streams mean nothing. A launch that the checker stops fails with kCudaLaunchFailed, and
// cuGetErrorString then says what was found.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver_types.h"
#include "emulator/gpu/gpu.h"
#include "emulator/launch.h"
#include "emulator/tensor_copies.h"

using namespace fulmen::cuda;  // NOLINT: the types of the interface under their own names
namespace emulator = fulmen::emulator;

namespace fulmen::cuda {
struct CUctx_st {};
struct CUmod_st {
  void* library;
  std::string kernel;  // by its name in reports
};
struct CUfunc_st {
  emulator::ThreadEntry* thread;
  std::string kernel;
};
}  // namespace fulmen::cuda

namespace {

constexpr int kVersion = 13000;
CUctx_st the_context;
thread_local std::vector<CUcontext> contexts;

std::mutex mutex;
std::string last_finding = "nothing was found";
std::deque<CUfunc_st> functions;  // never freed

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
  const int capability = emulator::setting("FULMEN_EMULATOR_CAPABILITY", 90);
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
      return capability >= 90 ? 232448 : capability == 80 ? 166912 : 101376;
    case kAttributeSharedBytesPerMultiprocessor:
      return capability >= 90 ? 233472 : capability == 80 ? 167936 : 102400;
    default:
      return 0;
  }
}

}  // namespace

#define DRIVER(function, ...) \
  extern "C" __attribute__((visibility("default"))) CUresult function(__VA_ARGS__)

DRIVER(cuInit, unsigned) { return kCudaSuccess; }
DRIVER(cuDriverGetVersion, int* version) {
  *version = kVersion;
  return kCudaSuccess;
}
DRIVER(cuGetErrorName, CUresult result, const char** name) {
  *name = result == kCudaLaunchFailed  ? "CUDA_ERROR_LAUNCH_FAILED"
          : result == kCudaOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
                                       : "CUDA_ERROR_INVALID_VALUE";
  return kCudaSuccess;
}
DRIVER(cuGetErrorString, CUresult result, const char** text) {
  static thread_local std::string said;
  const std::lock_guard lock(mutex);
  said = result == kCudaLaunchFailed ? last_finding : "refused by the emulator";
  *text = said.c_str();
  return kCudaSuccess;
}
DRIVER(cuDeviceGetCount, int* count) {
  *count = 1;
  return kCudaSuccess;
}
DRIVER(cuDeviceGet, CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? kCudaSuccess : kCudaInvalidDevice;
}
DRIVER(cuDeviceGetName, char* name, int capacity, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(capacity), "emulated GPU");
  return kCudaSuccess;
}
DRIVER(cuDeviceGetAttribute, int* value, int attribute, CUdevice) {
  *value = attribute_of(attribute);
  return kCudaSuccess;
}
DRIVER(cuDeviceTotalMem_v2, std::size_t* bytes, CUdevice) {
  *bytes = std::size_t{80} << 30;
  return kCudaSuccess;
}
DRIVER(cuDevicePrimaryCtxRetain, CUcontext* context, CUdevice) {
  *context = &the_context;
  return kCudaSuccess;
}
DRIVER(cuDevicePrimaryCtxRelease_v2, CUdevice) { return kCudaSuccess; }
DRIVER(cuCtxGetCurrent, CUcontext* context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return kCudaSuccess;
}
DRIVER(cuCtxPushCurrent_v2, CUcontext context) {
  contexts.push_back(context);
  return kCudaSuccess;
}
DRIVER(cuCtxPopCurrent_v2, CUcontext* context) {
  cuCtxGetCurrent(context);
  if (!contexts.empty()) contexts.pop_back();
  return kCudaSuccess;
}
DRIVER(cuCtxSynchronize) { return kCudaSuccess; }

DRIVER(cuModuleLoadData, CUmodule* module, const void* image) {
  const std::string text = static_cast<const char*>(image);
  const std::string prefix = emulator::kImagePrefix;
  if (text.compare(0, prefix.size(), prefix) != 0) return kCudaNoBinaryForGpu;
  void* const library = ::dlopen(text.c_str() + prefix.size(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::lock_guard lock(mutex);
    last_finding = ::dlerror();
    return kCudaLaunchFailed;
  }
  const auto name = static_cast<const char*>(::dlsym(library, emulator::kKernelName));
  *module = new CUmod_st{library, name != nullptr ? name : "kernel"};
  return kCudaSuccess;
}
DRIVER(cuModuleUnload, CUmodule module) {
  delete module;  // its code stays: sites of reports point into it
  return kCudaSuccess;
}
DRIVER(cuModuleGetFunction, CUfunction* function, CUmodule module, const char*) {
  void* const thread = ::dlsym(module->library, emulator::kThreadEntry);
  if (thread == nullptr) return kCudaInvalidValue;
  const std::lock_guard lock(mutex);
  *function = &functions.emplace_back(
      CUfunc_st{reinterpret_cast<emulator::ThreadEntry*>(thread), module->kernel});
  return kCudaSuccess;
}
DRIVER(cuFuncGetAttribute, int* value, int, CUfunction) {
  *value = 0;
  return kCudaSuccess;
}
DRIVER(cuFuncSetAttribute, CUfunction, int, int) { return kCudaSuccess; }
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks, CUfunction, int, std::size_t) {
  *blocks = 1;
  return kCudaSuccess;
}
DRIVER(cuLaunchKernelEx, const CUlaunchConfig* config, CUfunction function, void** params, void**) {
  try {
    emulator::run({function->kernel, function->thread, params[0], config->grid_x,
                   static_cast<int>(config->block_x), static_cast<int>(config->shared_bytes)});
    return kCudaSuccess;
  } catch (const emulator::Error& error) {
    const std::lock_guard lock(mutex);
    last_finding = error.what();
    return kCudaLaunchFailed;
  }
}

DRIVER(cuPointerGetAttributes, unsigned count, const int* attributes, void** values, CUdeviceptr) {
  for (unsigned i = 0; i < count; ++i) {
    const unsigned answer = attributes[i] == kPointerMemoryType  ? kMemoryDevice
                            : attributes[i] == kPointerIsManaged ? 1
                                                                 : 0;
    std::memcpy(values[i], &answer, sizeof(answer));
  }
  return kCudaSuccess;
}
DRIVER(cuMemAlloc_v2, CUdeviceptr* pointer, std::size_t bytes) { return allocate(pointer, bytes); }
DRIVER(cuMemcpyHtoD_v2, CUdeviceptr to, const void* from, std::size_t bytes) {
  std::memcpy(pointer_of(to), from, bytes);
  return kCudaSuccess;
}
DRIVER(cuMemcpyDtoH_v2, void* to, CUdeviceptr from, std::size_t bytes) {
  std::memcpy(to, pointer_of(from), bytes);
  return kCudaSuccess;
}
DRIVER(cuMemFree_v2, CUdeviceptr pointer) { return release(pointer); }
DRIVER(cuMemPoolCreate, CUmemoryPool* pool, const CUmemPoolProps*) {
  *pool = reinterpret_cast<CUmemoryPool>(&the_context);
  return kCudaSuccess;
}
DRIVER(cuMemPoolSetAttribute, CUmemoryPool, int, void*) { return kCudaSuccess; }
DRIVER(cuMemAllocFromPoolAsync, CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool, CUstream) {
  return allocate(pointer, bytes);
}
DRIVER(cuMemFreeAsync, CUdeviceptr pointer, CUstream) { return release(pointer); }
DRIVER(cuMemHostAlloc, void** pointer, std::size_t bytes, unsigned) {
  *pointer = emulator::allocate(bytes, "pinned memory");
  return *pointer != nullptr ? kCudaSuccess : kCudaOutOfMemory;
}
DRIVER(cuMemsetD8Async, CUdeviceptr pointer, unsigned char value, std::size_t bytes, CUstream) {
  std::memset(pointer_of(pointer), value, bytes);
  return kCudaSuccess;
}

// Refuses what the real one refuses: CUDA Driver API 13.0, section 6.33, cuTensorMapEncodeTiled.
DRIVER(cuTensorMapEncodeTiled, CUtensorMap* map, int type, unsigned rank, void* address,
       const std::uint64_t* extents, const std::uint64_t* stride_bytes, const unsigned* box,
       const unsigned* element_strides, int interleave, int swizzle, int, int) {
  constexpr int kTypeFloat16 = 6;
  constexpr int kTypeBFloat16 = 9;
  constexpr int kNoSwizzle = 0;
  constexpr int kSwizzle128B = 3;
  const bool known = (type == kTypeFloat16 || type == kTypeBFloat16) && rank == 4 &&
                     interleave == 0 && (swizzle == kNoSwizzle || swizzle == kSwizzle128B);
  if (!known) return kCudaNotSupported;
  if (reinterpret_cast<std::uint64_t>(address) % 16 != 0) return kCudaInvalidValue;
  emulator::HostTensorMap host{};
  host.data = static_cast<fulmen::u8*>(address);
  host.strides_bytes[0] = 2;
  for (unsigned axis = 0; axis < rank; ++axis) {
    if (extents[axis] == 0 || extents[axis] > 1ull << 31) return kCudaInvalidValue;
    if (box[axis] == 0 || box[axis] > 256 || element_strides[axis] != 1) return kCudaInvalidValue;
    host.extents[axis] = static_cast<int>(extents[axis]);
    if (axis == 0) continue;
    const std::uint64_t stride = stride_bytes[axis - 1];
    if (stride % 16 != 0 || stride >= 1ull << 40) return kCudaInvalidValue;
    host.strides_bytes[axis] = static_cast<fulmen::i64>(stride);
  }
  const unsigned row_bytes = 2 * box[0];
  if (row_bytes % 16 != 0 || (swizzle == kSwizzle128B && row_bytes > 128)) return kCudaInvalidValue;
  if (box[2] != 1 || box[3] != 1) return kCudaNotSupported;
  host.box_rows = static_cast<int>(box[1]);
  host.box_columns = static_cast<int>(box[0]);
  host.swizzled = swizzle == kSwizzle128B;
  const fulmen::TensorMap encoded = emulator::encode(host);
  static_assert(sizeof(encoded) == sizeof(*map));
  std::memcpy(static_cast<void*>(map), &encoded, sizeof(encoded));
  return kCudaSuccess;
}
