// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Clusters of thread blocks: whose shared memory an address means, whether that block may be
// reached, and the barrier of all its threads. What kernels/ptx/grid.cuh calls.
//
// A block may be reached by who knows that it has begun, and until it ends. Both are a matter of
// order, not of the schedule: an access that the start of the block is not ordered before, or that
// is not ordered before its end, is an error wherever it comes.
#pragma once

#include "emulator/accesses.h"

namespace fulmen::emulator {

// Addresses of the running thread's own block are such of shared::cta; those that map_shared()
// gives have the rank in their highest byte, from 1 on.
u32 map_shared(u32 address, u32 rank);
inline Location own(u32 address) { return {current_block, address}; }
Location in_cluster(u32 address);

// The bytes at an address of shared::cluster, which must be a multiple of `alignment`.
u8* bytes_at(const Location& at, u32 bytes, u32 alignment);

// A block that the running thread reaches, or asks an engine to: it has begun, and not ended.
void expect_reachable(const Block& owner);
// What is done there, so that the block does not end before.
void note_far_access(Block& owner, const Engine& engine, Kind kind, Site site);
// What was asked for happens now: the block is still there.
void expect_running(const Block& owner);
// All of that, for an access of the running thread.
void reach(const Location& at, Kind kind, Site site);

void cluster_arrive(bool release);
void cluster_wait();

// Over the cluster's network.
void count_far_bytes(const Location& at, u64 Counters::* what, u64 bytes);

}  // namespace fulmen::emulator
