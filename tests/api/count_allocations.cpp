// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// operator new of this test program, counting. Arrays and nothrow forms end up in it by default;
// the aligned form has a way of its own.
#include "api/count_allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<long> allocations{0};

void* counted(void* memory) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

size_t round_up(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

namespace fulmen::test {

long num_allocations() { return allocations.load(); }

}  // namespace fulmen::test

void* operator new(size_t bytes) { return counted(std::malloc(bytes ? bytes : 1)); }

void* operator new(size_t bytes, std::align_val_t alignment) {
  const size_t unit = static_cast<size_t>(alignment);
  return counted(std::aligned_alloc(unit, round_up(bytes ? bytes : 1, unit)));
}

// Visible, so that libstdc++ finds those with a size too: clang++ 16 exports the others alone.
#pragma GCC visibility push(default)
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
#pragma GCC visibility pop
