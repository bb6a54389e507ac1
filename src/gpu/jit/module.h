// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A kernel on a device, ready to launch: spec -> text -> cache or compiler -> gate -> module. The
// result is kept per device and kernel until the process ends, so the second request is a look-up.
//
// The gate: what the assembler's log says about a kernel decides whether its config may be used at
// all. Where matrix instructions wait for each other, or registers are spilled, results are right
// and only time would show it. Beside it, what the machine code consists of, read from the cubin
// itself: no disassembler is needed.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/driver/device.h"
#include "gpu/jit/cache.h"
#include "gpu/jit/kernel_spec.h"

namespace fulmen::gpu {

// Instructions in the machine code of a kernel by what they do; each counts once, however often it
// runs.
struct InstructionCounts {
  int tensor = 0;           // products of tiles on tensor cores
  int arithmetic = 0;       // additions, products, maxima of floating-point numbers
  int special = 0;          // exp2, reciprocals
  int conversion = 0;       // between number formats
  int shared = 0;           // shared memory
  int global = 0;           // global memory, copy engine included
  int local = 0;            // spilled registers
  int synchronisation = 0;  // barriers and waits
  int other = 0;            // addresses, loops, moves
};

// Counts by class for architectures sm_75 and later, whose instructions are 16 bytes with the
// operation in the low 9 bits. Zero for anything that is not a cubin.
InstructionCounts count_instructions(std::string_view cubin);

// What the assembler reported of the entry.
struct ResourceUse {
  int registers = 0;
  std::size_t stack_bytes = 0;
  std::size_t spill_store_bytes = 0;
  std::size_t spill_load_bytes = 0;
  std::vector<std::string> findings;  // "C7510: Potential Performance Loss: ...", each once
  InstructionCounts instructions;     // of the machine code
};

// Without the instructions.
ResourceUse parse_log(const std::string& log);

ResourceUse resource_use(const std::string& log, std::string_view cubin);

// Why the config may not be used, one sentence; "" when it may.
std::string gate(const KernelSpec& spec, const ResourceUse& use);

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

// From the cache, or compiled now: so in any case where `refused` is what the cache gave and a
// driver did not take. Needs NVRTC, but neither driver nor device. Throws Rejected.
KernelCache::Kernel compile_or_load(KernelCache& cache, const Nvrtc& nvrtc, const KernelSpec& spec,
                                    const std::string& arch,
                                    const KernelCache::Kernel& refused = nullptr);

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
