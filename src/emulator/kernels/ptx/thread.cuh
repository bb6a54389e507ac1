// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where a fiber stands and how it meets others: what src/kernels/ptx/thread.cuh declares.
#pragma once

#include <bit>

#include "emulator/barriers.h"
#include "emulator/warp.h"

namespace fulmen::ptx {

inline u32 thread_index() { return emulator::self().index; }
inline u32 block_index() { return emulator::block().index; }
inline u32 num_blocks() { return emulator::block().num_blocks; }

inline u32 shuffle_xor(u32 x, u32 mask) {
  return static_cast<u32>(
      emulator::exchange("shfl.bfly", x)[(emulator::self().lane() ^ mask) % 32]);
}
inline double shuffle_xor(double x, u32 mask) {
  return __builtin_bit_cast(
      double, u64{emulator::exchange(
                  "shfl.bfly", __builtin_bit_cast(u64, x))[(emulator::self().lane() ^ mask) % 32]});
}
inline float shuffle_xor(float x, u32 mask) {
  return __builtin_bit_cast(float, shuffle_xor(__builtin_bit_cast(u32, x), mask));
}
inline i32 shuffle(i32 x, u32 lane) {
  return static_cast<i32>(emulator::exchange("shfl.idx", static_cast<u32>(x))[lane % 32]);
}
inline i32 broadcast(i32 x) { return shuffle(x, 0); }

inline bool any(bool predicate) {
  for (const u64 x : emulator::exchange("vote.any", predicate ? 1 : 0)) {
    if (x != 0) return true;
  }
  return false;
}

inline u32 ballot(bool predicate) {
  u32 bits = 0, bit = 1;
  for (const u64 x : emulator::exchange("vote.ballot", predicate ? 1 : 0)) {
    bits |= x != 0 ? bit : 0;
    bit <<= 1;
  }
  return bits;
}
inline i32 count_ones(u32 x) { return std::popcount(x); }
inline i32 leading_zeros(u32 x) { return std::countl_zero(x); }

inline void compute_here(u64&) {}
inline void compute_here(u32&) {}

inline void warp_sync() { emulator::exchange("bar.warp.sync", 0, true); }
inline void bar_sync(u32 id, u32 threads) { emulator::named_barrier_sync(id, threads); }
inline void bar_arrive(u32 id, u32 threads) { emulator::named_barrier_arrive(id, threads); }
inline void block_sync() { bar_sync(0, static_cast<u32>(emulator::block().threads.size())); }

template <i32 kRegisters>
inline void setmaxnreg_inc() {
  static_assert(24 <= kRegisters && kRegisters <= 256 && kRegisters % 8 == 0);
  emulator::increase_registers(kRegisters);
}
template <i32 kRegisters>
inline void setmaxnreg_dec() {
  static_assert(24 <= kRegisters && kRegisters <= 256 && kRegisters % 8 == 0);
  emulator::decrease_registers(kRegisters);
}

}  // namespace fulmen::ptx
