// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory that pass no register and that nobody waits for until they
// are needed, for kernels whose tiles are plain C++ arrays. Turing has no such instruction: there
// the copies are ordinary loads and stores, done when they are issued.
#pragma once

#include "kernels/ptx/cp_async.cuh"

namespace fulmen::ptx {

// 16 bytes, both addresses multiples of 16; zeros instead unless `present`, then nothing is read.
inline void copy_vector(void* to, const u8* from, bool present) {
#if __CUDA_ARCH__ >= 800
  cp_async_16(static_cast<u32>(__cvta_generic_to_shared(to)), from, present);
#else
  struct alignas(16) Words {
    u32 word[4];
  };
  *static_cast<Words*>(to) = present ? *reinterpret_cast<const Words*>(from) : Words{};
#endif
}

// Until this thread's copies are done. Others see them after a barrier.
inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  cp_async_commit();
  cp_async_wait<0>();
#endif
}

}  // namespace fulmen::ptx
