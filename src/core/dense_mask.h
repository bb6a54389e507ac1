// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The boolean matrix that the mask options mean, entry by entry: the definition of their
// combination, quadratic in memory, and what mask.cuh and block_range.cuh are tested against. It is
// written without them on purpose.
#pragma once

#include "core/problem.h"

namespace fulmen {

// Whether query row i of a sequence sees key j, by causal, window, prefix and chunk alone.
bool is_visible(const IntervalMask& mask, const SequenceShape& shape, i64 q_row, i64 kv_row);

// Writes visible (batch, head, q_row, kv_row), packed (sequence, head, longest q, longest kv):
// bool. problem: of validate_dense_mask. Throws Error, before anything is written, when visible
// does not fit or lengths are wrong.
void dense_mask(const Problem& problem, const Tensor& visible);

}  // namespace fulmen
