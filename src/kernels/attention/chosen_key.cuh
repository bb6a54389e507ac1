// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Which keys an indexer chooses: those of the highest scores. A score and the number of its key
// become one integer that no other key has, larger where the score is higher, and of equal scores
// where the number is lower: the order is total, so the choice is one whatever way leads to it. And
// the arrays of a call, for the host and for kernels.
#pragma once

#include "kernels/attention/sequence.cuh"

namespace fulmen {

// The arrays of an indexer: tensors on the host, views in kernels.
template <class Array>
struct IndexerArrays {
  Array q;           // (batch, head, q_row, dim)
  Array k;           // (page, 1, row of the page, dim); without a table a page is a batch entry
  Array k_scale;     // (page, 1, row of the page, 1)    broadcast: stride 0
  Array weights;     // (batch, head, q_row, 1)
  Array kv_lengths;  // (1, 1, 1, batch)
  Array page_table;  // (batch, 1, 1, page of the request)
  Array indices;     // (batch, 1, q_row, chosen key): written
};

struct IndexerExtents {
  i64 batch = 0;
  i64 heads = 0;
  i64 rows = 0;  // of q
  i64 dim = 0;
  i64 topk = 0;
  i64 pages = 0;  // of the pool
  i64 page_size = 1;
  i64 keys = 0;  // of a request, at most
  bool causal = false;
};

// Keys that row i of a request sees, from its first: all, or with causal those up to its own, where
// the last row stands at the last key.
constexpr i64 keys_of_row(i64 keys, i64 rows, i64 row, bool causal) {
  return causal ? max<i64>(keys - rows + row + 1, 0) : keys;
}

// max(0, x); NaN stays NaN.
template <class Real>
constexpr Real rectified(Real x) {
  return x < Real(0) ? Real(0) : x;
}

// number: below 2^32. Never 0. NaN comes before all numbers, -0 is 0.
constexpr u64 ranked(float score, i64 number) {
  const u32 bits = __builtin_bit_cast(u32, score + 0.0f);
  const u32 rank = score != score ? 0xffffffffu : bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return u64{rank} << 32 | (0xffffffffu - static_cast<u32>(number));
}

constexpr i64 number_of(u64 ranked_key) { return i64{0xffffffffu - static_cast<u32>(ranked_key)}; }

}  // namespace fulmen
