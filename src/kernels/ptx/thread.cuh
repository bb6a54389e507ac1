// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where a thread stands and how it meets others: special registers, shuffles, votes, named
// barriers, the hand-over of registers. One instruction, one function (PTX ISA 9.0, sections 9.7.9,
// 9.7.13, 9.7.19.5, 10). The emulator has its own version of this file.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

// %tid.x, %ctaid.x, %nctaid.x
inline u32 thread_index() { return threadIdx.x; }
inline u32 block_index() { return blockIdx.x; }
inline u32 num_blocks() { return gridDim.x; }

// shfl.sync.bfly: the value of lane `lane ^ mask`.
inline float shuffle_xor(float x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }
inline double shuffle_xor(double x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }
inline u32 shuffle_xor(u32 x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }

// shfl.sync.idx: the value of lane `lane`; of lane 0.
inline i32 shuffle(i32 x, u32 lane) { return __shfl_sync(~0u, x, lane); }
inline i32 broadcast(i32 x) { return __shfl_sync(~0u, x, 0); }

// vote.sync.any
inline bool any(bool predicate) { return __any_sync(~0u, predicate); }

// vote.sync.ballot: bit l is the predicate of lane l. popc.
inline u32 ballot(bool predicate) { return __ballot_sync(~0u, predicate); }
inline i32 count_ones(u32 x) { return __popc(x); }
inline i32 leading_zeros(u32 x) { return __clz(i32(x)); }

// No instruction: x is computed here and not later, where its inputs would have to be kept.
inline void compute_here(u64& x) { asm volatile("" : "+l"(x)); }
inline void compute_here(u32& x) { asm volatile("" : "+r"(x)); }

// bar.warp.sync: orders the shared-memory accesses of a warp.
inline void warp_sync() { __syncwarp(); }

// barrier.sync 0: all threads of the block.
inline void block_sync() { __syncthreads(); }

// bar.sync: waits until `threads` threads have come to barrier `id`, itself included.
inline void bar_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: counts towards barrier `id` without waiting.
inline void bar_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// setmaxnreg.inc: the warpgroup waits until it may use kRegisters registers a thread.
template <i32 kRegisters>
inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// setmaxnreg.dec: the warpgroup gives back all registers beyond kRegisters a thread.
template <i32 kRegisters>
inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fulmen::ptx
