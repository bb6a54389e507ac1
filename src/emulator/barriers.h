// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers: the 16 named ones, and those in shared memory that count arrivals and bytes. What
// kernels/ptx/thread.cuh and mbarrier.cuh call.
#pragma once

#include "emulator/block.h"

namespace fulmen::emulator {

void named_barrier_arrive(u32 id, u32 threads);
void named_barrier_sync(u32 id, u32 threads);

void mbarrier_init(u32 address, u32 arrivals);
void mbarrier_arrive(u32 address);
void mbarrier_expect_bytes(u32 address, u32 bytes);  // before the arrival of the same thread
void mbarrier_complete_bytes(u32 address, u32 bytes);
void mbarrier_wait(u32 address, u32 parity);

}  // namespace fulmen::emulator
