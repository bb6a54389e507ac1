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

// "shared address 1024", and of which block where it is not the running thread's.
std::string name_of(const Location& barrier) {
  const std::string name = "shared address " + std::to_string(barrier.address);
  if (barrier.block == current_block) return name;
  return name + " of block " + std::to_string(barrier.block->index);
}

Mbarrier& mbarrier_at(const Location& at) {
  const auto found = at.block->mbarriers.find(at.address);
  if (found == at.block->mbarriers.end()) fail("no mbarrier was made at " + name_of(at));
  return found->second;
}

// What a block brings to a barrier.
Arrivals& arrivals_of(Mbarrier& barrier, const Block& origin, const Location& at) {
  return &origin == at.block ? barrier.own : barrier.others;
}

void finish_phase(Arrivals& arrivals, u32 phase) {
  if (arrivals.copies > 0) arrivals.arriving.seen.raise(arrivals.agent, arrivals.copies);
  arrivals.over[phase % 2] = std::exchange(arrivals.arriving, {});
}

void finish_phase_if_complete(Mbarrier& barrier, Ending ending) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  if (barrier.endings.size() == kKeptEndings) barrier.endings.pop_front();
  barrier.endings.push_back(ending);
  finish_phase(barrier.own, barrier.phase);
  finish_phase(barrier.others, barrier.phase);
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
}

// A phase that another block ends is known to be over by who has waited for it, though nothing else
// is known of that block to those who wait without .cluster.
Ending ending_by_others(Mbarrier& barrier) {
  if (barrier.phase_agent == kNoAgent) barrier.phase_agent = world().new_engine("an mbarrier");
  return {barrier.phase_agent, barrier.phase + 1};
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
        barrier_(mbarrier_at(own(address))),
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
           name_warps(barrier_.arrived_warps) +
           (barrier_.reached_by_others ? " and by other blocks" : "");
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
  bytes_at(own(address), 8, 8);
  Thread& thread = self();
  if (thread.init_agent == kNoAgent) {
    thread.init_agent = world().new_engine(world().name_agent(thread.agent));
  }
  const Engine init{thread.init_agent, ++thread.inits, thread.clock};
  on_mbarrier(own(address), Kind::kWrite, site, &init);
  thread.clock.seen.raise(thread.init_agent, thread.inits);
  if (arrivals == 0) fail("an mbarrier for 0 arrivals");
  Mbarrier& barrier = block().mbarriers[address];
  barrier = {};
  barrier.arrivals = barrier.pending = arrivals;
  barrier.made_by = thread.index;
}

void mbarrier_fence_init() {
  self().fenced_inits = self().inits;
  for (auto& [address, barrier] : block().mbarriers) {
    if (barrier.made_by == self().index) barrier.known_to_engine = true;
  }
}

void mbarrier_arrive(const Location& at, Site site) {
  reach(at, Kind::kAtomic, site);
  Mbarrier& barrier = mbarrier_at(at);
  on_mbarrier(at, Kind::kAtomic, site);
  if (barrier.pending == 0) {
    fail("more than " + std::to_string(barrier.arrivals) +
         " arrivals in one phase of the mbarrier at " + name_of(at));
  }
  const Thread& thread = self();
  const bool is_own = at.block == current_block;
  const Ending ending =
      is_own ? Ending{thread.agent, thread.clock.seen[thread.agent]} : ending_by_others(barrier);
  hand_over(arrivals_of(barrier, block(), at).arriving);
  --barrier.pending;
  if (is_own) barrier.arrived_warps |= 1u << thread.warp();
  barrier.reached_by_others |= !is_own;
  finish_phase_if_complete(barrier, ending);
}

void mbarrier_expect_bytes(const Location& at, u32 bytes) {
  if (at.block != current_block) expect_running(*at.block);
  mbarrier_at(at).bytes += bytes;
}

Engine mbarrier_engine(const Location& at) {
  Mbarrier& barrier = mbarrier_at(at);
  if (checking() && !barrier.known_to_engine) {
    fail("missing fence.mbarrier_init: a copy counts towards the mbarrier at " + name_of(at));
  }
  Arrivals& arrivals = arrivals_of(barrier, block(), at);
  if (arrivals.agent == kNoAgent) {
    arrivals.agent = world().new_engine("a copy to the mbarrier at " + name_of(at));
  }
  return {arrivals.agent, ++arrivals.copies, self().clock};
}

void mbarrier_complete_bytes(const Location& at, const Block& origin, u32 bytes) {
  expect_running(*at.block);
  Mbarrier& barrier = mbarrier_at(at);
  barrier.bytes -= bytes;
  const bool is_own = &origin == at.block;
  barrier.reached_by_others |= !is_own;
  finish_phase_if_complete(
      barrier, is_own ? Ending{barrier.own.agent, barrier.own.copies} : ending_by_others(barrier));
}

bool mbarrier_test(u32 address, u32 parity, Site site) {
  if (parity > 1) fail("an mbarrier has no parity " + std::to_string(parity));
  on_mbarrier(own(address), Kind::kAtomic, site);
  return MbarrierWait(address, parity).over();
}

void mbarrier_wait(u32 address, u32 parity, bool cluster, Site site) {
  if (parity > 1) fail("an mbarrier has no parity " + std::to_string(parity));
  const Mbarrier& barrier = mbarrier_at(own(address));
  on_mbarrier(own(address), Kind::kAtomic, site);
  count(&Counters::barrier_waits);
  const MbarrierWait phase(address, parity);
  wait(phase);
  if (phase.is_late()) fail(phase.lateness());
  if (barrier.phase == 0 || !checking()) return;
  take_over(barrier.own.over[parity]);
  if (cluster) take_over(barrier.others.over[parity]);
  if (barrier.phase_agent != kNoAgent) {
    self().clock.seen.raise(barrier.phase_agent, barrier.phase);
  }
}

}  // namespace fulmen::emulator
