// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What src/kernels/ptx/cp_async.cuh declares, on the host. Half of the copies land at once, half as
// late as the thread's waits allow, so that a missing wait or barrier shows as NaN or as old data.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "emulator/shared_memory.h"

namespace fulmen::ptx {

struct AsyncCopy {
  u32 shared;
  std::array<u8, 16> bytes;
  void land() const { std::memcpy(emulator::shared_at(shared, 16, 16), bytes.data(), 16); }
};

// Of one thread: copies not committed, and committed groups, oldest first.
struct AsyncCopies {
  std::vector<AsyncCopy> open;
  std::deque<std::vector<AsyncCopy>> groups;
};

inline AsyncCopies& async_copies() {
  static thread_local std::array<AsyncCopies, 1024> copies;
  return copies[emulator::self().index];
}

inline void cp_async_16(u32 shared, const u8* global, bool present) {
  AsyncCopy copy{shared, {}};
  emulator::shared_at(shared, 16, 16);
  if (present) {
    if (reinterpret_cast<u64>(global) % 16 != 0) {
      emulator::fail("cp.async of 16 bytes from an address that is not a multiple of 16");
    }
    std::memcpy(copy.bytes.data(), global, 16);
  }
  if (emulator::block().random() % 2 == 0) {
    copy.land();
  } else {
    async_copies().open.push_back(copy);
  }
}

inline void cp_async_commit() {
  AsyncCopies& copies = async_copies();
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}

template <i32 kPending>
inline void cp_async_wait() {
  AsyncCopies& copies = async_copies();
  while (copies.groups.size() > kPending) {
    for (const AsyncCopy& copy : copies.groups.front()) copy.land();
    copies.groups.pop_front();
  }
}

}  // namespace fulmen::ptx
