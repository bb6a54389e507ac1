// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two halves of a backward call to the kernels that compute with mma.sync (Ampere and later):
// BackwardSm80Config, known when a kernel is compiled, and BackwardSm80Params, known when it is
// launched. One of each serves all kernels of a call: preprocess, main kernel, postprocess and
// dbias. One config serves every length, batch and stride.
#pragma once

#include "kernels/forward_sm80/config.h"

namespace fulmen {

struct BackwardSm80Config {
  DType dtype = DType::kBFloat16;
  Precision precision = Precision::kFloat32;  // of float32: kTf32 or k3xTf32
  ScoreOptions score;
  i32 d_qk = 128;  // as computed with: zeros fill shorter rows up
  i32 d_v = 128;
  i32 warps = 8;
  i32 q_rows = 64;    // queries of an iteration (m_block)
  i32 kv_rows = 128;  // keys that a block owns (n_block)
  i32 stages = 2;     // of Q and dO in shared memory
  // Tiles of a warp: of S and dP at a time, of dK and dV, of dQ at a time. All multiples of 16.
  i32 s_rows = 32, s_columns = 32;
  i32 dkv_rows = 32;  // and as many dims as are left for it, see kv_parts()
  i32 dq_rows = 32, dq_dims = 32;
  i32 pair_stages = 1;         // of dS: with two, dQ of an iteration is computed in the next
  bool split_roles = false;    // half of the warps compute P and dV, the others dS and dK
  bool swap_ab = false;        // and keep S^T and dP^T in registers, see BackwardPairsSwapAbSm80
  bool split_d = false;        // warps of a group split the dims of Q K^T, see SplitDProductSm80
  bool unrolled = false;       // warp tiles of a role are unrolled where nothing is masked
  bool late_prefetch = false;  // each role prefetches when it has no scores in registers
  bool zeroes_dq = false;      // blocks zero dq_accum; else backward_preprocess_sm80 zeroes all
  i32 min_blocks = 1;          // on a multiprocessor: a bound on registers
  // Rows of q, k, v and dout are 16-byte vectors at multiples of 16 bytes; for
  // backward_preprocess_sm80 those of o and dout, and LSE or stats are float32.
  bool aligned = false;
  bool pair_aligned = false;  // likewise rows of mask and bias

  // Gradients that are asked for.
  bool dq = true;
  bool dk = true;
  bool dv = true;
  bool dbias = false;
  bool accumulates_dbias = false;  // dbias is broadcast along the batch or heads
  bool tiled_dbias = false;  // its rows are those of tiles of dS, 16-byte vectors of the same type
  bool split_sum = false;    // sinks and dlse: P and the share of lse have different denominators
  bool deterministic = false;  // blocks add to dQ in the order of their keys
  // Hopper and later: four sums of dQ, or four matrices, in one instruction; kernels of a call
  // begin while the one before ends.
  bool hopper = false;

  // Ablation.
  bool swizzle = true;      // as in ForwardSm80Config
  bool full_blocks = true;  // blocks that every row sees whole do no mask arithmetic

  // Scores are multiplied by the scale one by one, as in ForwardSm80Config.
  constexpr bool scales_scores() const {
    return score.bias != DType::kNone || score.score_mod || score.alibi || score.negative_scale ||
           score.user.score;
  }

  // Tiles count 16-bit words, as those of ForwardSm80Config.
  constexpr i32 element_bytes() const { return static_cast<i32>(size_bytes(dtype)); }
  constexpr i32 words(i32 elems) const { return elems * element_bytes() / 2; }

