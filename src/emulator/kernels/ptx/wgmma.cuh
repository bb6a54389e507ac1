// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Matrix products of a warpgroup on the host: what src/kernels/ptx/wgmma.cuh declares. N follows
// from the accumulator, and must be one that the instruction table there has.
#pragma once

#include "emulator/wgmma.h"

namespace fulmen::ptx {

inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit() { emulator::wgmma_commit(); }

template <i32 kPending>
inline void wgmma_wait() {
  emulator::wgmma_wait(kPending);
}

template <i32 kFloats>
inline void wgmma_fence_operand(float (&)[kFloats]) {}

constexpr u32 wgmma_descriptor(u32 shared, u32 leading_bytes) {
  return ((shared & 0x3ffffu) >> 4) | ((leading_bytes >> 4) << 16);
}
inline constexpr u32 kSwizzledRows = 0x40000040;
constexpr u32 plain_strides(u32 stride_bytes) { return stride_bytes >> 4; }

template <i32 kFloats>
inline constexpr bool kIsWgmmaAccumulator =
    kFloats == 24 || kFloats == 32 || kFloats == 40 || kFloats == 48 || kFloats == 56 ||
    kFloats == 64 || kFloats == 80 || kFloats == 88 || kFloats == 96 || kFloats == 128;

template <DType kDType, bool kTransposeB, u32 kUpper = kSwizzledRows, i32 kFloats>
inline void wgmma_ss(float (&d)[kFloats], u32 a, u32 b, bool accumulate,
                     Site site = Where::current()) {
  static_assert(kIsWgmmaAccumulator<kFloats>);
  emulator::wgmma_issue(
      {d, kFloats * 2, kDType, kTransposeB, false, accumulate, {a}, b, kUpper, site});
}

template <DType kDType, bool kTransposeB, u32 kUpper = kSwizzledRows, i32 kFloats>
inline void wgmma_rs(float (&d)[kFloats], u32 a0, u32 a1, u32 a2, u32 a3, u32 b, bool accumulate,
                     Site site = Where::current()) {
  static_assert(kIsWgmmaAccumulator<kFloats>);
  emulator::wgmma_issue(
      {d, kFloats * 2, kDType, kTransposeB, true, accumulate, {a0, a1, a2, a3}, b, kUpper, site});
}

}  // namespace fulmen::ptx
