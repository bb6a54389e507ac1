// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What forward_sm80 is compiled to know of a call. One config serves every length, batch and
// stride; an option of the problem that is off leaves no instruction behind. Switches marked
// "ablation" exist to measure what each idea buys.
#pragma once

#include "kernels/params.h"
#include "kernels/score_options.h"
#include "kernels/tile_lists/config.h"

namespace fulmen {

// Tiles of arrays over pairs of queries and keys in shared memory, as kernels copy and read them.
struct PairConfig {
  i32 q_rows, kv_rows, threads;
  bool mask;
  DType bias;
  bool aligned;              // rows of mask and bias are 16-byte vectors at multiples of 16 bytes
  bool interleaved = false;  // see ForwardSm80Config

  // An odd number of what a quad reads at a time, and of 4-byte elements one or two vectors more
  // than there are: so that rows read together meet different banks.
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
  DType dtype = DType::kBFloat16;             // of q, k and v
  DType o_dtype = DType::kNone;               // of o where it has 16 bits; none: dtype
  Precision precision = Precision::kFloat32;  // of float32: kTf32 or k3xTf32
  ScoreOptions score;
  i32 d_qk = 128;        // as computed with, a multiple of 16: zeros fill shorter rows up
  i32 d_v = 128;         // of one block, a multiple of 16: longer rows of V are cut, block by block
  i32 warps = 4;         // of a block
  i32 warps_n = 1;       // that share their rows, see row_group.cuh
  i32 row_tiles = 2;     // of 16 rows, that a warp owns: a B fragment is read once for all of them
  i32 kv_rows = 64;      // keys of an iteration
  i32 stages = 2;        // of K and V, in shared memory
  i32 stage_blocks = 1;  // blocks of keys that arrive together
  bool single_buffer = false;  // one stage: V is copied during Q K^T, the next K during P V
  // Of 32 keys, those numbered 8 c to 8 c + 7 are in lane c of a quad. K and V lie in shared memory
  // in an order that makes it so.
  bool interleaved = false;
  bool q_in_registers = false;  // fragments of Q stay in registers
  i32 min_blocks = 1;           // on a multiprocessor: a bound on registers
  // Rows of q, k, v and o are 16-byte vectors at multiples of 16 bytes, o of dtype.
  bool aligned = false;
  bool even_k = false;  // and as long as computed with: nothing fills them up
  // Every copy of keys is predicated on their number, which holds the copies apart: where few
  // products follow them a burst of copies keeps ldmatrix waiting.
  bool predicates_copies = false;
  bool fixed_length = false;  // no lengths, offsets, rng, windows, prefix or chunks
  bool caches = false;  // keys are found by a page table, or lie behind those that kv_start hides
  bool pair_aligned = false;  // rows of mask and bias are 16-byte vectors at multiples of 16 bytes

  // Ablation.
  bool swizzle = true;       // 16-byte vectors of shared rows exchanged: no bank conflicts
  bool full_blocks = true;   // blocks that every row sees whole do no mask arithmetic
  bool lazy_max = true;      // full blocks keep the maximum and look at the sum of P alone
  bool lazy_rescale = true;  // O is rescaled only when a maximum grew by more than 2^8
  bool folded_scale = true;  // exponents by one fma: s scale - max scale

  // Scores are multiplied by the scale one by one, before the softmax: for a bias, a user's score,
  // and a scale that is not positive.
  constexpr bool scales_scores() const {
    return score.bias != DType::kNone || score.negative_scale || score.user.score;
  }
  // Exponents by subtraction, so that exp(0) is 1 to the last bit.
  constexpr bool subtracts_max() const { return score.fp32_out || !folded_scale; }

  constexpr bool has_8_bits() const { return dtype == DType::kFloat8E4M3; }
  constexpr DType output() const { return o_dtype == DType::kNone ? dtype : o_dtype; }
  // The weight of the maximum, as a power of two: e4m3 ends at 448 and below 2^-10. By how much
  // more a maximum may grow before weights follow.
  constexpr float log2_unit() const { return has_8_bits() ? 4 : 0; }
  constexpr float log2_growth() const { return 8 - log2_unit(); }

  constexpr i32 element_bytes() const { return static_cast<i32>(size_bytes(dtype)); }
  // Tiles count 16-bit words: a row of float32 is one of twice as many, of e4m3 of half.
  constexpr i32 words(i32 dims) const { return dims * element_bytes() / 2; }

  // Whether P may outgrow the maximum that is subtracted by more than 2^100 before the end of the
  // main loop, where that is looked for; f16 has no room for it. Biases that grow along a row make
  // it common: then the maximum follows their sums, block by block.
  constexpr bool checks_sums_at_end() const { return lazy_max && dtype != DType::kFloat16; }
  constexpr bool rescales_by_sum() const {
    return checks_sums_at_end() && (score.alibi || score.bias != DType::kNone || score.user.score);
  }
  // Whether a second main loop may be needed: also where a NaN may have met a bias of -inf, or a
  // score of the user's is not finite.
  constexpr bool may_repeat() const {
    return checks_sums_at_end() || (lazy_max && (score.bias != DType::kNone || score.user.score));
  }

  // Whether score modifier or ALiBi, alone, becomes part of the exponent in blocks that all rows
  // see whole.
  constexpr bool maps_in_exponent() const {
    return score.score_mod != score.alibi && !score.mask && !score.asks_user_mask() &&
           !scales_scores() && !subtracts_max() && dtype != DType::kFloat32;
  }

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
  // Columns of S and P, and dims of O, that a warp computes.
  constexpr i32 warp_columns() const { return kv_rows / warps_n; }
  constexpr i32 warp_dims() const { return d_v / warps_n; }

