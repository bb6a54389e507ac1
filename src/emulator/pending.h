// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a thread has begun and not yet waited for: products of its warpgroup, its own asynchronous
// copies, a write that is under suspicion.
#pragma once

#include <array>
#include <deque>
#include <string>
#include <vector>

#include "emulator/clock.h"
#include "emulator/site.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::emulator {

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
  Site site = {};
};

// Registers that products write. `touched`: when the thread last used them otherwise, on the clock
// of WgmmaThread::events.
struct Accumulator {
  const float* begin;
  const float* end;
  u64 touched;
  u32 product;  // number of the last one that writes it
};

struct WgmmaThread {
  std::vector<Product> open;                 // issued, not committed
  std::vector<std::vector<Product>> groups;  // committed, oldest first
  std::vector<u32> group_ends;               // number of the last product of each group
  u32 issued = 0;                            // products are numbered from 1
  u32 complete = 0;                          // the last one that was waited for
  u64 events = 1;
  u64 fenced = 0;     // event of the last wgmma.fence
  u64 committed = 1;  // event of the last commit: before it, other registers were in use
  std::vector<Accumulator> accumulators;
};

// A product before all four warps have issued it, and the order that all of them guarantee.
struct PendingProduct {
  u32 warps = 0;
  Clock clock;
};

// One cp.async that has not landed.
struct ThreadCopy {
  u32 shared;
  u32 num_bytes;
  std::array<u8, 16> bytes;
};

struct ThreadCopyGroup {
  std::vector<ThreadCopy> copies;
  u32 last;  // number of the last copy before it was committed
};

struct ThreadCopies {
  std::vector<ThreadCopy> open;        // not committed
  std::deque<ThreadCopyGroup> groups;  // oldest first
  u32 issued = 0;                      // copies are numbered from 1
  u32 agent = ~0u;                     // the engine's
};

// One lane's operands of mma.sync.
struct WarpOperands {
  std::array<u32, 4> a;
  std::array<u32, 2> b;
};

// Two threads may write the same value without order: what lay there before a write that is not
// ordered after another one, and the complaint if it changes.
struct SameValue {
  const void* address = nullptr;
  std::vector<u8> before;
  std::string complaint;
};

}  // namespace fulmen::emulator
