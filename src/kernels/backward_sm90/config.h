// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The two halves of a call to the Hopper backward kernels as plain data: BackwardConfig, known when
// a kernel is compiled and its only template argument, and BackwardParams, known when it is
// launched. Read by the kernels, by the planner and by the emulator. A config never holds a length
// or a batch size; the switches marked "ablation" exist to measure what each idea buys.
#pragma once

#include "kernels/forward_sm90/config.h"
#include "kernels/params.h"

namespace fulmen {

struct BackwardConfig {
  DType dtype = DType::kBFloat16;
  i32 dims = 128;   // 64, 128, 192, 256: of a tile; smaller ones are filled up with zeros
  i32 q_rows = 64;  // queries of a step: 128 at dims 64, else 64
  MaskKind mask = MaskKind::kLength;
  bool has_stats = false;  // rows come with row_max, right for huge scores, else as lse alone
  bool sequences = false;  // packed or with lengths, which the device reads
  bool dq = true;          // which gradients are wanted
  bool dk = true;
  bool dv = true;
  bool ordered = false;    // blocks of keys add to rows of dQ in one order, the last one first, so
                           // that every run gives the same bits; where rows see all keys up to one
  i32 register_dims = 0;   // so many dims of K stay in registers, since every product reads them
                           // again; and of V, where products are divided
  bool take_turns = true;  // ablation: the warpgroups take turns at the tensor cores
  bool early_dv = true;    // ablation: dV += P^T dO is issued before dS is formed (q_rows 64)
  bool spread = true;      // ablation: without a mask, blocks of keys begin at different queries

  // Options of a score, which take dQ to a kernel of its own. One that is off leaves no
  // instruction.
  bool signed_scale = false;  // the scale may be 0 or negative
  bool softcap = false;
  bool alibi = false;
  DType bias = DType::kNone;  // its dtype
  bool pair_mask = false;     // the boolean one
  bool documents = false;
  bool dropout = false;

  static constexpr i32 kDsStages = 2;
  static constexpr i32 kMailboxes = 4;     // items that are known ahead
  static constexpr i32 kFinishRows = 128;  // rows of dQ that are rounded at a time
  static constexpr i32 kConsumerWarps = 8;
  static constexpr i32 kHalvesShift = 14;  // see shares_halves

  bool operator==(const BackwardConfig&) const = default;

  constexpr i32 threads() const { return 384; }
  // At launch all threads hold 168 registers; more than 3 * 168 in all and setmaxnreg waits for
  // ever.
  constexpr i32 producer_registers() const { return 24; }
  constexpr i32 consumer_registers() const { return 240; }

  // dQ of a step is 64 rows of a warpgroup, or half of the columns of all.
  constexpr bool dq_by_rows() const { return q_rows == 128; }
  constexpr i32 dq_floats() const { return q_rows * dims / 256; }  // of a thread

  // Above 128 dims one of dK and dV fills the registers of a warpgroup, and nothing is left for dQ,
  // which backward_dq_sm90 makes. Where both are wanted the warpgroups have the same 64 keys and
  // divide the products: one makes P and dV, the other dS and dK. Else they have 64 keys each.
  constexpr bool is_wide() const { return dims > 128; }
  constexpr bool divides_products() const { return is_wide() && dk && dv; }
  constexpr i32 kv_rows() const { return divides_products() ? 64 : 128; }
  constexpr i32 first_key(u32 warpgroup) const {
    return divides_products() ? 0 : 64 * i32(warpgroup);
  }
  constexpr bool needs_dp() const { return dq || dk; }  // dV alone takes P alone
  // Whether dS is announced behind the issue of the dQ before, whose product then hides the fence.
  // With turns it would keep the other warpgroup waiting.
  constexpr bool late_ds() const { return dims == 128 && dq && !take_turns; }
  // Where products are divided: whether P goes from one warpgroup to the other as float16, three
  // bits finer than dS will be. P, and so dV and dK, are then 2^kHalvesShift times as large.
  constexpr bool shares_halves() const { return divides_products() && dtype == DType::kBFloat16; }
  constexpr float sum_scale() const { return shares_halves() ? 1.f / (1 << kHalvesShift) : 1.f; }
  // Of Q and of dO. The warpgroups are half a step apart, and the next S is asked for early: with
  // two stages of Q the first would wait for a tile that the second has only just made room for.
  constexpr i32 stages() const { return is_wide() ? 2 : 3; }
  constexpr i32 dout_stages() const {
    return dims == 256 && needs_dp() && !divides_products() ? 1 : stages();
  }

