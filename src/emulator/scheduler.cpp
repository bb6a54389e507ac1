// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The scheduler. A round lets the warps run in random order, leaving out about a quarter of them,
// each thread until it waits; then the copy engine does some of its work, in random order too.
// After a round in which nothing moved no thread is left out, and all copies are done, late ones
// included: if still nothing moves, nothing ever will. In every fourth world one warp lags as far
// behind as waits let it: it goes on only when nothing else can.
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "emulator/accesses.h"
#include "emulator/block.h"
#include "emulator/order.h"

namespace fulmen::emulator {
namespace {

// Stacks for fibers, kept from block to block: making one costs two system calls, a block of a
// small problem less. Each lies behind a page that may not be touched. Thread safe.
class Stacks {
 public:
  using Stack = boost::context::stack_context;
  static constexpr std::size_t kBytes = 256 << 10;  // a thread's registers and a wgmma's matrices

  Stack take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return boost::context::protected_fixedsize_stack(kBytes).allocate();
    const Stack stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void give_back(const Stack& stack) {
    const std::lock_guard lock(mutex_);
    free_.push_back(stack);
  }

  static Stacks& all() {
    static Stacks stacks;
    return stacks;
  }

 private:
  std::mutex mutex_;
  std::vector<Stack> free_;
};

// What Boost.Context asks for a stack.
class StackAllocator {
 public:
  Stacks::Stack allocate() { return Stacks::all().take(); }
  void deallocate(Stacks::Stack& stack) { Stacks::all().give_back(stack); }
};

namespace context = boost::context;

class Scheduler;
constinit thread_local Scheduler* current_scheduler = nullptr;

class Scheduler {
 public:
  Scheduler(World& world, const std::function<void()>& kernel) : world_(world) {
    current_scheduler = this;
    for (const auto& block : world.blocks) {
      for (u32 warp = 0; warp < block->warps.size(); ++warp) {
        warps_.push_back(&block->threads[warp * kWarpSize]);
      }
      for (Thread& thread : block->threads) add_fiber(thread, kernel);
    }
    std::mt19937 own = world.random;
    if (own() % 4 == 0) last_ = warps_[own() % warps_.size()];
  }
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;
  ~Scheduler() {
    // A fiber that has not ended is left where it stands: its frames may not be unwound.
    for (context::fiber& fiber : fibers_) {
      if (fiber) new context::fiber(std::move(fiber));
    }
    current_block = nullptr;
    current_scheduler = nullptr;
  }

  void run() {
    u32 idle = 0;  // rounds in which nothing moved
    while (num_done_ < fibers_.size()) {
      const bool thorough = idle > 0, all = idle > 1;
      bool moved = run_warps(thorough, all);
      if (num_done_ == fibers_.size() && !world_.copies.empty()) {
        current_block = world_.copies[0].block;
        fail("the block has ended with copies still running");
      }
      moved |= run_copies(thorough);
      if (all && !moved) report_deadlock();
      idle = moved ? 0 : idle + 1;
    }
  }

  // Called on a thread's fiber.
  void suspend() { main_ = std::move(main_).resume(); }
  [[noreturn]] void stop(const std::string& message) {
    error_ = message;
    stopped_ = true;
    for (;;) suspend();
  }

 private:
  u32 draw(size_t count) { return static_cast<u32>(world_.random() % count); }

  void add_fiber(Thread& thread, const std::function<void()>& kernel) {
    StackAllocator allocator;
    Stacks::Stack stack = allocator.allocate();
    thread.stack_end = static_cast<const u8*>(stack.sp);
    thread.stack_begin = thread.stack_end - stack.size;
    fibers_.emplace_back(std::allocator_arg, context::preallocated(stack.sp, stack.size, stack),
                         allocator, [this, &thread, &kernel](context::fiber&& main) {
                           main_ = std::move(main);
                           kernel();
                           end_thread(thread);
                           return std::move(main_);
                         });
  }

