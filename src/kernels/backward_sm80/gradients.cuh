// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A warp's parts of dK and dV, which stay in its registers from the first tile of queries to the
// last, and of dQ, which is added to float32 sums in global memory. Called by backward_sm80.
#pragma once

#include "kernels/backward_sm80/dq.cuh"
#include "kernels/backward_sm80/producer.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

template <BackwardSm80Config kConfig>
struct BackwardGradientsSm80 {
  using Tiles = BackwardStorageSm80<kConfig>;
  using PairTile = typename Tiles::PairTile;
  using Products = typename Tiles::Products;
  static constexpr i32 kKvTiles = kConfig.dkv_rows / 16;

  // Where roles are split, the warps that weigh have dV there and the others dK.
  Tiles storage;
  float dK[kKvTiles][kConfig.dk_dims() / 2];
  float dV[kConfig.split_roles ? 1 : kKvTiles][kConfig.split_roles ? 1 : kConfig.dv_dims() / 2];

  BackwardGradientsSm80() {
    clear(dK);
    clear(dV);
  }
  auto& dv_sums() {
    if constexpr (kConfig.split_roles) {
      return dK;
    } else {
      return dV;
    }
  }

  // Of the keys of the block, and of the dims.
  static constexpr u32 kTeamGroups = kConfig.group_columns() / kConfig.dkv_rows;
  u32 kv_group() const {
    return storage.group() * kTeamGroups + storage.warp_in_group() % kTeamGroups;
  }
  u32 kv_part() const { return storage.warp_in_group() / kTeamGroups; }

  // sums += pairs^T tile, this warp's part of it.
  template <i32 kPartDims, i32 kWords>
  void add_columns(float (&sums)[kKvTiles][kPartDims / 2], const PairTile& pairs,
                   const SwizzledTile<kWords, kConfig.swizzle>& tile) const {
    Products::template multiply<kConfig.q_rows>(
        sums, Products::template left_columns<kKvTiles>(pairs, kv_group() * kKvTiles),
        Products::template right_columns<kPartDims / 16>(tile, kv_part() * (kPartDims / 16)));
  }

  // dQ = dS K, this warp's tiles, added to the sums.
  void add_dq(float* sums, i32 pair_stage) const {
    constexpr i32 kAcross = kConfig.d_qk / kConfig.dq_dims;
    constexpr i32 kDqTiles = kConfig.dq_rows / 16;
    // Where there are fewer tiles than warps, the halves of the block alternate.
    const i32 first = (storage.warp + pair_stage * (kConfig.warps / 2)) % kConfig.warps;
#pragma unroll 1
    for (i32 tile = first; tile < kConfig.dq_tiles(); tile += kConfig.warps) {
      const auto K = Products::template right_columns<kConfig.dq_dims / 16>(
          storage.k_tile(), tile % kAcross * (kConfig.dq_dims / 16));
      float dQ[kDqTiles][kConfig.dq_dims / 2];
      clear(dQ);
      if constexpr (kConfig.swap_ab) {
        Products::template multiply<kConfig.kv_rows>(
            dQ,
            Products::template left_columns<kDqTiles>(storage.ds_of_keys(pair_stage),
                                                      tile / kAcross * kDqTiles),
            K);
      } else {
        const auto dS = left_rows(storage.ds_tile(pair_stage), tile / kAcross * kConfig.dq_rows);
        Products::template multiply<kConfig.kv_rows>(
            dQ, [&](i32 k, i32 t) { return ptx::ldmatrix_x4(dS.at(k, 16 * t)); }, K);
      }
      using Order = DqAccumLayoutSm80<kConfig>;
      float* const to = sums + Order::index(tile, 0, 0, static_cast<i32>(lane_index()));
#pragma unroll
      for (i32 t = 0; t < kDqTiles; ++t) {
#pragma unroll
        for (i32 i = 0; i < kConfig.dq_dims / 2; i += 4) {
          const float (&x)[kConfig.dq_dims / 2] = dQ[t];
          float* const at = to + Order::index(0, t, i, 0);
          if constexpr (kConfig.hopper) {
            ptx::reduce_add_x4(at, x[i], x[i + 1], x[i + 2], x[i + 3]);
          } else {
#pragma unroll
            for (i32 e = 0; e < 4; ++e) ptx::reduce_add(at + 32 * e, x[i + e]);
          }
        }
      }
    }
  }