  // Whether items may be taken in parts of their queries (tile/backward_parts.cuh).
  constexpr bool splits() const {
    return dq && dk && dv && !ordered && !sequences && mask == MaskKind::kLength;
  }

  // As in AttentionConfig.
  constexpr bool maps_scores() const {
    return signed_scale || softcap || alibi || has_pair_terms();
  }
  constexpr bool has_pair_terms() const { return bias != DType::kNone || pair_mask || documents; }

  // Whether a product meets hidden pairs, whose infinities and NaN nobody may see.
  constexpr bool hides_pairs() const { return mask != MaskKind::kLength || has_pair_terms(); }

  // Bytes of shared memory, in the order in which they lie there.
  constexpr i32 q_bytes() const { return q_rows * dims * 2; }
  constexpr i32 k_bytes() const { return kv_rows() * dims * 2; }
  constexpr i32 v_bytes() const { return needs_dp() ? k_bytes() : 0; }
  constexpr i32 ds_bytes() const {  // or P, where products are divided
    const i32 bytes = divides_products() && !shares_halves() ? 4 : 2;
    return divides_products() || dq ? q_rows * kv_rows() * bytes : 0;
  }
  constexpr i32 out_bytes() const { return is_wide() ? 0 : k_bytes(); }     // dV, then dK
  constexpr i32 row_bytes() const { return q_rows * (has_stats ? 8 : 4); }  // what a row has kept
  constexpr i32 delta_bytes() const { return q_rows * 4; }
  constexpr i32 shared_bytes() const {
    return k_bytes() + v_bytes() + (stages() + dout_stages()) * q_bytes() + kDsStages * ds_bytes() +
           out_bytes() + stages() * row_bytes() + dout_stages() * delta_bytes() + 768;
  }

  constexpr bool valid() const {
    return (dtype == DType::kBFloat16 || dtype == DType::kFloat16) &&
           ((dims == 64 && q_rows == 128) || (dims == 64 && q_rows == 64 && !dq) ||
            ((dims == 128 || dims == 192 || dims == 256) && q_rows == 64)) &&
           !(is_wide() && dq) &&
           !(ordered && (!dq || spread || sequences || mask == MaskKind::kBoth)) &&
           register_dims % 16 == 0 && register_dims <= dims &&
           !((maps_scores() || dropout) && (dq || q_rows != 64)) && shared_bytes() <= 232448;
  }
};

// Q, dO: box (64, q_rows), K, V: (64, kv_rows), dK, dV: (64, 64); dims (d, rows, heads, batch),
// 16-bit elements, 128-byte swizzle, zero fill.
struct BackwardTensorMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
  TensorMap dk;
  TensorMap dv;
};

// Where sequences differ: what the device has found out about a block of keys. Sequences take their
// turns in the order of their blocks of keys, the ones with the most queries first.
struct alignas(16) BackwardPlace {
  i32 sequence;
  i32 first_block;    // blocks of keys of the sequences before it
  i32 num_kv_blocks;  // of its own, at least 1
  i32 all_kv_blocks;  // of all sequences
  i32 q_begin;
  i32 kv_begin;
  SequenceShape shape;
};

