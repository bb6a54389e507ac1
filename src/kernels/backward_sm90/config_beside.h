// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What calls of the kernels beside backward_sm90 are made of, as plain data: of the one before it,
// of dQ by blocks of queries, and of the fallback. As in config.h.
#pragma once

#include "kernels/backward_sm90/config.h"

namespace fulmen {

// The kernel before: lse and delta of every row, and zeros.
struct BackwardPreprocessConfig {
  DType dtype = DType::kBFloat16;
  i32 dims = 128;  // of v, filled up: 64, 128, 256, 512
  // stats, varlen, sinks (a row has one more key, of value 0), documents (of dK and dV) alone
  ScoreOptions score;

  static constexpr i32 kThreads = 256;
  static constexpr i32 kBlocksPerMultiprocessor = 8;
  // Thread blocks on a multiprocessor, and rows of 32 bytes that a thread loads at once.
  constexpr i32 resident_blocks() const { return score.varlen || score.documents ? 4 : 8; }
  constexpr i32 rows_in_flight() const { return 16 / resident_blocks() / vectors(); }
  constexpr i32 threads() const { return kThreads; }
  constexpr i32 threads_per_row() const { return dims / 8 / vectors(); }
  constexpr i32 vectors() const { return dims > 256 ? 2 : 1; }  // of 16 bytes, of a thread

  bool operator==(const BackwardPreprocessConfig&) const = default;
};

template <class Each>
constexpr void for_each_field(const BackwardPreprocessConfig& config, Each each) {
  each("dtype", config.dtype);
  each("dims", config.dims);
  each("score", config.score);
}

struct BackwardPreprocessParams {
  i32 heads_q;
  i32 q_len;
  i32 padded_q_rows;                // of a head: BackwardParams::padded_rows_per_head
  i32 dim_v;                        // a multiple of 8
  i32 num_rows;                     // batch entries * heads * padded_q_rows, below 2^30
  float* lse_log2;                  // as in BackwardParams
  float* delta;                     // as in BackwardParams
  u32* zeros;                       // counters, and sums but those below, to be cleared
  i64 num_zeros;                    // in 16 bytes
  float* sums;                      // of dQ with score.varlen, with as many rows as lse_log2
  i32 sum_dims;                     // of a row; 0: there are none
  SequenceShape bounds;             // with score.varlen: upper bounds of q_len and kv_len
  i32 kv_rows;                      // of a block of keys
  KeyBlockInfo* key_block_infos;    // as in BackwardParams
  const IdRange* query_ranges;      // (block of queries), with score.documents
  i32 q_rows;                       // of a block of queries
  DocumentBlocks* document_blocks;  // as in BackwardParams
  AttentionParams attention;        // with score.varlen: lengths, offsets, dq, dk, dv to clear;
                                    // sinks, ids
};

// backward_dq_sm90, whose config is ForwardSm90Config. `forward`: as for forward_sm90, with dq
// among its arrays; lse_log2, delta and nonfinite as in BackwardParams. Boxes of the maps: Q and dO
// (64, 64), K and V (64, kv_rows).
struct BackwardDqParams {
  BackwardTensorMaps maps;
  ForwardParams forward;
  i64 padded_rows_per_head;
  const float* lse_log2;
  const float* delta;
  u32* nonfinite;
  bool comes_first;  // as in BackwardParams
};

// The kernel after: gradients of the heads that are marked as not finite, pair by pair.
struct BackwardFallbackConfig {
  DType dtype = DType::kBFloat16;
  UserTerms user{};

  static constexpr i32 kThreads = 256;
  static constexpr i32 kMaxDim = kMostWideDims;
};

template <class Each>
constexpr void for_each_field(const BackwardFallbackConfig& config, Each each) {
  each("dtype", config.dtype);
  each("user", config.user);
}

struct BackwardFallbackParams {
  const u32* nonfinite;  // as in BackwardParams
  AttentionParams attention;
};

}  // namespace fulmen
