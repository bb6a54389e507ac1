// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Where a new row of keys and values goes in the caches, and at which position it stands. Contents
// of slots, lengths, tables and offsets are never trusted: what is out of range has its bit of
// Fault, and no row is written by it. The host reads them for arrays of its own, kernels read them
// on the device; both come here.
#pragma once

#include "kernels/attention/sequence.cuh"

namespace fulmen {

// The arrays of an append: tensors on the host, views in kernels.
template <class Array>
struct AppendArrays {
  Array k_cache;      // (page, kv_head, row of the page, dim_qk): written; absent: q alone rotates
  Array v_cache;      // (page, kv_head, row of the page, dim_v): written
  Array k;            // (batch, kv_head, row, dim_qk)    batch is 1 when packed
  Array v;            // (batch, kv_head, row, dim_v)
  Array cu_new;       // (1, 1, 1, sequence + 1)
  Array slots;        // (batch, 1, 1, row)
  Array page_table;   // (sequence, 1, 1, page of the request), or (1, 1, 1, entry)
  Array page_indptr;  // (1, 1, 1, sequence + 1)
  Array kv_lengths;   // (1, 1, 1, sequence)
  Array positions;    // (batch, 1, 1, row)
  Array cos;          // (1, 1, position, pair)
  Array sin;          // (1, 1, position, pair)
  Array q;            // (batch, head, row, dim_qk)
  Array q_out;        // (batch, head, row, dim_qk): written; may be q
  Array k_scale;      // (page, kv_head, row of the page, 1)    broadcast: extent 1, stride 0
  Array v_scale;      // likewise
};

struct AppendExtents {
  i64 sequences = 0;  // the batch; when packed, the arrays have one batch entry
  i64 rows = 0;       // of k: of all sequences together when packed
  i64 pages = 0;      // of the pools
  i64 page_size = 1;
  i64 columns = 0;    // of page_table: a request's pages; with page_indptr all entries
  i64 positions = 0;  // rows of cos and sin
};

// What the arrays say of one request: its rows in k, its part of the table.
struct AppendRequest {
  i64 begin = 0;  // its rows in k
  i64 end = 0;
  i64 table_begin = 0;  // its entries of page_table, with page_indptr
  i64 table_end = 0;
  i64 length = 0;  // kv_lengths, or 0
  u32 faults = 0;  // what is wrong with it; then none of its rows is written
};

// The numbers of a request as they were read: offsets of cu_new and page_indptr where present.
constexpr AppendRequest checked(AppendRequest request, const AppendExtents& extents,
                                bool has_table) {
  const bool fits = 0 <= request.begin && request.begin <= request.end &&
                    request.end <= extents.rows && 0 <= request.table_begin &&
                    request.table_begin <= request.table_end &&
                    request.table_end <= extents.columns;
  if (!fits) request.faults |= kFaultKvOffsets;
  const i64 most = has_table && fits ? (request.table_end - request.table_begin) * extents.page_size
                                     : i64{1} << 62;
  if (request.length < 0 || request.length > most) request.faults |= kFaultKvLengths;
  return request;
}

// Where a row goes. page < 0: nowhere.
struct AppendRow {
  i64 page = -1;
  i64 page_row = 0;
  i64 position = -1;  // in cos and sin; < 0: none
  u32 faults = 0;
};

// slot: -1 to skip the row.
constexpr AppendRow row_at_slot(i64 slot, const AppendExtents& extents) {
  AppendRow row;
  if (slot == -1) return row;
  const i64 page = slot / extents.page_size;
  if (slot < 0 || page >= extents.pages) {
    row.faults = kFaultSlots;
    return row;
  }
  row.page = page;
  row.page_row = slot - page * extents.page_size;
  return row;
}

// page: the table's entry for the row that stands at `place` of its request.
constexpr AppendRow row_at_page(i64 page, i64 place, const AppendExtents& extents) {
  AppendRow row;
  if (page < 0 || page >= extents.pages) {
    row.faults = kFaultPages;
    return row;
  }
  row.page = page;
  row.page_row = place % extents.page_size;
  return row;
}

// A row that rotates needs its position, or goes nowhere.
constexpr void set_position(AppendRow& row, i64 position, const AppendExtents& extents) {
  row.position = position;
  if (position >= 0 && position < extents.positions) return;
  row.position = -1;
  row.page = -1;
  row.faults |= kFaultPositions;
}

}  // namespace fulmen
