// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The float32 accumulators of dQ: their layout; their zeros just before they are needed, so that
// they lie in the L2 when blocks add to them; and their way into dq. A block of keys zeroes its
// share of a group of heads that comes later, and adds to its own group's once blocks before it
// have zeroed them. The first groups, or all without config.zeroes_dq, are zeroed by
// backward_preprocess_sm80. RowStore writes dk and dv as well.
#pragma once

#include "kernels/backward_sm80/config.h"
#include "kernels/common/array_access.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// In which order the tiles of a warp's dQ lie in dq_accum: as its lanes hold them, so that a warp
// adds to 128 neighbouring bytes, or 512, at a time.
template <BackwardSm80Config kConfig>
struct DqAccumLayoutSm80 {
  static constexpr i32 kFloats = kConfig.dq_dims / 2;  // of a thread, of 16 rows
  static constexpr i32 kTileElems = kConfig.dq_rows * kConfig.dq_dims;

  // Float i of lane `lane`, of 16 rows `t`, of tile `tile`.
  static constexpr i32 index(i32 tile, i32 t, i32 i, i32 lane) {
    const i32 group = t * (kFloats / 4) + i / 4;
    return tile * kTileElems +
           (kConfig.hopper ? (group * 32 + lane) * 4 + i % 4 : (group * 4 + i % 4) * 32 + lane);
  }
};

// Zeroes dQ of m_block `number`; all threads of a block.
template <BackwardSm80Config kConfig, i32 kThreads>
inline void zero_dq_accum(const BackwardSm80Params& params, u32 number) {
  float* const sums = params.dq_accum + i64{number} * kConfig.dq_elems();
  const i32 thread = static_cast<i32>(ptx::thread_index());
#pragma unroll
  for (i32 at = 0; at < kConfig.dq_elems(); at += 4 * kThreads) {
    if (at + 4 * thread < kConfig.dq_elems()) {
      ptx::store_l2_x4(sums + at + 4 * thread, {{0, 0, 0, 0}});
    }
  }
}

template <BackwardSm80Config kConfig>
struct DqZeroingSm80 {
  const BackwardSm80Params& params;
  u32 block;

  // Stores zeros; wait_zeroed() comes a barrier later, when they have arrived.
  void store_zeros() const {
    if constexpr (!kConfig.zeroes_dq) return;
    const HeadGroupsSm80& groups = params.groups;
    const u32 first = ahead() * groups.m_blocks;
    const u32 begin = first + block % groups.n_blocks * groups.m_blocks_each;
    const u32 end =
        min(min(begin + groups.m_blocks_each, first + groups.m_blocks), groups.all_m_blocks);
#pragma unroll 1
    for (u32 tile = begin; tile < end; ++tile) {
      zero_dq_accum<kConfig, kConfig.threads()>(params, tile);
    }
  }

  // Thread 0 announces the zeros and waits for those of the block's own group; the others may add
  // to them after the next barrier.
  void wait_zeroed() const {
    if constexpr (!kConfig.zeroes_dq) return;
    if (ptx::thread_index() != 0) return;
    const HeadGroupsSm80& groups = params.groups;
    if (ahead() * groups.m_blocks < groups.all_m_blocks)
      ptx::announce(params.zeroed_blocks + ahead());
    if (own() >= groups.ahead) ptx::await(params.zeroed_blocks + own(), groups.n_blocks);
  }

  // For a block that adds nothing.
  void zero_only() const {
    if constexpr (!kConfig.zeroes_dq) return;
    store_zeros();
    ptx::block_sync();
    wait_zeroed();
  }

 private:
  u32 own() const { return block / params.groups.n_blocks; }
  u32 ahead() const { return own() + params.groups.ahead; }
};

// Rows of a warp's accumulators, scaled and rounded, to an array of any dtype, stride and
// alignment: 16 bytes a lane, 8 of float32, where vectors of the array lie at multiples of 16
// bytes, else number by number.
struct RowStore {
  const ArrayView& array;
  i64 offset;  // of the lane's first row and the first dim, in elements
  i32 dims;    // that the array has from there on
  bool is_aligned;

  RowStore(const ArrayView& array_, DType dtype, i64 offset_, i64 dims_)
      : array(array_), offset(offset_), dims(static_cast<i32>(dims_)) {
    const i64 vector = 16 / size_bytes(dtype);  // elements
    const u64 address = reinterpret_cast<u64>(array.data + offset * size_bytes(dtype));
    is_aligned = array.dtype == dtype && array.strides[3] == 1 && array.strides[2] % vector == 0 &&
                 dims % vector == 0 && address % 16 == 0;
  }

