// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of a backward call of sm80: the float32 sums of dQ become dq, rows past the end of their
// sequence 0. And where backward_sm80 has marked a tile, rows of dq, dk or dv that are not finite
// are computed again by backward_naive, which reads visible pairs alone: NaN that only hidden pairs
// hold goes, NaN that belongs there comes back. Launched with one block for each of
// sm80_row_tiles(), then of sm80_key_tiles().
#pragma once

#include "kernels/backward_naive.cuh"
#include "kernels/backward_rows_sm80.cuh"

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

  // dq of the tile's rows, two dims a thread.
  void round(const Head<kConfig.dtype>& head, i64 first, const float* sums) const {
    const Sequence& sequence = head.sequence;
    const i32 pairs = static_cast<i32>(p.dim_qk + 1) / 2;
    const float scale = static_cast<float>(p.score_map.scale);
    const bool packed = p.dq.dtype == kConfig.dtype && p.dq.strides[3] == 1 &&
                        p.dq.strides[2] % 2 == 0 && p.dim_qk % 2 == 0 &&
                        reinterpret_cast<u64>(p.dq.data + head.q_row(p.dq, first) * 2) % 4 == 0;
    const i32 count = static_cast<i32>(clamp<i64>(sequence.q_slot - first, 0, kConfig.rows));
#pragma unroll 4
    for (i32 at = thread(); at < count * pairs; at += kSm80FinishThreads) {
      const i32 r = at / pairs;
      const i32 d = at % pairs * 2;
      const float* const from = sums + Order::place(r, d);
      constexpr i32 kNext = kConfig.wide_sums ? 1 : 32;
      const bool counts = first + r < sequence.shape.q_len;
      const float low = counts ? from[0] * scale : 0.f;
      const float high = counts ? from[kNext] * scale : 0.f;
      const i64 to = head.q_row(p.dq, first + r) + d * p.dq.strides[3];
      if (packed) {
        *reinterpret_cast<u32*>(p.dq.data + to * 2) = ptx::pack<kConfig.dtype>(low, high);
      } else {
        store_real_called(p.dq, to, low);
        if (d + 1 < p.dim_qk) store_real_called(p.dq, to + p.dq.strides[3], high);
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
    const i64 row_tiles = sm80_row_tiles(p, kConfig);
    if (block < row_tiles) return finish_rows(block);
    finish_keys(block - row_tiles);
  }
};

template <Sm80BackwardConfig kConfig>
void backward_finish_sm80(const Sm80BackwardParams& params) {
  BackwardFinishSm80<kConfig>(params).run();
}

}  // namespace fulmen
