// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A kernel on a device, ready to launch: spec -> text -> cache or compiler -> gate -> module. The
// result is kept per device and kernel until the process ends, so the second request is a look-up.
#pragma once

#include <memory>
#include <string>

#include "gpu/driver/device.h"
#include "gpu/jit/cache.h"
#include "gpu/jit/gate.h"

namespace fulmen::gpu {

struct LoadedKernel {
  const Device* device = nullptr;
  KernelSpec spec;
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  ResourceUse use;  // what the assembler said
  Origin origin = Origin::kCompiled;
  int blocks_resident = 0;  // on one multiprocessor
};

// A kernel that compiled, but not as it must: the finding. Planning goes on to another one.
class Rejected : public Error {
 public:
  explicit Rejected(const std::string& finding) : Error(Status::kUnsupported, finding) {}
};

// From the cache, or compiled now. Needs NVRTC, but neither driver nor device. Throws Rejected.
KernelCache::Kernel compile_or_load(KernelCache& cache, const Nvrtc& nvrtc, const KernelSpec& spec,
                                    const std::string& arch);

// Likewise by what this process has: a bundle, else its cache and compiler.
KernelCache::Kernel machine_code(const KernelSpec& spec, const std::string& arch);

// Loads machine code into a device's context. Throws Error.
LoadedKernel load_module(const Device& device, const KernelSpec& spec,
                         const CompiledKernel& compiled);

// Both, once per device and kernel. Thread safe; the reference stays valid. Compiles: call it while
// planning, never while running.
const LoadedKernel& prepare(const Device& device, const KernelSpec& spec);

// Forgets what was prepared, so that the next request compiles again. Modules stay loaded: a kernel
// of theirs may be running.
void forget_prepared_kernels();

}  // namespace fulmen::gpu