  // Row h of the lane's two (ptx/mma.cuh), which is `row` below its first, if it is inside the
  // array; zeros unless it counts. All lanes of a warp take part.
  template <DType kDType, i32 kFloats>
  void run(const float (&sums)[kFloats], i32 h, i32 row, bool inside, bool counts,
           float factor) const {
    float scaled[kFloats];
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) scaled[i] = counts ? sums[i] * factor : 0.f;
    const i64 at = offset + row * array.strides[2];
    if (is_aligned) {
      if constexpr (kDType == DType::kFloat32) {
        store_output_row(scaled, h, reinterpret_cast<float*>(array.data) + at, inside, dims);
      } else {
        store_output_row<kDType>(scaled, h, reinterpret_cast<u16*>(array.data) + at, inside, dims);
      }
    } else if (inside) {
      store_numbers(scaled, h, at);
    }
  }

 private:
  // In a loop that is not unrolled and therefore reads them from memory.
  template <i32 kFloats>
  void store_numbers(const float (&tile)[kFloats], i32 h, i64 from) const {
    float numbers[kFloats / 2];
#pragma unroll
    for (i32 at = 0; at < kFloats / 2; ++at) numbers[at] = tile[at / 2 * 4 + 2 * h + at % 2];
#pragma unroll 1
    for (i32 at = 0; at < kFloats / 2; ++at) {
      const i64 d = 8 * (at / 2) + 2 * static_cast<i32>(lane_index() % 4) + at % 2;
      if (d < dims) store_real(array, from + d * array.strides[3], numbers[at]);
    }
  }
};

// The sums of a tile of queries become dq.
template <BackwardSm80Config kConfig>
struct ConvertDqSm80 {
  using Order = DqAccumLayoutSm80<kConfig>;
  // Tiles of 16 rows at once: as many as registers hold.
  static constexpr i32 kTiles = min(kConfig.dq_rows / 16, max(32 / Order::kFloats, 1));
  using Sums = float[kTiles][Order::kFloats];

  const BackwardHeadOf<kConfig>& head;
  i64 first_row;  // of the tile
  const float* sums;

  // A tile of queries, by `num_warps` warps.
  void run(i32 num_warps) const {
#pragma unroll 1
    for (i32 tile = static_cast<i32>(warp_index()); tile < kConfig.dq_tiles(); tile += num_warps) {
#pragma unroll 1
      for (i32 first = 0; first < kConfig.dq_rows / 16; first += kTiles) {
        Sums dQ;
        read(dQ, tile, first);
        store(dQ, tile, first);
      }
    }
  }

 private:
  void read(Sums& dQ, i32 tile, i32 first) const {
    const float* const from = sums + i64{tile} * Order::kTileElems +
                              Order::index(0, first, 0, static_cast<i32>(lane_index()));
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < Order::kFloats; i += 4) {
        const float* const at = from + Order::index(0, t, i, 0);
        if constexpr (kConfig.hopper) {
          const ptx::F32x4 x = ptx::load_l2_x4(at);
#pragma unroll
          for (i32 e = 0; e < 4; ++e) dQ[t][i + e] = x.word[e];
        } else {
#pragma unroll
          for (i32 e = 0; e < 4; ++e) dQ[t][i + e] = ptx::load_l2(at + 32 * e);
        }
      }
    }
  }

  void store(const Sums& dQ, i32 tile, i32 first) const {
    constexpr i32 kAcross = kConfig.d_qk / kConfig.dq_dims;
    const AttentionParams& p = head.p;
    const Sequence& sequence = head.sequence;
    const i32 dim = tile % kAcross * kConfig.dq_dims;
    if (dim >= p.dim_qk) return;
    const i64 row = first_row + tile / kAcross * kConfig.dq_rows + 16 * first + lane_index() / 4;
    const RowStore store(p.dq, kConfig.dtype, head.q_row(p.dq, row) + dim * p.dq.strides[3],
                         min<i64>(p.dim_qk - dim, kConfig.dq_dims));
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 below = 16 * t + 8 * h;
        store.template run<kConfig.dtype>(
            dQ[t], h, below, row + below < sequence.q_slot, row + below < sequence.shape.q_len,
            static_cast<float>(p.score_map.scale) * kConfig.ds_scale());
      }
    }
  }
};

}  // namespace fulmen
