// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A merge of partial attentions, checked and in normal form, as validate.h does for attention.
#pragma once

#include <vector>

#include "core/problem.h"

namespace fulmen {

// The attention of all rows over some of the keys.
struct MergePart {
  Tensor o;    // (batch, head, row, dim)
  Tensor lse;  // (batch, head, row, 1)
};

struct MergeProblem {
  std::vector<MergePart> parts;  // over disjoint keys, at least one
  Tensor sinks;                  // (1, head, 1, 1), or absent
  Tensor o;                      // (batch, head, row, dim): written; may be the o of a part
  Tensor lse;                    // (batch, head, row, 1), or absent: written; may be the lse of one
};

// Checks arrays as the caller gave them and brings them to normal form. Throws Error.
MergeProblem validate_merge(MergeProblem given);

}  // namespace fulmen
