// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Matrix products on the host: what src/kernels/ptx/mma.cuh declares. Sums of a warp's are rounded
// as the hardware does it: emulator/tensor_core.h. N of a warpgroup's follows from the accumulator,
// and must be one that the instruction table there has.
#pragma once

#include "emulator/accesses.h"
#include "emulator/warp.h"
#include "emulator/wgmma.h"
#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

inline U32x4 ldmatrix_x4_trans(u32 row_address, Site site = Where::current()) {
  const std::array<u32, 4> words = emulator::load_transposed_matrices(row_address, site);
  return {{words[0], words[1], words[2], words[3]}};
}

inline u32 transpose_matrix(u32 x) {
  const auto& words = emulator::exchange("movmatrix", x);
  const u32 row = emulator::self().lane() / 4, column = emulator::self().lane() % 4 * 2;
  const auto number = [&](u32 i) {
    return static_cast<u32>(words[4 * (column + i) + row / 2]) >> row % 2 * 16 & 0xffff;
  };
  return number(1) << 16 | number(0);
}

// Those of all lanes.
inline const auto& exchange_operands(const u32 (&a)[4], u32 b0, u32 b1, i64 flops) {
  const u32 lane = emulator::self().lane();
  emulator::Warp& warp = emulator::block().warps[emulator::self().warp()];
  auto& operands = warp.operands[warp.meeting.round % 2];
  operands[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulator::exchange("mma", 0);
  if (lane == 0) {
    emulator::count(&emulator::Counters::products);
    emulator::count(&emulator::Counters::product_flops, flops);
  }
  return operands;
}

template <DType kDType>
inline void mma_m16n8k16(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::multiply_fragments(exchange_operands(a, b0, b1, 2 * 16 * 8 * 16), kDType, d);
}

inline void mma_m16n8k32_e4m3(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::multiply_fragments(exchange_operands(a, b0, b1, 2 * 16 * 8 * 32), DType::kFloat8E4M3,
                               d);
}

inline void mma_m16n8k8_tf32(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::multiply_fragments(exchange_operands(a, b0, b1, 2 * 16 * 8 * 8), DType::kFloat32, d);
}

inline u32 round_to_tf32(u32 x) {
  emulator::count(&emulator::Counters::conversions);
  const bool is_nan = (x & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0x7fffffffu : (x + 0x1000u) & 0xffffe000u;
}

inline u32 round_number_to_tf32(u32 x) { return round_to_tf32(x); }

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
    kFloats == 16 || kFloats == 24 || kFloats == 32 || kFloats == 40 || kFloats == 48 ||
    kFloats == 56 || kFloats == 64 || kFloats == 80 || kFloats == 88 || kFloats == 96 ||
    kFloats == 128;

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