  void end_thread(Thread& thread) {
    check_same_value();
    const bool waited = !checking() || thread.store_agent == kNoAgent ||
                        thread.clock.seen[thread.store_agent] >= thread.stores_issued;
    if (!thread.stores_running.empty() || !waited) {  // no other thread can wait for them
      fail("the thread ends before its tensor stores have");
    }
    leave_cluster();
    thread.done = true;
    ++num_done_;
  }

  bool run_warps(bool thorough, bool all) {
    for (size_t i = warps_.size(); i > 1; --i) std::swap(warps_[i - 1], warps_[draw(i)]);
    bool moved = false;
    for (Thread* const warp : warps_) {
      if ((warp == last_ && !all) || (!thorough && draw(4) == 0)) continue;
      for (u32 lane = 0; lane < kWarpSize; ++lane) moved |= run_until_it_waits(warp[lane]);
    }
    return moved;
  }

  bool run_until_it_waits(Thread& thread) {
    if (thread.done || (thread.waits_for != nullptr && !thread.waits_for->over())) return false;
    thread.waits_for = nullptr;
    current_block = thread.block;
    current_block->running = &thread;
    watching = is_watched_;
    context::fiber& fiber = fibers_[thread.agent];
    fiber = std::move(fiber).resume();
    current_block->running = nullptr;
    watching = false;
    if (stopped_) throw Error(error_);
    return true;
  }

  bool run_copies(bool thorough) {
    std::vector<Copy>& copies = world_.copies;
    bool moved = false;
    while (!copies.empty() && (thorough || draw(4) != 0)) {
      Copy& chosen = copies[draw(copies.size())];
      if (chosen.late && !thorough) continue;
      std::swap(chosen, copies.back());
      const Copy copy = std::move(copies.back());
      copies.pop_back();
      current_block = copy.block;
      copy.run();
      moved = true;
    }
    return moved;
  }

  [[noreturn]] void report_deadlock() const {
    std::string report = "deadlock";
    for (const auto& block : world_.blocks) {
      for (size_t warp = 0; warp < block->warps.size(); ++warp) {
        report += waits_of(*block, &block->threads[warp * kWarpSize]);
      }
    }
    current_block = world_.blocks[0].get();
    fail(report);
  }

  std::string waits_of(const Block& block, const Thread* lanes) const {
    std::map<std::string, u32> reasons;  // how many lanes wait for what
    for (u32 lane = 0; lane < kWarpSize; ++lane) {
      if (lanes[lane].done) continue;
      ++reasons[lanes[lane].waits_for->reason() + " (" + lanes[lane].at.text() + ")"];
    }
    std::string report;
    for (const auto& [reason, count] : reasons) {
      report += "\n  ";
      if (world_.blocks.size() > 1) report += "block " + std::to_string(block.index) + ", ";
      report += "warp " + std::to_string(lanes[0].warp()) + ", " + std::to_string(count) +
                (count == 1 ? " lane" : " lanes") + " in " + reason;
    }
    return report;
  }

  World& world_;
  const bool is_watched_ =
      world_.grid->check || world_.grid->memory != nullptr || world_.grid->counters != nullptr;
  std::vector<Thread*> warps_;    // the first lane of each
  const Thread* last_ = nullptr;  // of the warp that lags
  std::vector<context::fiber> fibers_;
  context::fiber main_;
  std::string error_;
  bool stopped_ = false;
  size_t num_done_ = 0;
};

}  // namespace

constinit thread_local Block* current_block = nullptr;
constinit thread_local bool watching = false;

void fail(const std::string& what) {
  std::string said = world().grid->kernel + ": block " + std::to_string(block().index);
  const Thread* const thread = block().running;
  if (thread != nullptr) {
    said += ", warp " + std::to_string(thread->warp()) + ", lane " + std::to_string(thread->lane());
    if (!(thread->at == Site())) said += ", at " + thread->at.text();
  }
  said += ": " + what;
  if (thread == nullptr) throw Error(said);
  current_scheduler->stop(said);
}

void wait(const Wait& wait) {
  check_same_value();
  if (wait.over()) return;
  self().waits_for = &wait;
  current_scheduler->suspend();
}

void run_world(World& world, const std::function<void()>& kernel) {
  Scheduler(world, kernel).run();
}

}  // namespace fulmen::emulator
