// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Warps that share their rows (split N), where a row of O is too wide for the registers of one:
// each computes its columns of S and P of a block of keys and its dims of O, every warps_n-th 16.
// They exchange P, maxima and sums through shared memory. So a fragment of K or V is read for 32
// rows, not for 16, and no product is computed twice. A group of one warp exchanges nothing. Called
// by forward_sm80; all warps of a group together.
#pragma once

#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

template <ForwardSm80Config kConfig>
struct RowGroupSm80 {
  static constexpr i32 kTiles = kConfig.row_tiles;
  static constexpr i32 kWarpsN = kConfig.warps_n;
  static constexpr bool kIsOneWarp = kWarpsN == 1;
  using PTile = SwizzledTile<kConfig.kv_rows, kConfig.swizzle>;

  u32 shared;  // P of the block; a number for each row of each warp; a word for each warp

  // Neighbours in number work on different schedulers.
  static u32 index() { return warp_index() / kWarpsN; }
  static u32 warp_n() { return warp_index() % kWarpsN; }
  static u32 first_row() { return index() * kConfig.warp_rows(); }  // in the block

  // Where fragment n of the warp's O lies, in vectors of 8 dims.
  static i32 vector(i32 n) { return 2 * (kWarpsN * (n / 2) + static_cast<i32>(warp_n())) + n % 2; }

  void sync() const {
    if constexpr (!kIsOneWarp) ptx::bar_sync(1 + index(), 32 * kWarpsN);
  }

  // P, row by row; written by put().
  PTile p_tile() const { return {shared}; }

  // Stores the warp's columns of P for the group.
  template <i32 kWords>
  void store_p(const u32 (&P)[kTiles][kWords]) const {
    const u32 lane = lane_index();
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 w = 0; w < kWords; ++w) {
        const u32 row = first_row() + 16 * t + 8 * (w % 2) + lane / 4;
        const u32 vector = warp_n() * kConfig.warp_columns() / 8 + w / 2;
        ptx::store_shared(p_tile().address(row, vector) + lane % 4 * 4, P[t][w]);
      }
    }
    sync();  // warps of the group -> P
  }

  // A number of each of this thread's rows, equal in its quad, reduced over the group.
  template <class Join>
  void all_reduce(float (&x)[kTiles][2], const Join& join) const {
    if constexpr (kIsOneWarp) return;
    sync();  // all have read what was exchanged before
#pragma unroll
    for (i32 at = 0; at < 2 * kTiles; ++at) {
      if (lane_index() % 4 != 0) break;
      ptx::store_shared(number(warp_n(), at), __builtin_bit_cast(u32, x[at / 2][at % 2]));
    }
    sync();  // warps of the group -> numbers
#pragma unroll
    for (i32 at = 0; at < 2 * kTiles; ++at) {
      float joined = load(0, at);
#pragma unroll
      for (u32 other = 1; other < kWarpsN; ++other) joined = join(joined, load(other, at));
      x[at / 2][at % 2] = joined;
    }
  }

  // Whether some warp says so; `mine` is the same for all lanes.
  bool any(bool own) const {
    if constexpr (kIsOneWarp) return own;
    if (lane_index() == 0) ptx::store_shared(word(warp_n()), own);
    sync();  // warps of the group -> words
    u32 any_set = 0;
#pragma unroll
    for (u32 other = 0; other < kWarpsN; ++other) any_set |= ptx::load_shared(word(other));
    return any_set != 0;
  }

 private:
  u32 number(u32 warp, i32 at) const {
    const u32 row = (index() * kWarpsN + warp) * kConfig.warp_rows() + static_cast<u32>(8 * at);
    return shared + kConfig.p_bytes() + (row + lane_index() / 4) * 4;
  }
  float load(u32 warp, i32 at) const {
    return __builtin_bit_cast(float, ptx::load_shared(number(warp, at)));
  }
  u32 word(u32 warp) const {
    return shared + kConfig.p_bytes() + kConfig.warps * kConfig.warp_rows() * 4 +
           (index() * kWarpsN + warp) * 4;
  }
};

}  // namespace fulmen
