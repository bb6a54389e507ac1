// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a call of the Hopper backward kernels is made of, as plain data: BackwardSm90Config, known
// when a kernel is compiled and its only template argument, and BackwardParams, known when it is
// launched. Read by the kernels, by src/gpu/backward_sm90 and by the emulator. A config never holds
// a length or a batch size; the switches marked "ablation" exist to measure what each idea buys.
#pragma once

#include "kernels/forward_sm90/config.h"
#include "kernels/params.h"

namespace fulmen {

struct BackwardSm90Config {
  DType dtype = DType::kBFloat16;
  i32 dims = 128;   // 64, 128, 192, 256, 320: of a tile; smaller ones are filled up with zeros
  i32 q_rows = 64;  // queries of a step: 128 at dims 64, else 64
  bool dq = true;   // which gradients are wanted
  bool dk = true;
  bool dv = true;
  bool deterministic = false;  // blocks of keys add to a row of dQ in one order, the last one
                               // first, so that every run gives the same bits; for masks under
                               // which a row sees all keys up to one
  i32 register_dims = 0;  // so many dims of K stay in registers, since every product reads them
                          // again; and of V, with divides_products()
  bool paired = false;    // clusters of two thread blocks, 64 keys each, walk over the same queries
                          // and make dQ of both together, half of the columns each (256 dims)
  bool shares_loads = false;  // two thread blocks of a cluster have neighbouring blocks of keys of
                              // a head and walk over the same queries: each loads half of the
                              // columns of Q and dO, for both (128 dims, no mask)
  bool whole_heads = false;   // a thread block has all blocks of keys of a kv head, one after the
                              // other, and sums its dQ in shared memory (64 dims, at most kHeadRows
                              // queries of all heads that share the keys)
  bool ping_pong = true;      // ablation: one warpgroup at a time issues its products
  bool early_dv = true;       // ablation: dV += P^T dO is issued before dS is formed (q_rows 64)
  bool staggered = true;      // ablation: without a mask, blocks of keys begin at different queries
  bool tiled_bias = false;    // bias and boolean mask of a step come by the copy engine with its Q;
  bool tiled_mask = false;    // else their elements are loaded one by one

  // Options other than mask_kind, varlen and stats take dQ to a kernel of its own. With stats rows
  // come with row_max, which is exact for large scores; else with lse alone.
  ScoreOptions score;

  static constexpr i32 kDsStages = 2;
  static constexpr i32 kWorkStages = 4;        // work tiles that are published ahead
  static constexpr i32 kConversionRows = 128;  // rows of dQ that are converted at a time
  static constexpr i32 kHeadRows = 512;        // whose dQ fits into shared memory, of 64 dims
  static constexpr i32 kConsumerWarps = 8;

  bool operator==(const BackwardSm90Config&) const = default;

  constexpr i32 threads() const { return 384; }
  // At launch all threads hold 168 registers; with more than 3 * 168 in all
  // setmaxnreg waits for ever.
  constexpr i32 producer_registers() const { return 24; }
  constexpr i32 consumer_registers() const { return 240; }

  // dQ of a step is 64 rows of a warpgroup, or half of the columns of all.
  constexpr bool dq_by_rows() const { return q_rows == 128; }
  constexpr i32 dq_columns() const { return dims / (dq_by_rows() ? 1 : 2 * blocks_of_tile()); }
  // Whether blocks of keys add their dQ to sums in global memory.
  constexpr bool adds_dq() const { return dq && !whole_heads; }
  // of a thread
  constexpr i32 dq_floats() const { return q_rows * dims / 256 / blocks_of_tile(); }

