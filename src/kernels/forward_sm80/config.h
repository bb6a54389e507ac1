// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What is known of a call to the kernels that compute with mma.sync (Ampere and later) when they
// are compiled. One config serves every length, batch and stride; an option of the problem that is
// off leaves no instruction behind. Switches marked "ablation" exist to measure what each idea
// buys.
#pragma once

#include "kernels/params.h"

namespace fulmen {

// Tiles of arrays over pairs of queries and keys in shared memory, as kernels copy and read them.
struct PairConfig {
  i32 q_rows, kv_rows, threads;
  bool mask;
  DType bias;
  bool aligned;              // rows of mask and bias are 16-byte units on multiples of 16 bytes
  bool interleaved = false;  // see ForwardSm80Config

  // An odd number of what a quad reads at a time, and of 4-byte elements one or two units more than
  // there are: so that rows read together meet different banks.
  constexpr i32 row_bytes(i32 size) const {
    if (interleaved) return size == 4 ? kv_rows * 4 + 16 : (kv_rows / 32 | 1) * 32 * size;
    return size == 4 ? kv_rows * 4 + 32 : (kv_rows * size / 16 | 1) * 16;
  }
  constexpr i32 mask_bytes() const { return mask ? q_rows * row_bytes(1) : 0; }
  constexpr i32 bias_bytes() const {
    return bias == DType::kNone ? 0 : q_rows * row_bytes(static_cast<i32>(size_bytes(bias)));
  }
  constexpr i32 bytes() const { return mask_bytes() + bias_bytes(); }
};

struct ForwardSm80Config {
  DType dtype = DType::kBFloat16;
  Precision precision = Precision::kFloat32;  // of float32: kTf32 or k3xTf32
  i32 d_qk = 128;        // as computed with, a multiple of 16: zeros fill shorter rows up
  i32 d_v = 128;         // of one block, a multiple of 16: longer rows of V are cut, block by block
  i32 warps = 4;         // of a block
  i32 warps_n = 1;       // forward: that share their rows, see row_group.cuh
  i32 row_tiles = 2;     // of 16 rows, that a warp owns: a B fragment is read once for all of them
  i32 kv_rows = 64;      // rows of the other side that a block meets at a time
  i32 stages = 2;        // of the tiles that change, in shared memory
  i32 stage_blocks = 1;  // forward: blocks of columns that arrive together
  // Forward, one stage: V arrives under Q K^T, the next K under P V.
  bool single_buffer = false;
  // Forward: of 32 keys, those numbered 8 c to 8 c + 7 are thread c's of a quad. K and V lie in
  // shared memory in an order that makes it so.
  bool interleaved = false;
  bool q_in_registers = false;  // forward: fragments of Q stay in registers
  i32 min_blocks = 1;           // on a multiprocessor: a bound on registers
  // Rows of q, k, v and o are 16-byte units on multiples of 16 bytes, o of dtype.
  bool aligned = false;
  bool even_k = false;  // and as long as computed with: nothing fills them up
  // Forward: all blocks of keys are copied with checks, which hold the copies apart: where few
  // products follow them a burst of copies keeps ldmatrix waiting.
  bool predicates_copies = false;

  // Options of the problem.
  bool fixed_length = false;  // forward: no lengths, offsets, rng, windows, prefix or chunks
  bool mask = false;
  DType bias = DType::kNone;
  bool pair_aligned = false;  // rows of mask and bias are 16-byte units on multiples of 16 bytes
  bool documents = false;
  bool scales_scores = false;  // scores are scaled one by one, in nats: for bias, scale <= 0
  bool softcap = false;
  bool alibi = false;
  bool dropout = false;
  bool stats = false;  // row_max and row_sum are asked for
  bool subtracts_max =
      false;  // exponents by subtraction, so that exp(0) is 1: for bias, float32 output

  // Ablation.
  bool swizzle = true;       // 16-byte units of shared rows exchanged, so that no banks collide
  bool full_blocks = true;   // blocks that every row sees whole do no mask arithmetic
  bool lazy_max = true;      // full blocks keep the shift and look at the sum of weights alone
  bool lazy_rescale = true;  // O is rescaled only when a maximum grew by more than 2^8

  constexpr i32 element_bytes() const { return static_cast<i32>(size_bytes(dtype)); }
  // Tiles count 16-bit words: a row of float32 is one of twice as many.
  constexpr i32 words(i32 dims) const { return dims * element_bytes() / 2; }

  // Whether weights may outgrow their shift by more than 2^100 until the end of the walk, where
  // that is looked for; f16 has no room for it. Biases that grow along a row make it common: then
  // the shift follows their sums, block by block.
  constexpr bool checks_sums_at_end() const { return lazy_max && dtype != DType::kFloat16; }
  constexpr bool rescales_by_sum() const {
    return checks_sums_at_end() && (alibi || bias != DType::kNone);
  }
  // Whether a second walk may be needed: also where a NaN may have met a bias of -inf.
  constexpr bool may_repeat() const {
    return checks_sums_at_end() || (lazy_max && bias != DType::kNone);
  }

