// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The matrix product of a warp on the host: what src/kernels/ptx/mma.cuh declares. Sums are rounded
// as the hardware does it: emulator/tensor_core.h.
#pragma once

#include "emulator/accesses.h"
#include "emulator/warp.h"
#include "kernels/ptx/memory.cuh"

namespace fulmen::ptx {

inline U32x4 ldmatrix_x4_trans(u32 row_address, Site site = Where::current()) {
  const std::array<u32, 4> words = emulator::load_transposed_matrices(row_address, site);
  return {{words[0], words[1], words[2], words[3]}};
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

inline void mma_m16n8k8_tf32(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::multiply_fragments(exchange_operands(a, b0, b1, 2 * 16 * 8 * 8), DType::kFloat32, d);
}

inline u32 round_to_tf32(u32 x) {
  emulator::count(&emulator::Counters::conversions);
  const bool is_nan = (x & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0x7fffffffu : (x + 0x1000u) & 0xffffe000u;
}

inline u32 round_number_to_tf32(u32 x) { return round_to_tf32(x); }

}  // namespace fulmen::ptx
