// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Faults planted into kernels whose text stays as it is: functions of kernels/ptx that do what they
// should unless the fault of the moment is theirs. Included before the text of a kernel, which then
// calls these; a program whose files all do so, since a kernel has one text in a program.
#pragma once

#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen::test {

enum class Fault {
  kNone,
  kBlockSync,     // barrier.sync of the block left out
  kWarpSync,      // bar.warp.sync left out
  kCopyWait,      // cp.async.wait_group lets one group more be pending
  kProxyFence,    // fence.proxy.async left out
  kInitFence,     // fence.mbarrier_init left out
  kParity,        // one mbarrier is waited for in the other phase
  kArrival,       // arrivals at one mbarrier go to the next one
  kBytes,         // one mbarrier expects 16 bytes too many
  kStage,         // copies to one tile go to another one: a stage is missing
  kLayout,        // copies to one tile are not swizzled
  kProductWait,   // wgmma.wait_group left out
  kProductFence,  // wgmma.fence left out
  kStoreWait,     // cp.async.bulk.wait_group left out
};

struct Plant {
  Fault fault = Fault::kNone;
  u32 address = 0;  // of the mbarrier or tile
  u32 other = 0;    // where the fault goes instead
};
inline Plant plant;

inline bool planted(Fault fault) { return plant.fault == fault; }
inline bool planted(Fault fault, u32 address) { return planted(fault) && plant.address == address; }

}  // namespace fulmen::test

namespace fulmen::ptx {

using test::Fault;
using test::plant;
using test::planted;

inline void planted_block_sync() {
  if (!planted(Fault::kBlockSync)) block_sync();
}
inline void planted_warp_sync() {
  if (!planted(Fault::kWarpSync)) warp_sync();
}

template <i32 kPending>
inline void planted_cp_async_wait() {
  planted(Fault::kCopyWait) ? cp_async_wait<kPending + 1>() : cp_async_wait<kPending>();
}

inline void planted_fence_proxy_async() {
  if (!planted(Fault::kProxyFence)) ptx::fence_proxy_async();
}
inline void planted_fence_mbarrier_init() {
  if (!planted(Fault::kInitFence)) fence_mbarrier_init();
}
inline void planted_mbarrier_wait(u32 barrier, u32 parity, Site site = Where::current()) {
  ptx::mbarrier_wait(barrier, planted(Fault::kParity, barrier) ? parity ^ 1 : parity, site);
}
inline void planted_mbarrier_arrive(u32 barrier, Site site = Where::current()) {
  ptx::mbarrier_arrive(planted(Fault::kArrival, barrier) ? plant.other : barrier, site);
}
inline void planted_mbarrier_arrive_expect(u32 barrier, u32 bytes, Site site = Where::current()) {
  ptx::mbarrier_arrive_expect(barrier, planted(Fault::kBytes, barrier) ? bytes + 16 : bytes, site);
}

inline void planted_tma_load(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row,
                             i32 head, i32 batch, u64 = 0, Site site = Where::current()) {
  TensorMap wrong = map;
  if (planted(Fault::kLayout, shared)) {
    emulator::HostTensorMap decoded = emulator::decode(map);
    decoded.swizzled = false;
    wrong = emulator::encode(decoded);
  }
  const u32 to = planted(Fault::kStage, shared) ? plant.other : shared;
  ptx::tma_load(to, wrong, barrier, dim, row, head, batch, site);
}
inline void planted_tma_store_wait() {
  if (!planted(Fault::kStoreWait)) ptx::tma_store_wait();
}

template <i32 kPending>
inline void planted_wgmma_wait() {
  if (!planted(Fault::kProductWait)) wgmma_wait<kPending>();
}
inline void planted_wgmma_fence() {
  if (!planted(Fault::kProductFence)) ptx::wgmma_fence();
}

}  // namespace fulmen::ptx

#define block_sync planted_block_sync
#define warp_sync planted_warp_sync
#define cp_async_wait planted_cp_async_wait
#define fence_proxy_async planted_fence_proxy_async
#define fence_mbarrier_init planted_fence_mbarrier_init
#define mbarrier_wait planted_mbarrier_wait
#define mbarrier_arrive planted_mbarrier_arrive
#define mbarrier_arrive_expect planted_mbarrier_arrive_expect
#define tma_load planted_tma_load
#define tma_store_wait planted_tma_store_wait
#define wgmma_wait planted_wgmma_wait
#define wgmma_fence planted_wgmma_fence
