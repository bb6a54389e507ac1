// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Runs a kernel on the host: the threads of a block as fibers whose turns a seeded scheduler draws,
// blocks one after the other. The same seed gives the same run. Called by tests.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/base.cuh"

namespace fulmen::emulator {

class GlobalMemory;
struct Counters;

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A part of shared memory by name, for reports: byte b of it is [b / row_bytes].
struct SharedArray {
  std::string name;
  u32 begin;  // bytes from the first of dynamic shared memory
  u32 bytes;
  u32 row_bytes;
};

struct Grid {
  i64 blocks;
  i32 threads;  // of a block: a multiple of 32, at most 1,024
  i32 shared_bytes;
  u32 seed;
  bool together = false;           // all blocks run at the same time: they wait for each other
  std::string kernel = "kernel";   // for reports
  bool check = true;               // races, fences, memory that no thread wrote; see README.md
  GlobalMemory* memory = nullptr;  // the arrays of the call; null: global accesses go unchecked
  std::vector<SharedArray> shared_arrays = {};
  Counters* counters = nullptr;  // what the launch did is added here; blocks run one by one
  bool overlaps = false;         // may begin before the launch before it has ended
};

// `kernel` is called once for every thread; it is the body of the entry, its arguments captured.
// Throws Error when an instruction is misused, when the checker finds something, or when all
// threads wait and nothing can wake them: the message then says what each warp waits for, and who
// has come. After an Error the stacks of the launch are abandoned, no destructor on them runs.
void launch(const Grid& grid, const std::function<void()>& kernel);

}  // namespace fulmen::emulator
