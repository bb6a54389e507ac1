// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From a problem and a device to what will run, and why. Pure: no CUDA, clock, environment, file or
// thread; the same input gives the same ordered list of candidates with reasons on any machine.
#pragma once

#include <string>
#include <vector>

#include "core/problem.h"

namespace fulmen {

// What plans know of a processor.
struct CpuDevice {
  std::string isa;       // name of the best instruction set that was built and is present
  int vector_bytes = 16;
  int num_threads = 1;
};

struct Candidate {
  Implementation implementation = Implementation::kAuto;
  bool accepted = false;
  std::string reason;
};

// Tile of the tiled CPU implementation: rows of q and of k, v that are worked on at once.
struct Tile {
  i64 rows = 0;
  i64 columns = 0;
};

struct Plan {
  Problem problem;  // pointers are those of plan time: not for use
  CpuDevice device;
  Implementation implementation = Implementation::kAuto;
  std::string reason;
  std::vector<Candidate> candidates;  // in order of preference
  Tile tile;
  size_t workspace_bytes = 0;
};

// Throws Error (kUnsupported) when the forced implementation cannot, with its reason.
Plan choose(const Problem& problem, const CpuDevice& device);

// Scratch of one slot and of the whole run of the tiled implementation, in bytes.
size_t tiled_workspace_bytes(const Problem& problem, Tile tile, int num_threads);

// Arithmetic of a plan: every visible pair that interval masks leave, counted exactly, with the
// sequences at their upper bounds.
struct Cost {
  double flops = 0;  // 2 (dim_qk + dim_v) a pair forward; 2.5 times as much backward
  double bytes = 0;  // each array read or written once
};
Cost cost(const Problem& problem);

// The JSON object of fulmen_explain.
std::string explain(const Plan& plan);

}  // namespace fulmen
