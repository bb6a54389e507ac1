// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers in shared memory, counted by the emulator: what src/kernels/ptx/mbarrier.cuh declares.
#pragma once

#include "emulator/barriers.h"

namespace fulmen::ptx {

inline void mbarrier_init(u32 barrier, u32 arrivals) { emulator::mbarrier_init(barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(u32 barrier) { emulator::mbarrier_arrive(barrier); }
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  emulator::mbarrier_expect_bytes(barrier, bytes);
  emulator::mbarrier_arrive(barrier);
}
inline void mbarrier_wait(u32 barrier, u32 parity) { emulator::mbarrier_wait(barrier, parity); }

}  // namespace fulmen::ptx
