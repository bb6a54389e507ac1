// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The tensor copy engine on the host: what src/kernels/ptx/tma.cuh declares. Advice for caches is
// ignored.
#pragma once

#include "emulator/order.h"
#include "emulator/tensor_copies.h"

namespace fulmen::ptx {

inline void prefetch_tensormap(const TensorMap&) {}

inline void tma_load(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row, i32 head,
                     i32 batch, Site site = Where::current()) {
  emulator::tensor_load(shared, map, barrier, {dim, row, head, batch}, site);
}

inline constexpr u64 kEvictFirst = 0;
inline constexpr u64 kEvictLast = 0;
inline void tma_load(u32 shared, const TensorMap& map, u32 barrier, i32 dim, i32 row, i32 head,
                     i32 batch, u64, Site site = Where::current()) {
  tma_load(shared, map, barrier, dim, row, head, batch, site);
}

inline void tma_store(const TensorMap& map, u32 shared, i32 dim, i32 row, i32 head, i32 batch,
                      Site site = Where::current()) {
  emulator::tensor_store(map, shared, {dim, row, head, batch}, site);
}
inline void tma_store_commit() { emulator::tensor_store_commit(); }
inline void tma_store_wait_read() { emulator::tensor_store_wait(); }  // a store reads as it writes
inline void tma_store_wait() { emulator::tensor_store_wait(); }
inline void fence_proxy_async() { emulator::fence_proxy(); }

}  // namespace fulmen::ptx
