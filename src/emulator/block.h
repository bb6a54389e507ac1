// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One thread block as the emulator sees it: its threads, shared memory, barriers and the work of
// its asynchronous engines. Every thread is a fiber; one runs at a time and gives way only where it
// waits (wait), so nothing here needs a lock. The functions of kernels/ptx read and change this
// state through block() and self(); launch.cpp makes it and decides who goes on.
// Misuse of an instruction ends in an Error that says which thread did what.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/config.h"

namespace fulmen::emulator {

inline constexpr u32 kWarpSize = 32;
inline constexpr u32 kWarpgroupSize = 128;
inline constexpr u32 kNumNamedBarriers = 16;
inline constexpr u32 kSharedBase = 1024;  // the first shared address, so that 0 is never valid

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What a thread waits for. It lives on the stack of the waiting thread.
class Wait {
 public:
  virtual bool over() const = 0;
  virtual std::string reason() const = 0;  // for the report of a deadlock

 protected:
  ~Wait() = default;
};

// Warps as bits, for reports: "warps 0 4" or "nobody".
std::string name_warps(u32 warps);

// One thread's part of a wgmma m64nNk16.
struct Product {
  float* accumulator;  // N / 2 floats in the thread's registers
  u32 columns;         // N
  DType dtype;         // of A and B
  bool transpose_b;
  bool a_in_registers;
  bool accumulate;
  std::array<u32, 4> a;  // registers, or a descriptor in a[0]
  u32 b;                 // descriptor
  u32 upper;             // word of the descriptors
};

struct Thread {
  u32 index = 0;
  bool done = false;
  const Wait* waits_for = nullptr;
  std::vector<Product> open;                 // issued, not committed
  std::vector<std::vector<Product>> groups;  // committed, oldest first
  u32 stores_issued = 0;                     // tensor stores, numbered from 1
  u32 stores_committed = 0;                  // number of the last committed one
  std::set<u32> stores_running;              // numbers of those not complete

  u32 warp() const { return index / kWarpSize; }
  u32 lane() const { return index % kWarpSize; }
  u32 warpgroup() const { return index / kWarpgroupSize; }
};

// Phases are counted, so that the parity of one names it.
struct Mbarrier {
  u32 arrivals;  // that make a phase
  u32 pending;   // arrivals missing
  i64 bytes;     // bytes missing; below 0 while data is early
  u32 phase = 0;
  u32 arrived_warps = 0;  // since it was made
};

// A meeting of threads: who comes last opens it for all and begins the next round.
struct Meeting {
  u32 expected = 0;  // threads of this round; 0: nobody has come
  u32 arrived = 0;
  u64 round = 0;
  u32 arrived_warps = 0;  // in this round
};

struct Warp {
  Meeting meeting;
  std::string_view instruction;  // that its lanes meet in
  std::array<u32, kWarpSize> given{};
  std::array<u32, kWarpSize> received{};
};

// Work of the copy engine. Every eighth is late: it is done when all threads wait and not before.
struct Copy {
  std::function<void()> run;
  bool late;
};

struct Block {
  u32 index;
  u32 num_blocks;
  std::vector<u8> shared;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Meeting> warpgroups;
  std::array<Meeting, kNumNamedBarriers> named_barriers;
  std::map<u32, Mbarrier> mbarriers;  // by shared address
  std::vector<Copy> copies;           // asked for, not done
  std::mt19937 random;
  Thread* running = nullptr;
};

inline constinit thread_local Block* current_block = nullptr;
inline Block& block() { return *current_block; }
inline Thread& self() { return *block().running; }

// Throws an Error that begins with block, warp and lane.
[[noreturn]] void fail(const std::string& what);

// Returns once wait.over(); other threads run meanwhile.
void wait(const Wait& wait);

// Leaves a copy to the copy engine.
void ask_for_copy(std::function<void()> run);

// Comes to a meeting of `threads` threads. `instruction` names it in a report.
void arrive(Meeting& meeting, u32 threads, const char* instruction);
void meet(Meeting& meeting, u32 threads, const char* instruction);

}  // namespace fulmen::emulator