  // Above 128 dims one of dK and dV fills the registers of a warpgroup, and nothing is left for dQ
  // of 64 keys, which backward_dq_sm90 makes unless blocks are paired. Where both are wanted the
  // warpgroups have the same 64 keys and divide the products: one makes P and dV, the other dS and
  // dK. Else they have 64 keys each.
  constexpr bool has_large_dims() const { return dims > 128; }
  constexpr bool divides_products() const { return has_large_dims() && dk && dv; }
  constexpr i32 blocks_of_tile() const { return paired ? 2 : 1; }  // thread blocks on a work tile
  constexpr i32 tiles_of_claim() const { return shares_loads ? 2 : 1; }
  constexpr i32 cluster_blocks() const { return blocks_of_tile() * tiles_of_claim(); }
  constexpr bool in_clusters() const { return cluster_blocks() > 1; }
  constexpr i32 kv_rows() const { return divides_products() && !paired ? 64 : 128; }
  constexpr i32 kv_rows_of_block() const { return divides_products() ? 64 : 128; }
  constexpr bool needs_dp() const { return dq || dk; }  // dV alone takes P alone
  // Whether dS is published behind the issue of the dQ before, whose product then hides the
  // fence. With dq_semaphore it would keep the other warpgroup waiting.
  constexpr bool late_ds() const { return dims == 128 && dq && !ping_pong; }
  // Where products are divided: whether P goes from one warpgroup to the other rounded, as dV takes
  // it. float16 holds none below 2^-24: there it goes as float32.
  constexpr bool shares_rounded() const { return divides_products() && dtype == DType::kBFloat16; }
  constexpr i32 p_stages() const { return (dims > 256 || paired) && !shares_rounded() ? 1 : 2; }
  // Whether all of K and V lies in registers as left operands. It comes there through the first
  // buffers of Q (64 keys) and dO (the others); of K shared memory has a copy, for dQ.
  constexpr bool holds_keys() const { return whole_heads; }
  constexpr i32 key_box_rows() const { return holds_keys() ? 64 : kv_rows(); }
  constexpr i32 value_box_rows() const { return holds_keys() ? 64 : kv_rows_of_block(); }
  // What undoes weight_shift in dQ, dK and dV.
  constexpr float sum_scale() const { return 1.f / static_cast<float>(1 << weight_shift(dtype)); }
  // Of Q and of dO. The warpgroups are half a step apart, and the next S is asked for early: with
  // two stages of Q the first would wait for a tile that the second has only just made room for.
  constexpr i32 stages() const {
    return has_large_dims() || (pair_bytes() > 0 && dims > 64) ? 2 : 3;
  }
  constexpr i32 dout_stages() const {
    return dims > 256 || (dims == 256 && needs_dp() && !divides_products()) ? 1 : stages();
  }

  // Whether work tiles may be split into parts of their queries (BackwardParts).
  constexpr bool splits() const {
    return adds_dq() && dk && dv && !deterministic && !score.varlen && !score.has_tile_lists() &&
           score.mask_kind == MaskKind::kNone;
  }

  // As in ForwardSm90Config.
  constexpr bool scales_scores() const { return score.scales_scores(); }
  constexpr bool maps_scores() const { return maps_every_score() || score.has_pair_terms(); }
  // The same in plain tiles, too.
  constexpr bool maps_every_score() const {
    return score.negative_scale || score.score_mod || score.alibi || score.asks_every_pair();
  }

  // Whether a product meets hidden pairs, whose infinities and NaN must not show.
  constexpr bool hides_pairs() const {
    return score.mask_kind != MaskKind::kNone || score.has_pair_terms() || score.has_tile_lists();
  }

