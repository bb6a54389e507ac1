// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the indexer's kernel is launched with: the arrays of fulmen_mla_indexer as views.
#pragma once

#include "kernels/attention/chosen_key.cuh"
#include "kernels/params.h"

namespace fulmen {

struct IndexerParams : IndexerArrays<ArrayView> {
  IndexerExtents extents;
  FaultBytes* faults;  // of the device, or null
};
static_assert(sizeof(IndexerParams) <= 4096);

}  // namespace fulmen
