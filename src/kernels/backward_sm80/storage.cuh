// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What backward_sm80 keeps in shared memory, and the products of warps with it. K and V stay; Q and
// dO come in stages; P and dS go from the warps that compute them to those that take them up.
#pragma once

#include "kernels/backward_sm80/scheduler.cuh"
#include "kernels/common/warp_mma_float32_sm80.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

// It may be saved in shared memory during the main loop, so that registers are left for fragments.
struct KeyBlockWordsSm80 {
  ptx::U32x4 words[4];
};
static_assert(sizeof(KeyBlockWordsSm80) == sizeof(KeyBlockSm80));

inline void save_key_block(u32 shared, const KeyBlockSm80& keys) {
  if (ptx::thread_index() != 0) return;
  const auto saved = __builtin_bit_cast(KeyBlockWordsSm80, keys);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) ptx::store_shared_x4(shared + 16 * i, saved.words[i]);
}
// After a barrier.
inline KeyBlockSm80 load_key_block(u32 shared) {
  KeyBlockWordsSm80 saved;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) saved.words[i] = ptx::load_shared_x4(shared + 16 * i);
  return __builtin_bit_cast(KeyBlockSm80, saved);
}

template <BackwardSm80Config kConfig>
struct BackwardStorageSm80 {
  using QkTile = SwizzledTile<kConfig.words(kConfig.d_qk), kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.words(kConfig.d_v), kConfig.swizzle>;
  using PairTile =
      SwizzledTile<kConfig.words(kConfig.kv_rows), kConfig.swizzle>;  // rows are queries
  using Products = BlockProducts<kConfig.dtype, kConfig.precision, kConfig.swizzle>;
  static_assert(kConfig.why_invalid()[0] == 0);

  u32 shared = ptx::dynamic_shared();
  u32 warp = warp_index();

  QkTile k_tile() const { return {shared}; }
  VTile v_tile() const { return {shared + kConfig.k_bytes()}; }
  u32 stage_at(i32 stage) const {
    return shared + kConfig.k_bytes() + kConfig.v_bytes() + stage * kConfig.stage_bytes();
  }
  QkTile q_tile(i32 stage) const { return {stage_at(stage)}; }
  VTile dout_tile(i32 stage) const { return {stage_at(stage) + kConfig.q_bytes()}; }
  u32 rows_at(i32 stage) const {
    return stage_at(stage) + kConfig.q_bytes() + kConfig.dout_bytes();
  }
  u32 columns_at(i32 stage) const { return rows_at(stage) + kConfig.q_rows * 16; }
  u32 row_ids_at(i32 stage) const { return columns_at(stage) + kConfig.q_rows * 8; }
  u32 pairs_at(i32 stage) const { return rows_at(stage) + kConfig.row_bytes(); }
  PairTile p_tile() const { return {stage_at(kConfig.stages)}; }
  PairTile ds_tile(i32 stage) const {
    return {stage_at(kConfig.stages) + (1 + stage) * kConfig.pair_bytes()};
  }
  u32 slices() const {
    return ds_tile(kConfig.pair_stages).base + (computes_p() ? 0 : kConfig.split_d_bytes());
  }
  // Instead of these, where keys come first.
  using KeysTile = SwizzledTile<kConfig.words(kConfig.q_rows), kConfig.swizzle>;  // rows are keys
  u32 p_fragments() const { return p_tile().base; }
  KeysTile ds_of_keys(i32 stage) const { return {ds_tile(stage).base}; }
  u32 key_block_at() const { return key_ids() - kConfig.key_block_bytes(); }
  u32 key_ids() const { return shared + kConfig.shared_bytes() - kConfig.ids_bytes(); }

  // The first warps compute P, the others dS, where roles are split. Warps of a group are
  // neighbours, so that they share no scheduler.
  bool computes_p() const { return !kConfig.split_roles || warp < kConfig.role_warps(); }
  u32 group() const { return warp % kConfig.role_warps() / kConfig.group_warps(); }
  u32 warp_in_group() const { return warp % kConfig.group_warps(); }

  // Barrier of the warps of a group with the same role.
  void group_sync() const {
    if constexpr (kConfig.group_warps() == 1) {
      ptx::warp_sync();
    } else if constexpr (kConfig.group_warps() == kConfig.warps) {
      ptx::block_sync();
    } else {
      ptx::bar_sync(1 + group() + (computes_p() ? 0 : kConfig.num_groups()),
                    32 * kConfig.group_warps());
    }
  }
  // Part `number` of a warp's P, on its way to the warp of the other role that makes dS of it.
  void arrive_p_ready(i32 number) const { ptx::bar_arrive(store_p_fragments(number), 64); }
  void wait_p_ready(i32 number) const { ptx::bar_sync(store_p_fragments(number), 64); }
  u32 store_p_fragments(i32 number) const {
    return 1 + kConfig.group_barriers() + warp % kConfig.role_warps() +
           static_cast<u32>(number) * kConfig.role_warps();
  }
};

}  // namespace fulmen