  constexpr i32 threads() const { return 32 * warps; }
  // Warps side by side along the keys of dK and dV; the others share the dims.
  constexpr i32 role_warps() const { return split_roles ? warps / 2 : warps; }
  constexpr i32 kv_groups() const { return kv_rows / dkv_rows; }
  constexpr i32 kv_parts() const { return role_warps() / kv_groups(); }
  // A group of warps computes the columns of P and dS that its dK and dV need, and no others.
  constexpr i32 group_columns() const { return max(dkv_rows, s_columns); }
  constexpr i32 num_groups() const { return kv_rows / group_columns(); }
  constexpr i32 group_warps() const { return role_warps() / num_groups(); }
  constexpr i32 group_tiles() const { return q_rows / s_rows * (group_columns() / s_columns); }
  constexpr i32 parts() const { return (group_tiles() + group_warps() - 1) / group_warps(); }
  constexpr i32 group_barriers() const { return group_warps() == 1 ? 0 : 2 * num_groups(); }
  constexpr i32 dk_dims() const { return d_qk / kv_parts(); }
  constexpr i32 dv_dims() const { return d_v / kv_parts(); }
  constexpr i32 dq_tiles() const { return q_rows / dq_rows * (d_qk / dq_dims); }
  constexpr i32 dq_elems() const { return q_rows * d_qk; }

  constexpr bool needs_ds() const { return dq || dk || dbias || score.user.captures; }
  // dS is kept times 2^ds_shift(); dbias is dS as it is. P likewise, and where one role reads P of
  // the other as float16, which has nothing below 2^-24, times 2^10.
  constexpr i32 ds_shift() const { return dbias ? 0 : weight_shift(dtype); }
  constexpr i32 p_shift() const {
    return split_roles && dtype == DType::kFloat16 ? 10 : ds_shift();
  }
  // What undoes them in sums of dS, in those of P; what makes P that of dS.
  constexpr float ds_scale() const { return 1.f / static_cast<float>(1 << ds_shift()); }
  constexpr float p_scale() const { return 1.f / static_cast<float>(1 << p_shift()); }
  constexpr float p_to_ds() const { return p_scale() / ds_scale(); }
  // Whether arrays over pairs, or a user's mask, say what is hidden: then any pair may be.
  constexpr bool hides_pairs() const { return score.hides_before_user() || score.asks_user_mask(); }
  constexpr bool copies_pairs() const { return score.mask || score.bias != DType::kNone; }

  // Shared memory in this order: K, V, stages of Q, dO, row statistics, mask and bias; P, dS,
  // partial sums of split_d, the block's KeyBlockSm80, document ids of the keys.
  constexpr i32 k_bytes() const { return kv_rows * d_qk * element_bytes(); }
  constexpr i32 v_bytes() const { return kv_rows * d_v * element_bytes(); }
  constexpr i32 q_bytes() const { return q_rows * d_qk * element_bytes(); }
  constexpr i32 dout_bytes() const { return q_rows * d_v * element_bytes(); }
  // RowStatsSm80, KeyRangeSm80, document id
  constexpr i32 row_bytes() const { return q_rows * (16 + 8 + (score.documents ? 8 : 0)); }
  constexpr PairConfig pairs() const {
    return {q_rows, kv_rows, threads(), score.mask, score.bias, pair_aligned};
  }
  constexpr i32 stage_bytes() const {
    return q_bytes() + dout_bytes() + row_bytes() + pairs().bytes();
  }
  constexpr i32 pair_bytes() const { return q_rows * kv_rows * element_bytes(); }
  // Of each of two roles.
  constexpr i32 split_d_bytes() const {
    return split_d ? group_warps() * (group_warps() - 1) * s_rows * s_columns * 4 : 0;
  }
  // Where registers are short the KeyBlockSm80 is saved in shared memory.
  constexpr bool saves_key_block() const { return split_roles && !swap_ab; }
  constexpr i32 key_block_bytes() const { return saves_key_block() ? 64 : 0; }
  constexpr i32 ids_bytes() const { return score.documents ? kv_rows * 8 : 0; }
  constexpr i32 shared_bytes() const {
    return k_bytes() + v_bytes() + stages * stage_bytes() + (1 + pair_stages) * pair_bytes() +
           2 * split_d_bytes() + key_block_bytes() + ids_bytes();
  }

