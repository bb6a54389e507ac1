// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Attention over the union of keys from the attention over each part of them.
#pragma once

#include "core/merge_problem.h"

namespace fulmen::cpu {

// Writes every row of o and, where present, lse. Sums in float64. problem: of validate_merge, its
// arrays in host memory. Rows are shared among the threads of the pool.
void merge(const MergeProblem& problem);

}  // namespace fulmen::cpu
