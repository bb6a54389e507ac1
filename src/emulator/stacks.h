// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Stacks for fibers, kept from block to block: making one costs two system calls, a block of a
// small problem less. Each lies behind a page that may not be touched. Thread safe.
#pragma once

#include <boost/context/protected_fixedsize_stack.hpp>
#include <mutex>
#include <vector>

namespace fulmen::emulator {

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

}  // namespace fulmen::emulator