  // A warp's tile of S, for the structs that backward_sm80 shares with forward_sm80.
  constexpr ForwardSm80Config scores() const {
    ForwardSm80Config config;
    config.dtype = dtype;
    config.d_qk = d_qk;
    config.d_v = d_v;
    config.warps = warps;
    config.row_tiles = s_rows / 16;
    config.kv_rows = s_columns;
    config.score.negative_scale = scales_scores();
    config.score.score_mod = score.score_mod;
    config.score.alibi = score.alibi;
    config.score.dropout = score.dropout;
    config.score.user = score.user;
    config.swizzle = swizzle;
    return config;
  }

  // "" or why no kernel can be compiled for this config.
  constexpr const char* why_invalid() const {
    const bool is_float32 = dtype == DType::kFloat32;
    if (is_float32 ? precision == Precision::kFloat32
                   : dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
      return "the tensor cores have no product of this dtype and precision";
    }
    if (warps < 1 || warps > 16) return "a block has 1 to 16 warps";
    if (stages < 1 || stages > 2 || pair_stages < 1 || pair_stages > stages) {
      return "there are one or two stages, and no more of dS than of Q";
    }
    const auto divides = [](i32 part, i32 whole) { return part % 16 == 0 && whole % part == 0; };
    if (q_rows % 16 != 0 || !divides(s_rows, q_rows) || !divides(s_columns, kv_rows)) {
      return "tiles of S are multiples of 16 that divide q_rows and kv_rows";
    }
    if (!divides(dkv_rows, kv_rows) || !divides(dq_rows, q_rows) || !divides(dq_dims, d_qk)) {
      return "tiles of dK, dV and dQ are multiples of 16 that divide the block's";
    }
    if (role_warps() % kv_groups() != 0 || !divides(dk_dims(), d_qk) || !divides(dv_dims(), d_v)) {
      return "the warps of a role divide dK and dV into multiples of 16";
    }
    if (group_columns() % dkv_rows != 0 || group_columns() % s_columns != 0 ||
        kv_rows % group_columns() != 0) {
      return "groups of warps own whole tiles of S, dK and dV";
    }
    if (score.blocks || (score.mask_tiles && kv_rows % kPartRows != 0)) {
      return "lists of tiles are those of a mask, in parts of 64 keys";
    }
    if (zeroes_dq && !dq) return "there is no dQ to zero";
    return why_invalid_roles();
  }

