// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where memory is, as the CUDA driver says, and from it where a call runs; and one GPU: its facts,
// read once, its bytes of faults, and its primary context, the one that PyTorch, CuPy and the CUDA
// runtime share. The caller's current device and context are never changed: work that needs a
// context pushes ours and pops it again. Thread safe.
#pragma once

#include <atomic>
#include <string>

#include "core/problem.h"
#include "core/tensor.h"
#include "gpu/driver/driver.h"
#include "plan/gpu.h"

namespace fulmen::gpu {

// A process that has not loaded libcuda has no device memory, so the question never loads it; nor
// does it start it, for a driver that was never started knows no pointer.
struct MemorySpace {
  enum Kind { kHost, kPinned, kDevice };
  Kind kind = kHost;
  bool is_managed = false;  // kernels on every device may use it, and the host too
  int device = -1;          // that it belongs to; -1 for the host

  // The device's allocation around it, where the driver said.
  u64 begin = 0;
  u64 bytes = 0;
  bool has_around(const void* pointer) const {
    return reinterpret_cast<u64>(pointer) - begin < bytes;
  }
};

MemorySpace memory_space_of(const DriverTable& driver, const void* pointer);

// Likewise by the driver that this process has loaded, if it has.
MemorySpace memory_space_of(const void* pointer);

// Completes the options of a request: an automatic backend becomes that of the implementation or
// device that is named, else that of the memory of q (k, v, o where q is empty); and a device is
// set where CUDA leaves it open. Returns the memory space of that array where it was asked for.
// Throws Error kArgument where the call is for the CPU but an array is in device memory.
MemorySpace resolve_device(Request& request);

// Throws Error kUnsupported where an array is in device memory, for calls that only the CPU has.
// `call` begins the sentence: "fulmen_merge".
void require_host(const Tensor& tensor, const char* array, const char* call);

// What plans know of it, and what only a device that is here has.
struct DeviceFacts : Gpu {
  int ordinal = 0;  // as the process numbers its devices (CUDA_VISIBLE_DEVICES applies)
  std::size_t memory_bytes = 0;
};

class Device {
 public:
  // Throws Error kDevice or kUnsupported (older than Turing).
  Device(Driver& driver, int ordinal);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceFacts& facts() const { return facts_; }
  int ordinal() const { return facts_.ordinal; }
  std::string arch() const;  // "sm_90a"
  Driver& driver() const { return driver_; }
  CUcontext context() const { return context_; }

  // Where workspaces of simple calls come from; null where the device has no such pools.
  CUmemoryPool pool() const { return pool_; }

  // In pinned memory: kernels set them, and the host reads them without waiting for kernels.
  FaultBytes* faults() const { return faults_; }
  u32 take_faults() const;  // reads and clears

  // Tells the log of faults that it was not told of yet.
  void log_faults() const;

 private:
  Driver& driver_;
  DeviceFacts facts_;
  void open_pool();

  CUmemoryPool pool_ = nullptr;
  CUcontext context_ = nullptr;   // retained, and kept until the process ends
  FaultBytes* faults_ = nullptr;  // likewise
  mutable std::atomic<u32> logged_faults_{0};
};

// The device of that number: opened by its first use, then the same object. Thread safe. Throws
// Error when there is no such device.
Device& device(int ordinal);

// Makes a device's context current for a scope, and nothing else: no other call may change it.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device);
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext();

 private:
  Driver& driver_;
  bool pushed_ = false;
};

// Checks that `pointer` is memory that kernels on `device` may use: of that device, managed, or
// pinned host memory. Returns where it is. Throws Error kArgument naming `array`; null is accepted.
MemorySpace check_pointer(const Device& device, const void* pointer, const char* array);

}  // namespace fulmen::gpu
