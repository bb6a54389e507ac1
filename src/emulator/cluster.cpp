// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Clusters: PTX ISA 9.0, sections 5.1.5 (shared::cluster), 9.7.9.22 and 9.7.13.4.
#include "emulator/cluster.h"

#include <algorithm>
#include <utility>

#include "emulator/order.h"
#include "emulator/shared_memory.h"
#include "emulator/warp.h"

namespace fulmen::emulator {
namespace {

constexpr u32 kRankShift = 24;  // shared memory of a block is smaller

class ClusterWait final : public Wait {
 public:
  ClusterWait(const Cluster& cluster, u64 round) : cluster_(cluster), round_(round) {}
  bool over() const override { return cluster_.round >= round_; }
  std::string reason() const override {
    return "barrier.cluster.wait: " + std::to_string(cluster_.missing) + " of " +
           std::to_string(cluster_.running) + " running threads have not arrived";
  }

 private:
  const Cluster& cluster_;
  u64 round_;
};

void finish_round_if_complete(Cluster& cluster) {
  if (cluster.missing != 0) return;
  for (const Block* const block : cluster.blocks) {
    cluster.arriving.seen.raise(block->begin_agent, 1);
  }
  cluster.over[cluster.round % 2] = std::exchange(cluster.arriving, {});
  ++cluster.round;
  cluster.missing = cluster.running;
}

// What a relaxed arrival hands over: that the block has begun, mbarriers that are fenced.
void hand_over_relaxed(Clock& to) {
  const Thread& thread = self();
  if (thread.init_agent != kNoAgent) to.seen.raise(thread.init_agent, thread.fenced_inits);
}

std::string does(Kind kind) {
  return kind == Kind::kRead ? " reads" : kind == Kind::kWrite ? " writes" : " adds to";
}

// The last thread of a block ends: whoever reached there must be known to be done.
void expect_done(const Block& block) {
  for (const auto& [agent, access] : block.far_accesses) {
    if (block.at_end.seen[agent] >= access.time) continue;
    fail("the block may end before " + world().name_agent(agent) + does(access.kind) +
         " its shared memory at " + access.site.text() + ": it has waited for no word of that");
  }
}

}  // namespace

u32 map_shared(u32 address, u32 rank) {
  const u32 size = static_cast<u32>(block().cluster->blocks.size());
  if (rank >= size) {
    fail("mapa to block " + std::to_string(rank) + " of a cluster of " + std::to_string(size));
  }
  if (address >> kRankShift != 0) fail("mapa of an address that is mapped already");
  return (rank + 1) << kRankShift | address;
}

Location in_cluster(u32 address) {
  const u32 rank = address >> kRankShift;
  if (rank == 0) return own(address);
  const std::vector<Block*>& blocks = block().cluster->blocks;
  if (rank > blocks.size()) fail("no block of the cluster has address " + std::to_string(address));
  return {blocks[rank - 1], address & ((1u << kRankShift) - 1)};
}

u8* bytes_at(const Location& at, u32 bytes, u32 alignment) {
  const u32 size = at.block->shared_bytes;
  const u64 end = u64{at.address} + bytes;
  if (at.address < kSharedBase || end > u64{kSharedBase} + size) {
    const char* const hint = at.address >> kRankShift != 0 ? "; it is of shared::cluster" : "";
    fail(std::to_string(bytes) + " bytes at shared address " + std::to_string(at.address) +
         ", which begins at " + std::to_string(kSharedBase) + " and has " + std::to_string(size) +
         " bytes" + hint);
  }
  if (at.address % alignment != 0) {
    fail("shared address " + std::to_string(at.address) + " is not a multiple of " +
         std::to_string(alignment));
  }
  return at.block->shared + (at.address - kSharedBase);
}

void expect_running(const Block& owner) {
  if (!owner.has_ended()) return;
  fail("reaches shared memory of block " + std::to_string(owner.index) + ", which has ended");
}

void note_far_access(Block& owner, const Engine& engine, Kind kind, Site site) {
  if (checking()) owner.far_accesses[engine.agent] = {engine.time, kind, site};
}

void expect_reachable(const Block& owner) {
  if (&owner == current_block) return;
  expect_running(owner);
  if (!checking() || self().clock.seen[owner.begin_agent] > 0) return;
  fail("reaches shared memory of block " + std::to_string(owner.index) +
       ", which may not have begun: no barrier of the cluster came before");
}

void reach(const Location& to, Kind kind, Site site) {
  at(site);
  expect_reachable(*to.block);
  if (to.block == current_block) return;
  const Thread& thread = self();
  note_far_access(*to.block, {thread.agent, thread.clock.seen[thread.agent], thread.clock}, kind,
                  site);
}

void count_far_bytes(const Location& at, u64 Counters::* what, u64 bytes) {
  if (at.block != current_block) count(what, bytes);
}

void cluster_arrive(bool release) {
  exchange(release ? "barrier.cluster.arrive" : "barrier.cluster.arrive.relaxed", 0);
  Thread& thread = self();
  if (thread.cluster_arrivals != thread.cluster_waits) {
    fail("barrier.cluster.arrive: the thread has not waited since it arrived");
  }
  ++thread.cluster_arrivals;
  Cluster& cluster = *block().cluster;
  release ? hand_over(cluster.arriving) : hand_over_relaxed(cluster.arriving);
  --cluster.missing;
  finish_round_if_complete(cluster);
}

void cluster_wait() {
  exchange("barrier.cluster.wait", 0);
  Thread& thread = self();
  if (thread.cluster_arrivals == thread.cluster_waits) {
    fail("barrier.cluster.wait: the thread has not arrived");
  }
  count(&Counters::barrier_waits);
  Cluster& cluster = *block().cluster;
  wait(ClusterWait(cluster, thread.cluster_arrivals));
  take_over(cluster.over[thread.cluster_waits++ % 2]);
}

void leave_cluster() {
  Block& here = block();
  Cluster& cluster = *here.cluster;
  if (checking()) here.at_end.join(self().clock);
  ++here.num_ended;
  if (here.has_ended()) expect_done(here);
  --cluster.running;
  if (self().cluster_arrivals > cluster.round) return;  // has arrived in this round
  --cluster.missing;
  if (cluster.running > 0) finish_round_if_complete(cluster);
}

}  // namespace fulmen::emulator
