// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What src/kernels/ptx/async_copy.cuh declares, on the host.
#pragma once

#include "kernels/ptx/cp_async.cuh"

namespace fulmen::ptx {

inline void copy_vector(void* to, const u8* from, bool present) {
  const u64 offset = reinterpret_cast<u64>(to) - reinterpret_cast<u64>(emulator::block().shared);
  cp_async_16(emulator::kSharedBase + static_cast<u32>(offset), from, present);
}

inline void wait_for_copies() {
  cp_async_commit();
  cp_async_wait<0>();
}

}  // namespace fulmen::ptx
