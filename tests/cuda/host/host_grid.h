// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Running a kernel on the host: blocks one after the other, the threads of a block as coroutines on
// stacks of their own that take turns at every meeting point. Threads of a block must meet equally
// often, which the general kernels do. Shared memory starts as NaN bytes and out of it nothing
// leaks from block to block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace fulmen::host {

struct Here {
  unsigned thread = 0;
  unsigned block = 0;
  unsigned num_blocks = 1;
};
Here& here();

// All threads of the block get here before any goes on.
void meet();

// The value that thread `from` brings to the same exchange.
void exchange_bytes(void* value, std::size_t bytes, unsigned from);
template <class T>
T exchange(T value, unsigned from) {
  exchange_bytes(&value, sizeof(T), from);
  return value;
}

// The block's dynamic shared memory, on a multiple of 1,024.
unsigned char* shared_memory();

void run_grid(std::int64_t num_blocks, int num_threads, std::size_t shared_bytes,
              const std::function<void()>& kernel);

}  // namespace fulmen::host
