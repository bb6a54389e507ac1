// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The host's version of src/kernels/ptx/thread.cuh, as far as naive and simt kernels need it: where
// a thread stands, the barrier of the block, shuffles. host_grid.h runs the threads.
#pragma once

#include "host_grid.h"
#include "kernels/base.cuh"

namespace fulmen::ptx {

inline u32 thread_index() { return host::here().thread; }
inline u32 block_index() { return host::here().block; }
inline u32 num_blocks() { return host::here().num_blocks; }

inline void block_sync() { host::meet(); }
inline void warp_sync() { host::meet(); }

template <class T>
T shuffle_xor(T x, u32 mask) {
  return host::exchange(x, host::here().thread ^ mask);
}

}  // namespace fulmen::ptx