  // Whether softcap or ALiBi, alone, becomes part of the exponent in blocks that all rows see
  // whole.
  constexpr bool maps_in_exponent() const {
    return softcap != alibi && !mask && bias == DType::kNone && !scales_scores && !subtracts_max &&
           dtype != DType::kFloat32;
  }

  // Whether arrays over pairs arrive beside K.
  constexpr bool has_pairs() const { return mask || bias != DType::kNone || documents; }

  // The first column of a lane's scores; how far that of float f lies behind it.
  constexpr i32 first_column_of(u32 lane) const {
    return static_cast<i32>((interleaved ? 8 : 2) * (lane % 4));
  }
  constexpr i32 column_of(i32 f) const {
    return interleaved ? f / 16 * 32 + f / 4 % 4 * 2 + f % 2 : f / 4 * 8 + f % 2;
  }

  constexpr i32 threads() const { return 32 * warps; }
  constexpr i32 warp_rows() const { return 16 * row_tiles; }
  constexpr i32 q_rows() const { return warp_rows() * warps / warps_n; }
  // Columns of a block that a warp weighs, dims of O that it adds up.
  constexpr i32 warp_columns() const { return kv_rows / warps_n; }
  constexpr i32 warp_dims() const { return d_v / warps_n; }

  // Shared memory of the forward kernel, in this order: Q, stages of K and V, stages of mask,
  // bias and numbers of documents, those of the rows, limits of the rows, what the warps of a team
  // exchange, a word that says whether to walk again.
  constexpr i32 q_bytes() const { return q_rows() * d_qk * element_bytes(); }
  constexpr i32 stage_columns() const { return kv_rows * stage_blocks; }
  constexpr i32 k_bytes() const { return stage_columns() * d_qk * element_bytes(); }
  constexpr i32 v_bytes() const { return stage_columns() * d_v * element_bytes(); }
  constexpr PairConfig pairs() const {
    return {q_rows(), kv_rows, threads(), mask, bias, pair_aligned, interleaved};
  }
  constexpr i32 ids_bytes() const { return documents ? kv_rows * 8 : 0; }
  constexpr i32 pair_bytes() const { return pairs().bytes() + ids_bytes(); }
  constexpr i32 own_ids_bytes() const { return documents ? warps * warp_rows() * 8 : 0; }
  constexpr i32 row_range_bytes() const { return warps * warp_rows() * 8; }
  constexpr i32 p_bytes() const { return q_rows() * kv_rows * 2; }
  constexpr i32 exchange_bytes() const {
    return warps_n == 1 ? 0 : p_bytes() + warps * warp_rows() * 4 + warps * 4;
  }
  constexpr i32 pairs_at() const { return q_bytes() + stages * (k_bytes() + v_bytes()); }
  constexpr i32 own_ids_at() const { return pairs_at() + stages * pair_bytes(); }
  constexpr i32 row_ranges_at() const { return own_ids_at() + own_ids_bytes(); }
  constexpr i32 exchange_at() const { return row_ranges_at() + row_range_bytes(); }
  constexpr i32 repeat_at() const { return exchange_at() + exchange_bytes(); }
  // O goes over all of it.
  constexpr i32 forward_shared_bytes() const {
    return max(repeat_at() + 16,
               aligned && dtype != DType::kFloat32 ? q_rows() * max(d_qk, d_v) * 2 : 0);
  }

  constexpr bool valid() const {
    const bool has_products = dtype == DType::kFloat32
                                  ? precision != Precision::kFloat32 && d_v % 32 == 0
                                  : dtype == DType::kBFloat16 || dtype == DType::kFloat16;
    return has_products && d_qk % 16 == 0 && 16 <= d_qk && d_v % 16 == 0 && 16 <= d_v &&
           1 <= warps && warps <= 16 && 1 <= row_tiles && row_tiles <= 2 && kv_rows % 16 == 0 &&
           16 <= kv_rows && 1 <= stages && 1 <= warps_n && warps % warps_n == 0 &&
           kv_rows % (16 * warps_n) == 0 && d_v % (16 * warps_n) == 0 &&
           (warps_n == 1 || dtype != DType::kFloat32) && 1 <= stage_blocks &&
           (stage_blocks == 1 || (warps_n == 1 && !has_pairs())) &&
           (!single_buffer || (stages == 1 && stage_blocks == 1 && !has_pairs())) &&
           (!predicates_copies || single_buffer) && (!interleaved || warp_columns() % 32 == 0) &&
           (!q_in_registers || (dtype != DType::kFloat32 && !single_buffer));
  }
};

}  // namespace fulmen
