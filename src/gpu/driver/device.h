// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One GPU: its facts, read once, its word of faults, and its primary context, the one that
// PyTorch, CuPy and the CUDA runtime share. The caller's current device and context are never
// changed: work that needs a context pushes ours and pops it again.
#pragma once

#include <atomic>
#include <string>

#include "core/tensor.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/place.h"
#include "plan/gpu.h"

namespace fulmen::gpu {

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

  // One word of pinned memory that kernels set bits of Fault in (kernels/params.h) and the host
  // reads without waiting for them.
  u32* faults() const { return faults_; }
  u32 take_faults() const;  // reads and clears

  // Tells the log of faults that it was not told of yet.
  void log_faults() const;

 private:
  Driver& driver_;
  DeviceFacts facts_;
  void open_pool();

  CUmemoryPool pool_ = nullptr;
  CUcontext context_ = nullptr;  // retained, and kept until the process ends
  u32* faults_ = nullptr;        // likewise
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
PointerPlace check_pointer(const Device& device, const void* pointer, const char* array);

}  // namespace fulmen::gpu
