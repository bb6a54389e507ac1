// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory that run beside the thread that asks for them. They complete
// group by group: commit closes a group, wait leaves at most so many of the youngest running; what
// other threads copied is there after a barrier. PTX ISA 9.0, section 9.7.9.25.3.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

// cp.async.cg: 16 bytes, both addresses multiples of 16, past the L1. Zeros instead unless
// `present`; then nothing is read.
inline void cp_async_16(u32 shared, const u8* global, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(present ? 16 : 0)
               : "memory");
}

// cp.async.ca: 4 or 8 bytes, both addresses multiples of as many. Zeros instead unless `present`.
template <i32 kBytes>
inline void cp_async_small(u32 shared, const u8* global, bool present) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
               "n"(kBytes), "r"(present ? kBytes : 0)
               : "memory");
}

// cp.async.commit_group
inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group
template <i32 kPending>
inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The same for kernels whose tiles are plain C++ arrays. Turing has no such instruction: there the
// copies are ordinary loads and stores, done when they are issued.

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
