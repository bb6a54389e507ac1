// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Runs a kernel on the host: the threads of a block as fibers whose turns a seeded scheduler draws,
// blocks one after the other. The same seed gives the same run. Called by tests. And what a launch
// did, for the comparison with models and with a GPU's own counters.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/shadow.h"
#include "kernels/base.cuh"

namespace fulmen::emulator {

class GlobalMemory;

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

// Traffic of every array, instructions by class, and for each line that touches shared memory the
// wavefronts that a warp's access takes. Lanes run one after the other here: the n-th access of
// each lane at one line makes one access of the warp.
struct Counters {
  struct Traffic {
    u64 loaded_bytes = 0;
    u64 stored_bytes = 0;
    u64 loaded_sectors = 0;  // of 32 bytes, that warps and engines ask the L2 for
    u64 stored_sectors = 0;
  };
  struct SharedSite {
    u64 accesses = 0;    // of warps
    u64 wavefronts = 0;  // that they took
    u64 needed = 0;      // that they take when no two words meet in a bank
    u64 conflicts() const { return wavefronts - needed; }
  };

  std::map<std::string, Traffic> arrays;     // global memory, by array
  std::map<std::string, SharedSite> shared;  // ld.shared, st.shared, ldmatrix, stmatrix, by line
  u64 products = 0;                          // matrix instructions of warps or warpgroups
  u64 product_flops = 0;
  u64 multiply_adds = 0;  // fma of threads, as all below
  u64 exponentials = 0;
  u64 conversions = 0;  // packs of two
  u64 barrier_waits = 0;
  u64 shuffles = 0;
  u64 cluster_loaded_bytes = 0;  // from shared memory of another block of the cluster
  u64 cluster_stored_bytes = 0;  // to it, by stores and by copies

  // Who touches memory, and where in the kernel's text.
  struct Who {
    u32 warp;
    u32 lane;
    Site site;
  };
  void global_access(const std::string& array, u64 address, u64 bytes, bool stores, const Who& who);
  void shared_access(u32 offset, u32 bytes, const Who& who);
  void finish_blocks();  // counts what not all lanes came to

 private:
  struct WarpAccess {
    u32 lanes = 0;
    std::array<u64, 32> addresses;
  };
  struct Queue {  // of one warp at one line
    std::array<u64, 32> came{};
    u64 first = 0;  // number of waiting[0]
    std::deque<WarpAccess> waiting;
  };
  struct AccessSite {
    u64 site;
    u32 warp;
    u32 bytes;
    u64* sectors;  // that it adds to; null: shared memory
    auto operator<=>(const AccessSite&) const = default;
  };
  void add(const AccessSite& where, u32 lane, u64 address);
  void count(const AccessSite& where, const WarpAccess& access);
  void count_shared(const AccessSite& where, const WarpAccess& access);

  std::map<AccessSite, Queue> queues_;
  std::map<u64, Site> sites_;
  std::map<u64, SharedSite> by_site_;
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
  i32 cluster_size = 1;          // blocks of a cluster, which always run together; 16 at most
};

// `kernel` is called once for every thread; it is the body of the entry, its arguments captured.
// Throws Error when a grid is none that a GPU would run, when an instruction is misused, when the
// checker finds something, or when all threads wait and nothing can wake them: the message then
// says what each warp waits for, and who has come. After an Error the stacks of the launch are
// abandoned, no destructor on them runs.
void launch(const Grid& grid, const std::function<void()>& kernel);

}  // namespace fulmen::emulator
