// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles in plain C++, with the arithmetic of AMX-BF16: numbers below the normal ones are 0,
// products of even and of odd elements are summed apart. The text of cpu/isa/tile_products.h is
// compiled over them for two widths of vectors, so that it is tested on machines without such
// instructions.
#pragma once

#include "cpu/kernels.h"

namespace fulmen::cpu {

// What a machine with AVX2, or with AVX-512, can run; panels of 16 and of 32 lanes.
extern const PairKernels kEmulatedTilesAvx2;
extern const PairKernels kEmulatedTilesAvx512;
extern const PairKernels kEmulatedSplitAvx2;
extern const PairKernels kEmulatedSplitAvx512;

#if defined(__AVX2__)  // in the files that define them

struct EmulatedTiles {
  static constexpr i64 kRows = 16, kLanesOfRow = 16;
  struct Tile {
    u32 lanes[kRows][kLanesOfRow];
  };
  static inline thread_local Tile tiles[8];
  static inline thread_local bool is_configured = false;

  // Tiles are not to be used before, and are 0 after.
  static Tile& at(int number) {
    if (!is_configured) __builtin_trap();
    return tiles[number];
  }
  static void configure() {
    is_configured = true;
    for (Tile& tile : tiles) tile = {};
  }
  static void release() { is_configured = false; }

  template <int kNumber>
  static void zero() {
    at(kNumber) = {};
  }
  template <int kNumber>
  static void load(const void* rows, i64 stride_bytes) {
    for (i64 row = 0; row < kRows; ++row) {
      __builtin_memcpy(at(kNumber).lanes[row], static_cast<const char*>(rows) + row * stride_bytes,
                       64);
    }
  }
  template <int kNumber>
  static void store(void* rows, i64 stride_bytes) {
    for (i64 row = 0; row < kRows; ++row) {
      __builtin_memcpy(static_cast<char*>(rows) + row * stride_bytes, at(kNumber).lanes[row], 64);
    }
  }

  static float normal(u32 bits) {
    return (bits & 0x7f800000u) == 0 ? 0.0f : __builtin_bit_cast(float, bits);
  }

  template <int kC, int kA, int kB>
  static void multiply_add() {
    for (i64 i = 0; i < kRows; ++i) {
      for (i64 n = 0; n < kLanesOfRow; ++n) {
        float even = 0, odd = 0;
        for (i64 k = 0; k < kLanesOfRow; ++k) {
          const u32 a = at(kA).lanes[i][k], b = at(kB).lanes[k][n];
          even += normal(a << 16) * normal(b << 16);
          odd += normal(a & 0xffff0000u) * normal(b & 0xffff0000u);
        }
        const float sum = __builtin_bit_cast(float, at(kC).lanes[i][n]) + (even + odd);
        at(kC).lanes[i][n] = __builtin_bit_cast(u32, sum);
      }
    }
  }
};

#endif

}  // namespace fulmen::cpu
