// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers in shared memory that count arrivals and bytes. A phase ends when all expected threads
// have arrived and all expected bytes have landed; the parity of the phase tells a waiter whether
// the one it means is over. A fresh barrier is in phase 0: waiting for parity 1 returns at once.
// PTX ISA 9.0, section 9.7.13.15.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

// mbarrier.init: `arrivals` make a phase.
inline void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes fresh barriers known to the copy engine.
inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive
inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrives and adds `bytes` to what this phase waits for.
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait in a loop: returns once the phase of this parity is over.
inline void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace fulmen::ptx
