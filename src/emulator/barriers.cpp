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

constexpr size_t kKeptEndings = 8;

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

void finish_phase_if_complete(Mbarrier& barrier, Ending ending) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  if (barrier.endings.size() == kKeptEndings) barrier.endings.pop_front();
  barrier.endings.push_back(ending);
  if (barrier.copies > 0) barrier.arriving.seen.raise(barrier.agent, barrier.copies);
  barrier.over[barrier.phase % 2] = std::exchange(barrier.arriving, {});
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
}

// The phase that the running thread can mean by a parity: the first one that it does not know to
// be over, or the one before.
i64 phase_meant(const Mbarrier& barrier, u32 parity) {
  i64 known = barrier.phase;
  for (auto last = barrier.endings.rbegin(); last != barrier.endings.rend(); ++last) {
    if (self().clock.seen[last->agent] >= last->time) break;
    --known;
  }
  return known % 2 == parity ? known : known - 1;
}

class MbarrierWait final : public Wait {
 public:
  MbarrierWait(u32 address, u32 parity)
      : address_(address),
        parity_(parity),
        barrier_(mbarrier_at(address)),
        meant_(phase_meant(barrier_, parity)) {}

  // Two phases on, the parity is the same again: who comes so late waits for another phase.
  bool is_late() const { return checking() && barrier_.phase >= meant_ + 2; }
  bool over() const override { return barrier_.phase % 2 != parity_ || is_late(); }
  std::string lateness() const {
    return "waits for phase " + std::to_string(meant_) + " of the mbarrier at shared address " +
           std::to_string(address_) + ", which is two behind: phase " +
           std::to_string(barrier_.phase) + " has begun, and parity " + std::to_string(parity_) +
           " no longer means that";
  }
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
  i64 meant_;
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
  on_mbarrier(address - kSharedBase, Kind::kWrite, site);
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
  on_mbarrier(address - kSharedBase, Kind::kAtomic, site);
  if (barrier.pending == 0) {
    fail("more than " + std::to_string(barrier.arrivals) +
         " arrivals in one phase of the mbarrier at shared address " + std::to_string(address));
  }
  const Thread& thread = self();
  const Ending ending{thread.agent, thread.clock.seen[thread.agent]};
  hand_over(barrier.arriving);
  --barrier.pending;
  barrier.arrived_warps |= 1u << thread.warp();
  finish_phase_if_complete(barrier, ending);
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
  finish_phase_if_complete(barrier, {barrier.agent, barrier.copies});
}

void mbarrier_wait(u32 address, u32 parity, Site site) {
  if (parity > 1) fail("an mbarrier has no parity " + std::to_string(parity));
  const Mbarrier& barrier = mbarrier_at(address);
  on_mbarrier(address - kSharedBase, Kind::kAtomic, site);
  count(&Counters::barrier_waits);
  const MbarrierWait phase(address, parity);
  wait(phase);
  if (phase.is_late()) fail(phase.lateness());
  if (barrier.phase > 0) take_over(barrier.over[parity]);
}

}  // namespace fulmen::emulator
