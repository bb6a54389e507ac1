// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What src/kernels/ptx/cp_async.cuh declares, on the host.
#pragma once

#include "emulator/copies.h"
#include "kernels/ptx/cp_async.cuh"

namespace fulmen::ptx {

inline void cp_async_16(u32 shared, const u8* global, bool present, Site site = Where::current()) {
  emulator::thread_copy(shared, present ? global : nullptr, 16, site);
}
template <i32 kBytes>
inline void cp_async_small(u32 shared, const u8* global, bool present,
                           Site site = Where::current()) {
  static_assert(kBytes == 4 || kBytes == 8);
  emulator::thread_copy(shared, present ? global : nullptr, kBytes, site);
}
inline void cp_async_commit() { emulator::thread_copy_commit(); }

template <i32 kPending>
inline void cp_async_wait() {
  emulator::thread_copy_wait(kPending);
}

inline void copy_vector(void* to, const u8* from, bool present) {
  const u64 offset = reinterpret_cast<u64>(to) - reinterpret_cast<u64>(emulator::block().shared);
  cp_async_16(emulator::kSharedBase + static_cast<u32>(offset), from, present);
}

inline void wait_for_copies() {
  cp_async_commit();
  cp_async_wait<0>();
}

}  // namespace fulmen::ptx
