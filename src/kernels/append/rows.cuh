// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a block of the append kernel finds out before it moves anything: for each of its rows, where
// it comes from, where it goes and at which position it stands. One thread a row; and the threads
// of the grid look at one request each for the faults of the host's word.
#pragma once

#include "kernels/append/config.h"
#include "kernels/append/params.h"
#include "kernels/common/array_access.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// One row of a block, in shared memory.
struct RowTarget {
  i64 batch;
  i64 row;   // of the batch entry, in k, v and q
  i64 page;  // < 0: not appended
  i64 page_row;
  i64 position;  // in cos and sin; < 0: not rotated, and its q is not written
};
static_assert(sizeof(RowTarget) == kRowTargetBytes);

inline AppendRequest load_request(const AppendParams& p, i64 sequence) {
  AppendRequest request{0, p.extents.rows, 0, p.extents.columns, 0, 0};
  if (p.cu_new.present()) {
    request.begin = load_index(p.cu_new, sequence * p.cu_new.strides[3]);
    request.end = load_index(p.cu_new, (sequence + 1) * p.cu_new.strides[3]);
  }
  if (p.page_indptr.present()) {
    request.table_begin = load_index(p.page_indptr, sequence * p.page_indptr.strides[3]);
    request.table_end = load_index(p.page_indptr, (sequence + 1) * p.page_indptr.strides[3]);
  }
  if (p.kv_lengths.present()) {
    request.length = load_index(p.kv_lengths, sequence * p.kv_lengths.strides[3]);
  }
  return checked(request, p.extents, p.page_table.present());
}

// The last sequence that begins at or before a row; the caller checks that it owns the row.
inline i64 sequence_of_row(const AppendParams& p, i64 row) {
  i64 low = 0;
  i64 high = p.extents.sequences - 1;
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (load_index(p.cu_new, middle * p.cu_new.strides[3]) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Where a row of a request that holds it goes.
inline AppendRow load_row(const AppendParams& p, const AppendRequest& request, i64 sequence,
                          i64 batch, i64 row) {
  const i64 place = request.length + row - request.begin;
  AppendRow found;
  if (p.slots.present()) {
    found = row_at_slot(load_index(p.slots, p.slots.offset(batch, 0, 0, row)), p.extents);
  } else if (p.page_table.present()) {
    const i64 column = request.table_begin + place / p.extents.page_size;
    if (column < request.table_end) {
      const i64 table = p.page_indptr.present() ? 0 : sequence;
      const i64 page = load_index(p.page_table, p.page_table.offset(table, 0, 0, column));
      found = row_at_page(page, place, p.extents);
    } else {
      found.faults = kFaultSlots;
    }
  }
  if (p.rotary_dim == 0) return found;
  const bool has_positions = p.positions.present();
  set_position(
      found, has_positions ? load_index(p.positions, p.positions.offset(batch, 0, 0, row)) : place,
      p.extents);
  return found;
}

// Row `number` of all batch entries.
inline void find_target(const AppendParams& p, i64 number, RowTarget& target) {
  const bool packed = p.cu_new.present();
  const i64 batch = packed ? 0 : number / p.extents.rows;
  const i64 row = number - batch * p.extents.rows;
  AppendRow found;
  if (p.extents.sequences > 0) {
    const i64 sequence = packed ? sequence_of_row(p, row) : batch;
    const AppendRequest request = load_request(p, sequence);
    if (request.faults == 0 && row >= request.begin && row < request.end) {
      found = load_row(p, request, sequence, batch, row);
    }
  }
  target.batch = batch;
  target.row = row;
  target.page = found.page;
  target.page_row = found.page_row;
  target.position = found.position;
  if (found.faults != 0 && p.faults != nullptr) ptx::set_bits(p.faults, found.faults);
}

inline void record_request_faults(const AppendParams& p, i32 num_threads) {
  const bool has_numbers = p.cu_new.present() || p.page_indptr.present() || p.kv_lengths.present();
  if (p.faults == nullptr || !has_numbers) return;
  const i64 all_threads = static_cast<i64>(ptx::num_blocks()) * num_threads;
  u32 found = 0;
  for (i64 i = static_cast<i64>(ptx::block_index()) * num_threads + ptx::thread_index();
       i < p.extents.sequences; i += all_threads) {
    found |= load_request(p, i).faults;
  }
  if (found != 0) ptx::set_bits(p.faults, found);
}

}  // namespace fulmen
