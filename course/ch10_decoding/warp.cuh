// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Numbers of the 32 lanes of a warp together. Included by decode.cu alone.
#pragma once

#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

using namespace fulmen;

float warp_max(float x) {
  for (u32 mask = 16; mask > 0; mask /= 2) x = ptx::max(x, ptx::shuffle_xor(x, mask));
  return x;
}
float warp_sum(float x) {
  for (u32 mask = 16; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
  return x;
}
// The number that lane `from` has.
float of_lane(float x, u32 from) {
  return __builtin_bit_cast(float, ptx::shuffle(__builtin_bit_cast(i32, x), from));
}
