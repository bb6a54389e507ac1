// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// How tiled kernels divide rows among blocks. A dense axis has ceil(rows / tile) tiles for each
// batch entry. A packed axis has a fixed number of slots, since its offsets are known on the device
// only: sequence i begins at slot offset[i] / tile + i, and never needs more slots than lie before
// that of sequence i + 1, for ceil(n / t) <= (a + n) / t - a / t + 1, divisions rounded down.
#pragma once

#include "kernels/common/sequences.cuh"
#include "kernels/params.h"

namespace fulmen {

// Tiles along the axis of query rows, or of keys, for one head of one batch entry of the arrays.
constexpr i64 num_tile_slots(bool packed, i64 num_sequences, i64 extent, i64 tile_rows) {
  return packed ? extent / tile_rows + num_sequences : ceil_div(extent, tile_rows);
}
constexpr i64 num_q_slots(const AttentionParams& p, i64 tile_rows) {
  return num_tile_slots(p.packed.q, p.num_sequences, p.q_rows, tile_rows);
}
constexpr i64 num_kv_slots(const AttentionParams& p, i64 tile_rows) {
  return num_tile_slots(p.packed.kv, p.num_sequences, p.kv_rows, tile_rows);
}

constexpr i64 first_slot(i64 offset, i64 sequence, i64 tile_rows) {
  return offset / tile_rows + sequence;
}

// Blocks that own query rows of each head, or key rows of each kv_head.
constexpr i64 num_q_tiles(const AttentionParams& p, i64 tile_rows) {
  return p.batch_extent() * p.heads_q * num_q_slots(p, tile_rows);
}
constexpr i64 num_kv_tiles(const AttentionParams& p, i64 tile_rows) {
  return p.kv_batch_extent() * p.heads_kv * num_kv_slots(p, tile_rows);
}

// What a block works on: heads are neighbours, so that the blocks that run together are about
// equally long. Under a causal mask the last rows see the most keys, and the first keys are seen by
// the most rows: the long tiles come first.
struct TileTask {
  i64 batch;
  i64 head;
  i64 slot;
};

constexpr TileTask tile_task(i64 block, i64 batch_extent, i64 heads, i64 num_slots,
                             bool last_first) {
  const i64 batch_head = block % (batch_extent * heads);
  const i64 slot = block / (batch_extent * heads);
  return {batch_head / heads, batch_head % heads, last_first ? num_slots - 1 - slot : slot};
}

// The indices of an axis of `length` that add up in element `at` of an axis of `extent`.
constexpr Interval summed(i64 at, i64 extent, i64 length) {
  return extent == 1 ? Interval{0, length} : Interval{at, min(at + 1, length)};
}

// The first element of a tile of dbias.
struct DbiasTile {
  i64 batch, head, row, column;
};

constexpr i64 dbias_tiles(const AttentionParams& p, i64 tile_rows, i64 tile_columns) {
  return p.dbias_extents[0] * p.dbias_extents[1] * ceil_div(p.dbias_extents[2], tile_rows) *
         ceil_div(p.dbias_extents[3], tile_columns);
}

constexpr DbiasTile dbias_tile(const AttentionParams& p, i64 block, i64 tile_rows,
                               i64 tile_columns) {
  const i64 columns = ceil_div(p.dbias_extents[3], tile_columns);
  const i64 rows = ceil_div(p.dbias_extents[2], tile_rows);
  return {block / columns / rows / p.dbias_extents[1], block / columns / rows % p.dbias_extents[1],
          block / columns % rows * tile_rows, block % columns * tile_columns};
}

// Which rows of which sequence a block works on, from its slot: for packed arrays the offsets say,
// and they are in device memory. A block's sequence, and the first of its rows there:
struct TilePlace {
  i64 index;
  i64 first_row;
};

inline TilePlace find_tile(const AttentionParams& p, const ArrayView& offsets, const TileTask& task,
                           i64 tile_rows) {
  if (!offsets.present()) return {task.batch, task.slot * tile_rows};
  i64 low = 0;
  i64 high = p.num_sequences - 1;
  while (low < high) {  // the last sequence whose first slot is not beyond ours
    const i64 middle = (low + high + 1) / 2;
    const i64 offset = load_index(offsets, middle * offsets.strides[3]);
    if (first_slot(offset, middle, tile_rows) <= task.slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const i64 offset = load_index(offsets, low * offsets.strides[3]);
  return {low, (task.slot - first_slot(offset, low, tile_rows)) * tile_rows};
}

// Number of a tile of queries among all, and of its slot.
inline i64 row_tile_number(const AttentionParams& p, i64 batch, i64 head, i64 slot, i64 num_slots) {
  return (batch * p.heads_q + head) * num_slots + slot;
}

// How the naive kernels divide a problem among threads: shared by the kernels, which find their
// task, and by the host, which counts the threads. All counts are 64-bit.

inline constexpr i64 kNaiveChunk = 32;  // dimensions of a row that one thread holds in registers

constexpr i64 num_chunks(i64 dim) { return ceil_div(dim, kNaiveChunk); }

// One chunk of row `row` (of the array's row axis) of one batch entry and head.
struct RowTask {
  i64 batch;
  i64 head;
  i64 row;
  i64 chunk;
};

constexpr RowTask row_task(i64 task, i64 chunks, i64 rows, i64 heads) {
  const i64 row = task / chunks;
  return {row / rows / heads, row / rows % heads, row % rows, task % chunks};
}

constexpr i64 forward_naive_tasks(const AttentionParams& p) {
  return p.batch_extent() * p.heads_q * p.q_rows * num_chunks(p.dim_v);
}

constexpr i64 backward_naive_dq_tasks(const AttentionParams& p) {
  return p.batch_extent() * p.heads_q * p.q_rows * num_chunks(p.dim_qk);
}

constexpr i64 backward_naive_captures_tasks(const AttentionParams& p) {
  return p.batch_extent() * p.heads_q * p.q_rows;
}

// Chunks of dK come first, then those of dV; only of those that are asked for.
constexpr i64 dk_chunks(const AttentionParams& p) {
  return p.dk.present() ? num_chunks(p.dim_qk) : 0;
}
constexpr i64 dkdv_chunks(const AttentionParams& p) {
  return dk_chunks(p) + (p.dv.present() ? num_chunks(p.dim_v) : 0);
}
constexpr i64 backward_naive_dkdv_tasks(const AttentionParams& p) {
  return p.kv_batch_extent() * p.heads_kv * p.kv_rows * dkdv_chunks(p);
}

constexpr i64 backward_naive_dbias_tasks(const AttentionParams& p) {
  return p.dbias_extents[0] * p.dbias_extents[1] * p.dbias_extents[2] * p.dbias_extents[3];
}

}  // namespace fulmen
