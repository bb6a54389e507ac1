// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Modules, loaded lazily and kept. They are not unloaded at exit: the driver may be gone by then.

#include "gpu/jit/module.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu/jit/bundle.h"

namespace fulmen::gpu {
namespace {

void check_shared_memory(const Device& device, const KernelSpec& spec) {
  const std::size_t available = device.facts().shared_bytes_per_block;
  if (spec.shared_bytes <= available) return;
  throw Error(Status::kUnsupported,
              sentence(spec.name, " needs ", spec.shared_bytes, " bytes of shared memory a block; ",
                       device.facts().name, " has ", available));
}

// 48 KB need no asking; beyond that a kernel opts in.
constexpr std::size_t kSharedBytesWithoutOptIn = 48 * 1024;

// The entry of a loaded module, and how many of its blocks a multiprocessor holds.
void finish(LoadedKernel& kernel, const std::string& what) {
  Driver& driver = kernel.device->driver();
  const KernelSpec& spec = kernel.spec;
  driver.check(driver->cuModuleGetFunction(&kernel.function, kernel.module, kEntryName),
               "find the entry of " + what);
  if (spec.shared_bytes > kSharedBytesWithoutOptIn) {
    driver.check(driver->cuFuncSetAttribute(kernel.function, kFunctionMaxDynamicSharedBytes,
                                            static_cast<int>(spec.shared_bytes)),
                 "give shared memory to " + what);
  }
  driver.check(driver->cuOccupancyMaxActiveBlocksPerMultiprocessor(
                   &kernel.blocks_resident, kernel.function, spec.num_threads, spec.shared_bytes),
               "find how many blocks fit a multiprocessor of " + what);
}

struct Slot {
  std::mutex mutex;
  std::unique_ptr<const LoadedKernel> kernel;
};

struct Slots {
  using Map = std::map<std::pair<const Device*, std::string>, std::unique_ptr<Slot>>;

  std::mutex mutex;
  Map by_kernel;
  std::vector<Map> forgotten;
};

Slots& slots() {
  static Slots the_slots;
  return the_slots;
}

Slot& slot_of(const Device& device, const std::string& identity) {
  const std::lock_guard lock(slots().mutex);
  std::unique_ptr<Slot>& slot = slots().by_kernel[{&device, identity}];
  if (slot == nullptr) slot = std::make_unique<Slot>();
  return *slot;
}

}  // namespace

KernelCache::Kernel compile_or_load(KernelCache& cache, const Nvrtc& nvrtc, const KernelSpec& spec,
                                    const std::string& arch) {
  const KernelKey key = kernel_key(spec, arch, nvrtc.version());
  KernelCache::Kernel kernel = cache.get(key, [&] { return compile(nvrtc, spec, arch); });
  const std::string reason = gate(spec, parse_log(kernel->log));
  if (!reason.empty()) throw Rejected(reason);
  return kernel;
}

KernelCache::Kernel machine_code(const KernelSpec& spec, const std::string& arch) {
  if (KernelCache::Kernel kernel = bundled_kernel(spec, arch)) return kernel;
  return compile_or_load(kernel_cache(), nvrtc(), spec, arch);
}

LoadedKernel load_module(const Device& device, const KernelSpec& spec,
                         const CompiledKernel& compiled) {
  check_shared_memory(device, spec);
  Driver& driver = device.driver();
  const CurrentContext current(device);
  const std::string what = sentence("the kernel ", spec.name, " on device ", device.ordinal(), " (",
                                    device.facts().name, ", ", device.arch(), ")");
  LoadedKernel kernel;
  kernel.device = &device;
  kernel.spec = spec;
  kernel.use = resource_use(compiled.log, compiled.cubin);
  kernel.origin = compiled.origin;
  driver.check(driver->cuModuleLoadData(&kernel.module, compiled.cubin.data()), "load " + what);
  try {
    finish(kernel, what);
  } catch (...) {
    driver->cuModuleUnload(kernel.module);
    throw;
  }
  return kernel;
}

const LoadedKernel& prepare(const Device& device, const KernelSpec& spec) {
  Slot& slot = slot_of(device, sentence(wrapper_text(spec), spec.shared_bytes));
  const std::lock_guard lock(slot.mutex);
  if (slot.kernel == nullptr) {
    const auto compiled = machine_code(spec, device.arch());
    slot.kernel = std::make_unique<const LoadedKernel>(load_module(device, spec, *compiled));
  }
  return *slot.kernel;
}

void forget_prepared_kernels() {
  const std::lock_guard lock(slots().mutex);
  slots().forgotten.push_back(std::exchange(slots().by_kernel, {}));
}

}  // namespace fulmen::gpu
