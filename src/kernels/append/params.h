// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the append kernel is launched with: the arrays of fulmen_append_kv as views, and how the
// work of a row divides into pieces: runs of lanes() elements that one thread reads and writes, or
// two runs that turn together.
#pragma once

#include "kernels/attention/append_row.cuh"
#include "kernels/params.h"

namespace fulmen {

struct AppendParams : AppendArrays<ArrayView> {
  AppendExtents extents;
  i64 all_rows;         // of all batch entries
  i32 rows_of_block;    // at most kMaxAppendRows
  i32 threads_of_row;   // each has one of its pieces, or some
  i32 rotary_dim;       // elements of a head that rotate; may be 0 beside cos
  i32 rotated_of_head;  // pieces of a head of k and q that rotate
  i32 pieces_of_head;   // all pieces of a head of k and q
  i32 pieces_of_v_head;
  i32 k_pieces;  // of a row: those of k come first, then those of v, then those of q
  i32 kv_pieces;
  i32 pieces;
  i32 record_dims;     // numbers of a record, or 0; then a piece is a head of k or of q
  FaultBytes* faults;  // of the device, or null
};
static_assert(sizeof(AppendParams) <= 4096);

}  // namespace fulmen
