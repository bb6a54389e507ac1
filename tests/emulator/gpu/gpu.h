// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A GPU that is none: a shared library with the functions of libcuda and of NVRTC that fulmen
// binds. Its compiler makes host code of kernels (host_compiler.h), its driver runs that in the
// emulator (driver.cpp, modules.cpp), so that everything from a public call down to the last
// instruction happens as on a GPU. Device memory is host memory: every pointer counts as managed.
// What the environment says, read at first use, the seed at every launch:
//   FULMEN_EMULATOR_CAPABILITY       90: the GPU has compute capability 9.0
//   FULMEN_EMULATOR_MULTIPROCESSORS  4
//   FULMEN_EMULATOR_CHECK            1: the checker is on; 0: quicker, and only what is named is
//                                    counted, no access through a pointer
//   FULMEN_EMULATOR_SEED             1: of the schedule
//   FULMEN_EMULATOR_CACHE            where compiled kernels are kept; ~/.cache/fulmen-emulator
//   CXX                              g++: the compiler
#pragma once

#include <cstddef>
#include <string>

#include "emulator/global_memory.h"
#include "emulator/launch.h"

namespace fulmen::emulator {

int setting(const char* variable, int otherwise);
inline int capability() { return setting("FULMEN_EMULATOR_CAPABILITY", 90); }

// Compiled kernels are text: this, and the path of a shared library.
inline constexpr const char* kImagePrefix = "emulated kernel ";

// What such a library has, under these names: a function that runs the kernel's body for the
// current thread, and how reports call the kernel.
inline constexpr const char* kThreadEntry = "fulmen_emulated_thread";
inline constexpr const char* kKernelName = "fulmen_kernel_name";
using ThreadEntry = void(const void* params);

struct LaunchRequest {
  std::string kernel;
  ThreadEntry* thread;
  const void* params;
  i64 blocks;
  i32 threads;
  i32 shared_bytes;
  i32 cluster_size;
  bool may_overlap;  // begin before the launch before it has ended, if nothing is done in between
};
// Runs it to its end. Throws Error with what the checker found.
void run(const LaunchRequest& request);
void wait_for_kernels();  // before anything else that a stream or the host does

#define FULMEN_DRIVER(function, ...) \
  extern "C" __attribute__((visibility("default"))) fulmen::gpu::CUresult function(__VA_ARGS__)

// Memory of the GPU: the checker calls it by name and sees accesses beyond it.
void* allocate(std::size_t bytes, const std::string& name);
void release(void* pointer);

}  // namespace fulmen::emulator
