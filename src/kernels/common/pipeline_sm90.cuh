// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rings of buffers in shared memory between one producer and several consumers. Buffer i has two
// mbarriers: `full` (producer -> consumers: the data has landed) and `empty` (consumers ->
// producer: it was read). Both sides go round the pipeline in the same order, each with a
// PipelineState of its own; the phase flips with every round.
#pragma once

#include "kernels/ptx/tma.cuh"

namespace fulmen {

template <i32 kBuffers>
struct PipelineState {
  u32 index = 0;
  u32 phase = 0;

  // count <= kBuffers
  constexpr void advance(u32 count = 1) {
    index += count;
    if (index >= kBuffers) {
      index -= kBuffers;
      phase ^= 1;
    }
  }
};

template <i32 kBuffers>
struct Pipeline {
  u32 data;  // buffer i begins at data + i * buffer_bytes
  u32 buffer_bytes;
  u32 barriers;  // full 0, empty 0, full 1, empty 1, ...

  static constexpr u32 kBarrierBytes = 16 * kBuffers;

  constexpr u32 address(PipelineState<kBuffers> at) const { return data + at.index * buffer_bytes; }
  constexpr u32 full(PipelineState<kBuffers> at) const { return barriers + 16 * at.index; }
  constexpr u32 empty(PipelineState<kBuffers> at) const { return barriers + 16 * at.index + 8; }

  // By one thread, before any other use; `readers` arrivals free a buffer.
  void init(u32 readers) const {
    for (i32 i = 0; i < kBuffers; ++i) {
      ptx::mbarrier_init(barriers + 16 * i, 1);
      ptx::mbarrier_init(barriers + 16 * i + 8, readers);
    }
  }

  // Producer: waits until the buffer is free, then announces the bytes to come, to `full` or
  // another barrier. A fresh pipeline is free.
  void producer_acquire(PipelineState<kBuffers> at) const { producer_acquire(at, full(at)); }
  void producer_acquire(PipelineState<kBuffers> at, u32 barrier) const {
    ptx::mbarrier_wait(empty(at), at.phase ^ 1);
    ptx::mbarrier_arrive_expect(barrier, buffer_bytes);
  }

  // Consumer: waits for the data; says that it was read.
  void consumer_wait(PipelineState<kBuffers> at) const { ptx::mbarrier_wait(full(at), at.phase); }
  void consumer_release(PipelineState<kBuffers> at) const { ptx::mbarrier_arrive(empty(at)); }
};

}  // namespace fulmen
