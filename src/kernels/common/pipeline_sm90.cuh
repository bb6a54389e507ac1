// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rings of buffers between one producer and several consumers. Buffer i has two mbarriers: `full`
// (producer -> consumers: the data has landed) and `empty` (consumers -> producer: it was read).
// Both sides walk the ring in the same order, each with a Cursor of its own; the parity flips with
// every round. Called by the sm90 kernels; every address is in shared memory.
#pragma once

#include "kernels/ptx/mbarrier.cuh"

namespace fulmen {

template <i32 kBuffers>
struct Cursor {
  u32 buffer = 0;
  u32 parity = 0;

  // count <= kBuffers
  constexpr void advance(u32 count = 1) {
    buffer += count;
    if (buffer >= kBuffers) {
      buffer -= kBuffers;
      parity ^= 1;
    }
  }
};

template <i32 kBuffers>
struct Ring {
  u32 data;  // buffer i begins at data + i * buffer_bytes
  u32 buffer_bytes;
  u32 barriers;  // full 0, empty 0, full 1, empty 1, ...

  static constexpr u32 kBarrierBytes = 16 * kBuffers;

  constexpr u32 address(Cursor<kBuffers> at) const { return data + at.buffer * buffer_bytes; }
  constexpr u32 full(Cursor<kBuffers> at) const { return barriers + 16 * at.buffer; }
  constexpr u32 empty(Cursor<kBuffers> at) const { return barriers + 16 * at.buffer + 8; }

  // By one thread, before any other use; `readers` arrivals free a buffer.
  void init(u32 readers) const {
    for (i32 i = 0; i < kBuffers; ++i) {
      ptx::mbarrier_init(barriers + 16 * i, 1);
      ptx::mbarrier_init(barriers + 16 * i + 8, readers);
    }
  }

  // Producer: waits until the buffer is free, then announces the bytes to come, to `full` or
  // another barrier. A fresh ring is free.
  void acquire(Cursor<kBuffers> at) const { acquire(at, full(at)); }
  void acquire(Cursor<kBuffers> at, u32 barrier) const {
    ptx::mbarrier_wait(empty(at), at.parity ^ 1);
    ptx::mbarrier_arrive_expect(barrier, buffer_bytes);
  }

  // Consumer: waits for the data; says that it was read.
  void wait(Cursor<kBuffers> at) const { ptx::mbarrier_wait(full(at), at.parity); }
  void release(Cursor<kBuffers> at) const { ptx::mbarrier_arrive(empty(at)); }
};

}  // namespace fulmen