  // This warp's part of dK or dV.
  template <i32 kPartDims>
  void store(float (&sums)[kKvTiles][kPartDims / 2], const KeyBlockSm80& keys,
             const ArrayView& array, i64 dim, float factor) const {
    const i64 first_dim = kv_part() * kPartDims;
    const i64 dims = min<i64>(dim - first_dim, kPartDims);
    if (dims <= 0 || !array.present()) return;
    const i64 row = keys.first_key + kv_group() * kConfig.dkv_rows + lane_index() / 4;
    const i64 offset =
        array.offset(keys.sequence.batch, keys.kv_head, keys.sequence.kv_begin + row, first_dim);
    const RowStore store(array, kConfig.dtype, offset, dims);
    if constexpr (kConfig.hopper && kConfig.element_bytes() == 2) {
      if (store.is_aligned) return store_vectors<kPartDims>(sums, keys, array, dims, factor);
    }
#pragma unroll
    for (i32 t = 0; t < kKvTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i64 key = row + 16 * t + 8 * h;
        store.template run<kConfig.dtype>(sums[t], h, 16 * t + 8 * h, key < keys.sequence.kv_slot,
                                          key < keys.sequence.shape.kv_len, factor);
      }
    }
  }

 private:
  // The same by way of shared memory, so that lanes store whole rows of 16-byte vectors.
  template <i32 kPartDims>
  void store_vectors(const float (&sums)[kKvTiles][kPartDims / 2], const KeyBlockSm80& keys,
                     const ArrayView& array, i64 dims, float factor) const {
    constexpr i32 kVectors = kPartDims / 8;
    // Equal sizes for both gradients: warps are not done with dK at the same time.
    constexpr i32 kPlaceBytes = kConfig.dkv_rows * max(kConfig.dk_dims(), kConfig.dv_dims()) * 2;
    const SwizzledTile<kPartDims, true> mine{storage.shared + storage.warp * kPlaceBytes};
    const i32 lane = static_cast<i32>(lane_index());
    const i64 first = keys.first_key + kv_group() * kConfig.dkv_rows;
    ptx::warp_sync();  // what was shared before is read
    share<kPartDims>(sums, mine, keys.sequence.shape.kv_len - first - lane / 4, factor);
    ptx::warp_sync();
    u16* const data = reinterpret_cast<u16*>(array.data) +
                      array.offset(keys.sequence.batch, keys.kv_head,
                                   keys.sequence.kv_begin + first, kv_part() * kPartDims);
#pragma unroll
    for (i32 at = 0; at < kConfig.dkv_rows * kVectors; at += 32) {
      const i32 row = (at + lane) / kVectors, vector = (at + lane) % kVectors;
      const ptx::U32x4 x =
          ptx::load_shared_x4(mine.address(static_cast<u32>(row), static_cast<u32>(vector)));
      if (first + row < keys.sequence.kv_slot && 8 * vector < dims) {
        ptx::store_global_x4(data + row * array.strides[2] + 8 * vector, x);
      }
    }
  }
  // `left`: keys that count from this lane's first row on; rows of others are zeros.
  template <i32 kPartDims>
  static void share(const float (&sums)[kKvTiles][kPartDims / 2],
                    const SwizzledTile<kPartDims, true>& tile, i64 left, float factor) {
    const auto to = left_rows(tile, 0);
#pragma unroll
    for (i32 t = 0; t < kKvTiles; ++t) {
#pragma unroll
      for (i32 j = 0; j < kPartDims / 16; ++j) {
        float scaled[8];
#pragma unroll
        for (i32 i = 0; i < 8; ++i) {
          scaled[i] = 16 * t + 8 * (i / 2 % 2) < left ? sums[t][8 * j + i] * factor : 0.f;
        }
        ptx::stmatrix_x4(to.at(j, 16 * t), Products::words(scaled));
      }
    }
  }
};

}  // namespace fulmen
