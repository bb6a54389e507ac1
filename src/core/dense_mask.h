// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The boolean matrix that the mask options and arrays mean together, entry by entry: quadratic in
// memory.
#pragma once

#include "core/problem.h"

namespace fulmen {

// Writes visible (batch, head, q_row, kv_row), packed (sequence, head, longest q, longest kv):
// bool. problem: of validate_dense_mask. Throws Error, before anything is written, when visible
// does not fit or lengths are wrong.
void dense_mask(const Problem& problem, const Tensor& visible);

}  // namespace fulmen