// What documents leave of the blocks of queries that a block of keys visits, in units of blocks:
// [begin, end), and those of one document with all of a warpgroup's keys.
struct alignas(16) BackwardVisit {
  i32 begin;
  i32 end;
  i32 full_begin[2];
  i32 full_end[2];
};

// A line is one key/value head of one sequence, with the query heads that share it. Where
// BackwardConfig::sequences is set, q_len and kv_len of `shape` are upper bounds.
struct BackwardParams {
  BackwardTensorMaps maps;
  i32 batch;  // sequences
  i32 heads_q;
  i32 heads_kv;         // divides heads_q
  i32 group_size;       // heads_q / heads_kv: divided in the loader's loop it came out wrong (NVRTC
                        // 13.0 took heads_q ^ heads_kv for the dividend)
  SequenceShape shape;  // kv_len > 0
  IntervalMask mask;
  float scale;            // softmax scale, > 0
  float scale_log2;       // scale * log2(e)
  i32 num_kv_blocks;      // ceil(kv_len / kv_rows)
  i32 num_finish_blocks;  // ceil(q_len / kFinishRows); rows are padded to that
  i32 lines_per_group;    // lines that are walked together, of one sequence where they differ
  i32 last_lines;         // the last, if more are walked together there; else 0
  i32 num_slots;          // lines whose sums of dQ exist at a time; all where sequences differ
  i32 lag;                // an item rounds dQ of the item so many before it
  i32 num_split;          // so many items, the last, are taken in
  i32 num_parts;          // parts of their queries; only where lines are walked one by one
  i32 dim_qk;             // of dq
  i64 rows_of_head;       // of the two arrays below: see padded_row
  const float* rows;      // (batch, heads_q, padded q_row): lse log2(e), +inf: left out; with
                          // stats at kept_row(row), and row_max, of a huge one, kKeptBlock further
  const float* delta;     // (batch, heads_q, padded q_row): sum of dO O, less dlse
  float* dq_sums;         // (slot, head of the line, padded q_row, dims): order of fragments;
                          // where sequences differ (batch, heads_q, padded q_row, dims)
  u32* next_item;         // items claimed so far
  u32* done;              // (line): blocks of keys whose share of dQ has arrived
  u32* freed;             // (line): items that have cleared their part of its slot
  float* part_sums;  // (split item, part but the last, warpgroup; dK, dV; 64 * dims): of fragments
  u32* parts_done;   // (split item, warpgroup): parts whose sums are there
  u32* turns;        // (padded row / q_rows, of all heads): blocks of keys that have added to dQ
  u32* spoiled;      // 1 + (line): not 0 where a gradient is not finite; the first: anywhere
  i32 dim_v;
  const BackwardPlace* places;  // (block of keys, in the order of turns), where sequences differ
  const BackwardVisit* visits;  // (block of keys, see first_key_range), with config.documents
  AttentionParams attention;    // lengths, offsets, dq, dk, dv and the arrays of options
  float softcap_in;             // the last three as in ForwardParams
  float softcap_out;
  float kept_scale;
  bool comes_first;  // after backward_prepare_sm90; a launch after that one overlaps its end

  constexpr i32 num_lines() const { return batch * heads_kv; }
  constexpr i32 padded_q_rows() const { return num_finish_blocks * BackwardConfig::kFinishRows; }
};

// With stats a row's lse stands alone where it is small enough to be exact, and row_max is 0. Of a
// row beyond kHugeScore row_max is kept apart, and log2(row_sum) stands in the place of lse. Blocks
// of the first alternate with blocks of the second.
inline constexpr i32 kKeptBlock = 64;
inline constexpr float kHugeScore = 1024;
constexpr i64 kept_row(i64 row) { return row + row / kKeptBlock * kKeptBlock; }

