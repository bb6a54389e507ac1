// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rings of buffers in shared memory between one producer and several consumers. Buffer i has two
// mbarriers: `full` (producer -> consumers: the data has landed) and `empty` (consumers ->
// producer: it was read). Both sides go round the pipeline in the same order, each with a
// PipelineState of its own; the phase flips with every round. And the named barriers of the
// consumers.
#pragma once

#include "kernels/ptx/thread.cuh"
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
    producer_wait(at);
    ptx::mbarrier_arrive_expect(barrier, buffer_bytes);
  }
  void producer_wait(PipelineState<kBuffers> at) const {
    ptx::mbarrier_wait(empty(at), at.phase ^ 1);
  }

  // The same of a buffer that consumers read by ldmatrix: what the copy engine writes comes after
  // that only behind a proxy fence.
  void producer_wait_loaded(PipelineState<kBuffers> at) const {
    producer_wait(at);
    ptx::fence_proxy_async();
  }
  void producer_acquire_loaded(PipelineState<kBuffers> at) const {
    producer_wait_loaded(at);
    ptx::mbarrier_arrive_expect(full(at), buffer_bytes);
  }

  // Consumer: waits for the data; says that it was read.
  void consumer_wait(PipelineState<kBuffers> at) const { ptx::mbarrier_wait(full(at), at.phase); }
  void consumer_release(PipelineState<kBuffers> at) const { ptx::mbarrier_arrive(empty(at)); }
};

// A thread of one of the consumer warpgroups of a thread block.
template <i32 kWarpgroups, bool kMayPingPong>
struct ConsumerThread {
  static_assert(kWarpgroups <= 3);
  static constexpr bool kPingPong = kMayPingPong && kWarpgroups > 1;
  static constexpr u32 kPingPongBarrier = 1;   // and on, one for each warpgroup
  static constexpr u32 kWarpgroupBarrier = 4;  // likewise
  static constexpr u32 kConsumersBarrier = 7;

  u32 warpgroup;
  u32 thread;  // 0 .. 127

  // Its first row of a 64-row fragment, the second is 8 further; and its first column.
  i32 first_row() const { return i32(thread / 32 * 16 + thread % 32 / 4); }
  i32 first_column() const { return i32(thread % 4 * 2); }

  // Ping-pong: warpgroup w issues its products after warpgroup w - 1, so that the exponentials of
  // one run under the products of another.
  void ping_pong_wait() const {
    if constexpr (kPingPong) ptx::bar_sync(kPingPongBarrier + warpgroup, 256);
  }
  void ping_pong_arrive() const {
    const u32 next = warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1;
    if constexpr (kPingPong) ptx::bar_arrive(kPingPongBarrier + next, 256);
  }

  // All warps have come here: of the warpgroup, which a wgmma synchronises as well; of all.
  void sync_warpgroup() const { ptx::bar_sync(kWarpgroupBarrier + warpgroup, 128); }
  void sync_consumers() const { ptx::bar_sync(kConsumersBarrier, 128 * kWarpgroups); }

  // A block of keys that only other warpgroups of the thread block see.
  template <i32 kBuffers>
  void skip_block(Pipeline<kBuffers> k, PipelineState<kBuffers> k_at, Pipeline<kBuffers> v,
                  PipelineState<kBuffers> v_at) const {
    k.consumer_wait(k_at);
    ping_pong_wait();
    ping_pong_arrive();  // before V: with one stage it comes only when the others have read K
    sync_warpgroup();
    if (thread == 0) k.consumer_release(k_at);
    v.consumer_wait(v_at);
    sync_warpgroup();
    if (thread == 0) v.consumer_release(v_at);
  }
};

}  // namespace fulmen
