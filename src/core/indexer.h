// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_mla_indexer as every backend takes it: arrays in normal form, and sizes.
#pragma once

#include "core/tensor.h"
#include "kernels/attention/chosen_key.cuh"

namespace fulmen {

struct IndexerProblem : IndexerArrays<Tensor> {
  IndexerExtents extents;
};

template <class Array>
struct IndexerArrayOf {
  const char* name;
  Array IndexerArrays<Array>::* member;
};
template <class Array>
inline constexpr IndexerArrayOf<Array> kIndexerArraysOf[] = {
    {"q", &IndexerArrays<Array>::q},
    {"k", &IndexerArrays<Array>::k},
    {"k_scale", &IndexerArrays<Array>::k_scale},
    {"weights", &IndexerArrays<Array>::weights},
    {"kv_lengths", &IndexerArrays<Array>::kv_lengths},
    {"page_table", &IndexerArrays<Array>::page_table},
    {"indices", &IndexerArrays<Array>::indices},
};
using IndexerArray = IndexerArrayOf<Tensor>;
inline constexpr auto& kIndexerArrays = kIndexerArraysOf<Tensor>;

// Checks arrays as the caller gave them, and brings them to normal form. given: the arrays and
// extents.causal. Throws Error.
IndexerProblem validate_indexer(IndexerProblem given);

// Contents of lengths and tables, for arrays in host memory, before anything is written. Throws
// Error.
void check_contents(const IndexerProblem& problem);

// Keys of a request, and where one of them lies, by contents that were checked.
i64 keys_of(const IndexerProblem& problem, i64 batch);
i64 page_of(const IndexerProblem& problem, i64 batch, i64 key);

}  // namespace fulmen
