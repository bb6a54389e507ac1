// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the merge kernel is launched with: fulmen_merge's arrays as views. Passed by value, within
// the 4 KiB that every driver takes.
#pragma once

#include "kernels/params.h"

namespace fulmen {

// The attention of all rows over some of the keys.
struct MergePartView {
  ArrayView o;    // (batch, head, row, dim)
  ArrayView lse;  // (batch, head, row, 1)
};

struct MergeParams {
  static constexpr i32 kMaxParts = 32;

  MergePartView parts[kMaxParts];
  i32 num_parts;
  ArrayView sinks;  // (1, head, 1, 1), or absent
  ArrayView o;      // (batch, head, row, dim)
  ArrayView lse;    // (batch, head, row, 1), or absent
  i64 heads;
  i64 rows;
  i64 num_rows;  // of all batch entries and heads together
  i64 dim;
};
static_assert(sizeof(MergeParams) <= 4096);

}  // namespace fulmen
