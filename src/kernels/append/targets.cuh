// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where the rows of a block go: which page, which row of it, at which position; and the faults of
// requests. Numbers in memory are never trusted: kernels/attention/append_row.cuh.
#pragma once

#include "kernels/append/config.h"
#include "kernels/append/params.h"
#include "kernels/common/array_access.cuh"
#include "kernels/common/faults.cuh"
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

template <class Index>
AppendRequest load_request(const AppendParams& p, i64 sequence) {
  AppendRequest request{0, p.extents.rows, 0, p.extents.columns, 0, 0};
  if (p.cu_new.present()) {
    request.begin = Index::load(p.cu_new, sequence * p.cu_new.strides[3]);
    request.end = Index::load(p.cu_new, (sequence + 1) * p.cu_new.strides[3]);
  }
  if (p.page_indptr.present()) {
    request.table_begin = Index::load(p.page_indptr, sequence * p.page_indptr.strides[3]);
    request.table_end = Index::load(p.page_indptr, (sequence + 1) * p.page_indptr.strides[3]);
  }
  if (p.kv_lengths.present()) {
    request.length = Index::load(p.kv_lengths, sequence * p.kv_lengths.strides[3]);
  }
  return checked(request, p.extents, p.page_table.present());
}

// The last sequence that begins at or before a row; the caller checks that it owns the row.
template <class Index>
i64 sequence_of_row(const AppendParams& p, i64 row) {
  i64 low = 0;
  i64 high = p.extents.sequences - 1;
#pragma unroll 1
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (Index::load(p.cu_new, middle * p.cu_new.strides[3]) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Where the row goes that stands at `place` of its request.
template <class Index>
AppendRow row_in_table(const AppendParams& p, const AppendRequest& request, i64 sequence,
                       i64 place) {
  AppendRow found;
  const i64 column = request.table_begin + place / p.extents.page_size;
  if (column >= request.table_end) {
    found.faults = kFaultSlots;
    return found;
  }
  const i64 table = p.page_indptr.present() ? 0 : sequence;
  const i64 page = Index::load(p.page_table, p.page_table.offset(table, 0, 0, column));
  return row_at_page(page, place, p.extents);
}

// A row of all batch entries: which one of which entry.
struct RowNumber {
  i64 batch = 0;
  i64 row;

  RowNumber(const AppendParams& p, i64 number) : row(number) {
    if (p.cu_new.present()) return;
    batch = number / p.extents.rows;
    row = number - batch * p.extents.rows;
  }

  // The one `count` rows further, by steps, which are few: a division takes longer.
  RowNumber plus(const AppendParams& p, i32 count) const {
    RowNumber next = *this;
    next.row += count;
#pragma unroll 1
    while (!p.cu_new.present() && next.row >= p.extents.rows) {
      next.row -= p.extents.rows;
      ++next.batch;
    }
    return next;
  }
};

// Where a row goes. What depends on no other number is asked for first: each answer takes as long
// as all of them together.
template <class Index>
void find_target(const AppendParams& p, const RowNumber& number, RowTarget& target) {
  const auto [batch, row] = number;
  const auto of_row = [&](const ArrayView& array) {
    return array.present() ? Index::load(array, array.offset(batch, 0, 0, row)) : -1;
  };
  const i64 slot = of_row(p.slots);
  const i64 position = of_row(p.positions);
  AppendRow found;
  if (p.extents.sequences > 0) {
    const i64 sequence = p.cu_new.present() ? sequence_of_row<Index>(p, row) : batch;
    const AppendRequest request = load_request<Index>(p, sequence);
    if (request.faults == 0 && row >= request.begin && row < request.end) {
      const i64 place = request.length + row - request.begin;
      if (p.slots.present()) {
        found = row_at_slot(slot, p.extents);
      } else if (p.page_table.present()) {
        found = row_in_table<Index>(p, request, sequence, place);
      }
      if (p.cos.present()) set_position(found, p.positions.present() ? position : place, p.extents);
    }
  }
  target = {batch, row, found.page, found.page_row, found.position};
  report(p.faults, found.faults);
}

// Some threads of the grid look at one request each, for the faults that the host hears of.
template <class Index>
void record_request_faults(const AppendParams& p, i64 thread, i64 all_threads) {
  const bool has_numbers = p.cu_new.present() || p.page_indptr.present() || p.kv_lengths.present();
  if (p.faults == nullptr || !has_numbers) return;
  u32 found = 0;
#pragma unroll 1
  for (i64 i = thread; i < p.extents.sequences; i += all_threads) {
    found |= load_request<Index>(p, i).faults;
  }
  report(p.faults, found);
}

}  // namespace fulmen
