// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two halves of a backward call to the kernels that compute with mma.sync (Ampere and later):
// BackwardSm80Config, known when a kernel is compiled, and BackwardSm80Params, known when it is
// launched. One of each serves all kernels of a call: what prepares, computes, finishes, and dbias
// beside them. One config serves every length, batch and stride.
#pragma once

#include "kernels/forward_sm80/config.h"

namespace fulmen {

struct BackwardSm80Config {
  DType dtype = DType::kBFloat16;
  Precision precision = Precision::kFloat32;  // of float32: kTf32 or k3xTf32
  i32 d_qk = 128;                             // as computed with: zeros fill shorter rows up
  i32 d_v = 128;
  i32 warps = 8;
  i32 q_rows = 64;    // queries of a step
  i32 kv_rows = 128;  // keys that a block owns
  i32 stages = 2;     // of Q and dO in shared memory
  // Tiles of a warp: of S and dP at a time, of dK and dV, of dQ at a time. All multiples of 16.
  i32 s_rows = 32, s_columns = 32;
  i32 dkv_rows = 32;  // and as many dims as are left for it, see kv_parts()
  i32 dq_rows = 32, dq_dims = 32;
  i32 pair_stages = 1;         // of dS: with two, dQ of a step is computed in the next
  bool split_roles = false;    // half of the warps compute P and dV, the others dS and dK
  bool swap_ab = false;        // and keep them in registers, see BackwardPairsSwapAbSm80
  bool split_d = false;        // the warps of a team share out dims of S, see SplitDProductSm80
  bool unrolled = false;       // parts of a role side by side where nothing is hidden
  bool late_prefetch = false;  // for the next tiles, each role when it has no scores in registers
  bool zeroes_dq = false;      // blocks clear sums of dQ; else backward_preprocess_sm80 clears all
  i32 min_blocks = 1;          // on a multiprocessor: a bound on registers
  // Rows of q, k, v and dout are 16-byte units on multiples of 16 bytes; for
  // backward_preprocess_sm80 those of o and dout, and what is kept of a row is float32.
  bool aligned = false;

  // What the problem asks for.
  bool dq = true;
  bool dk = true;
  bool dv = true;
  bool mask = false;
  DType bias = DType::kNone;
  bool pair_aligned = false;  // rows of mask and bias are 16-byte units on multiples of 16 bytes
  bool documents = false;
  bool dbias = false;
  bool accumulates_dbias = false;  // dbias is broadcast along the batch or heads
  bool tiled_dbias = false;    // its rows are those of tiles of dS, 16-byte units of the same type
  bool scales_scores = false;  // scores are scaled one by one, in nats, as in ForwardSm80Config
  bool softcap = false;
  bool alibi = false;
  bool dropout = false;
  bool split_sum = false;  // sinks and dlse: P and the share of lse have different denominators
  bool deterministic =
      false;  // blocks add to dQ in the order of their keys: the same bits every time
  // Hopper and later: four sums of dQ, or four matrices, in one instruction; kernels of a call
  // begin while the one before ends.
  bool hopper = false;

  // Ablation.
  bool swizzle = true;      // as in ForwardSm80Config
  bool full_blocks = true;  // blocks that every row sees whole do no mask arithmetic

  // Tiles count 16-bit words, as those of ForwardSm80Config.
  constexpr i32 element_bytes() const { return static_cast<i32>(size_bytes(dtype)); }
  constexpr i32 words(i32 elems) const { return elems * element_bytes() / 2; }

  constexpr i32 threads() const { return 32 * warps; }
  // Warps side by side along the keys of dK and dV; the others share the dims.
  constexpr i32 role_warps() const { return split_roles ? warps / 2 : warps; }
  constexpr i32 kv_groups() const { return kv_rows / dkv_rows; }
  constexpr i32 kv_parts() const { return role_warps() / kv_groups(); }
  // A team of warps computes the columns of P and dS that its dK and dV take up, and no others.
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

  constexpr bool needs_ds() const { return dq || dk || dbias; }
  // Whether arrays over pairs say what is hidden: then any pair may be.
  constexpr bool hides_pairs() const { return mask || bias != DType::kNone; }

  // Shared memory in this order: K, V, stages of Q, dO, what is kept of their rows, mask and bias;
  // P, dS, sums that slices hand over, the block's KeyBlockSm80, numbers of the keys' documents.
  constexpr i32 k_bytes() const { return kv_rows * d_qk * element_bytes(); }
  constexpr i32 v_bytes() const { return kv_rows * d_v * element_bytes(); }
  constexpr i32 q_bytes() const { return q_rows * d_qk * element_bytes(); }
  constexpr i32 dout_bytes() const { return q_rows * d_v * element_bytes(); }
  // RowStatsSm80, KeyRangeSm80, the number of the document
  constexpr i32 row_bytes() const { return q_rows * (16 + 8 + (documents ? 8 : 0)); }
  constexpr PairConfig pairs() const {
    return {q_rows, kv_rows, threads(), mask, bias, pair_aligned};
  }
  constexpr i32 stage_bytes() const {
    return q_bytes() + dout_bytes() + row_bytes() + pairs().bytes();
  }
  constexpr i32 pair_bytes() const { return q_rows * kv_rows * element_bytes(); }
  // Of each of two roles.
  constexpr i32 split_d_bytes() const {
    return split_d ? group_warps() * (group_warps() - 1) * s_rows * s_columns * 4 : 0;
  }
  // Where registers are short the place of the block waits in shared memory.
  constexpr bool saves_key_block() const { return split_roles && !swap_ab; }
  constexpr i32 key_block_bytes() const { return saves_key_block() ? 64 : 0; }
  constexpr i32 ids_bytes() const { return documents ? kv_rows * 8 : 0; }
  constexpr i32 shared_bytes() const {
    return k_bytes() + v_bytes() + stages * stage_bytes() + (1 + pair_stages) * pair_bytes() +
           2 * split_d_bytes() + key_block_bytes() + ids_bytes();
  }

