// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the configs and the plan of sm90's backward pass both read off a problem. Pure.
#pragma once

#include "core/problem.h"
#include "kernels/backward_sm90/config.h"

namespace fulmen {

inline i64 rows_up(i64 rows, i64 unit) { return ceil_div(rows, unit) * unit; }

// Rows of a head of what is kept per query row: every sequence begins at a multiple of
// kConversionRows.
inline i64 padded_rows_per_head(const Problem& problem) {
  if (!problem.packed) return rows_up(problem.q_rows, BackwardSm90Config::kConversionRows);
  return rows_up(problem.q_rows, BackwardSm90Config::kConversionRows) +
         (problem.num_sequences + 1) * BackwardSm90Config::kConversionRows;
}

// Dims of a tile: smaller head dimensions are filled up with zeros.
inline i32 tile_dims(const Problem& problem) {
  return static_cast<i32>(rows_up(max(problem.dim_qk, problem.dim_v), 64));
}

inline bool wants_order(const Problem& problem) {
  return problem.deterministic || problem.batch_invariant;
}

}  // namespace fulmen
