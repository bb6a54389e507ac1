// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tensor copy engine on the host, and barriers in shared memory, counted by the emulator: what
// src/kernels/ptx/tma.cuh declares. Advice for caches is ignored.
#pragma once

#include "emulator/barriers.h"
#include "emulator/copies.h"
#include "emulator/order.h"
#include "emulator/shared_memory.h"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

inline void mbarrier_init(u32 barrier, u32 arrivals, Site site = Where::current()) {
  emulator::mbarrier_init(barrier, arrivals, site);
}
inline void fence_mbarrier_init() { emulator::mbarrier_fence_init(); }
inline void mbarrier_arrive(u32 barrier, Site site = Where::current()) {
  emulator::mbarrier_arrive(emulator::own(barrier), site);
}
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes, Site site = Where::current()) {
  emulator::mbarrier_expect_bytes(emulator::own(barrier), bytes);
  emulator::mbarrier_arrive(emulator::own(barrier), site);
}
inline void mbarrier_wait(u32 barrier, u32 parity, Site site = Where::current()) {
  emulator::mbarrier_wait(barrier, parity, false, site);
}

inline bool mbarrier_test(u32 barrier, u32 parity, Site site = Where::current()) {
  return emulator::mbarrier_test(barrier, parity, site);
}

inline void prefetch_tensormap(const TensorMap&) {}

inline void tma_load(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row, i32 head,
                     i32 batch, Site site = Where::current()) {
  emulator::tensor_load(shared, map, barrier, {dim, row, head, batch}, site);
}

inline constexpr u64 kEvictFirst = 0;
inline constexpr u64 kEvictLast = 0;
inline void tma_load(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row, i32 head,
                     i32 batch, u64, Site site = Where::current()) {
  tma_load(shared, map, barrier, dim, row, head, batch, site);
}

inline void tma_store(const TensorMap& map, u32 shared, i32 dim, i32 row, i32 head, i32 batch,
                      Site site = Where::current()) {
  emulator::tensor_store(map, shared, {dim, row, head, batch}, site);
}
inline void tma_store_commit() { emulator::tensor_store_commit(); }
inline void tma_store_wait_read() { emulator::tensor_store_wait(); }  // a store reads as it writes
inline void tma_store_wait() { emulator::tensor_store_wait(); }
inline void fence_proxy_async() { emulator::fence_proxy(); }

inline void bulk_load(u32 shared, const void* source, u32 bytes, u32 barrier,
                      Site site = Where::current()) {
  emulator::bulk_load(shared, source, bytes, barrier, site);
}

inline void tma_prefetch(const TensorMap&, i32, i32, i32, i32) {}

inline void mbarrier_arrive_cluster(u32 barrier, Site site = Where::current()) {
  emulator::mbarrier_arrive(emulator::in_cluster(barrier), site);
}
inline void mbarrier_arrive_expect_cluster(u32 barrier, u32 bytes, Site site = Where::current()) {
  emulator::mbarrier_expect_bytes(emulator::in_cluster(barrier), bytes);
  emulator::mbarrier_arrive(emulator::in_cluster(barrier), site);
}
inline void mbarrier_arrive_read(u32 barrier, Site site = Where::current()) {
  mbarrier_arrive_cluster(barrier, site);
}
inline void mbarrier_arrive_expect_copy(u32 barrier, u32 bytes, Site site = Where::current()) {
  mbarrier_arrive_expect_cluster(barrier, bytes, site);
}
inline void mbarrier_wait_cluster(u32 barrier, u32 parity, Site site = Where::current()) {
  emulator::mbarrier_wait(barrier, parity, true, site);
}

inline void mbarrier_wait_copies(u32 barrier, u32 parity, Site site = Where::current()) {
  mbarrier_wait_cluster(barrier, parity, site);
}
inline void store_async(u32 address, u32 x, u32 barrier, Site site = Where::current()) {
  emulator::store_async(address, &x, sizeof(x), barrier, site);
}
inline void store_async_x4(u32 address, U32x4 x, u32 barrier, Site site = Where::current()) {
  emulator::store_async(address, &x, sizeof(x), barrier, site);
}
inline void bulk_store_cluster(u32 address, u32 source, u32 bytes, u32 barrier,
                               Site site = Where::current()) {
  emulator::bulk_store_cluster(address, source, bytes, barrier, site);
}
inline void tma_load_multicast(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row,
                               i32 head, i32 batch, u32 ranks, Site site = Where::current()) {
  emulator::tensor_load_multicast(shared, map, barrier, {dim, row, head, batch}, ranks, site);
}

}  // namespace fulmen::ptx