  // Bytes of shared memory, in the order in which they lie there.
  constexpr i32 q_bytes() const { return q_rows * dims * 2; }
  // Of K and V; where blocks are paired, of half of their columns: of K both blocks' keys, for dQ.
  constexpr i32 k_bytes() const { return kv_rows() * dims / blocks_of_tile() * 2; }
  constexpr i32 v_bytes() const {
    return needs_dp() && !holds_keys() ? kv_rows_of_block() * dims / blocks_of_tile() * 2 : 0;
  }
  constexpr i32 ds_bytes() const { return dq ? q_rows * kv_rows() * 2 : 0; }
  constexpr i32 p_bytes() const {
    return divides_products() ? q_rows * 64 * (shares_rounded() ? 2 : 4) : 0;
  }
  constexpr i32 head_bytes() const { return whole_heads ? kHeadRows * dims * 4 : 0; }  // of dQ
  constexpr i32 out_bytes() const {  // dV, then dK
    return has_large_dims() || whole_heads ? 0 : k_bytes();
  }
  constexpr i32 bias_bytes() const {  // of a step
    return tiled_bias ? q_rows * kv_rows() * i32(size_bytes(score.bias)) : 0;
  }
  constexpr i32 pair_bytes() const { return bias_bytes() + (tiled_mask ? q_rows * kv_rows() : 0); }
  constexpr i32 lse_bytes() const { return q_rows * (score.stats ? 8 : 4); }  // lse_log2
  constexpr i32 delta_bytes() const { return q_rows * 4; }
  constexpr i32 shared_bytes() const {
    return k_bytes() + v_bytes() + (stages() + dout_stages()) * q_bytes() + kDsStages * ds_bytes() +
           p_stages() * p_bytes() + head_bytes() + out_bytes() +
           stages() * (lse_bytes() + pair_bytes()) + dout_stages() * delta_bytes() + 768;
  }

  // Why no kernel can have this config; "" where one can.
  constexpr const char* why_invalid() const {
    if (dtype != DType::kBFloat16 && dtype != DType::kFloat16) return "the dtype has 16 bits";
    if (dims != 64 && dims != 128 && dims != 192 && dims != 256 && dims != kMostWideDims) {
      return "a tile has 64, 128, 192, 256 or 320 dims";
    }
    if (dims > 256 && !divides_products()) return "beyond 256 dims dK and dV are made together";
    if (q_rows != 64 && !(q_rows == 128 && dims == 64))
      return "only 64 dims have 128 queries a step";
    if (dims == 64 && q_rows == 64 && adds_dq()) {
      return "dQ of 64 dims is made of 128 queries a step";
    }
    if (shares_loads && (dims != 128 || !adds_dq() || deterministic || score.varlen ||
                         score.has_tile_lists() || score.mask_kind != MaskKind::kNone)) {
      return "blocks that share loads see all queries, and make dQ of 128 dims";
    }
    if (whole_heads && (dims != 64 || q_rows != 64 || register_dims != 64 || !dq || deterministic ||
                        score.varlen || score.has_tile_lists())) {
      return "dQ of whole heads is made of 64 queries of 64 dims a step";
    }
    if (has_large_dims() && dq && !paired) return "above 128 dims registers leave no room for dQ";
    if (paired && (dims != 256 || !dq || !dk || !dv || score.varlen || register_dims != 128)) {
      return "paired blocks make all gradients of 256 dims, half of K in registers";
    }
    if (deterministic && (!dq || staggered || score.varlen || score.mask_kind == MaskKind::kBoth)) {
      return "an order of sums needs dQ, no stagger, sequences that are alike, no left bound";
    }
    if (score.has_tile_lists() && (paired || deterministic)) {
      return "lists of tiles leave no order of sums, and no pairs";
    }
    if (register_dims % 16 != 0 || register_dims > dims) return "register_dims is a multiple of 16";
    if ((maps_every_score() || score.dropout) && (dq || q_rows != 64)) {
      return "options of scores take 64 queries a step and leave dQ out";
    }
    if ((tiled_bias && score.bias == DType::kNone) || (tiled_mask && !score.mask) ||
        (pair_bytes() > 0 && kv_rows() != 128)) {
      return "tiles of bias and mask are 128 keys wide";
    }
    if (shared_bytes() > 232448) return "a block has 232,448 bytes of shared memory";
    return "";
  }
  constexpr bool valid() const { return *why_invalid() == 0; }
};

template <class Each>
constexpr void for_each_field(const BackwardSm90Config& config, Each each) {
  each("dtype", config.dtype);
  each("dims", config.dims);
  each("q_rows", config.q_rows);
  each("dq", config.dq);
  each("dk", config.dk);
  each("dv", config.dv);
  each("deterministic", config.deterministic);
  each("register_dims", config.register_dims);
  each("paired", config.paired);
  each("shares_loads", config.shares_loads);
  each("whole_heads", config.whole_heads);
  each("ping_pong", config.ping_pong);
  each("early_dv", config.early_dv);
  each("staggered", config.staggered);
  each("tiled_bias", config.tiled_bias);
  each("tiled_mask", config.tiled_mask);
  each("score", config.score);
}

// Q, dO: box (64, q_rows), K: (64, kv_rows), V: (64, kv_rows_of_block), dK, dV: (64, 64); dims (d,
// rows, heads, batch), 16-bit elements, 128-byte swizzle, zero fill. Bias and mask, where they come
// in tiles: boxes of 128 bytes of q_rows rows; of backward_dq_sm90 as in ForwardTensorMaps.
struct BackwardTensorMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap dout;
  TensorMap dk;
  TensorMap dv;
  TensorMap bias;
  TensorMap mask;
};

