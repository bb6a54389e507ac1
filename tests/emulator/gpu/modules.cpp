// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// libcuda's functions of modules and launches, as far as fulmen binds them. A launch that the
// checker stops fails with kCudaLaunchFailed, and cuGetErrorString then says what was found.
#include <dlfcn.h>

#include <deque>
#include <mutex>
#include <string>

#include "emulator/gpu/gpu.h"
#include "emulator/launch.h"
#include "gpu/driver/driver.h"

using namespace fulmen::gpu;  // NOLINT: the types of the interface under their own names
namespace emulator = fulmen::emulator;

namespace fulmen::gpu {
struct CUmod_st {
  void* library;
  std::string kernel;  // by its name in reports
};
struct CUfunc_st {
  emulator::ThreadEntry* thread;
  std::string kernel;
};
}  // namespace fulmen::gpu

namespace {

std::mutex mutex;
std::string last_finding = "nothing was found";
std::deque<CUfunc_st> functions;  // never freed

const CUlaunchAttribute* find(const CUlaunchConfig& config, int id) {
  for (unsigned i = 0; i < config.num_attributes; ++i) {
    if (config.attributes[i].id == id) return config.attributes + i;
  }
  return nullptr;
}

// Blocks of a cluster.
int cluster_size(const CUlaunchConfig& config) {
  const CUlaunchAttribute* const found = find(config, kLaunchClusterDimension);
  if (found == nullptr) return 1;
  const auto& [x, y, z] = found->value.cluster;
  if (y != 1 || z != 1) throw emulator::Error("a cluster has blocks in y or z");
  if (x > 1 && emulator::capability() < 90) throw emulator::Error("the GPU has no clusters");
  return static_cast<int>(x);
}

// Programmatic dependent launch.
bool may_overlap(const CUlaunchConfig& config) {
  const CUlaunchAttribute* const found = find(config, kLaunchProgrammaticStreamSerialization);
  return found != nullptr && found->value.programmatic_stream_serialization != 0;
}

}  // namespace

FULMEN_DRIVER(cuGetErrorName, CUresult result, const char** name) {
  *name = result == kCudaLaunchFailed  ? "CUDA_ERROR_LAUNCH_FAILED"
          : result == kCudaOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
                                       : "CUDA_ERROR_INVALID_VALUE";
  return kCudaSuccess;
}
FULMEN_DRIVER(cuGetErrorString, CUresult result, const char** text) {
  static thread_local std::string said;
  const std::lock_guard lock(mutex);
  said = result == kCudaLaunchFailed ? last_finding : "refused by the emulator";
  *text = said.c_str();
  return kCudaSuccess;
}

FULMEN_DRIVER(cuModuleLoadData, CUmodule* module, const void* image) {
  const std::string text = static_cast<const char*>(image);
  const std::string prefix = emulator::kImagePrefix;
  if (text.compare(0, prefix.size(), prefix) != 0) return kCudaNoBinaryForGpu;
  void* const library = ::dlopen(text.c_str() + prefix.size(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::lock_guard lock(mutex);
    last_finding = ::dlerror();
    return kCudaLaunchFailed;
  }
  const auto name = static_cast<const char*>(::dlsym(library, emulator::kKernelName));
  *module = new CUmod_st{library, name != nullptr ? name : "kernel"};
  return kCudaSuccess;
}
FULMEN_DRIVER(cuModuleUnload, CUmodule module) {
  delete module;  // its code stays: sites of reports point into it
  return kCudaSuccess;
}
FULMEN_DRIVER(cuModuleGetFunction, CUfunction* function, CUmodule module, const char*) {
  void* const thread = ::dlsym(module->library, emulator::kThreadEntry);
  if (thread == nullptr) return kCudaInvalidValue;
  const std::lock_guard lock(mutex);
  *function = &functions.emplace_back(
      CUfunc_st{reinterpret_cast<emulator::ThreadEntry*>(thread), module->kernel});
  return kCudaSuccess;
}
FULMEN_DRIVER(cuFuncGetAttribute, int* value, int, CUfunction) {
  *value = 0;
  return kCudaSuccess;
}
FULMEN_DRIVER(cuFuncSetAttribute, CUfunction, int, int) { return kCudaSuccess; }
FULMEN_DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks, CUfunction, int,
              std::size_t) {
  *blocks = 1;
  return kCudaSuccess;
}
FULMEN_DRIVER(cuLaunchKernelEx, const CUlaunchConfig* config, CUfunction function, void** params,
              void**) {
  try {
    emulator::run({function->kernel, function->thread, params[0], config->grid_x,
                   static_cast<int>(config->block_x), static_cast<int>(config->shared_bytes),
                   cluster_size(*config), may_overlap(*config)});
    return kCudaSuccess;
  } catch (const emulator::Error& error) {
    const std::lock_guard lock(mutex);
    last_finding = error.what();
    return kCudaLaunchFailed;
  }
}
