// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Launches, what their checks know of memory, and what was counted. Functions that begin with
// fulmen_emulator_ are called by the Python package (fulmen.lab.cases.emulator).
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <utility>

#include "emulator/gpu/gpu.h"
#include "emulator/launch.h"

namespace fulmen::emulator {
namespace {

constexpr std::size_t kAlignment = 256;  // as the driver's

struct Allocation {
  std::string name;
  std::size_t bytes;
};

struct Gpu {
  std::mutex mutex;
  std::map<void*, Allocation> allocations;
  std::unique_ptr<GlobalMemory> memory;  // of them; made anew when they have changed
  Counters counters;
  bool counting = false;
  bool comes_after_kernel = false;
  std::string report;
};

Gpu& gpu() {
  static Gpu the_gpu;
  return the_gpu;
}

GlobalMemory* memory_of(Gpu& gpu) {
  if (gpu.memory == nullptr) {
    std::vector<GlobalArray> arrays;
    for (const auto& [data, allocation] : gpu.allocations) {
      arrays.push_back({.name = allocation.name,
                        .data = data,
                        .extents = {1, 1, 1, static_cast<i64>(allocation.bytes)},
                        .strides = {0, 0, 0, 1},
                        .writable = true,
                        .margin_bytes = kAlignment});
    }
    gpu.memory = std::make_unique<GlobalMemory>(arrays);
  }
  return gpu.memory.get();
}

}  // namespace

int setting(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0' ? std::atoi(text) : otherwise;
}

void* allocate(std::size_t bytes, const std::string& name) {
  // Room before and behind it, that a kernel must not touch.
  const std::size_t whole = bytes + 3 * kAlignment - bytes % kAlignment;
  u8* const begin = static_cast<u8*>(std::aligned_alloc(kAlignment, whole));
  if (begin == nullptr) return nullptr;
  std::memset(begin, 0xff, whole);  // NaN in every format
  const std::lock_guard lock(gpu().mutex);
  gpu().allocations[begin + kAlignment] = {name, bytes};
  gpu().memory.reset();
  return begin + kAlignment;
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  const std::lock_guard lock(gpu().mutex);
  gpu().allocations.erase(pointer);
  gpu().memory.reset();
  std::free(static_cast<u8*>(pointer) - kAlignment);
}

void run(const LaunchRequest& request) {
  static const bool check = setting("FULMEN_EMULATOR_CHECK", 1) != 0;
  const u32 seed = static_cast<u32>(setting("FULMEN_EMULATOR_SEED", 1));  // each launch's own
  const std::lock_guard lock(gpu().mutex);
  const bool after_kernel = std::exchange(gpu().comes_after_kernel, true);
  launch({.blocks = request.blocks,
          .threads = request.threads,
          .shared_bytes = request.shared_bytes,
          .seed = seed,
          .kernel = request.kernel,
          .check = check && !gpu().counting,
          .memory = check || gpu().counting ? memory_of(gpu()) : nullptr,
          .counters = gpu().counting ? &gpu().counters : nullptr,
          .overlaps = request.may_overlap && after_kernel,
          .cluster_size = request.cluster_size},
         [&] { request.thread(request.params); });
}

void wait_for_kernels() {
  const std::lock_guard lock(gpu().mutex);
  gpu().comes_after_kernel = false;
}

namespace {

void write_shared(std::ostream& out, const Counters& counters) {
  const char* separator = "";
  for (const auto& [site, counted] : counters.shared) {
    out << separator << "{\"site\": \"" << site << "\", \"accesses\": " << counted.accesses
        << ", \"wavefronts\": " << counted.wavefronts << ", \"conflicts\": " << counted.conflicts()
        << '}';
    separator = ", ";
  }
}

std::string as_json(const Counters& counters) {
  std::ostringstream out;
  out << "{\"arrays\": {";
  const char* separator = "";
  for (const auto& [name, traffic] : counters.arrays) {
    out << separator << '"' << name << "\": {\"loaded_bytes\": " << traffic.loaded_bytes
        << ", \"stored_bytes\": " << traffic.stored_bytes
        << ", \"loaded_sectors\": " << traffic.loaded_sectors
        << ", \"stored_sectors\": " << traffic.stored_sectors << '}';
    separator = ", ";
  }
  out << "}, \"shared\": [";
  write_shared(out, counters);
  out << "], \"products\": " << counters.products
      << ", \"product_flops\": " << counters.product_flops
      << ", \"multiply_adds\": " << counters.multiply_adds
      << ", \"exponentials\": " << counters.exponentials
      << ", \"conversions\": " << counters.conversions
      << ", \"barrier_waits\": " << counters.barrier_waits
      << ", \"shuffles\": " << counters.shuffles
      << ", \"cluster_loaded_bytes\": " << counters.cluster_loaded_bytes
      << ", \"cluster_stored_bytes\": " << counters.cluster_stored_bytes << '}';
  return out.str();
}

}  // namespace
}  // namespace fulmen::emulator

#define FULMEN_EXPORT extern "C" __attribute__((visibility("default")))

// Memory of the GPU that reports call by a name; null: there is none left.
FULMEN_EXPORT void* fulmen_emulator_allocate(const char* name, std::size_t bytes) {
  return fulmen::emulator::allocate(bytes, name);
}
FULMEN_EXPORT void fulmen_emulator_release(void* pointer) { fulmen::emulator::release(pointer); }

// Counts from here on, from 0; or no longer.
FULMEN_EXPORT void fulmen_emulator_count(int on) {
  using namespace fulmen::emulator;  // NOLINT
  const std::lock_guard lock(gpu().mutex);
  gpu().counters = {};
  gpu().counting = on != 0;
}

// What was counted, as JSON; valid until the next call.
FULMEN_EXPORT const char* fulmen_emulator_counted() {
  using namespace fulmen::emulator;  // NOLINT
  const std::lock_guard lock(gpu().mutex);
  gpu().report = as_json(gpu().counters);
  return gpu().report.c_str();
}
