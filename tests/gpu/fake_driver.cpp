// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A CUDA driver that is none: a shared library with the functions that fulmen binds, for tests on
// machines without a GPU. It counts calls, keeps a context stack for each thread, remembers every
// launch with a copy of its parameters, and fails where the environment says so:
//   FAKE_CUDA_<function>=<CUresult>   that function returns it
//   FAKE_CUDA_VERSION=<n>             cuDriverGetVersion (13000)
//   FAKE_CUDA_DEVICES=<n>             how many devices there are (2)
//   FAKE_CUDA_CAPABILITY=<n>          their compute capability (90)
// Machine code is text that begins with "cubin sm_<arch>", as fake_nvrtc.cpp writes it; code of
// another architecture is refused as a driver would.
#include "fake_driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/driver/driver.h"

using namespace fulmen::gpu;  // NOLINT: the types of the interface under their own names

namespace fulmen::gpu {
struct CUctx_st {
  int device;
};
struct CUmod_st {
  int device;
  std::string kernel;
  std::size_t params_bytes;
};
struct CUfunc_st {
  const CUmod_st* module;
  int dynamic_shared_bytes;
};
}  // namespace fulmen::gpu

namespace {

// Memory that does not count as operator new of the program under test.
template <class T>
struct Uncounted {
  using value_type = T;
  Uncounted() = default;
  template <class U>
  Uncounted(const Uncounted<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(std::malloc(n * sizeof(T))); }
  void deallocate(T* memory, std::size_t) { std::free(memory); }
  friend bool operator==(const Uncounted&, const Uncounted&) { return true; }
};
using Bytes = std::vector<char, Uncounted<char>>;

constexpr int kMaxDevices = 8;
CUctx_st contexts[kMaxDevices] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
thread_local std::vector<CUcontext, Uncounted<CUcontext>> context_stack;

std::mutex mutex;
std::map<std::string_view, int> calls;
struct Allocation {
  std::size_t bytes;
  int device;  // -1: pinned host memory
  bool is_managed;
  bool is_in_stream;
};
std::map<CUdeviceptr, Allocation, std::less<>, Uncounted<std::pair<const CUdeviceptr, Allocation>>>
    allocations;  // by where they begin
struct Reclaim {  // what a process leaves behind, as drivers do
  ~Reclaim() {
    for (const auto& left : allocations) std::free(reinterpret_cast<void*>(left.first));
  }
} reclaim;
std::deque<FakeLaunch, Uncounted<FakeLaunch>> launches;
std::deque<Bytes, Uncounted<Bytes>> params_of_launches;
std::deque<CUmod_st> modules;  // never freed: a driver would do that
std::deque<CUfunc_st> functions;

int number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

// Counts the call; the result that the environment wants of it.
CUresult called(const char* function) {
  const std::lock_guard lock(mutex);
  ++calls[function];
  char variable[80];
  std::snprintf(variable, sizeof variable, "FAKE_CUDA_%s", function);
  return number(variable, kCudaSuccess);
}

CUcontext current() { return context_stack.empty() ? nullptr : context_stack.back(); }

CUdeviceptr allocate(std::size_t bytes, int device, bool is_in_stream) {
  const auto pointer = reinterpret_cast<CUdeviceptr>(std::calloc(bytes, 1));
  const std::lock_guard lock(mutex);
  allocations[pointer] = {bytes, device, false, is_in_stream};
  return pointer;
}

void release(CUdeviceptr pointer) {
  const std::lock_guard lock(mutex);
  allocations.erase(pointer);
  std::free(reinterpret_cast<void*>(pointer));
}

// The text between two marks, or "".
std::string between(const std::string& text, const std::string& begin, const std::string& end) {
  const std::size_t at = text.find(begin);
  if (at == std::string::npos) return "";
  const std::size_t from = at + begin.size();
  return text.substr(from, text.find(end, from) - from);
}

}  // namespace

#define FAKE(function, ...) \
  extern "C" __attribute__((visibility("default"))) CUresult function(__VA_ARGS__)
