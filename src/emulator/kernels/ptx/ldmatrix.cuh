// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What src/kernels/ptx/ldmatrix.cuh declares, on the host.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

inline U32x4 ldmatrix_x4_trans(u32 row_address) {
  emulator::shared_at(row_address, 16, 16);
  const std::array<u64, 32> rows = emulator::exchange("ldmatrix.trans", row_address);
  const u32 lane = emulator::self().lane();
  U32x4 x{};
  for (u32 i = 0; i < 4; ++i) {
    for (u32 half = 0; half < 2; ++half) {
      const u32 address = static_cast<u32>(rows[i * 8 + lane % 4 * 2 + half]) + lane / 4 * 2;
      x.word[i] |= static_cast<u32>(emulator::load_shared<u16>(address)) << (16 * half);
    }
  }
  emulator::exchange("ldmatrix.trans", 0);  // nobody writes before all have read
  return x;
}

}  // namespace fulmen::ptx
