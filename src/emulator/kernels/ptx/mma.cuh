// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The matrix product of a warp on the host: what src/kernels/ptx/mma.cuh declares. Sums go from the
// first product to the last in float32, which the hardware does not promise.
#pragma once

#include <cmath>

#include "emulator/accesses.h"
#include "emulator/warp.h"

namespace fulmen::ptx {

template <DType kDType>
inline float mma_element(u32 word, u32 half) {
  const u16 bits = static_cast<u16>(word >> (16 * half));
  return kDType == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(f16{bits});
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
  const auto& operands = exchange_operands(a, b0, b1, 2 * 16 * 8 * 16);
  const u32 lane = emulator::self().lane();
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = lane / 4;
    const u32 column = 2 * (lane % 4) + i % 2;
    for (u32 k = 0; k < 16; ++k) {
      const u32 quad = k % 8 / 2;
      const u32 left = operands[4 * row + quad].a[i / 2 + k / 8 * 2];
      const u32 right = operands[4 * column + quad].b[k / 8];
      d[i] += mma_element<kDType>(left, k % 2) * mma_element<kDType>(right, k % 2);
    }
  }
}

inline float toward_zero(double x) {
  const float nearest = static_cast<float>(x);
  const bool is_beyond = std::fabs(static_cast<double>(nearest)) > std::fabs(x);
  return is_beyond && std::isfinite(x) ? std::nextafter(nearest, 0.f) : nearest;
}

// The hardware reads the upper 19 bits of an input and cuts a sum off towards zero.
inline double tf32_element(u32 word) { return __builtin_bit_cast(float, word & 0xffffe000u); }

inline void mma_m16n8k8_tf32(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  const auto& operands = exchange_operands(a, b0, b1, 2 * 16 * 8 * 8);
  const u32 lane = emulator::self().lane();
  for (u32 i = 0; i < 4; ++i) {
    double sum = d[i];
    for (u32 k = 0; k < 8; ++k) {
      const u32 left = operands[4 * (lane / 4) + k % 4].a[i / 2 + k / 4 * 2];
      const u32 right = operands[4 * (2 * (lane % 4) + i % 2) + k % 4].b[k / 4];
      sum += tf32_element(left) * tf32_element(right);
    }
    d[i] = toward_zero(sum);
  }
}

inline u32 round_to_tf32(u32 x) {
  emulator::count(&emulator::Counters::conversions);
  const bool is_nan = (x & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0x7fffffffu : (x + 0x1000u) & 0xffffe000u;
}

}  // namespace fulmen::ptx
