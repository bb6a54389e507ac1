// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The part of the CUDA driver's binary interface that fulmen uses, declared by hand so that no CUDA
// header is needed to build. The interface is stable: NVIDIA adds suffixed functions (_v2) instead
// of changing old ones. Names are NVIDIA's, without the enum types, since C passes enums as int.
// Seen by src/gpu only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fulmen::gpu {

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
inline constexpr CUresult kCudaNoBinaryForGpu = 209;
inline constexpr CUresult kCudaEccUncorrectable = 214;
inline constexpr CUresult kCudaInvalidHandle = 400;
inline constexpr CUresult kCudaOperatingSystem = 304;
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

}  // namespace fulmen::gpu
