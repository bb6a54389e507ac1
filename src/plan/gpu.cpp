// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The table of cards. Sizes from the CUDA C++ Programming Guide, "Compute Capabilities"; counts,
// bandwidths and peaks from NVIDIA's data sheets (dense, boost clock; GeForce: 16-bit products with
// float32 sums).

#include "plan/gpu.h"

#include <array>

#include "core/error.h"

namespace fulmen {
namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;
constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;

// What the cards of one architecture have in common.
struct Architecture {
  int compute_capability;
  size_t shared_bytes_per_multiprocessor;
  int threads_per_multiprocessor;
  int blocks_per_multiprocessor;
};
constexpr Architecture kArchitectures[] = {
    {75, 64 * kKiB, 1024, 16},   {80, 164 * kKiB, 2048, 32}, {86, 100 * kKiB, 1536, 16},
    {87, 164 * kKiB, 1536, 16},  {89, 100 * kKiB, 1536, 24}, {90, 228 * kKiB, 2048, 32},
    {100, 228 * kKiB, 2048, 32}, {120, 100 * kKiB, 1536, 24}};

constexpr int kRegisters = 65536;              // of a multiprocessor, all architectures
constexpr size_t kReservedSharedBytes = kKiB;  // of each block, by the system, since Ampere

const Architecture& architecture_of(int compute_capability) {
  const Architecture* found = &kArchitectures[0];
  for (const Architecture& candidate : kArchitectures) {
    if (candidate.compute_capability <= compute_capability) found = &candidate;
  }
  return *found;
}

size_t reserved_bytes(int compute_capability) {
  return compute_capability >= 80 ? kReservedSharedBytes : 0;
}

// What a data sheet says of one card.
struct Sheet {
  const char* name;
  int compute_capability;
  int num_multiprocessors;
  size_t l2_mib;
  double gigabytes;                 // a second
  double tensor, float32, float64;  // TFLOP/s
};

Gpu card(const Sheet& sheet) {
  const size_t shared = architecture_of(sheet.compute_capability).shared_bytes_per_multiprocessor;
  Gpu gpu;
  gpu.name = sheet.name;
  gpu.compute_capability = sheet.compute_capability;
  gpu.num_multiprocessors = sheet.num_multiprocessors;
  gpu.shared_bytes_per_block = shared - reserved_bytes(sheet.compute_capability);
  gpu.shared_bytes_per_multiprocessor = shared;
  gpu.registers_per_multiprocessor = kRegisters;
  gpu.l2_bytes = sheet.l2_mib * kMiB;
  gpu.bandwidth = sheet.gigabytes * kGiga;
  gpu.tensor_flops = sheet.tensor * kTera;
  gpu.float32_flops = sheet.float32 * kTera;
  gpu.float64_flops = sheet.float64 * kTera;
  return gpu;
}

const std::array<Gpu, 10>& table() {
  static const std::array<Gpu, 10> cards = {card({"t4", 75, 40, 4, 320, 65, 8.1, 0.25}),
                                            card({"a100", 80, 108, 40, 2039, 312, 19.5, 9.7}),
                                            card({"rtx3090", 86, 82, 6, 936, 71, 35.6, 0.56}),
                                            card({"a10", 86, 72, 6, 600, 125, 31.2, 0.49}),
                                            card({"rtx4090", 89, 128, 72, 1008, 165, 82.6, 1.3}),
                                            card({"l40s", 89, 142, 96, 864, 362, 91.6, 1.4}),
                                            card({"h100", 90, 132, 50, 3352, 989, 66.9, 33.5}),
                                            card({"h200", 90, 132, 50, 4800, 989, 66.9, 33.5}),
                                            card({"b200", 100, 148, 126, 8000, 2250, 75, 37}),
                                            card({"rtx5090", 120, 170, 96, 1792, 209, 104.8, 1.6})};
  return cards;
}

}  // namespace

std::span<const Gpu> known_gpus() { return table(); }

const Gpu& gpu_named(const std::string& name) {
  for (const Gpu& gpu : table()) {
    const std::string arch = arch_name(gpu.compute_capability);
    const std::string family = sentence("sm_", gpu.compute_capability);
    if (name == gpu.name || name == arch || name == family) return gpu;
  }
  std::string names;
  for (const Gpu& gpu : table()) names += gpu.name + ", ";
  throw Error(Status::kArgument, sentence("device_name is '", name, "'; known are ", names,
                                          "and their architectures, such as sm_90a"));
}

const Gpu& gpu_like(int compute_capability) {
  const Gpu* nearest = &table().front();
  for (const Gpu& gpu : table()) {
    const bool is_newer = gpu.compute_capability > nearest->compute_capability;
    if (gpu.compute_capability <= compute_capability && is_newer) nearest = &gpu;
  }
  return *nearest;
}

std::string arch_name(int compute_capability) {
  // Hopper and later have instructions that belong to one architecture alone.
  return sentence("sm_", compute_capability, compute_capability >= 90 ? "a" : "");
}

int blocks_per_multiprocessor(const Gpu& gpu, int registers, int num_threads, size_t shared_bytes) {
  if (num_threads <= 0) return 0;
  const Architecture& architecture = architecture_of(gpu.compute_capability);
  int blocks = architecture.threads_per_multiprocessor / num_threads;
  blocks = min(blocks, architecture.blocks_per_multiprocessor);
  const size_t shared = shared_bytes + reserved_bytes(gpu.compute_capability);
  if (shared > 0) {
    blocks = min(blocks, static_cast<int>(gpu.shared_bytes_per_multiprocessor / shared));
  }
  if (registers > 0) {  // handed out to warps, in pieces of 256
    const int of_warp = static_cast<int>(ceil_div(32 * registers, 256)) * 256;
    blocks = min(blocks, gpu.registers_per_multiprocessor / of_warp * 32 / num_threads);
  }
  return blocks;
}

double peak_flops(const Gpu& gpu, DType dtype, Precision precision, bool tensor_cores) {
  if (dtype == DType::kFloat64) return gpu.float64_flops;
  if (!tensor_cores) return gpu.float32_flops;
  if (dtype != DType::kFloat32) return gpu.tensor_flops;
  return gpu.tensor_flops / (precision == Precision::k3xTf32 ? 6 : 2);
}

}  // namespace fulmen
