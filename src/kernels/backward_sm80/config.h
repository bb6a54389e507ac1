// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two halves of a backward call to the kernels that compute with mma.sync (Ampere and later):
// Sm80BackwardConfig, known when a kernel is compiled, and Sm80BackwardParams, known when it is
// launched. One of each serves all kernels of a call: what prepares, computes, finishes, and dbias
// beside them. One config serves every length, batch and stride.
#pragma once

#include "kernels/forward_sm80/config.h"

namespace fulmen {

struct Sm80BackwardConfig {
  DType dtype = DType::kBFloat16;
  Precision precision = Precision::kFloat32;  // of float32: kTf32 or k3xTf32
  i32 d_qk = 128;                             // as computed with: zeros fill shorter rows up
  i32 d_v = 128;
  i32 warps = 8;
  i32 rows = 64;      // queries of a step
  i32 columns = 128;  // keys that a block owns
  i32 stages = 2;     // of Q and dO in shared memory
  // Tiles of a warp: of S and dP at a time, of dK and dV, of dQ at a time. All multiples of 16.
  i32 s_rows = 32, s_columns = 32;
  i32 kv_rows = 32;  // and as many dims as are left for it, see kv_parts()
  i32 dq_rows = 32, dq_dims = 32;
  i32 pair_stages = 1;        // of dS: with two, dQ of a step is computed in the next
  bool split_roles = false;   // half of the warps compute P and dV, the others dS and dK
  bool keys_first = false;    // and keep them in registers, see BackwardKeysSm80
  bool sliced = false;        // the warps of a team share out dims of S, see BackwardSlicesSm80
  bool beside = false;        // parts of a role side by side where nothing is hidden
  bool asks_late = false;     // for the next tiles, each role when it has no scores in registers
  bool clears_ahead = false;  // blocks clear sums of dQ; else backward_preprocess_sm80 clears all
  i32 min_blocks = 1;         // on a multiprocessor: a bound on registers
  // Rows of q, k, v and dout are 16-byte units on multiples of 16 bytes; for
  // backward_preprocess_sm80 those of o and dout, and what is kept of a row is float32.
  bool units = false;

  // What the problem asks for.
  bool dq = true;
  bool dk = true;
  bool dv = true;
  bool mask = false;
  DType bias = DType::kNone;
  bool pair_units = false;  // rows of mask and bias are 16-byte units on multiples of 16 bytes
  bool documents = false;
  bool dbias = false;
  bool sums_dbias = false;   // dbias is broadcast along the batch or heads
  bool tiled_dbias = false;  // its rows are those of tiles of dS, 16-byte units of the same type
  bool natural = false;      // scores are scaled one by one, in nats, as in Sm80Config
  bool softcap = false;
  bool alibi = false;
  bool dropout = false;
  bool split_sum = false;  // sinks and dlse: P and the share of lse have different denominators
  bool ordered = false;    // blocks add to dQ in the order of their keys: the same bits every time
  // Hopper and later: four sums of dQ, or four matrices, in one instruction; kernels of a call
  // begin while the one before ends.
  bool hopper = false;

  // Ablation.
  bool swizzle = true;      // as in Sm80Config
  bool full_blocks = true;  // blocks that every row sees whole do no mask arithmetic

  // Tiles count 16-bit words, as those of Sm80Config.
  constexpr i32 element_bytes() const { return static_cast<i32>(size_bytes(dtype)); }
  constexpr i32 words(i32 elems) const { return elems * element_bytes() / 2; }

  constexpr i32 threads() const { return 32 * warps; }
  // Warps side by side along the keys of dK and dV; the others share the dims.
  constexpr i32 role_warps() const { return split_roles ? warps / 2 : warps; }
  constexpr i32 kv_groups() const { return columns / kv_rows; }
  constexpr i32 kv_parts() const { return role_warps() / kv_groups(); }
  // A team of warps computes the columns of P and dS that its dK and dV take up, and no others.
  constexpr i32 team_columns() const { return max(kv_rows, s_columns); }
  constexpr i32 num_teams() const { return columns / team_columns(); }
  constexpr i32 team_warps() const { return role_warps() / num_teams(); }
  constexpr i32 team_tiles() const { return rows / s_rows * (team_columns() / s_columns); }
  constexpr i32 parts() const { return (team_tiles() + team_warps() - 1) / team_warps(); }
  constexpr i32 team_barriers() const { return team_warps() == 1 ? 0 : 2 * num_teams(); }
  constexpr i32 dk_dims() const { return d_qk / kv_parts(); }
  constexpr i32 dv_dims() const { return d_v / kv_parts(); }
  constexpr i32 dq_tiles() const { return rows / dq_rows * (d_qk / dq_dims); }
  constexpr i32 dq_elems() const { return rows * d_qk; }

  constexpr bool needs_ds() const { return dq || dk || dbias; }
  // Whether arrays over pairs say what is hidden: then any pair may be.
  constexpr bool hides_pairs() const { return mask || bias != DType::kNone; }

