// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a problem and a device to what will run, and why. Pure: no CUDA, clock, environment, file or
// thread; the same input gives the same ordered list of candidates with reasons on any machine.
// choose() is on the path of every call and builds no text; explain() builds it when asked.
#pragma once

#include <string>
#include <vector>

#include "core/problem.h"
#include "plan/gpu.h"

namespace fulmen {

// What plans know of a processor.
struct CpuDevice {
  const char* isa = "generic";  // the best instruction set that was built and is present
  int vector_bytes = 16;
  int num_threads = 1;
};

// Tile of the tiled CPU implementation: rows of q, and rows of k and v, worked on at once.
struct Tile {
  i64 rows = 0;
  i64 columns = 0;
};

struct Plan {
  Problem problem;   // its pointers are those of plan time: not for use
  CpuDevice device;  // of a problem for the CPU
  Gpu gpu;           // of a problem for a GPU
  Implementation implementation = Implementation::kAuto;
  Tile tile;                   // zero where the implementation has none
  size_t workspace_bytes = 0;  // exactly what a run takes, linear in the rows
};

// The plan of a problem for the CPU. Throws Error (kUnsupported) when the forced implementation
// cannot, with its reason.
Plan choose(const Problem& problem, const CpuDevice& device);

struct Candidate {
  Implementation implementation;
  bool accepted;
  std::string reason;
};

// Every implementation in order of preference; the first accepted one is chosen. On a GPU a kernel
// may still turn out not to compile as it must: src/gpu goes down the list.
std::vector<Candidate> candidates(const Problem& problem);
std::vector<Candidate> candidates(const Problem& problem, const Gpu& gpu);

// Workspaces of GPU plans are used from a multiple of this on.
inline constexpr size_t kGpuWorkspaceAlignment = 256;

// The plan of a problem for a GPU with an accepted implementation.
Plan plan_of(const Problem& problem, const Gpu& gpu, Implementation implementation);

// Arithmetic of a problem: every pair that interval masks leave visible, counted exactly, with each
// sequence at its upper bounds.
struct Cost {
  double pairs = 0;  // visible (query row, key) pairs, over all heads and sequences
  double flops = 0;  // 2 (dim_qk + dim_v) a pair forward, 2.5 times as much backward
  double bytes = 0;  // every array that is present, read or written once
};
Cost cost(const Problem& problem);

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

// What is known of a GPU plan once its kernels were compiled.
struct KernelReport {
  std::string name;
  bool compiled = false;  // the six below are known
  InstructionCounts instructions;
  int registers = 0;
  size_t spill_bytes = 0;
  int blocks_resident = 0;  // on one multiprocessor
  std::string origin;       // where the machine code came from
  std::vector<std::string> findings;
  size_t shared_bytes = 0;
  int num_threads = 0;
  i64 num_blocks = 0;
};

struct GpuReport {
  std::vector<Candidate> candidates;  // what the compiler rejected included
  int index = -1;                     // of the device; -1 for one that is not here
  std::vector<KernelReport> kernels;
  std::vector<std::string> notes;
};

// The JSON object that fulmen_explain documents.
std::string explain(const Plan& plan);
std::string explain(const Plan& plan, const GpuReport& report);

}  // namespace fulmen
