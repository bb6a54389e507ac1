// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// S = Q K^T or dP = dO V^T of wide heads by the warps of a team together: each multiplies a slice
// of the dims for all of the block and hands the sums to those whose parts they are, through shared
// memory. So a fragment is read once for two row tiles and two column tiles, not once for each
// part, and eight sums run side by side instead of two. Called by backward_weights_sm80.
#pragma once

#include "kernels/backward_sm80/sight.cuh"

namespace fulmen {

template <Sm80BackwardConfig kConfig>
struct BackwardSlicesSm80 {
  using Tiles = BackwardTilesSm80<kConfig>;
  using Products = typename Tiles::Products;
  using Scores = typename BackwardStepSm80<kConfig>::Scores;  // a part, 16 x 16
  static constexpr i32 kMembers = kConfig.team_warps();
  static constexpr i32 kAcross = kConfig.columns / 16;  // parts side by side
  static constexpr u32 kSlotBytes = 32 * 32;            // of a part: 8 floats a lane
  using Sums = float[kConfig.rows / 16][kConfig.columns / 2];

  Tiles tiles;

  // S = this warp's part of queries keys^T. All warps of the team together.
  template <i32 kDims, class Tile>
  void multiply(Scores& S, const Tile& queries, const Tile& keys) const {
    Sums sums;
    multiply_slice<kDims>(sums, queries, keys);
    hand_over(S[0], sums);
    tiles.team_sync();  // the sums of the team's slices are there
    gather(S[0]);
  }

 private:
  template <i32 kDims, class Tile>
  void multiply_slice(Sums& sums, const Tile& queries, const Tile& keys) const {
    constexpr i32 kSliceDims = kDims / kMembers;
    using Way = PartRow<kDims, kConfig.swizzle, kSliceDims / 16>;
    const u32 first = tiles.member() * (kSliceDims / 16);
    const Way left(left_rows(queries, 0), first), right(right_rows(keys), first);
    Products::template set_scores<kSliceDims>(
        sums, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(left.at(k, 16 * t)); },
        [&](i32 k, i32 n) { return ptx::ldmatrix_x4(right.at(k, 16 * n)); });
  }

  // Where the lane's sums for a part lie: slot `slot` of those of all other members.
  u32 place(u32 part, u32 slot) const {
    return tiles.slices() + (part * (kMembers - 1) + slot) * kSlotBytes + lane_index() * 16;
  }

  void hand_over(float (&S)[8], const Sums& sums) const {
    const u32 own = tiles.member();
#pragma unroll
    for (u32 part = 0; part < kMembers; ++part) {
      const float* const x = &sums[part / kAcross][part % kAcross * 8];
      if (part == own) {
#pragma unroll
        for (i32 i = 0; i < 8; ++i) S[i] = x[i];
      } else {
        const u32 to = place(part, own < part ? own : own - 1);
        store(to, x);
        store(to + kSlotBytes / 2, x + 4);
      }
    }
  }
  void gather(float (&S)[8]) const {
#pragma unroll
    for (u32 slot = 0; slot < kMembers - 1; ++slot) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const ptx::U32x4 x =
            ptx::load_shared_x4(place(tiles.member(), slot) + half * (kSlotBytes / 2));
#pragma unroll
        for (u32 e = 0; e < 4; ++e) S[4 * half + e] += __builtin_bit_cast(float, x.word[e]);
      }
    }
  }

  static void store(u32 to, const float* x) {
    ptx::U32x4 words;
#pragma unroll
    for (i32 e = 0; e < 4; ++e) words.word[e] = __builtin_bit_cast(u32, x[e]);
    ptx::store_shared_x4(to, words);
  }
};

}  // namespace fulmen
