// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of a backward call of sm80: the float32 sums of dQ become dq, rows past the end of their
// sequence 0. And where backward_sm80 has marked a tile, rows of dq, dk or dv that are not finite
// are computed again by backward_naive, which reads visible pairs alone: NaN that only hidden pairs
// hold goes, NaN that belongs there comes back. Launched with one block for each of
// num_q_tiles(), then of num_kv_tiles().
#pragma once

#include "kernels/backward_naive.cuh"
#include "kernels/backward_rows_sm80.cuh"
#include "kernels/tile/row_store.cuh"

namespace fulmen {

inline constexpr i32 kSm80FinishThreads = 256;

template <Sm80BackwardConfig kConfig>
struct BackwardFinishSm80 {
  using Order = Sm80DqOrder<kConfig>;

  const Sm80BackwardParams& params;
  const AttentionParams& p;

  explicit BackwardFinishSm80(const Sm80BackwardParams& params_)
      : params(params_), p(params_.attention) {}

  static i32 thread() { return static_cast<i32>(ptx::thread_index()); }

  // dq of the tile's rows: a warp takes up what a warp has added, and as it lies.
  void round(const Head<kConfig.dtype>& head, i64 first, const float* sums) const {
    constexpr i32 kWarps = kSm80FinishThreads / 32;
    constexpr i32 kAcross = kConfig.d_qk / kConfig.dq_dims;
    const Sequence& sequence = head.sequence;
    const float scale = static_cast<float>(p.score_map.scale);
    const i64 num_rows = sequence.shape.q_len - first;
    const i64 num_slots = sequence.q_slot - first;
#pragma unroll 1
    for (i32 tile = static_cast<i32>(warp_index()); tile < kConfig.dq_tiles(); tile += kWarps) {
      const i32 dim = tile % kAcross * kConfig.dq_dims;
      const i32 row = tile / kAcross * kConfig.dq_rows + static_cast<i32>(lane_index() / 4);
      if (dim >= p.dim_qk) continue;
      const RowStore store(p.dq, kConfig.dtype,
                           head.q_row(p.dq, first + row) + dim * p.dq.strides[3],
                           min<i64>(p.dim_qk - dim, kConfig.dq_dims));
      float dQ[kConfig.dq_rows / 16][Order::kFloats];
      read(dQ, sums + Order::index(tile, 0, 0, static_cast<i32>(lane_index())));
#pragma unroll
      for (i32 t = 0; t < kConfig.dq_rows / 16; ++t) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          const i32 below = 16 * t + 8 * h;
          store.template run<kConfig.dtype>(dQ[t], h, below, row + below < num_slots,
                                            row + below < num_rows, scale);
        }
      }
    }
  }

  template <i32 kTiles>
  static void read(float (&dQ)[kTiles][Order::kFloats], const float* from) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < Order::kFloats; i += 4) {
        const float* const at = from + Order::index(0, t, i, 0);
        if constexpr (kConfig.wide_stores) {
          const ptx::F32x4 x = ptx::load_l2_x4(at);
#pragma unroll
          for (i32 e = 0; e < 4; ++e) dQ[t][i + e] = x.word[e];
        } else {
#pragma unroll
          for (i32 e = 0; e < 4; ++e) dQ[t][i + e] = at[32 * e];
        }
      }
    }
  }

  __attribute__((noinline)) static void repeat_dq(const AttentionParams& p, const RowTask& task) {
    backward_naive_dq_row<kConfig.dtype>(p, task);
  }
  __attribute__((noinline)) static void repeat_dkdv(const AttentionParams& p, const RowTask& task) {
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

  void mend_rows(const Head<kConfig.dtype>& head, i64 first) const {
    const Sequence& sequence = head.sequence;
    const i64 chunks = num_chunks(p.dim_qk);
    const i64 count = clamp<i64>(sequence.shape.q_len - first, 0, kConfig.rows);
    for (i64 at = thread(); at < count * chunks; at += kSm80FinishThreads) {
      const RowTask task{sequence.batch, head.head, sequence.q_begin + first + at / chunks,
                         at % chunks};
      if (!all_finite(p.dq, task, task.chunk, p.dim_qk)) repeat_dq(p, task);
    }
  }

  void mend_keys(const Head<kConfig.dtype>& head, i64 first) const {
    const Sequence& sequence = head.sequence;
    const i64 chunks = dkdv_chunks(p);
    const i64 count = clamp<i64>(sequence.shape.kv_len - first, 0, kConfig.columns);
    for (i64 at = thread(); at < count * chunks; at += kSm80FinishThreads) {
      const RowTask task{sequence.batch, head.kv_head, sequence.kv_begin + first + at / chunks,
                         at % chunks};
      const bool is_dk = task.chunk < dk_chunks(p);
      const bool finite = is_dk ? all_finite(p.dk, task, task.chunk, p.dim_qk)
                                : all_finite(p.dv, task, task.chunk - dk_chunks(p), p.dim_v);
      if (!finite) repeat_dkdv(p, task);
    }
  }

  void finish_rows(i64 block) const {
    const i64 num_slots = num_tile_slots(p, p.q_rows, kConfig.rows);
    const TileTask task = tile_task(block, p.batch_extent(), p.heads_q, num_slots, false);
    const TilePlace place = find_tile(p, p.cu_q, task, kConfig.rows);
    if (!p.dq.present() || place.first_row < 0) return;
    const Head<kConfig.dtype> head(p, place.index, task.head);
    const i64 number = row_tile_number(p, task.batch, task.head, task.slot, num_slots);
    round(head, place.first_row, params.dq_sums + number * kConfig.dq_elems());
    if (params.suspect_rows[number] == 0) return;
    ptx::block_sync();  // dq of the tile is there
    mend_rows(head, place.first_row);
  }

  void finish_keys(i64 block) const {
    const i64 num_slots = num_tile_slots(p, p.kv_rows, kConfig.columns);
    const TileTask task = tile_task(block, p.batch_extent(), p.heads_kv, num_slots, false);
    const i64 number = (task.batch * p.heads_kv + task.head) * num_slots + task.slot;
    if (params.suspect_keys[number] == 0) return;
    const TilePlace place = find_tile(p, p.cu_kv, task, kConfig.columns);
    mend_keys(Head<kConfig.dtype>(p, place.index, task.head * p.group_size()), place.first_row);
  }

  void run() const {
    const i64 block = ptx::block_index();
    const i64 row_tiles = num_q_tiles(p, kConfig.rows);
    if (block < row_tiles) return finish_rows(block);
    finish_keys(block - row_tiles);
  }
};

template <Sm80BackwardConfig kConfig>
void backward_finish_sm80(const Sm80BackwardParams& params) {
  BackwardFinishSm80<kConfig>(params).run();
}

}  // namespace fulmen