// With sequences of different lengths: one block of keys. Sequences with the most queries come
// first, and the blocks of keys of one sequence one after the other.
struct alignas(16) KeyBlockInfo {
  i32 sequence;
  i32 first_block;    // blocks of keys of the sequences before it
  i32 num_kv_blocks;  // of its own, at least 1
  i32 all_kv_blocks;  // of all sequences
  i32 q_begin;
  i32 kv_begin;
  SequenceShape shape;
};

// The blocks of queries [begin, end) that share a document with a block of keys, and those of one
// document with all keys of a warpgroup.
struct alignas(16) DocumentBlocks {
  i32 begin;
  i32 end;
  i32 full_begin[2];
  i32 full_end[2];
};

// batch_kv_head counts key/value heads over all batch entries (or sequences), each with the query
// heads that share it. With score.varlen q_len and kv_len of `shape` are upper
// bounds.
struct BackwardParams {
  BackwardTensorMaps maps;
  i32 batch;  // sequences
  i32 heads_q;
  i32 heads_kv;    // divides heads_q
  i32 group_size;  // heads_q / heads_kv: divided in the producer's loop it came out wrong (NVRTC
                   // 13.0 took heads_q ^ heads_kv for the dividend)
  SequenceShape shape;  // kv_len > 0
  IntervalMask mask;
  float scale;                // softmax scale, > 0
  float scale_log2;           // scale * log2(e)
  i32 num_kv_blocks;          // ceil(kv_len / kv_rows)
  i32 num_conversion_blocks;  // ceil(q_len / kConversionRows); rows are padded to that
  i32 heads_per_group;  // kv heads whose blocks of keys are interleaved; with sequences: of one
                        // sequence
  i32 last_heads;       // size of the last group if larger; else 0
  i32 num_accum_slots;  // kv heads whose sums of dQ exist at a time; all with sequences
  i32 lag;              // a work tile converts dQ of the one so many before it
  i32 num_split;        // so many work tiles, the last, are split into
  i32 num_parts;        // parts of their queries; only with heads_per_group 1
  i32 dim_qk;           // of dq
  i64 padded_rows_per_head;  // of the two arrays below: see padded_row
  const float* lse_log2;     // (batch, heads_q, padded q_row): lse log2(e) - weight_shift;
                             // +inf: P is 0. With stats at lse_index(row), and row_max of a
                             // large row kLseBlock further
  const float* delta;        // (batch, heads_q, padded q_row): sum of dO O, less dlse
  float* dq_accum;           // (slot, query head of the kv head, padded q_row, dims), order of
                             // fragments; with sequences (batch, heads_q, padded q_row, dims)
  u32* next_tile;            // work tiles claimed so far
  u32* done;                 // (batch_kv_head): blocks of keys whose share of dQ has arrived
  u32* freed;                // (batch_kv_head): work tiles that have cleared their part of its slot
  float* part_sums;   // (split tile, part but the last, warpgroup; dK, dV; 64 * dims): fragments;
                      // of pairs (split tile, block, warpgroup; 64 * dims), of all parts, from 0 on
  u32* parts_done;    // (split tile, block, warpgroup): parts whose sums are there
  u32* dq_semaphore;  // (padded row / q_rows, of all heads): blocks of keys that have added to dQ;
                      // of pairs (.., block): to its half of the columns
  u32* nonfinite;     // 1 + (batch_kv_head): not 0 where a gradient is not finite; [0]: anywhere
  i32 dim_v;
  const KeyBlockInfo*
      key_block_infos;  // (block of keys, in the order of work tiles), with score.varlen
  const DocumentBlocks*
      document_blocks;        // (block of keys, see first_key_range), with score.documents
  AttentionParams attention;  // lengths, offsets, dq, dk, dv and the arrays of options
  TileLists tile_lists;       // with score.has_tile_lists(): of blocks of keys
  ScoreMod score_mod;         // and the next, as in ForwardParams
  float kept_scale;
  bool comes_first;  // after backward_preprocess_sm90; a launch after that one overlaps its end

