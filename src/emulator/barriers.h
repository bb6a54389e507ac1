// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers: the 16 named ones, and those in shared memory that count arrivals and bytes. What
// kernels/ptx/thread.cuh and tma.cuh call.
#pragma once

#include "emulator/cluster.h"

namespace fulmen::emulator {

void named_barrier_arrive(u32 id, u32 threads);
void named_barrier_sync(u32 id, u32 threads);

void mbarrier_init(u32 address, u32 arrivals, Site site);
void mbarrier_fence_init();  // for the barriers that this thread has made
void mbarrier_arrive(const Location& barrier, Site site);
void mbarrier_expect_bytes(const Location& barrier, u32 bytes);  // before the thread arrives

// A copy is asked for by the running thread, that counts towards a barrier: its engine.
Engine mbarrier_engine(const Location& barrier);
void mbarrier_complete_bytes(const Location& barrier, const Block& origin, u32 bytes);

// cluster: with the order that arrivals and copies of other blocks bring (.acquire.cluster).
bool mbarrier_test(u32 address, u32 parity, Site site);  // tells nothing but whether it is over
void mbarrier_wait(u32 address, u32 parity, bool cluster, Site site);

}  // namespace fulmen::emulator
