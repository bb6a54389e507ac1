// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of a backward call of sm80: the float32 sums of dQ become dq. And where backward_sm80 has
// marked a tile, rows of dq, dk or dv that are not finite are computed again by backward_naive,
// which reads visible pairs alone: NaN that only hidden pairs hold goes, NaN that belongs there
// comes back. Launched with sm80_postprocess_blocks().
#pragma once

#include "kernels/backward_sm80/dq.cuh"
#include "kernels/backward_sm80/row_store.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/tile_tasks.cuh"
#include "kernels/naive/backward_naive.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

template <BackwardSm80Config kConfig>
struct ConvertDqSm80 {
  using Order = DqAccumLayoutSm80<kConfig>;
  // Tiles of 16 rows at once: as many as registers hold.
  static constexpr i32 kTiles = min(kConfig.dq_rows / 16, max(32 / Order::kFloats, 1));
  using Sums = float[kTiles][Order::kFloats];

  const Head<kConfig.dtype>& head;
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
        store.template run<kConfig.dtype>(dQ[t], h, below, row + below < sequence.q_slot,
                                          row + below < sequence.shape.q_len,
                                          static_cast<float>(p.score_map.scale));
      }
    }
  }
};

inline constexpr i32 kSm80PostprocessThreads = 256;

template <BackwardSm80Config kConfig>
struct BackwardPostprocessSm80 {
  const BackwardSm80Params& params;
  const AttentionParams& p;

  explicit BackwardPostprocessSm80(const BackwardSm80Params& params_)
      : params(params_), p(params_.attention) {}

  static i32 thread() { return static_cast<i32>(ptx::thread_index()); }

  __attribute__((noinline)) static void recompute_dq(const AttentionParams& p,
                                                     const RowTask& task) {
    backward_naive_dq_row<kConfig.dtype>(p, task);
  }
  __attribute__((noinline)) static void recompute_dkdv(const AttentionParams& p,
                                                       const RowTask& task) {
    backward_naive_dkdv_row<kConfig.dtype>(p, task);
  }

  static bool all_finite(const ArrayView& array, const RowTask& task, i64 chunk, i64 dim) {
    const i64 first = chunk * kNaiveChunk;
    const i64 offset = array.offset(task.batch, task.head, task.row, first);
    float sum = 0;  // of x - x: 0, or NaN
    for (i64 d = 0; d < min(kNaiveChunk, dim - first); ++d) {
      const float x = load_real_called<float>(array, offset + d * array.strides[3]);
      sum += x - x;
    }
    return sum == 0;
  }

  void recompute_rows(const Head<kConfig.dtype>& head, i64 first) const {
    const Sequence& sequence = head.sequence;
    const i64 chunks = num_chunks(p.dim_qk);
    const i64 count = clamp<i64>(sequence.shape.q_len - first, 0, kConfig.q_rows);
    for (i64 at = thread(); at < count * chunks; at += kSm80PostprocessThreads) {
      const RowTask task{sequence.batch, head.head, sequence.q_begin + first + at / chunks,
                         at % chunks};
      if (!all_finite(p.dq, task, task.chunk, p.dim_qk)) recompute_dq(p, task);
    }
  }

  void recompute_keys(const Head<kConfig.dtype>& head, i64 first) const {
    const Sequence& sequence = head.sequence;
    const i64 chunks = dkdv_chunks(p);
    const i64 count = clamp<i64>(sequence.shape.kv_len - first, 0, kConfig.kv_rows);
    for (i64 at = thread(); at < count * chunks; at += kSm80PostprocessThreads) {
      const RowTask task{sequence.batch, head.kv_head, sequence.kv_begin + first + at / chunks,
                         at % chunks};
      const bool is_dk = task.chunk < dk_chunks(p);
      const bool finite = is_dk ? all_finite(p.dk, task, task.chunk, p.dim_qk)
                                : all_finite(p.dv, task, task.chunk - dk_chunks(p), p.dim_v);
      if (!finite) recompute_dkdv(p, task);
    }
  }

  // Tile `number` of queries.
  void finish_rows(i64 number) const {
    const i64 num_slots = num_tile_slots(p, p.q_rows, kConfig.q_rows);
    const i64 batch_head = number / num_slots;
    const TileTask task{batch_head / p.heads_q, batch_head % p.heads_q, number % num_slots};
    const TilePlace place = find_tile(p, p.cu_q, task, kConfig.q_rows);
    if (!p.dq.present() || place.first_row < 0) return;
    const Head<kConfig.dtype> head(p, place.index, task.head);
    ConvertDqSm80<kConfig>{head, place.first_row, params.dq_accum + number * kConfig.dq_elems()}
        .run(kSm80PostprocessThreads / 32);
    if (params.nonfinite_m_blocks[number] == 0) return;
    ptx::block_sync();  // all warps -> dq of the tile
    recompute_rows(head, place.first_row);
  }

  // Tile `number` of keys.
  void finish_keys(i64 number) const {
    const i64 num_slots = num_tile_slots(p, p.kv_rows, kConfig.kv_rows);
    const i64 batch_head = number / num_slots;
    const TileTask task{batch_head / p.heads_kv, batch_head % p.heads_kv, number % num_slots};
    const TilePlace place = find_tile(p, p.cu_kv, task, kConfig.kv_rows);
    recompute_keys(Head<kConfig.dtype>(p, place.index, task.head * p.group_size()),
                   place.first_row);
  }

  // Tiles of keys whose mark is set, of 32 from `first` on.
  void finish_marked_keys(i64 first) const {
    const i64 own = first + lane_index();
    const bool is_marked =
        own < num_kv_tiles(p, kConfig.kv_rows) && params.nonfinite_n_blocks[own] != 0;
    u32 marked = ptx::ballot(is_marked);
    for (i64 number = first; marked != 0; ++number, marked >>= 1) {
      if ((marked & 1) != 0) finish_keys(number);
    }
  }

  void run() const {
    const i64 block = ptx::block_index();
    const i64 row_tiles = num_q_tiles(p, kConfig.q_rows);
    if (block < row_tiles) {
      finish_rows(row_tiles - 1 - block);  // of the last heads the sums are in the L2 still
    } else {
      finish_marked_keys((block - row_tiles) * kSm80MarkedBlocks);
    }
  }
};

template <BackwardSm80Config kConfig>
void backward_postprocess_sm80(const BackwardSm80Params& params) {
  if constexpr (kConfig.hopper) ptx::grid_dependency_wait();
  BackwardPostprocessSm80<kConfig>(params).run();
}

}  // namespace fulmen
