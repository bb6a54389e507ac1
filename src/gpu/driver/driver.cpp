// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared libraries by dlopen; loading libcuda and putting its failures into sentences.

#include "gpu/driver/driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <utility>

namespace fulmen::gpu {

SharedLibrary::SharedLibrary(SharedLibrary&& other) noexcept { *this = std::move(other); }

SharedLibrary& SharedLibrary::operator=(SharedLibrary&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(owned_, other.owned_);
  std::swap(name_, other.name_);
  std::swap(error_, other.error_);
  return *this;
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr && owned_) dlclose(handle_);
}

SharedLibrary SharedLibrary::open(const std::string& name) {
  SharedLibrary library;
  library.name_ = name;
  library.handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library.handle_ == nullptr) {
    const char* reason = dlerror();
    library.error_ = reason != nullptr ? reason : "unknown loader error";
  }
  return library;
}

SharedLibrary SharedLibrary::find_loaded(const std::string& name) {
  SharedLibrary library;
  library.name_ = name;
  library.handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library.handle_ == nullptr) library.error_ = "not loaded";
  return library;
}

std::string SharedLibrary::path() const {
  if (handle_ == nullptr) return "";
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return "";
  return map->l_name;
}

void* SharedLibrary::symbol(const char* name) const {
  return handle_ != nullptr ? dlsym(handle_, name) : nullptr;
}

namespace {

// How many forks lie between the first process and this one.
std::atomic<unsigned> fork_count{0};

void watch_forks() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
}

