// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver (libcuda), loaded at first use and never before: its functions by name, its
// version and, for each way it can fail, a sentence. Everything else in src/gpu goes through
// driver(). Thread safe. A process that forked after first use is refused: the driver's state does
// not survive.
//
// The part of its binary interface that fulmen uses is declared by hand, so that no CUDA header is
// needed to build. The interface is stable: NVIDIA adds suffixed functions (_v2) instead of
// changing old ones. Names are NVIDIA's, without the enum types, since C passes enums as int.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/error.h"

namespace fulmen::gpu {

// A shared library opened at run time and closed with the object. The CUDA driver and NVRTC come in
// this way, so that fulmen needs neither to build, to be imported or to compute on the CPU.
class SharedLibrary {
 public:
  SharedLibrary() = default;
  SharedLibrary(SharedLibrary&& other) noexcept;
  SharedLibrary& operator=(SharedLibrary&& other) noexcept;
  ~SharedLibrary();

  // Opens a path or a plain name. The result is empty (false) when that fails; error() then says
  // why, in the words of the loader.
  static SharedLibrary open(const std::string& name);

  // Only if this process has already loaded it.
  static SharedLibrary find_loaded(const std::string& name);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }
  const std::string& error() const { return error_; }

  // The file that was loaded, as the loader reports it; "" when unknown.
  std::string path() const;

  // nullptr when the library has no such symbol.
  void* symbol(const char* name) const;

  // Sets `function` to the symbol; false when there is none.
  template <class Function>
  bool bind(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

  // Stays loaded until the process ends: for libraries whose own threads outlive us.
  void keep() { owned_ = false; }

 private:
  void* handle_ = nullptr;
  bool owned_ = true;
  std::string name_;
  std::string error_;
};

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUmemoryPool = struct CUmemPoolHandle_st*;

// CUresult: those that are told apart.
inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaInvalidValue = 1;
inline constexpr CUresult kCudaOutOfMemory = 2;
inline constexpr CUresult kCudaNotInitialized = 3;
inline constexpr CUresult kCudaDeinitialized = 4;
inline constexpr CUresult kCudaDeviceUnavailable = 46;
inline constexpr CUresult kCudaNoDevice = 100;
inline constexpr CUresult kCudaInvalidDevice = 101;
inline constexpr CUresult kCudaInvalidImage = 200;
inline constexpr CUresult kCudaNoBinaryForGpu = 209;
inline constexpr CUresult kCudaEccUncorrectable = 214;
inline constexpr CUresult kCudaInvalidPtx = 218;
inline constexpr CUresult kCudaUnsupportedPtx = 222;
inline constexpr CUresult kCudaInvalidSource = 300;
inline constexpr CUresult kCudaOperatingSystem = 304;
inline constexpr CUresult kCudaInvalidHandle = 400;
inline constexpr CUresult kCudaNotFound = 500;
inline constexpr CUresult kCudaIllegalAddress = 700;
inline constexpr CUresult kCudaLaunchOutOfResources = 701;
inline constexpr CUresult kCudaLaunchTimeout = 702;
inline constexpr CUresult kCudaMisalignedAddress = 716;
inline constexpr CUresult kCudaLaunchFailed = 719;
inline constexpr CUresult kCudaNotPermitted = 800;
inline constexpr CUresult kCudaNotSupported = 801;
inline constexpr CUresult kCudaSystemNotReady = 802;
inline constexpr CUresult kCudaSystemDriverMismatch = 803;
inline constexpr CUresult kCudaStreamCaptureUnsupported = 900;
inline constexpr CUresult kCudaStreamCaptureInvalidated = 901;

// CUdevice_attribute.
inline constexpr int kAttributeClockRateKhz = 13;
inline constexpr int kAttributeNumMultiprocessors = 16;
inline constexpr int kAttributeMemoryClockKhz = 36;
inline constexpr int kAttributeMemoryBusBits = 37;
inline constexpr int kAttributeL2Bytes = 38;
inline constexpr int kAttributeComputeMajor = 75;
inline constexpr int kAttributeComputeMinor = 76;
inline constexpr int kAttributeSharedBytesPerMultiprocessor = 81;
inline constexpr int kAttributeRegistersPerMultiprocessor = 82;
inline constexpr int kAttributeSharedBytesPerBlock = 97;  // with opt-in

// CUpointer_attribute, CUmemorytype.
inline constexpr int kPointerContext = 1;
inline constexpr int kPointerMemoryType = 2;
inline constexpr int kPointerIsManaged = 8;
inline constexpr int kPointerDevice = 9;
inline constexpr int kPointerRangeBegin = 11;
inline constexpr int kPointerRangeBytes = 12;
inline constexpr unsigned kMemoryHost = 1;
inline constexpr unsigned kMemoryDevice = 2;

// Flags of cuMemHostAlloc.
inline constexpr unsigned kHostPortable = 1;  // pinned for every context
inline constexpr unsigned kHostMapped = 2;    // kernels may use the same address

// CUmemPoolProps and CUmemPool_attribute.
inline constexpr int kAllocationPinned = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kPoolReleaseThreshold = 4;  // u64: bytes kept when the host synchronises
struct CUmemPoolProps {
  int allocation_type;
  int handle_types;
  int location_type;
  int location_id;
  void* security_attributes;
  std::size_t max_size;
  unsigned char reserved[56];
};
static_assert(sizeof(void*) != 8 || sizeof(CUmemPoolProps) == 88);

// CUfunction_attribute.
inline constexpr int kFunctionSharedBytes = 1;
inline constexpr int kFunctionLocalBytes = 3;
inline constexpr int kFunctionNumRegisters = 4;
inline constexpr int kFunctionMaxDynamicSharedBytes = 8;
inline constexpr int kFunctionNonPortableClusters = 14;

// CUlaunchAttributeID.
inline constexpr int kLaunchClusterDimension = 4;
inline constexpr int kLaunchProgrammaticStreamSerialization = 6;

struct CUlaunchAttribute {
  int id;
  char pad[8 - sizeof(int)];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72);

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(void*) != 8 || sizeof(CUlaunchConfig) == 56);

// cuTensorMapEncodeTiled fills this: opaque, passed to kernels by value.
struct alignas(64) CUtensorMap {
  std::uint64_t opaque[16];
};
static_assert(sizeof(CUtensorMap) == 128);

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
