// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Every precondition of fulmen.h that the host can see, one sentence each, before anything is
// written. The order of checks: presence, ranks and null pointers, dtypes, shapes, options,
// overlaps. What fulmen.h says of each array is the table in arrays.h.
#pragma once

#include <vector>

#include "core/arrays.h"
#include "core/problem.h"

namespace fulmen {

// head dims up to which every backend computes; 576 is the absorbed form of latent attention.
inline constexpr i64 kMaxDimQk = 576;
inline constexpr i64 kMaxDimV = 512;

// Checks a request and brings it to normal form; arrays that the operation does not look at become
// absent. Throws Error (error.h).
Problem validate(const Request& request, Pointers pointers);

// Likewise for dense_mask: extents of q and k, and the arrays that mask. The operation is unused.
Problem validate_dense_mask(const Request& request);

// The part that looks at options: checks them, and fills what follows from them into a problem
// whose sizes are known. Throws Error with one sentence.
void apply_options(Problem& problem, const Options& options, const Experiment& experiment);

// The expression of a call for the arrays that it reads: fills program and scalars. Throws Error.
void apply_expression(Problem& problem, const Request& request);

// A result that is merged with what o and stats hold, or gradients that are added to what dq, dk
// and dv hold, beside other arrays. Throws Error.
void check_accumulate(const Request& request);

// Whether an array holds sums that the call adds to.
bool is_accumulated(const Request& request, Array array);

// Segments beside other arrays. Throws Error.
void check_segment_presence(const Arrays& arrays);

// Lists of blocks beside the sizes of the problem. Throws Error.
void apply_blocks(Problem& problem, const Request& request);

// The boolean matrix that masks and arrays mean together, entry by entry: quadratic in memory.
// Writes visible (batch, head, q_row, kv_row), packed (sequence, head, longest q, longest kv):
// bool. problem: of validate_dense_mask. Throws Error, before anything is written, when visible
// does not fit or lengths are wrong.
void dense_mask(const Problem& problem, const Tensor& visible);

// The attention of all rows over some of the keys.
struct MergePart {
  Tensor o;    // (batch, head, row, dim)
  Tensor lse;  // (batch, head, row, 1)
};

// A merge of partial attentions, checked and in normal form.
struct MergeProblem {
  std::vector<MergePart> parts;  // over disjoint keys, at least one
  Tensor sinks;                  // (1, head, 1, 1), or absent
  Tensor o;                      // (batch, head, row, dim): written; may be the o of a part
  Tensor lse;                    // (batch, head, row, 1), or absent: written; may be the lse of one
};

// Checks arrays as the caller gave them and brings them to normal form. Throws Error.
MergeProblem validate_merge(MergeProblem given);

}  // namespace fulmen
