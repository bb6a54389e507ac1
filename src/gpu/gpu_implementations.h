// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The implementations on GPUs, as plans see them: what each refuses, and what it needs. An
// implementation is a row of this table and a row of the table in gpu/implementations.h. Pure.
#pragma once

#include <span>
#include <string>

#include "plan/gpu.h"
#include "plan/plan.h"

namespace fulmen {

// What a run takes beside the arrays.
struct GpuNeeds {
  Tile tile;                   // zero where there is none
  size_t workspace_bytes = 0;  // exactly, of memory that begins at a multiple of 256
  size_t zeroed_bytes = 0;     // the first so many of them are zero when the first kernel starts
  i64 alignment_bytes = 1;     // what every pointer must be a multiple of
};

// An optimisation that a problem is to be computed without.
constexpr bool leaves_out(const Problem& problem, Optimisation optimisation) {
  return (problem.without & static_cast<u32>(optimisation)) != 0;
}

struct GpuImplementation {
  Implementation implementation;
  const char* merit;          // one clause
  bool tensor_cores = false;  // its products run on them
  // Why it cannot compute a problem on a GPU, one clause; "" when it can.
  std::string (*refusal)(const Problem& problem, const Gpu& gpu);
  // Called only where nothing is refused.
  GpuNeeds (*needs)(const Problem& problem, const Gpu& gpu);
  // The optimisations that its kernel for a problem has and can be made without.
  u32 (*switches)(const Problem& problem);
  bool chooses_tiles = false;  // forward, a plan may name a tile that is not the table's
};

// In order of preference.
std::span<const GpuImplementation> gpu_implementations();

const GpuImplementation& gpu_implementation(Implementation implementation);

}  // namespace fulmen
