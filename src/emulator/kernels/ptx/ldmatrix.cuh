// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What src/kernels/ptx/ldmatrix.cuh declares, on the host.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

inline U32x4 ldmatrix_x4_trans(u32 row_address, Site site = Where::current()) {
  const std::array<u32, 4> words = emulator::load_transposed_matrices(row_address, site);
  return {{words[0], words[1], words[2], words[3]}};
}

}  // namespace fulmen::ptx
