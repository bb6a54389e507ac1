// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a problem to what will run, and why; src/gpu adds what a plan for a GPU has. Pure: no clock,
// environment, file or thread; the same input gives the same ordered list of candidates with
// reasons on any machine.
// choose() is on the path of every call and builds no text; explain() builds it when asked.
#pragma once

#include <string>
#include <vector>

#include "core/problem.h"

namespace fulmen {

// What plans know of a processor.
struct CpuDevice {
  const char* isa = "generic";  // the best instruction set that was built and is present
  int vector_bytes = 16;
  int num_threads = 1;
  bool has_tiles = false;  // multiplies numbers of 16 bits by an instruction on tiles
};

// Tile of the tiled CPU implementation: rows of q, and rows of k and v, worked on at once.
struct Tile {
  i64 rows = 0;
  i64 columns = 0;
};

struct Plan {
  Problem problem;   // its pointers are those of plan time: not for use
  CpuDevice device;  // of a problem for the CPU
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

// Every implementation on CPUs in order of preference; the first accepted one is chosen.
std::vector<Candidate> candidates(const Problem& problem);

// Arithmetic of a problem: every pair that interval masks leave visible, counted exactly, with each
// sequence at its upper bounds.
struct Cost {
  double pairs = 0;  // visible (query row, key) pairs, over all heads and sequences
  double flops = 0;  // 2 (dim_qk + dim_v) a pair forward, 2.5 times as much backward
  double bytes = 0;  // every array that is present, read or written once; of pools what is used
};
Cost cost(const Problem& problem);

// The JSON object that fulmen_explain documents.
std::string explain(const Plan& plan);

}  // namespace fulmen