 private:
  constexpr const char* why_invalid_roles() const {
    if (!split_roles) {
      if (split_d || swap_ab || late_prefetch) return "needs split roles";
      return s_rows <= 32 ? "" : "a warp with both roles has at most 32 rows of S";
    }
    if (warps % 2 != 0 || 1 + group_barriers() + role_warps() * parts() > 16) {
      return "split roles need an even number of warps and at most 16 named barriers";
    }
    if (d_qk != d_v || !dq || !dk || !dv || score.dropout || score.score_mod || score.user.any() ||
        split_sum) {
      return "split roles compute all of dQ, dK, dV, of equal dims, without these options";
    }
    if (split_d &&
        (s_rows != 16 || s_columns != 16 || num_groups() != 1 || group_tiles() != group_warps())) {
      return "split_d needs one group of warps, each with one tile of 16 x 16";
    }
    if (swap_ab && (late_prefetch || kv_parts() != 1 || dkv_rows != s_columns || d_qk > 64)) {
      return "swap_ab needs warps that own whole rows of dK and dV of at most 64 dims";
    }
    return "";
  }
};

template <class Each>
constexpr void for_each_field(const BackwardSm80Config& config, Each each) {
  each("dtype", config.dtype);
  each("precision", config.precision);
  each("score", config.score);
  each("d_qk", config.d_qk);
  each("d_v", config.d_v);
  each("warps", config.warps);
  each("q_rows", config.q_rows);
  each("kv_rows", config.kv_rows);
  each("stages", config.stages);
  each("s_rows", config.s_rows);
  each("s_columns", config.s_columns);
  each("dkv_rows", config.dkv_rows);
  each("dq_rows", config.dq_rows);
  each("dq_dims", config.dq_dims);
  each("pair_stages", config.pair_stages);
  each("split_roles", config.split_roles);
  each("swap_ab", config.swap_ab);
  each("split_d", config.split_d);
  each("unrolled", config.unrolled);
  each("late_prefetch", config.late_prefetch);
  each("zeroes_dq", config.zeroes_dq);
  each("min_blocks", config.min_blocks);
  each("aligned", config.aligned);
  each("pair_aligned", config.pair_aligned);
  each("dq", config.dq);
  each("dk", config.dk);
  each("dv", config.dv);
  each("dbias", config.dbias);
  each("accumulates_dbias", config.accumulates_dbias);
  each("tiled_dbias", config.tiled_dbias);
  each("split_sum", config.split_sum);
  each("deterministic", config.deterministic);
  each("hopper", config.hopper);
  each("swizzle", config.swizzle);
  each("full_blocks", config.full_blocks);
}

// What every pair of a query row takes from it:
//   E = exp(score - row_max) / 2^sum_log2,  P = E share,  dS = E (share dP + offset)
// E and P times 2^config.p_shift(), which is taken from sum_log2, dS times 2^config.ds_shift().
// A row past the end of its sequence has sum_log2 = inf. share is 1 unless config.split_sum.
struct alignas(16) RowStatsSm80 {
  float row_max;  // in nats
  float sum_log2;
  float offset;  // dlse - share dot(dO, O)
  float share;
};

// The keys that the structured masks let a row see.
struct alignas(8) KeyRangeSm80 {
  i32 begin, end;
};

// Blocks of keys are launched by groups of neighbouring key/value heads; while they start they zero
// dq_accum of a group that comes later, see DqZeroingSm80.
struct HeadGroupsSm80 {
  u32 kv_heads;       // of a group
  u32 n_blocks;       // of keys, of a group
  u32 m_blocks;       // of queries, of a group
  u32 m_blocks_each;  // of these, that a block zeroes
  u32 all_m_blocks;   // of all groups
  u32 ahead;          // how many groups later those come that a block zeroes
};

// The arrays come last: heads look for a user's expression behind them.
struct BackwardSm80Params {
  // (batch, head, m_block): config.q_rows RowStatsSm80, as many KeyRangeSm80, as many document ids
  u8* row_stats;
  KeyRangeSm80* key_bounds;  // (batch, head, m_block): keys with a document of its rows
  float* dq_accum;           // (batch, head, m_block, config.dq_elems()), see DqAccumLayoutSm80
  float* dbias_accum;        // (dbias_extents); config.accumulates_dbias
  u32* nonfinite_m_blocks;   // (batch, head, m_block): dQ may hold NaN of masked pairs
  u32* nonfinite_n_blocks;   // (batch, kv_head, n_block): so may dK and dV
  u32* dq_semaphores;        // (batch, head, m_block): blocks that have added to dQ; deterministic
  u32* next_n_block;         // number of blocks that have started; deterministic
  u32* zeroed_blocks;        // (group of key/value heads): blocks that have zeroed their share
  HeadGroupsSm80 groups;
  TileLists tile_lists;  // by keys; with config.score.mask_tiles
  AttentionParams attention;
};

// Blocks of backward_postprocess_sm80: one for each m_block, then one for every 32 n_blocks, whose
// marks it reads.
inline constexpr i32 kSm80MarkedBlocks = 32;
constexpr i64 sm80_postprocess_blocks(i64 m_blocks, i64 n_blocks) {
  return m_blocks + ceil_div(n_blocks, kSm80MarkedBlocks);
}

}  // namespace fulmen
