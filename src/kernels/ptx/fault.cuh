// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Telling the host that something is wrong: bits that stay set in a word of pinned memory.
#pragma once

#include "kernels/base.cuh"

namespace fulmen::ptx {

// red.relaxed.sys.global.or
inline void set_bits(u32* word, u32 bits) {
  asm volatile("red.relaxed.sys.global.or.b32 [%0], %1;" ::"l"(word), "r"(bits) : "memory");
}

}  // namespace fulmen::ptx
