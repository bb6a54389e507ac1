// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What src/kernels/ptx/cp_async.cuh declares, on the host.
#pragma once

#include "emulator/thread_copies.h"

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

}  // namespace fulmen::ptx
