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

}  // namespace fulmen::ptx