  // Shared memory in this order: K, V, stages of Q, dO, what is kept of their rows, mask and bias;
  // P, dS, sums that slices hand over, the block's KeyPlace, numbers of the keys' documents.
  constexpr i32 k_bytes() const { return columns * d_qk * element_bytes(); }
  constexpr i32 v_bytes() const { return columns * d_v * element_bytes(); }
  constexpr i32 q_bytes() const { return rows * d_qk * element_bytes(); }
  constexpr i32 dout_bytes() const { return rows * d_v * element_bytes(); }
  // Sm80Row, Sm80Columns, the number of the document
  constexpr i32 row_bytes() const { return rows * (16 + 8 + (documents ? 8 : 0)); }
  constexpr PairConfig pairs() const { return {rows, columns, threads(), mask, bias, pair_units}; }
  constexpr i32 stage_bytes() const {
    return q_bytes() + dout_bytes() + row_bytes() + pairs().bytes();
  }
  constexpr i32 pair_bytes() const { return rows * columns * element_bytes(); }
  // Of each of two roles.
  constexpr i32 slice_bytes() const {
    return sliced ? team_warps() * (team_warps() - 1) * s_rows * s_columns * 4 : 0;
  }
  // Where registers are short the place of the block waits in shared memory.
  constexpr bool keeps_place() const { return split_roles && !keys_first; }
  constexpr i32 place_bytes() const { return keeps_place() ? 64 : 0; }
  constexpr i32 ids_bytes() const { return documents ? columns * 8 : 0; }
  constexpr i32 shared_bytes() const {
    return k_bytes() + v_bytes() + stages * stage_bytes() + (1 + pair_stages) * pair_bytes() +
           2 * slice_bytes() + place_bytes() + ids_bytes();
  }

  // A warp's tile of S, as the pieces that it shares with forward_sm80 see it.
  constexpr Sm80Config scores() const {
    Sm80Config config;
    config.dtype = dtype;
    config.d_qk = d_qk;
    config.d_v = d_v;
    config.warps = warps;
    config.row_tiles = s_rows / 16;
    config.columns = s_columns;
    config.natural = natural;
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
           1 <= pair_stages && pair_stages <= stages && divides(s_rows, rows) &&
           divides(s_columns, columns) && divides(kv_rows, columns) && divides(dq_rows, rows) &&
           divides(dq_dims, d_qk) && role_warps() % kv_groups() == 0 &&
           team_columns() % kv_rows == 0 && team_columns() % s_columns == 0 &&
           columns % team_columns() == 0 && divides(dk_dims(), d_qk) && divides(dv_dims(), d_v) &&
           rows % 16 == 0 && (s_rows <= 32 || split_roles) && (!clears_ahead || dq) &&
           (!sliced || (split_roles && s_rows == 16 && s_columns == 16 && num_teams() == 1 &&
                        team_tiles() == team_warps())) &&
           (!asks_late || (split_roles && !keys_first)) &&
           (!keys_first ||
            (split_roles && kv_parts() == 1 && kv_rows == s_columns && d_qk <= 64)) &&
           (!split_roles || (1 + team_barriers() + role_warps() * parts() <= 16 && warps % 2 == 0 &&
                             d_qk == d_v && dq && dk && dv && !dropout && !softcap && !split_sum));
  }
};

// What every pair of a query row takes from it:
//   E = exp(score - row_max) / 2^sum_log2,  P = E share,  dS = E (share dP + offset)
// A row that counts for nothing has sum_log2 = inf. share is 1 unless config.split_sum.
struct alignas(16) Sm80Row {
  float row_max;  // in nats
  float sum_log2;
  float offset;
  float share;
};

// The keys that the structured masks let a row see.
struct alignas(8) Sm80Columns {
  i32 begin, end;
};

// Blocks of keys go group by group, each of some neighbouring key/value heads; while they start
// they clear the sums of dQ of a group that comes later, see BackwardSumsSm80.
struct Sm80Groups {
  u32 lines;           // key/value heads of a group
  u32 blocks;          // of keys, of a group
  u32 row_tiles;       // tiles of queries of a group
  u32 row_tiles_each;  // of these, that a block clears
  u32 all_row_tiles;   // of all groups
  u32 ahead;           // how many groups later those come that a block clears
};

struct Sm80BackwardParams {
  AttentionParams attention;
  u8* row_tiles;  // (batch, head, slot of queries): config.rows Sm80Row, as many Sm80Columns, as
                  // many numbers of documents
  Sm80Columns* hulls;  // (batch, head, slot of queries): of all rows; config.documents
  float* dq_sums;      // (batch, head, slot of queries, config.dq_elems()), see Sm80DqOrder
  float* dbias_sums;   // (dbias_extents); config.sums_dbias
  u32* suspect_rows;   // (batch, head, slot of queries): dQ may have met NaN that is hidden from it
  u32* suspect_keys;   // (batch, kv_head, slot of keys): so may dK and dV
  u32* turns;          // (batch, head, slot of queries): blocks that have added; config.ordered
  u32* next_block;     // started so far; config.ordered
  u32* cleared;        // (group of key/value heads): blocks that have cleared sums of it
  Sm80Groups groups;
};

// Blocks of backward_postprocess_sm80: one for each tile of queries, then one for every 32 tiles of
// keys, whose marks it looks at.
inline constexpr i32 kSm80FinishMarks = 32;
constexpr i64 sm80_finish_blocks(i64 row_tiles, i64 key_tiles) {
  return row_tiles + ceil_div(key_tiles, kSm80FinishMarks);
}

}  // namespace fulmen
