// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Dynamic shared memory as an ordinary pointer, for kernels whose tiles are plain C++ arrays. The
// compiler turns accesses through it into ld.shared and st.shared.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

// The first byte of the block's dynamic shared memory, on a multiple of 1,024.
inline u8* shared_bytes() {
  extern __shared__ __align__(1024) u8 fulmen_shared[];
  return fulmen_shared;
}

}  // namespace fulmen::ptx