#define ENTER(function) \
  if (const CUresult injected = called(#function); injected != kCudaSuccess) return injected

FAKE(cuInit, unsigned) {
  ENTER(cuInit);
  return kCudaSuccess;
}
FAKE(cuDriverGetVersion, int* version) {
  *version = number("FAKE_CUDA_VERSION", 13000);
  return kCudaSuccess;
}
FAKE(cuGetErrorName, CUresult result, const char** name) {
  switch (result) {
    case kCudaOutOfMemory:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case kCudaNoDevice:
      *name = "CUDA_ERROR_NO_DEVICE";
      break;
    case kCudaNoBinaryForGpu:
      *name = "CUDA_ERROR_NO_BINARY_FOR_GPU";
      break;
    default:
      return kCudaInvalidValue;
  }
  return kCudaSuccess;
}
FAKE(cuGetErrorString, CUresult, const char** text) {
  *text = "text of the fake driver";
  return kCudaSuccess;
}
FAKE(cuDeviceGetCount, int* count) {
  ENTER(cuDeviceGetCount);
  *count = number("FAKE_CUDA_DEVICES", 2);
  return kCudaSuccess;
}
FAKE(cuDeviceGet, CUdevice* device, int ordinal) {
  ENTER(cuDeviceGet);
  *device = ordinal;
  return kCudaSuccess;
}
FAKE(cuDeviceGetName, char* name, int capacity, CUdevice device) {
  ENTER(cuDeviceGetName);
  const std::string text = "Fake GPU " + std::to_string(device);
  std::strncpy(name, text.c_str(), static_cast<std::size_t>(capacity));
  return kCudaSuccess;
}
FAKE(cuDeviceGetAttribute, int* value, int attribute, CUdevice) {
  ENTER(cuDeviceGetAttribute);
  const int capability = number("FAKE_CUDA_CAPABILITY", 90);
  switch (attribute) {
    case kAttributeComputeMajor:
      *value = capability / 10;
      break;
    case kAttributeComputeMinor:
      *value = capability % 10;
      break;
    case kAttributeNumMultiprocessors:
      *value = 132;
      break;
    case kAttributeSharedBytesPerBlock:
      *value = 232448;
      break;
    case kAttributeSharedBytesPerMultiprocessor:
      *value = 233472;
      break;
    default:
      *value = 1;
      break;
  }
  return kCudaSuccess;
}
FAKE(cuDeviceTotalMem_v2, std::size_t* bytes, CUdevice) {
  ENTER(cuDeviceTotalMem_v2);
  *bytes = std::size_t{80} << 30;
  return kCudaSuccess;
}
FAKE(cuDevicePrimaryCtxRetain, CUcontext* context, CUdevice device) {
  ENTER(cuDevicePrimaryCtxRetain);
  *context = &contexts[device];
  return kCudaSuccess;
}
FAKE(cuDevicePrimaryCtxRelease_v2, CUdevice) {
  ENTER(cuDevicePrimaryCtxRelease_v2);
  return kCudaSuccess;
}
FAKE(cuCtxGetCurrent, CUcontext* context) {
  ENTER(cuCtxGetCurrent);
  *context = current();
  return kCudaSuccess;
}
FAKE(cuCtxPushCurrent_v2, CUcontext context) {
  ENTER(cuCtxPushCurrent_v2);
  context_stack.push_back(context);
  return kCudaSuccess;
}
FAKE(cuCtxPopCurrent_v2, CUcontext* context) {
  ENTER(cuCtxPopCurrent_v2);
  *context = current();
  if (!context_stack.empty()) context_stack.pop_back();
  return kCudaSuccess;
}
FAKE(cuCtxSynchronize) {
  ENTER(cuCtxSynchronize);
  return kCudaSuccess;
}
FAKE(cuModuleLoadData, CUmodule* module, const void* image) {
  ENTER(cuModuleLoadData);
  if (current() == nullptr) return kCudaNotInitialized;
  const std::string expected = "cubin sm_" + std::to_string(number("FAKE_CUDA_CAPABILITY", 90));
  if (std::strncmp(static_cast<const char*>(image), expected.c_str(), expected.size()) != 0) {
    return kCudaNoBinaryForGpu;
  }
  const std::string text = static_cast<const char*>(image);
  const std::lock_guard lock(mutex);
  const std::string bytes = between(text, ") == ", ", \"host and device disagree on the param");
  *module = &modules.emplace_back(CUmod_st{current()->device, between(text, "// ", "\n"),
                                           static_cast<std::size_t>(std::atol(bytes.c_str()))});
  return kCudaSuccess;
}
FAKE(cuModuleUnload, CUmodule) {
  ENTER(cuModuleUnload);
  return kCudaSuccess;
}
FAKE(cuModuleGetFunction, CUfunction* function, CUmodule module, const char*) {
  ENTER(cuModuleGetFunction);
  const std::lock_guard lock(mutex);
  *function = &functions.emplace_back(CUfunc_st{module, 0});
  return kCudaSuccess;
}
FAKE(cuFuncGetAttribute, int* value, int, CUfunction) {
  ENTER(cuFuncGetAttribute);
  *value = 0;
  return kCudaSuccess;
}
FAKE(cuFuncSetAttribute, CUfunction function, int attribute, int value) {
  ENTER(cuFuncSetAttribute);
  if (attribute == kFunctionMaxDynamicSharedBytes) function->dynamic_shared_bytes = value;
  return kCudaSuccess;
}
FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks, CUfunction, int, std::size_t) {
  ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
  *blocks = 4;
  return kCudaSuccess;
}
FAKE(cuLaunchKernelEx, const CUlaunchConfig* config, CUfunction function, void** params, void**) {
  ENTER(cuLaunchKernelEx);
  const CUmod_st& module = *function->module;
  if (current() == nullptr || current()->device != module.device) return kCudaInvalidValue;
  const std::lock_guard lock(mutex);
  const char* given = static_cast<const char*>(params[0]);
  Bytes& copy = params_of_launches.emplace_back();
  if (given != nullptr) copy.assign(given, given + module.params_bytes);
  FakeLaunch& launch = launches.emplace_back();
  launch = {
      *config, module.device, function->dynamic_shared_bytes, module.kernel.c_str(), copy.data(),
      {}};
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    launch.attributes[i] = config->attributes[i];
  }
  return kCudaSuccess;
}
FAKE(cuPointerGetAttributes, unsigned count, const int* attributes, void** values,
     CUdeviceptr pointer) {
  ENTER(cuPointerGetAttributes);
  const std::lock_guard lock(mutex);
  auto found = allocations.upper_bound(pointer);
  const bool is_known = found != allocations.begin() && (--found, true) &&
                        pointer < found->first + found->second.bytes;
  const Allocation memory = is_known ? found->second : Allocation{0, -2, false, false};
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == kPointerRangeBegin || attributes[i] == kPointerRangeBytes) {
      const std::uint64_t begin = is_known ? found->first : 0;
      const std::uint64_t answer = attributes[i] == kPointerRangeBegin ? begin : memory.bytes;
      std::memcpy(values[i], &answer, sizeof(answer));
      continue;
    }
    const unsigned type = memory.device >= 0 ? kMemoryDevice : kMemoryHost;
    const int answer = attributes[i] == kPointerMemoryType  ? static_cast<int>(is_known ? type : 0)
                       : attributes[i] == kPointerDevice    ? memory.device
                       : attributes[i] == kPointerIsManaged ? memory.is_managed
                                                            : 0;
    std::memcpy(values[i], &answer, sizeof(answer));
  }
  return kCudaSuccess;
}
FAKE(cuMemAlloc_v2, CUdeviceptr* pointer, std::size_t bytes) {
  ENTER(cuMemAlloc_v2);
  if (current() == nullptr) return kCudaNotInitialized;
  *pointer = allocate(bytes, current()->device, false);
  return kCudaSuccess;
}
FAKE(cuMemFree_v2, CUdeviceptr pointer) {
  ENTER(cuMemFree_v2);
  release(pointer);
  return kCudaSuccess;
}
FAKE(cuMemPoolCreate, CUmemoryPool* pool, const CUmemPoolProps* properties) {
  ENTER(cuMemPoolCreate);
  *pool = reinterpret_cast<CUmemoryPool>(&contexts[properties->location_id]);
  return kCudaSuccess;
}
FAKE(cuMemPoolSetAttribute, CUmemoryPool, int attribute, void* value) {
  ENTER(cuMemPoolSetAttribute);
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, value, sizeof(bytes));
  return attribute == kPoolReleaseThreshold && bytes > 0 ? kCudaSuccess : kCudaInvalidValue;
}
FAKE(cuMemAllocFromPoolAsync, CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool,
     CUstream) {
  ENTER(cuMemAllocFromPoolAsync);
  if (current() == nullptr) return kCudaNotInitialized;
  if (pool != reinterpret_cast<CUmemoryPool>(current())) return kCudaInvalidValue;
  *pointer = allocate(bytes, current()->device, true);
  return kCudaSuccess;
}
FAKE(cuMemFreeAsync, CUdeviceptr pointer, CUstream) {
  ENTER(cuMemFreeAsync);
  if (current() == nullptr) return kCudaNotInitialized;
  release(pointer);
  return kCudaSuccess;
}
FAKE(cuMemHostAlloc, void** pointer, std::size_t bytes, unsigned) {
  ENTER(cuMemHostAlloc);
  if (current() == nullptr) return kCudaNotInitialized;
  *pointer = reinterpret_cast<void*>(allocate(bytes, -1, false));
  return kCudaSuccess;
}
FAKE(cuTensorMapEncodeTiled, CUtensorMap* map, int, unsigned, void* address, const std::uint64_t*,
     const std::uint64_t*, const unsigned*, const unsigned*, int, int, int, int) {
  ENTER(cuTensorMapEncodeTiled);
  map->opaque[0] = reinterpret_cast<std::uint64_t>(address);
  return kCudaSuccess;
}
FAKE(cuMemsetD8Async, CUdeviceptr, unsigned char, std::size_t, CUstream) {
  ENTER(cuMemsetD8Async);
  return kCudaSuccess;
}

extern "C" __attribute__((visibility("default"))) int fake_num_calls(const char* function) {
  const std::lock_guard lock(mutex);
  const auto found = calls.find(function);
  return found == calls.end() ? 0 : found->second;
}

extern "C" __attribute__((visibility("default"))) int fake_num_launches() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(launches.size());
}

extern "C" __attribute__((visibility("default"))) FakeLaunch fake_launch(int index) {
  const std::lock_guard lock(mutex);
  return launches[static_cast<std::size_t>(index)];
}

extern "C" __attribute__((visibility("default"))) std::size_t fake_num_bytes_in_streams() {
  const std::lock_guard lock(mutex);
  std::size_t bytes = 0;
  for (const auto& [pointer, memory] : allocations) bytes += memory.is_in_stream * memory.bytes;
  return bytes;
}

extern "C" __attribute__((visibility("default"))) void fake_set_managed(CUdeviceptr pointer,
                                                                        int managed) {
  const std::lock_guard lock(mutex);
  allocations[pointer].is_managed = managed != 0;
}
