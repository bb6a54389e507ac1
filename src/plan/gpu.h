// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What plans know of a GPU: the facts that decide which kernels fit, and the peaks that a roofline
// is drawn with. A table of cards by name, so that plans can be made for a GPU that is not here;
// src/gpu fills the same struct for one that is. Pure.
#pragma once

#include <span>
#include <string>

#include "core/tensor.h"

namespace fulmen {

struct Gpu {
  std::string name;            // "h100", or as the driver calls it
  int compute_capability = 0;  // 90 for 9.0
  int num_multiprocessors = 0;
  size_t shared_bytes_per_block = 0;  // the most that a kernel may opt in to
  size_t shared_bytes_per_multiprocessor = 0;
  int registers_per_multiprocessor = 0;
  size_t l2_bytes = 0;
  double bandwidth = 0;     // bytes a second
  double tensor_flops = 0;  // a second, 16-bit inputs, float32 sums, dense
  double float32_flops = 0;
  double float64_flops = 0;
};

// The oldest that fulmen has kernels for (Turing).
inline constexpr int kMinComputeCapability = 75;

// Every card of the table, oldest first.
std::span<const Gpu> known_gpus();

// "h100", or the first card of an architecture: "sm_90a", "sm_90". Throws Error kArgument with the
// names that exist.
const Gpu& gpu_named(const std::string& name);

// A card of the same architecture, or of the nearest older one.
const Gpu& gpu_like(int compute_capability);

// "sm_90a" as NVRTC wants it; 'a' where the architecture has instructions that later ones lack.
std::string arch_name(int compute_capability);

// How many blocks of a kernel a multiprocessor holds at once, from what each takes.
int blocks_per_multiprocessor(const Gpu& gpu, int registers, int num_threads, size_t shared_bytes);

// Floating-point operations a second, for inputs of a dtype on tensor cores or CUDA cores,
// whichever an implementation uses; of float32 on tensor cores, which take tf32 at half the rate of
// 16 bits, those asked for.
double peak_flops(const Gpu& gpu, DType dtype, Precision precision, bool tensor_cores);

}  // namespace fulmen