// The name of the first function that the library lacks, or nullptr.
const char* bind_all(const SharedLibrary& library, DriverTable& t) {
  const char* missing = nullptr;
  const auto need = [&](auto& function, const char* name) {
    if (!library.bind(function, name) && missing == nullptr) missing = name;
  };
  need(t.cuInit, "cuInit");
  need(t.cuDriverGetVersion, "cuDriverGetVersion");
  need(t.cuGetErrorName, "cuGetErrorName");
  need(t.cuGetErrorString, "cuGetErrorString");
  need(t.cuDeviceGetCount, "cuDeviceGetCount");
  need(t.cuDeviceGet, "cuDeviceGet");
  need(t.cuDeviceGetName, "cuDeviceGetName");
  need(t.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  need(t.cuDeviceTotalMem_v2, "cuDeviceTotalMem_v2");
  need(t.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  need(t.cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease_v2");
  need(t.cuCtxGetCurrent, "cuCtxGetCurrent");
  need(t.cuCtxPushCurrent_v2, "cuCtxPushCurrent_v2");
  need(t.cuCtxPopCurrent_v2, "cuCtxPopCurrent_v2");
  need(t.cuCtxSynchronize, "cuCtxSynchronize");
  need(t.cuModuleLoadData, "cuModuleLoadData");
  need(t.cuModuleUnload, "cuModuleUnload");
  need(t.cuModuleGetFunction, "cuModuleGetFunction");
  need(t.cuFuncGetAttribute, "cuFuncGetAttribute");
  need(t.cuFuncSetAttribute, "cuFuncSetAttribute");
  need(t.cuOccupancyMaxActiveBlocksPerMultiprocessor,
       "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  need(t.cuLaunchKernelEx, "cuLaunchKernelEx");
  need(t.cuPointerGetAttributes, "cuPointerGetAttributes");
  need(t.cuMemAlloc_v2, "cuMemAlloc_v2");
  need(t.cuMemFree_v2, "cuMemFree_v2");
  need(t.cuMemPoolCreate, "cuMemPoolCreate");
  need(t.cuMemPoolSetAttribute, "cuMemPoolSetAttribute");
  need(t.cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync");
  need(t.cuMemFreeAsync, "cuMemFreeAsync");
  need(t.cuMemHostAlloc, "cuMemHostAlloc");
  need(t.cuMemsetD8Async, "cuMemsetD8Async");
  library.bind(t.cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
  return missing;
}

Status status_of(CUresult result) {
  switch (result) {
    case kCudaOutOfMemory:
      return Status::kOutOfMemory;
    case kCudaNoBinaryForGpu:
    case kCudaNotSupported:
      return Status::kUnsupported;
    case kCudaInvalidHandle:
      return Status::kArgument;
    default:
      return Status::kDevice;
  }
}

// What the caller can do about it; "" where nothing general is known.
const char* advice(CUresult result) {
  switch (result) {
    case kCudaOutOfMemory:
      return "free device memory or make the problem smaller";
    case kCudaNotInitialized:
    case kCudaDeinitialized:
      return "the process is shutting down, or was forked from one that had used CUDA";
    case kCudaDeviceUnavailable:
      return "another process holds the device in exclusive mode";
    case kCudaNoDevice:
      return "no NVIDIA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
             "backend='cpu'";
    case kCudaInvalidDevice:
      return "the device number does not exist in this process";
    case kCudaNoBinaryForGpu:
      return "the kernel was compiled for another architecture";
    case kCudaEccUncorrectable:
      return "the device's memory is damaged; reset or replace it";
    case kCudaOperatingSystem:
      return "check the driver's installation and the container's devices";
    case kCudaInvalidHandle:
      return "the stream must belong to the device of the call, and must not have been destroyed";
    case kCudaNotSupported:
      return "this device or driver lacks the feature";
    case kCudaIllegalAddress:
    case kCudaMisalignedAddress:
    case kCudaLaunchFailed:
      return "an earlier kernel of this process, of any library, failed; the process must be "
             "restarted";
    case kCudaLaunchOutOfResources:
      return "the kernel needs more of a block than the device has";
    case kCudaLaunchTimeout:
      return "the display's watchdog stopped the kernel";
    case kCudaSystemNotReady:
      return "start the fabric manager, or wait until the system is ready";
    case kCudaSystemDriverMismatch:
      return "the driver's library and kernel module differ in version: restart the machine";
    case kCudaStreamCaptureUnsupported:
    case kCudaStreamCaptureInvalidated:
      return "the stream is being captured into a graph";
    default:
      return "";
  }
}

}  // namespace

std::string cuda_version_name(int version) {
  return sentence(version / 1000, ".", version % 1000 / 10);
}

Driver::Driver(const std::string& library) : library_(SharedLibrary::open(library)) {
  if (!library_) {
    throw Error(Status::kNotFound,
                sentence("the NVIDIA driver library ", library, " could not be loaded (",
                         library_.error(), "); install the NVIDIA driver, or use backend='cpu'"));
  }
  library_.keep();  // the driver runs threads of its own
  const char* missing = bind_all(library_, table_);
  if (table_.cuDriverGetVersion != nullptr) table_.cuDriverGetVersion(&version_);
  if (version_ < kMinDriverVersion || missing != nullptr) {
    throw Error(
        Status::kUnsupported,
        sentence("the NVIDIA driver ", library, " speaks CUDA ", cuda_version_name(version_),
                 missing != nullptr ? sentence(" and lacks ", missing) : std::string(),
                 "; fulmen needs CUDA ", cuda_version_name(kMinDriverVersion),
                 " or later (driver 550): update the driver, or use backend='cpu'"));
  }
  watch_forks();
  fork_generation_ = fork_count.load();
  check(table_.cuInit(0), "start the driver");
  check(table_.cuDeviceGetCount(&num_devices_), "count the devices");
  if (num_devices_ == 0) fail(kCudaNoDevice, "find a device");
}

void Driver::fail(CUresult result, std::string_view action) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (table_.cuGetErrorName(result, &name) != kCudaSuccess || name == nullptr) name = "unknown";
  if (table_.cuGetErrorString(result, &text) != kCudaSuccess || text == nullptr) text = "no text";
  const std::string hint = advice(result);
  throw Error(status_of(result), sentence("CUDA could not ", action, ": ", name, " (", result, ", ",
                                          text, ")", hint.empty() ? "" : "; ", hint));
}

void Driver::check_not_forked() const {
  if (fork_generation_ == fork_count.load(std::memory_order_relaxed)) return;
  throw Error(
      Status::kDevice,
      "this process was forked from one that had already used CUDA, and the driver does not "
      "survive that; start workers with the 'spawn' method, or fork before first use");
}

Driver& driver() {
  static Driver instance;  // a throwing constructor is tried again by the next call
  instance.check_not_forked();
  return instance;
}

}  // namespace fulmen::gpu
