// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Named barriers and mbarriers: PTX ISA 9.0, sections 9.7.13.1 and 9.7.13.15.
#include "emulator/barriers.h"

#include <utility>

#include "emulator/order.h"
#include "emulator/shared_memory.h"

namespace fulmen::emulator {
namespace {

Meeting& named_barrier(u32 id, u32 threads) {
  if (id >= kNumNamedBarriers) fail("barrier " + std::to_string(id) + " of 16");
  if (threads == 0 || threads % kWarpSize != 0 || threads > block().threads.size()) {
    fail("barrier " + std::to_string(id) + " for " + std::to_string(threads) + " threads");
  }
  return block().named_barriers[id];
}

constexpr const char* kBarrierNames[kNumNamedBarriers] = {
    "barrier 0",  "barrier 1",  "barrier 2",  "barrier 3", "barrier 4",  "barrier 5",
    "barrier 6",  "barrier 7",  "barrier 8",  "barrier 9", "barrier 10", "barrier 11",
    "barrier 12", "barrier 13", "barrier 14", "barrier 15"};

Mbarrier& mbarrier_at(u32 address) {
  const auto found = block().mbarriers.find(address);
  if (found == block().mbarriers.end()) {
    fail("no mbarrier was made at shared address " + std::to_string(address));
  }
  return found->second;
}

void finish_phase_if_complete(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  if (barrier.copies > 0) barrier.arriving.seen.raise(barrier.agent, barrier.copies);
  barrier.over[barrier.phase % 2] = std::exchange(barrier.arriving, {});
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
}

class MbarrierWait final : public Wait {
 public:
  MbarrierWait(u32 address, u32 parity)
      : address_(address), parity_(parity), barrier_(mbarrier_at(address)) {}

  bool over() const override { return barrier_.phase % 2 != parity_; }
  std::string reason() const override {
    return "mbarrier.try_wait at shared address " + std::to_string(address_) + ", parity " +
           std::to_string(parity_) + ": phase " + std::to_string(barrier_.phase) + " lacks " +
           std::to_string(barrier_.pending) + " of " + std::to_string(barrier_.arrivals) +
           " arrivals and " + std::to_string(barrier_.bytes) + " bytes; so far it was reached by " +
           name_warps(barrier_.arrived_warps);
  }

 private:
  u32 address_;
  u32 parity_;
  const Mbarrier& barrier_;
};

}  // namespace

void named_barrier_arrive(u32 id, u32 threads) {
  arrive(named_barrier(id, threads), threads, kBarrierNames[id], true);
}

void named_barrier_sync(u32 id, u32 threads) {
  count(&Counters::barrier_waits);
  meet(named_barrier(id, threads), threads, kBarrierNames[id], true);
}

void mbarrier_init(u32 address, u32 arrivals, Site site) {
  shared_at(address, 8, 8);
  on_shared(address - kSharedBase, 8, Kind::kWrite, site);
  if (arrivals == 0) fail("an mbarrier for 0 arrivals");
  Mbarrier& barrier = block().mbarriers[address];
  barrier = {};
  barrier.arrivals = barrier.pending = arrivals;
  barrier.made_by = self().index;
}

void mbarrier_fence_init() {
  for (auto& [address, barrier] : block().mbarriers) {
    if (barrier.made_by == self().index) barrier.known_to_engine = true;
  }
}

void mbarrier_arrive(u32 address, Site site) {
  Mbarrier& barrier = mbarrier_at(address);
  on_shared(address - kSharedBase, 8, Kind::kAtomic, site);
  if (barrier.pending == 0) {
    fail("more than " + std::to_string(barrier.arrivals) +
         " arrivals in one phase of the mbarrier at shared address " + std::to_string(address));
  }
  hand_over(barrier.arriving);
  --barrier.pending;
  barrier.arrived_warps |= 1u << self().warp();
  finish_phase_if_complete(barrier);
}

void mbarrier_expect_bytes(u32 address, u32 bytes) { mbarrier_at(address).bytes += bytes; }

u32 mbarrier_count_copy(u32 address) {
  Mbarrier& barrier = mbarrier_at(address);
  if (checking() && !barrier.known_to_engine) {
    fail("missing fence.mbarrier_init: a copy counts towards the mbarrier at shared address " +
         std::to_string(address));
  }
  if (barrier.agent == kNoAgent) {
    barrier.agent =
        world().new_engine("a copy to the mbarrier at shared address " + std::to_string(address));
  }
  return ++barrier.copies;
}

Engine mbarrier_engine(u32 address, u32 number) {
  return {mbarrier_at(address).agent, number, self().clock};
}

void mbarrier_complete_bytes(u32 address, u32 bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  barrier.bytes -= bytes;
  finish_phase_if_complete(barrier);
}

void mbarrier_wait(u32 address, u32 parity, Site site) {
  if (parity > 1) fail("an mbarrier has no parity " + std::to_string(parity));
  const Mbarrier& barrier = mbarrier_at(address);
  on_shared(address - kSharedBase, 8, Kind::kAtomic, site);
  count(&Counters::barrier_waits);
  wait(MbarrierWait(address, parity));
  if (barrier.phase > 0) take_over(barrier.over[parity]);
}

}  // namespace fulmen::emulator
