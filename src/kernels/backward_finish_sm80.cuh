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

  // Eight neighbouring dims of a row, as four lanes have added them.
  struct Unit {
    float dim[8];
  };
  static Unit unit_of(const float* sums, i32 row, i32 dim) {
    struct alignas(8) Pair {
      float x[2];
    };
    struct alignas(16) Quad {
      float x[4];
    };
    const float* const from = sums + Order::place(row, dim);
    Unit unit;
    if constexpr (kConfig.wide_stores) {
#pragma unroll
      for (i32 lane = 0; lane < 4; ++lane) {
        const Pair pair = *reinterpret_cast<const Pair*>(from + 4 * lane);
        unit.dim[2 * lane] = pair.x[0];
        unit.dim[2 * lane + 1] = pair.x[1];
      }
    } else {
      const Quad even = *reinterpret_cast<const Quad*>(from);
      const Quad odd = *reinterpret_cast<const Quad*>(from + 32);
#pragma unroll
      for (i32 lane = 0; lane < 4; ++lane) {
        unit.dim[2 * lane] = even.x[lane];
        unit.dim[2 * lane + 1] = odd.x[lane];
      }
    }
    return unit;
  }

  // dq of the tile's rows, eight dims a thread at a time.
  void round(const Head<kConfig.dtype>& head, i64 first, const float* sums) const {
    const Sequence& sequence = head.sequence;
    const i32 dims = static_cast<i32>(p.dim_qk);
    const i32 units = (dims + 7) / 8;
    const float scale = static_cast<float>(p.score_map.scale);
    const i64 tile = head.q_row(p.dq, first);
    const bool in_units = p.dq.dtype == kConfig.dtype && p.dq.strides[3] == 1 &&
                          p.dq.strides[2] % 8 == 0 && dims % 8 == 0 &&
                          reinterpret_cast<u64>(p.dq.data + tile * 2) % 16 == 0;
    const i32 count = static_cast<i32>(clamp<i64>(sequence.q_slot - first, 0, kConfig.rows));
    const i64 num_rows = sequence.shape.q_len - first;
#pragma unroll 4
    for (i32 at = thread(); at < count * units; at += kSm80FinishThreads) {
      const i32 row = at / units;
      const i32 dim = at % units * 8;
      Unit unit{};
      if (row < num_rows) unit = unit_of(sums, row, dim);
      const i64 to = tile + row * p.dq.strides[2] + dim * p.dq.strides[3];
      if (in_units) {
        ptx::U32x4 x;
#pragma unroll
        for (i32 w = 0; w < 4; ++w) {
          x.word[w] =
              ptx::pack<kConfig.dtype>(unit.dim[2 * w] * scale, unit.dim[2 * w + 1] * scale);
        }
        ptx::store_global_x4(reinterpret_cast<u16*>(p.dq.data) + to, x);
      } else {
#pragma unroll
        for (i32 i = 0; i < 8; ++i) {
          if (dim + i >= dims) break;
          store_real_called(p.dq, to + i * p.dq.strides[3], unit.dim[i] * scale);
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
