// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers: the 16 named ones, and those in shared memory that count arrivals and bytes. What
// kernels/ptx/thread.cuh and tma.cuh call.
#pragma once

#include "emulator/accesses.h"

namespace fulmen::emulator {

void named_barrier_arrive(u32 id, u32 threads);
void named_barrier_sync(u32 id, u32 threads);

void mbarrier_init(u32 address, u32 arrivals, Site site);
void mbarrier_fence_init();  // for the barriers that this thread has made
void mbarrier_arrive(u32 address, Site site);
void mbarrier_expect_bytes(u32 address, u32 bytes);  // before the arrival of the same thread
u32 mbarrier_count_copy(u32 address);                // a copy is asked for: its number
Engine mbarrier_engine(u32 address, u32 number);
void mbarrier_complete_bytes(u32 address, u32 bytes);
void mbarrier_wait(u32 address, u32 parity, Site site);

}  // namespace fulmen::emulator
