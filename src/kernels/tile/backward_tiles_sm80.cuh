// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What backward_sm80 keeps in shared memory, and the products of warps with it. K and V stay; Q and
// dO come in stages; P and dS go from the warps that compute them to those that take them up.
#pragma once

#include "kernels/ptx/memory.cuh"
#include "kernels/sm80_backward_config.h"
#include "kernels/tile/block_products.cuh"

namespace fulmen {

template <Sm80BackwardConfig kConfig>
struct BackwardTilesSm80 {
  using QkTile = SwizzledTile<kConfig.d_qk, kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.d_v, kConfig.swizzle>;
  using PairTile = SwizzledTile<kConfig.columns, kConfig.swizzle>;  // rows are queries
  static_assert(kConfig.valid());

  u32 shared = ptx::dynamic_shared();
  u32 warp = warp_index();

  QkTile k_tile() const { return {shared}; }
  VTile v_tile() const { return {shared + kConfig.k_bytes()}; }
  u32 stage_at(i32 stage) const {
    return shared + kConfig.k_bytes() + kConfig.v_bytes() + stage * kConfig.stage_bytes();
  }
  QkTile q_tile(i32 stage) const { return {stage_at(stage)}; }
  VTile dout_tile(i32 stage) const { return {stage_at(stage) + kConfig.q_bytes()}; }
  PairTile p_tile() const { return {stage_at(kConfig.stages)}; }
  PairTile ds_tile() const { return {stage_at(kConfig.stages) + kConfig.pair_bytes()}; }
  u32 rows_at() const { return ds_tile().base + kConfig.pair_bytes(); }
  u32 terms_at() const {
    return shared + kConfig.shared_bytes() - kConfig.term_bytes() +
           warp * 16 * kConfig.scores().term_stride() * 4;
  }
};

}  // namespace fulmen
