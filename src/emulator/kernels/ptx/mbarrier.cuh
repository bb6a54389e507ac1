// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers in shared memory, counted by the emulator: what src/kernels/ptx/mbarrier.cuh declares.
#pragma once

#include "emulator/barriers.h"

namespace fulmen::ptx {

inline void mbarrier_init(u32 barrier, u32 arrivals, Site site = Where::current()) {
  emulator::mbarrier_init(barrier, arrivals, site);
}
inline void fence_mbarrier_init() { emulator::mbarrier_fence_init(); }
inline void mbarrier_arrive(u32 barrier, Site site = Where::current()) {
  emulator::mbarrier_arrive(barrier, site);
}
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes, Site site = Where::current()) {
  emulator::mbarrier_expect_bytes(barrier, bytes);
  emulator::mbarrier_arrive(barrier, site);
}
inline void mbarrier_wait(u32 barrier, u32 parity, Site site = Where::current()) {
  emulator::mbarrier_wait(barrier, parity, site);
}

}  // namespace fulmen::ptx
