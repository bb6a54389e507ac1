// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The scheduler. A round lets the warps run in random order, leaving out about a quarter of them,
// each thread until it waits; then the copy engine does some of its work, in random order too.
// After a round in which nothing moved nobody is left out, and all copies are done, late ones
// included: if still nothing moves, nothing ever will.
#include "emulator/launch.h"

#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <exception>
#include <numeric>
#include <utility>

#include "emulator/block.h"

namespace fulmen::emulator {
namespace {

namespace context = boost::context;

constexpr size_t kStackBytes = 128 << 10;  // a thread's registers; 21 KB of one wgmma

class Scheduler;
constinit thread_local Scheduler* current_scheduler = nullptr;

class Scheduler {
 public:
  Scheduler(Block& block, const std::function<void()>& kernel) : block_(block) {
    current_block = &block;
    current_scheduler = this;
    order_.resize(block.warps.size());
    std::iota(order_.begin(), order_.end(), 0u);
    for (Thread& thread : block.threads) {
      fibers_.emplace_back(std::allocator_arg, context::protected_fixedsize_stack(kStackBytes),
                           [this, &thread, &kernel](context::fiber&& main) {
                             main_ = std::move(main);
                             run_thread(thread, kernel);
                             return std::move(main_);
                           });
    }
  }
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;
  ~Scheduler() {
    fibers_.clear();  // unwinds threads that have not finished
    current_block = nullptr;
    current_scheduler = nullptr;
  }

  void run() {
    bool thorough = false;
    while (num_done_ < block_.threads.size()) {
      bool moved = run_warps(thorough);
      if (num_done_ == block_.threads.size() && !block_.copies.empty()) {
        fail("the block has ended with copies still running");
      }
      moved |= run_copies(thorough);
      if (thorough && !moved) report_deadlock();
      thorough = !moved;
    }
  }

  // Called on a thread's fiber.
  void suspend() { main_ = std::move(main_).resume(); }

 private:
  u32 draw(size_t count) { return static_cast<u32>(block_.random() % count); }

  void run_thread(Thread& thread, const std::function<void()>& kernel) {
    try {
      kernel();
      if (!thread.stores_running.empty()) {  // nobody else can wait for them
        fail("the thread ends before its tensor stores have");
      }
    } catch (const std::exception&) {  // an exception may not leave its fiber
      error_ = std::current_exception();
    }
    thread.done = true;
    ++num_done_;
  }

  bool run_warps(bool thorough) {
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[draw(i)]);
    bool moved = false;
    for (const u32 warp : order_) {
      if (!thorough && draw(4) == 0) continue;
      for (u32 lane = 0; lane < kWarpSize; ++lane) {
        moved |= run_until_it_waits(block_.threads[warp * kWarpSize + lane]);
      }
    }
    return moved;
  }

  bool run_until_it_waits(Thread& thread) {
    if (thread.done || (thread.waits_for != nullptr && !thread.waits_for->over())) return false;
    thread.waits_for = nullptr;
    block_.running = &thread;
    context::fiber& fiber = fibers_[thread.index];
    fiber = std::move(fiber).resume();
    block_.running = nullptr;
    if (error_) std::rethrow_exception(error_);
    return true;
  }

  bool run_copies(bool thorough) {
    std::vector<Copy>& copies = block_.copies;
    bool moved = false;
    while (!copies.empty() && (thorough || draw(4) != 0)) {
      Copy& chosen = copies[draw(copies.size())];
      if (chosen.late && !thorough) continue;
      std::swap(chosen, copies.back());
      const Copy copy = std::move(copies.back());
      copies.pop_back();
      copy.run();
      moved = true;
    }
    return moved;
  }

  [[noreturn]] void report_deadlock() const {
    std::string report = "deadlock";
    for (size_t warp = 0; warp < block_.warps.size(); ++warp) {
      std::map<std::string, u32> reasons;  // how many lanes wait for what
      for (u32 lane = 0; lane < kWarpSize; ++lane) {
        const Thread& thread = block_.threads[warp * kWarpSize + lane];
        if (!thread.done) ++reasons[thread.waits_for->reason()];
      }
      for (const auto& [reason, lanes] : reasons) {
        report += "\n  warp " + std::to_string(warp) + ", " + std::to_string(lanes) +
                  (lanes == 1 ? " lane" : " lanes") + " in " + reason;
      }
    }
    fail(report);
  }

  Block& block_;
  std::vector<u32> order_;
  std::vector<context::fiber> fibers_;
  context::fiber main_;
  std::exception_ptr error_;
  size_t num_done_ = 0;
};

}  // namespace

void wait(const Wait& wait) {
  if (wait.over()) return;
  self().waits_for = &wait;
  current_scheduler->suspend();
}

void launch(const Grid& grid, const std::function<void()>& kernel) {
  if (grid.threads <= 0 || grid.threads > 1024 || grid.threads % 32 != 0) {
    throw Error("emulator: a block of " + std::to_string(grid.threads) +
                " threads; a multiple of 32 up to 1,024 works");
  }
  const u32 threads = static_cast<u32>(grid.threads);
  for (i32 index = 0; index < grid.blocks; ++index) {
    Block block{};
    block.index = static_cast<u32>(index);
    block.num_blocks = static_cast<u32>(grid.blocks);
    block.shared.assign(static_cast<size_t>(grid.shared_bytes), 0xff);  // NaN in every format
    block.threads.resize(threads);
    for (u32 i = 0; i < threads; ++i) block.threads[i].index = i;
    block.warps.resize(threads / kWarpSize);
    block.warpgroups.resize((threads + kWarpgroupSize - 1) / kWarpgroupSize);
    block.random.seed(grid.seed + block.index);
    Scheduler(block, kernel).run();
  }
}

}  // namespace fulmen::emulator
