// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One GPU: its facts, read once, and its primary context, the one that PyTorch, CuPy and the CUDA
// runtime share. The caller's current device and context are never changed: work that needs a
// context pushes ours and pops it again.
#pragma once

#include <string>

#include "cuda/driver.h"

namespace fulmen::cuda {

struct DeviceFacts {
  int ordinal = 0;  // as the process numbers its devices (CUDA_VISIBLE_DEVICES applies)
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int num_multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::size_t l2_bytes = 0;
  std::size_t shared_bytes_per_block = 0;  // the most that a kernel may opt in to
  std::size_t shared_bytes_per_multiprocessor = 0;
  int registers_per_multiprocessor = 0;
};

// The oldest that fulmen has kernels for (Turing).
inline constexpr int kMinComputeCapability = 75;

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

 private:
  Driver& driver_;
  DeviceFacts facts_;
  CUcontext context_ = nullptr;  // retained, and kept until the process ends
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
// pinned host memory. Throws Error kArgument naming `array`; null is accepted.
void check_pointer(const Device& device, const void* pointer, const char* array);

// The device whose memory `pointer` is, or -1 for memory that CUDA does not know.
int device_of(Driver& driver, const void* pointer);

}  // namespace fulmen::cuda
