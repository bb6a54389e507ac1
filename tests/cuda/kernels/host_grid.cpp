// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Coroutines by ucontext: each is resumed once a round and runs to its next meeting point.

#include "host_grid.h"

#include <ucontext.h>

#include <cstdlib>
#include <memory>
#include <vector>

namespace fulmen::host {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kSharedAlignment = 1024;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

struct Block {
  std::vector<Thread> threads;
  ucontext_t scheduler;
  std::vector<std::uint64_t> slots;  // what threads bring to an exchange
  std::vector<unsigned char> shared;
  const std::function<void()>* kernel = nullptr;
};

Block block;
Here position;

void run_thread() {
  (*block.kernel)();
  block.threads[position.thread].done = true;
}

void run_block(int num_threads) {
  for (Thread& thread : block.threads) {
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &block.scheduler;
    makecontext(&thread.context, run_thread, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (int i = 0; i < num_threads; ++i) {
      Thread& thread = block.threads[static_cast<std::size_t>(i)];
      if (thread.done) continue;
      position.thread = static_cast<unsigned>(i);
      swapcontext(&block.scheduler, &thread.context);
      running = running || !thread.done;
    }
  }
}

}  // namespace

Here& here() { return position; }

void meet() {
  Thread& thread = block.threads[position.thread];
  swapcontext(&thread.context, &block.scheduler);
}

void exchange_bytes(void* value, std::size_t bytes, unsigned from) {
  std::memcpy(&block.slots[position.thread], value, bytes);
  meet();
  std::memcpy(value, &block.slots[from], bytes);
  meet();
}

unsigned char* shared_memory() {
  const auto address = reinterpret_cast<std::uintptr_t>(block.shared.data());
  return block.shared.data() + (kSharedAlignment - address % kSharedAlignment) % kSharedAlignment;
}

void run_grid(std::int64_t num_blocks, int num_threads, std::size_t shared_bytes,
              const std::function<void()>& kernel) {
  block.kernel = &kernel;
  block.threads.resize(static_cast<std::size_t>(num_threads));
  for (Thread& thread : block.threads) {
    if (thread.stack == nullptr) thread.stack = std::make_unique<char[]>(kStackBytes);
  }
  block.slots.resize(block.threads.size());
  position.num_blocks = static_cast<unsigned>(num_blocks);
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    position.block = static_cast<unsigned>(i);
    block.shared.assign(shared_bytes + kSharedAlignment, 0xff);
    run_block(num_threads);
  }
}

}  // namespace fulmen::host