// Where row 0 of a sequence's query rows lies in a head of `rows` and `delta`: every sequence
// begins at a multiple of kFinishRows, with room for its rows rounded up to that.
constexpr i64 padded_row(bool packed, i64 sequence, i64 q_begin) {
  if (!packed) return 0;
  return (q_begin / BackwardConfig::kFinishRows + sequence) * BackwardConfig::kFinishRows;
}

// How a launch of `grid` blocks walks so that what an item waits for was claimed well before it:
// the sums of a line are complete, and its slot is clear again, before anybody needs them. Items
// are claimed in order and by running blocks only, so no block waits for one that has not started.
struct BackwardSchedule {
  i32 lines_per_group;
  i32 last_lines;
  i32 num_slots;
  i32 lag;
};

constexpr BackwardSchedule backward_schedule(i64 num_lines, i64 num_kv_blocks, i64 lines_per_group,
                                             i64 last_lines, i64 grid, bool longest_last = false) {
  const i64 lines = min(lines_per_group, num_lines);
  const i64 last = last_lines > lines ? min(last_lines, num_lines) : 0;
  const i64 per_group = lines * num_kv_blocks, per_last = last * num_kv_blocks;
  // Items between the last of a group and its rounding; a group more where that is the longest.
  const i64 margin = grid + grid / 4;
  const i64 behind = longest_last ? per_group : 0;
  const i64 lag = max(per_group, per_last) + behind + margin;
  const i64 groups = 1 + ceil_div(lag + max(margin, per_last), per_group);
  return {i32(lines), i32(last), i32(min(num_lines, lines * groups)), i32(lag)};
}

// The kernel before: per row of O and dO what the main kernel needs, and zeros.
struct BackwardPrepareConfig {
  DType dtype = DType::kBFloat16;
  i32 dims = 128;          // of v, filled up: 64, 128
  bool has_stats = false;  // as in BackwardConfig
  bool sequences = false;  // as in BackwardConfig
  bool sinks = false;      // every row has one more key, of value 0
  bool documents = false;  // as in BackwardConfig

  static constexpr i32 kThreads = 256;
  static constexpr i32 kBlocksPerMultiprocessor = 8;
  // Blocks that are resident, and rows of 32 bytes that a thread asks for at once.
  constexpr i32 resident_blocks() const { return sequences || documents ? 4 : 8; }
  constexpr i32 rows_in_flight() const { return 16 / resident_blocks(); }
  constexpr i32 threads() const { return kThreads; }
  constexpr i32 threads_per_row() const { return dims / 8; }  // 16 bytes each
};

struct BackwardPrepareParams {
  i32 heads_q;
  i32 q_len;
  i32 padded_q_rows;  // of a head: BackwardParams::rows_of_head
  i32 dim_v;          // a multiple of 8
  i32 num_rows;       // lines of heads * padded_q_rows, below 2^30
  float* rows;        // as in BackwardParams
  float* delta;       // as in BackwardParams
  u32* zeros;         // 16-byte units that are cleared: counters, and sums but those below
  i64 num_zeros;
  float* sums;                  // of dQ where sequences differ, with as many rows as `rows`
  i32 sum_dims;                 // of a row; 0: there are none
  SequenceShape bounds;         // where sequences differ: q_len and kv_len of none are more
  i32 kv_rows;                  // of a block of keys
  BackwardPlace* places;        // as in BackwardParams
  const IdRange* query_ranges;  // (block of queries), with config.documents
  i32 q_rows;                   // of a block of queries
  BackwardVisit* visits;        // as in BackwardParams
  AttentionParams attention;    // where sequences differ: lengths, offsets, dq, dk, dv to clear;
                                // sinks, ids
};

// The kernel after: the lines whose gradients are not finite, pair by pair.
struct BackwardCarefulConfig {
  DType dtype = DType::kBFloat16;

  static constexpr i32 kThreads = 256;
  static constexpr i32 kMaxDim = 256;
};

struct BackwardCarefulParams {
  const u32* spoiled;  // as in BackwardParams
  AttentionParams attention;
};

}  // namespace fulmen