  // Shared memory, in this order: Q, stages of K and V, stages of mask, bias and document ids of
  // keys, document ids of rows, the interval of keys of each row, what warps that share rows
  // exchange, a word that says whether to repeat the main loop.
  constexpr i32 q_bytes() const { return q_rows() * d_qk * element_bytes(); }
  constexpr i32 stage_columns() const { return kv_rows * stage_blocks; }
  constexpr i32 k_bytes() const { return stage_columns() * d_qk * element_bytes(); }
  constexpr i32 v_bytes() const { return stage_columns() * d_v * element_bytes(); }
  constexpr PairConfig pairs() const {
    return {q_rows(), kv_rows, threads(), score.mask, score.bias, pair_aligned, interleaved};
  }
  constexpr i32 ids_bytes() const { return score.documents ? kv_rows * 8 : 0; }
  constexpr i32 pair_bytes() const { return pairs().bytes() + ids_bytes(); }
  constexpr i32 own_ids_bytes() const { return score.documents ? warps * warp_rows() * 8 : 0; }
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
  // Whether a row of Q has room for one of O in 16 bits.
  constexpr bool o_fits_q() const { return 2 * d_v <= d_qk * element_bytes(); }
  // O goes over all of it.
  constexpr i32 shared_bytes() const {
    return max(repeat_at() + 16,
               aligned && dtype != DType::kFloat32 ? q_rows() * max(d_qk, d_v) * 2 : 0);
  }

  // "" or why no kernel can be compiled for this config.
  constexpr const char* why_invalid() const {
    const bool is_float32 = dtype == DType::kFloat32;
    if (is_float32 ? precision == Precision::kFloat32
                   : dtype != DType::kBFloat16 && dtype != DType::kFloat16 && !has_8_bits()) {
      return "the tensor cores have no product of this dtype and precision";
    }
    if (has_8_bits() && (d_qk % 32 != 0 || d_v % 32 != 0 || kv_rows % 32 != 0 || kv_rows > 128)) {
      return "e4m3 has head dimensions that are multiples of 32 and sums over 32 to 128 keys";
    }
    if (has_8_bits() && (o_dtype == DType::kNone || lazy_max || interleaved || caches ||
                         warps_n > 1 || score.has_pair_terms() || score.dropout ||
                         score.score_mod || score.alibi || scales_scores())) {
      return "e4m3 has warps with rows of their own, and masks that are intervals alone";
    }
    if (d_qk < 16 || d_qk % 16 != 0 || d_v < 16 || d_v % 16 != 0) {
      return "head dimensions are multiples of 16";
    }
    if (is_float32 && d_v % 32 != 0) return "d_v of float32 is a multiple of 32";
    if (warps < 1 || warps > 16) return "a block has 1 to 16 warps";
    if (row_tiles < 1 || row_tiles > 2) return "a warp has one or two tiles of 16 rows";
    if (kv_rows < 16 || kv_rows % 16 != 0) return "kv_rows is a multiple of 16";
    if (stages < 1 || stage_blocks < 1) return "there is at least one stage of one block";
    if (warps_n < 1 || warps % warps_n != 0 || kv_rows % (16 * warps_n) != 0 ||
        d_v % (16 * warps_n) != 0) {
      return "warps_n divides warps, and kv_rows and d_v into multiples of 16";
    }
    if (warps_n > 1 && is_float32) return "warps that share rows exchange 16-bit P";
    if (stage_blocks > 1 && (warps_n > 1 || score.has_pair_terms())) {
      return "stages of several blocks need warps with rows of their own and no arrays over pairs";
    }
    if (single_buffer && (stages > 1 || stage_blocks > 1 || score.has_pair_terms())) {
      return "a single buffer has one stage of one block and no arrays over pairs";
    }
    if (caches && (fixed_length || score.has_pair_terms())) {
      return "caches have lengths, and no arrays over pairs here";
    }
    if (interleaved && score.user.any()) return "a user's expression takes keys in their order";
    if (score.blocks || (score.mask_tiles && (stages > 2 || q_rows() % kPartRows != 0))) {
      return "lists of tiles are those of a mask, in parts of 64 rows, with two stages at most";
    }
    if (predicates_copies && !single_buffer) return "predicated copies need a single buffer";
    if (interleaved && warp_columns() % 32 != 0) return "interleaved keys come in groups of 32";
    if (q_in_registers && (is_float32 || single_buffer)) {
      return "Q in registers is of 16 bits and has arrived before the loop";
    }
    return "";
  }
};

template <class Each>
constexpr void for_each_field(const ForwardSm80Config& config, Each each) {
  each("dtype", config.dtype);
  each("o_dtype", config.o_dtype);
  each("precision", config.precision);
  each("score", config.score);
  each("d_qk", config.d_qk);
  each("d_v", config.d_v);
  each("warps", config.warps);
  each("warps_n", config.warps_n);
  each("row_tiles", config.row_tiles);
  each("kv_rows", config.kv_rows);
  each("stages", config.stages);
  each("stage_blocks", config.stage_blocks);
  each("single_buffer", config.single_buffer);
  each("interleaved", config.interleaved);
  each("q_in_registers", config.q_in_registers);
  each("min_blocks", config.min_blocks);
  each("aligned", config.aligned);
  each("even_k", config.even_k);
  each("predicates_copies", config.predicates_copies);
  each("fixed_length", config.fixed_length);
  each("caches", config.caches);
  each("pair_aligned", config.pair_aligned);
  each("swizzle", config.swizzle);
  each("full_blocks", config.full_blocks);
  each("lazy_max", config.lazy_max);
  each("lazy_rescale", config.lazy_rescale);
  each("folded_scale", config.folded_scale);
}

}  // namespace fulmen
