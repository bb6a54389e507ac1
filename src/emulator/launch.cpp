// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Makes worlds of blocks and runs them one after the other: a cluster to a world (of one block, if
// the launch says nothing), or all blocks in one. On one thread of the host, so that what blocks
// add to or count together comes in one order.
#include "emulator/launch.h"

#include <atomic>

#include "emulator/block.h"

namespace fulmen::emulator {
namespace {

constexpr u32 kSharedAlignment = 1024;
constexpr i32 kMaxClusterBlocks = 16;  // of a cluster that is not portable

std::unique_ptr<Block> make_block(World& world, const Grid& grid, i64 index) {
  auto block = std::make_unique<Block>();
  const u32 threads = static_cast<u32>(grid.threads);
  block->world = &world;
  block->index = static_cast<u32>(index);
  block->num_blocks = static_cast<u32>(grid.blocks);
  block->shared_bytes = static_cast<u32>(grid.shared_bytes);
  block->memory.assign(block->shared_bytes + kSharedAlignment, 0xff);  // NaN in every format
  const u64 misalignment = reinterpret_cast<u64>(block->memory.data()) % kSharedAlignment;
  block->shared = block->memory.data() + (kSharedAlignment - misalignment) % kSharedAlignment;
  if (grid.check) block->shadow.resize((block->shared_bytes + kGranuleBytes - 1) / kGranuleBytes);
  if (grid.check) block->layouts.resize(block->shared_bytes / kLayoutBytes + 1);
  block->begin_agent = world.new_engine("the start of block " + std::to_string(index));
  block->threads.resize(threads);
  for (u32 i = 0; i < threads; ++i) {
    Thread& thread = block->threads[i];
    thread.block = block.get();
    thread.index = i;
    thread.agent = static_cast<u32>(world.blocks.size()) * threads + i;
    thread.clock.seen.raise(thread.agent, 1);
    thread.clock.seen.raise(block->begin_agent, 1);
  }
  block->warps.resize(threads / kWarpSize);
  block->warpgroups.resize((threads + kWarpgroupSize - 1) / kWarpgroupSize);
  return block;
}

void join_cluster(World& world, Block& block) {
  if (block.index % static_cast<u32>(world.grid->cluster_size) == 0) {
    world.clusters.push_back(std::make_unique<Cluster>());
  }
  Cluster& cluster = *world.clusters.back();
  block.cluster = &cluster;
  block.rank = static_cast<u32>(cluster.blocks.size());
  cluster.blocks.push_back(&block);
  cluster.running += static_cast<u32>(block.threads.size());
  cluster.missing = cluster.running;
}

// A launch, for one that overlaps it.
struct Last {
  Earlier before;
  bool ends_behind = true;    // a block has waited for the launches before, so its end is theirs
  bool begins_behind = true;  // and did so before it let the next launch begin
};

class Launch {
 public:
  Launch(const Grid& grid, const std::function<void()>& kernel)
      : grid_(grid),
        kernel_(kernel),
        num_worlds_(grid.together ? 1 : grid.blocks / grid.cluster_size) {
    const u32 first = worlds_so_far.fetch_add(static_cast<u32>(num_worlds_)) + 1;
    before_ = {.first = first, .over = first};
    if (!grid.overlaps) return;
    before_.over = last.begins_behind ? last.before.first : last.before.over;
    before_.awaited = last.ends_behind ? 0 : last.before.first;
  }

  void run() {
    Last ours;
    ours.before = before_;
    ours.ends_behind = ours.begins_behind = !grid_.overlaps;
    for (i64 i = 0; i < num_worlds_; ++i) run_world_number(i, ours);
    last = ours;
  }

 private:
  void run_world_number(i64 number, Last& ours) {
    World world;
    world.grid = &grid_;
    world.number = before_.first + static_cast<u32>(number);
    world.before = before_;
    world.announced_by = &announced_by_;
    world.random.seed(grid_.seed + static_cast<u32>(number));
    const i64 blocks = grid_.together ? grid_.blocks : grid_.cluster_size;
    world.num_thread_agents = static_cast<u32>(blocks * grid_.threads);
    for (i64 i = 0; i < blocks; ++i) {
      world.blocks.push_back(make_block(world, grid_, number * blocks + i));
      join_cluster(world, *world.blocks.back());
    }
    world.before.agent = world.new_engine("the launches before");
    run_world(world, kernel_);
    if (grid_.counters != nullptr) grid_.counters->finish_blocks();
    ours.ends_behind |= world.has_waited;
    ours.begins_behind |= world.has_waited && !world.released_early;
  }

  static inline std::atomic<u32> worlds_so_far{0};
  static inline thread_local Last last;
  const Grid& grid_;
  const std::function<void()>& kernel_;
  i64 num_worlds_;
  Earlier before_;
  std::map<const void*, std::set<u32>> announced_by_;
};

}  // namespace

void launch(const Grid& grid, const std::function<void()>& kernel) {
  if (grid.threads <= 0 || grid.threads > 1024 || grid.threads % 32 != 0) {
    throw Error("emulator: a block of " + std::to_string(grid.threads) +
                " threads; a multiple of 32 up to 1,024 works");
  }
  const i32 cluster = grid.cluster_size;
  if (cluster < 1 || cluster > kMaxClusterBlocks || grid.blocks % cluster != 0) {
    throw Error("emulator: " + std::to_string(grid.blocks) + " blocks in clusters of " +
                std::to_string(cluster) + "; 1 to " + std::to_string(kMaxClusterBlocks) +
                " that divide the grid work");
  }
  Launch(grid, kernel).run();
}

}  // namespace fulmen::emulator