  // A warp's tile of S, as the pieces that it shares with forward_sm80 see it.
  constexpr ForwardSm80Config scores() const {
    ForwardSm80Config config;
    config.dtype = dtype;
    config.d_qk = d_qk;
    config.d_v = d_v;
    config.warps = warps;
    config.row_tiles = s_rows / 16;
    config.kv_rows = s_columns;
    config.scales_scores = scales_scores;
    config.softcap = softcap;
    config.alibi = alibi;
    config.dropout = dropout;
    config.swizzle = swizzle;
    return config;
  }

  constexpr bool valid() const {
    const auto divides = [](i32 part, i32 whole) { return part % 16 == 0 && whole % part == 0; };
    const bool has_products = dtype == DType::kFloat32
                                  ? precision != Precision::kFloat32
                                  : dtype == DType::kBFloat16 || dtype == DType::kFloat16;
    return has_products && 1 <= warps && warps <= 16 && 1 <= stages && stages <= 2 &&
           1 <= pair_stages && pair_stages <= stages && divides(s_rows, q_rows) &&
           divides(s_columns, kv_rows) && divides(dkv_rows, kv_rows) && divides(dq_rows, q_rows) &&
           divides(dq_dims, d_qk) && role_warps() % kv_groups() == 0 &&
           group_columns() % dkv_rows == 0 && group_columns() % s_columns == 0 &&
           kv_rows % group_columns() == 0 && divides(dk_dims(), d_qk) && divides(dv_dims(), d_v) &&
           q_rows % 16 == 0 && (s_rows <= 32 || split_roles) && (!zeroes_dq || dq) &&
           (!split_d || (split_roles && s_rows == 16 && s_columns == 16 && num_groups() == 1 &&
                         group_tiles() == group_warps())) &&
           (!late_prefetch || (split_roles && !swap_ab)) &&
           (!swap_ab || (split_roles && kv_parts() == 1 && dkv_rows == s_columns && d_qk <= 64)) &&
           (!split_roles ||
            (1 + group_barriers() + role_warps() * parts() <= 16 && warps % 2 == 0 && d_qk == d_v &&
             dq && dk && dv && !dropout && !softcap && !split_sum));
  }
};

// What every pair of a query row takes from it:
//   E = exp(score - row_max) / 2^sum_log2,  P = E share,  dS = E (share dP + offset)
// A row that counts for nothing has sum_log2 = inf. share is 1 unless config.split_sum.
struct alignas(16) RowStatsSm80 {
  float row_max;  // in nats
  float sum_log2;
  float offset;
  float share;
};

// The keys that the structured masks let a row see.
struct alignas(8) KeyRangeSm80 {
  i32 begin, end;
};

// Blocks of keys go group by group, each of some neighbouring key/value heads; while they start
// they clear the sums of dQ of a group that comes later, see DqZeroingSm80.
struct HeadGroupsSm80 {
  u32 lines;           // key/value heads of a group
  u32 blocks;          // of keys, of a group
  u32 row_tiles;       // tiles of queries of a group
  u32 row_tiles_each;  // of these, that a block clears
  u32 all_row_tiles;   // of all groups
  u32 ahead;           // how many groups later those come that a block clears
};

struct BackwardSm80Params {
  AttentionParams attention;
  u8* row_tiles;             // (batch, head, slot of queries): config.q_rows RowStatsSm80, as many
                             // KeyRangeSm80, as many numbers of documents
  KeyRangeSm80* key_bounds;  // (batch, head, slot of queries): of all rows; config.documents
  float* dq_accum;     // (batch, head, slot of queries, config.dq_elems()), see DqAccumLayoutSm80
  float* dbias_accum;  // (dbias_extents); config.accumulates_dbias
  u32* suspect_m_blocks;  // (batch, head, slot of queries): dQ may have met NaN that is hidden from
                          // it
  u32* suspect_n_blocks;  // (batch, kv_head, slot of keys): so may dK and dV
  u32* dq_semaphores;     // (batch, head, slot of queries): blocks that have added;
                          // config.deterministic
  u32* next_n_block;      // started so far; config.deterministic
  u32* zeroed_blocks;     // (group of key/value heads): blocks that have cleared sums of it
  HeadGroupsSm80 groups;
};

// Blocks of backward_postprocess_sm80: one for each tile of queries, then one for every 32 tiles of
// keys, whose marks it looks at.
inline constexpr i32 kSm80MarkedBlocks = 32;
constexpr i64 sm80_postprocess_blocks(i64 row_tiles, i64 key_tiles) {
  return row_tiles + ceil_div(key_tiles, kSm80MarkedBlocks);
}

}  // namespace fulmen
