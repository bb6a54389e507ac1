// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver (libcuda), loaded at first use and never before: its functions by name, its
// version and, for each way it can fail, a sentence. Everything else in src/gpu goes through
// driver(). Thread safe. A process that forked after first use is refused: the driver's state does
// not survive.
#pragma once

#include <string>
#include <string_view>

#include "core/error.h"
#include "gpu/driver/driver_types.h"
#include "gpu/driver/shared_library.h"

namespace fulmen::gpu {

// CUDA 12.4, the oldest driver interface that is supported (its first driver is 550.54).
inline constexpr int kMinDriverVersion = 12040;

// The functions, by their names in libcuda. Optional ones may be null.
struct DriverTable {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult result, const char** name);
  CUresult (*cuGetErrorString)(CUresult result, const char** text);

  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int capacity, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuDeviceTotalMem_v2)(std::size_t* bytes, CUdevice device);

  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRelease_v2)(CUdevice device);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxPushCurrent_v2)(CUcontext context);
  CUresult (*cuCtxPopCurrent_v2)(CUcontext* context);
  CUresult (*cuCtxSynchronize)();

  CUresult (*cuModuleLoadData)(CUmodule* module, const void* image);
  CUresult (*cuModuleUnload)(CUmodule module);
  CUresult (*cuModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  CUresult (*cuFuncGetAttribute)(int* value, int attribute, CUfunction function);
  CUresult (*cuFuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, CUfunction function,
                                                          int threads, std::size_t shared_bytes);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** params,
                               void** extra);

  CUresult (*cuPointerGetAttributes)(unsigned count, const int* attributes, void** values,
                                     CUdeviceptr pointer);
  CUresult (*cuMemAlloc_v2)(CUdeviceptr* pointer, std::size_t bytes);
  CUresult (*cuMemFree_v2)(CUdeviceptr pointer);
  CUresult (*cuMemPoolCreate)(CUmemoryPool* pool, const CUmemPoolProps* properties);
  CUresult (*cuMemPoolSetAttribute)(CUmemoryPool pool, int attribute, void* value);
  CUresult (*cuMemAllocFromPoolAsync)(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool,
                                      CUstream stream);
  CUresult (*cuMemFreeAsync)(CUdeviceptr pointer, CUstream stream);
  CUresult (*cuMemHostAlloc)(void** pointer, std::size_t bytes, unsigned flags);
  CUresult (*cuMemsetD8Async)(CUdeviceptr pointer, unsigned char value, std::size_t bytes,
                              CUstream stream);

  // Optional: Hopper's tensor maps.
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap* map, int type, unsigned rank, void* address,
                                     const std::uint64_t* extents,
                                     const std::uint64_t* stride_bytes, const unsigned* box,
                                     const unsigned* element_strides, int interleave, int swizzle,
                                     int l2_promotion, int fill);
};

class Driver {
 public:
  // Loads `library` and initialises it. Throws Error: kNotFound (no driver), kUnsupported (too
  // old), kDevice (present, but does not start).
  explicit Driver(const std::string& library = "libcuda.so.1");

  const DriverTable& table() const { return table_; }
  const DriverTable* operator->() const { return &table_; }

  // 1000 * major + 10 * minor of the newest CUDA that the driver speaks.
  int version() const { return version_; }
  int num_devices() const { return num_devices_; }
  std::string path() const { return library_.path(); }

  // Throws Error for everything but success. `action` completes "CUDA could not ...".
  void check(CUresult result, std::string_view action) const {
    if (result != kCudaSuccess) fail(result, action);
  }
  [[noreturn]] void fail(CUresult result, std::string_view action) const;

  // Throws Error when this process is a fork of the one that loaded the driver.
  void check_not_forked() const;

 private:
  SharedLibrary library_;
  DriverTable table_{};
  int version_ = 0;
  int num_devices_ = 0;
  unsigned fork_generation_ = 0;
};

// The driver of this process. Loaded by the first call; a failed call throws and the next one tries
// again.
Driver& driver();

// "12.4" from 12040.
std::string cuda_version_name(int version);

}  // namespace fulmen::gpu
