// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where memory is, as the CUDA driver says, and from it where a call runs. A process that has not
// loaded libcuda has no device memory, so the question never loads it; nor does it start it, for a
// driver that was never started knows no pointer. Thread safe.
#pragma once

#include "core/problem.h"
#include "gpu/driver/driver.h"

namespace fulmen::gpu {

struct PointerPlace {
  enum Kind { kHost, kPinned, kDevice };
  Kind kind = kHost;
  bool is_managed = false;  // kernels on every device may use it, and the host too
  int device = -1;          // that it belongs to; -1 for the host

  // The device's allocation around it, where the driver said; what lies in it is in one place.
  u64 begin = 0;
  u64 bytes = 0;
  bool has_around(const void* pointer) const {
    return reinterpret_cast<u64>(pointer) - begin < bytes;
  }
};

PointerPlace place_of(const DriverTable& driver, const void* pointer);

// Likewise by the driver that this process has loaded, if it has.
PointerPlace place_of(const void* pointer);

// Completes the options of a request: an automatic backend becomes that of the implementation or
// device that is named, else that of the memory of q (k, v, o where q is empty); and a device is
// set where CUDA leaves it open. Returns the place of that array where it was asked for. Throws
// Error kArgument where the call is for the CPU but an array is in device memory.
PointerPlace settle_place(Request& request);

// Throws Error kUnsupported where an array is in device memory, for calls that only the CPU has.
// `call` begins the sentence: "fulmen_merge".
void require_host(const Tensor& tensor, const char* array, const char* call);

}  // namespace fulmen::gpu
