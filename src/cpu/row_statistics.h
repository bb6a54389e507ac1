// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// First pass of the tiled backward: what every row brings along. From stats (or lse), o, dout and
// dlse to row_max, 1 / l, delta = rowsum(dO O), and the row's share of dsinks; and zero gradients
// for rows that see nothing. A task is a block of query rows of one head.
#pragma once

#include "cpu/head_block.h"
#include "plan/tiled_workspace.h"

namespace fulmen::cpu {

template <class Real>
void prepare_rows(const Problem& problem, const TileSizes& sizes,
                  const BackwardShared<Real>& shared, const BackwardScratch<Real>& scratch,
                  const HeadBlock& at);

// dsinks[head] = -sum over rows of p_sink delta, in the order of the rows.
template <class Real>
void store_dsinks(const Problem& problem, const BackwardShared<Real>& shared);

}  // namespace fulmen::cpu
