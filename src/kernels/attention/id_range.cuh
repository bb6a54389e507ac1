// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The documents that a block of rows can belong to, as an interval of ids, and how many blocks of
// keys have one. Shared by kernels, planner and tests; tile/document_ranges.cuh fills and reads it.
#pragma once

#include "kernels/base.cuh"

namespace fulmen {

struct IdRange {
  i64 least = 0x7fffffffffffffff;
  i64 largest = -0x7fffffffffffffff - 1;

  constexpr void add(i64 id) {
    least = min(least, id);
    largest = max(largest, id);
  }
  constexpr bool meets(const IdRange& other) const {
    return least <= other.largest && other.least <= largest;
  }
  // Whether all ids of both are the same one.
  constexpr bool is_one_with(const IdRange& other) const {
    return least == largest && other.least == other.largest && least == other.least;
  }
};

// Blocks of keys are numbered through all sequences (tile/document_ranges.cuh): numbers in use, and
// some more where sequences are packed.
constexpr i64 num_key_ranges(i64 kv_rows, i64 num_sequences, bool packed, i64 block_rows) {
  if (packed) return kv_rows / block_rows + num_sequences;
  return ceil_div(kv_rows, block_rows) * num_sequences;
}

}  // namespace fulmen
