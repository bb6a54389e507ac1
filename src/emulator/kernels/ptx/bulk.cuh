// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Bulk copies on the host: what src/kernels/ptx/bulk.cuh declares. There are no caches to prefetch
// into.
#pragma once

#include <cstring>

#include "emulator/barriers.h"
#include "emulator/shared_memory.h"
#include "kernels/forward_sm90/config.h"

namespace fulmen::ptx {

inline void bulk_load(u32 shared, const void* source, u32 bytes, u32 barrier,
                      Site site = Where::current()) {
  if (reinterpret_cast<u64>(source) % 16 != 0 || bytes % 16 != 0) {
    emulator::fail("cp.async.bulk from an address or of a size that is not a multiple of 16");
  }
  u8* const to = emulator::shared_at(shared, bytes, 16);
  const emulator::Engine engine =
      emulator::mbarrier_engine(barrier, emulator::mbarrier_count_copy(barrier));
  emulator::on_shared_by(engine, true, shared - emulator::kSharedBase, bytes,
                         emulator::Kind::kWrite, site);
  emulator::on_global(source, bytes, emulator::Kind::kRead, site);
  emulator::ask_for_copy([=] {
    std::memcpy(to, source, bytes);
    emulator::mbarrier_complete_bytes(barrier, bytes);
  });
}

inline void tma_prefetch(const TensorMap&, i32, i32, i32, i32) {}

}  // namespace fulmen::ptx
