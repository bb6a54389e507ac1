// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every load and store of a kernel passes here before it happens: those of functions of kernels/ptx
// by name, those through plain pointers by the compiler's instrumentation (instrumented.cpp).
// Checks range, order and content, and counts.
#pragma once

#include "emulator/block.h"
#include "emulator/launch.h"

namespace fulmen::emulator {

using Kind = Access::Kind;

// An asynchronous engine at work: who it is, when, and what its work is ordered after.
struct Engine {
  u32 agent;
  u32 time;
  const Clock& clock;
};

// memcpy that is not instrumented: for what an instruction does after it was checked.
void copy_bytes(void* to, const void* from, u64 bytes);
template <class T>
T load_unseen(const T* pointer) {
  T x;
  copy_bytes(&x, pointer, sizeof(T));
  return x;
}
template <class T>
void store_unseen(T* pointer, T x) {
  copy_bytes(pointer, &x, sizeof(T));
}

// By the running thread. `offset` counts from the first byte of shared memory.
void on_shared(u32 offset, u32 bytes, Kind kind, Site site);
void on_cluster(const Location& at, u32 bytes, Kind kind, Site site);  // and of any block's
// By no load or store; init: as which agent.
void on_mbarrier(const Location& at, Kind kind, Site site, const Engine* init = nullptr);
void on_global(const void* address, u64 bytes, Kind kind, Site site);
void on_pointer(const void* address, u64 bytes, Kind kind, Site site);  // wherever that is

// async: the engine works in the asynchronous proxy.
void on_shared_by(const Engine& engine, bool async, u32 offset, u32 bytes, Kind kind, Site site);
void on_cluster_by(const Engine& engine, bool async, const Location& at, u32 bytes, Kind kind,
                   Site site);

// What a copy made of a part of shared memory; unknown once a thread has written there.
void set_layout(const Location& at, u32 bytes, Layout layout);
// An engine reads the kilobyte of this byte as a matrix of the layout.
void expect_layout(const Engine& engine, u32 offset, Layout layout, Site site);

// Complains if the running thread's last write was one of different values without order.
void check_same_value();

// Adds to a counter of the launch, if it counts.
inline void count(u64 Counters::* what, u64 number = 1) {
  const Block* const here = current_block;
  if (here == nullptr || here->running == nullptr) return;  // host code calls arithmetic, too
  if (Counters* const counters = here->world->grid->counters) counters->*what += number;
}

// Where the running thread stands, for reports.
inline void at(Site site) { self().at = site; }

}  // namespace fulmen::emulator