  constexpr i32 num_batch_kv_heads() const { return batch * heads_kv; }
  constexpr i32 padded_q_rows() const {
    return num_conversion_blocks * BackwardSm90Config::kConversionRows;
  }
};

// With stats every row has two numbers: lse and 0 where lse is small enough to be exact; in large
// rows, with |row_max| above kLargeScore, log2(row_sum) and row_max. Blocks of kLseBlock of the
// first alternate with blocks of the second.
inline constexpr i32 kLseBlock = 64;
inline constexpr float kLargeScore = 1024;
constexpr i64 lse_index(i64 row) { return row + row / kLseBlock * kLseBlock; }

// Number of a sequence's first query row in a head of lse_log2 and delta: every sequence begins at
// a multiple of kConversionRows, and has its rows rounded up to that.
constexpr i64 padded_row(bool packed, i64 sequence, i64 q_begin) {
  if (!packed) return 0;
  return (q_begin / BackwardSm90Config::kConversionRows + sequence) *
         BackwardSm90Config::kConversionRows;
}

// The order of work tiles of a launch of `grid` blocks: what a work tile waits for was claimed well
// before it, so that the sums of a kv head are complete before the work tile that converts them
// runs, and its slot is clear again before the next head uses it. Work tiles are claimed in order
// and by running blocks only, so no block waits for one that has not started.
struct BackwardSchedule {
  i32 heads_per_group;
  i32 last_heads;
  i32 num_accum_slots;
  i32 lag;
};

constexpr BackwardSchedule backward_schedule(i64 num_batch_kv_heads, i64 num_kv_blocks,
                                             i64 heads_per_group, i64 last_heads, i64 grid,
                                             bool longest_last = false) {
  const i64 heads = min(heads_per_group, num_batch_kv_heads);
  const i64 last = last_heads > heads ? min(last_heads, num_batch_kv_heads) : 0;
  const i64 per_group = heads * num_kv_blocks, per_last = last * num_kv_blocks;
  // Work tiles between the last of a group and its conversion; a group more where the last is the
  // longest.
  const i64 margin = grid + grid / 4;
  const i64 behind = longest_last ? per_group : 0;
  const i64 lag = max(per_group, per_last) + behind + margin;
  const i64 groups = 1 + ceil_div(lag + max(margin, per_last), per_group);
  return {i32(heads), i32(last), i32(min(num_batch_kv_heads, heads * groups)), i32(lag)};
}

}  // namespace fulmen
