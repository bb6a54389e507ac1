// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What decode_sm80 is compiled to know of a call, and how its shared memory and workspace are laid
// out. One config serves every length, batch, page size and stride.
#pragma once

#include "kernels/params.h"
#include "kernels/score_options.h"

namespace fulmen {

struct DecodeSm80Config {
  DType dtype = DType::kBFloat16;  // of q and o; of k, v too, unless they are quantised
  DType quantised = DType::kNone;  // the type of k and v where it has 8 bits
  bool scaled = false;             // a number for some of them says what they are multiplied by
  bool converts = false;           // e4m3 by the card itself, which has an instruction for it
  ScoreOptions score;
  i32 d_qk = 128;  // as computed with, a multiple of 16: zeros fill shorter rows up
  i32 d_v = 128;   // likewise
  // Neighbouring heads of k and v whose query rows are one row tile: rows of them all are copied
  // together, which lie side by side where heads are inside a token. Transposed a warp has the rows
  // of all, else every row warp those of a head of its own, which are 16.
  i32 heads = 1;
  i32 row_warps = 1;  // warps that share keys, each with 16 query rows of a row tile
  i32 splits = 8;     // of a block's keys: each has row_warps warps and a ring of its own
  i32 kv_rows = 16;   // keys that a split takes at a time, at most 32; in boxes 128
  i32 stages = 2;     // of a ring of K and V in shared memory
  i32 min_blocks = 1;
  // Blocks that take a block of keys together, each with splits of its own, and add their results
  // up inside a cluster (from Hopper on).
  i32 cluster = 1;
  bool whole = false;  // as many workers as heads of k and v in all sequences, each has one whole
  bool one_query = false;   // a row tile has one query row of every head of a group
  bool transposed = false;  // row warps have 8 rows, which are the columns of products
  // Every four row warps are a warpgroup, whose products of 64 rows are Hopper's: tensor cores read
  // keys, values and queries in shared memory. The copy engine brings keys and values in boxes of
  // 64 dims by so many rows, which divide kv_rows and, of pools, a page; head dims are multiples
  // of 64. 0: warps by themselves.
  i32 box_rows = 0;
  // Of a chunk of keys, which is what workers divide; chunks begin at multiples of it. More than
  // one: each makes a part of its own, whoever has it, and bits depend on nothing but the request.
  // One: a worker's keys of a row tile make one part.
  i32 chunk_blocks = 1;
  bool ragged = false;  // more than kv_lengths and page_table says where sequences are
  bool paged = false;   // k and v are pools of pages
  bool placed = false;  // an array says where query rows stand
  bool tree = false;    // an array says which of the last keys a row sees
  bool mixed = false;  // requests that have more than kFewRows are left to a kernel beside this one

  constexpr i32 warps() const { return splits * row_warps; }
  constexpr i32 threads() const { return 32 * warps(); }
  constexpr i32 split_threads() const { return 32 * row_warps; }
  constexpr i32 block_keys() const { return cluster * splits * kv_rows; }
  constexpr i32 rows_of_warp() const { return transposed ? 8 : 16; }
  constexpr i32 rows() const { return rows_of_warp() * row_warps; }  // of all heads of a group
  // Heads of k and v whose rows a warp has.
  constexpr i32 heads_of_warp() const { return transposed ? heads : 1; }

  constexpr bool is_quantised() const { return quantised != DType::kNone; }
  constexpr DType kv_dtype() const { return is_quantised() ? quantised : dtype; }
  // Of the operands of products: float16 holds every number of 8 bits.
  constexpr DType product_dtype() const { return is_quantised() ? DType::kFloat16 : dtype; }
  // Rows of Q become float16 by a power of two of their own.
  constexpr bool narrows_q() const { return product_dtype() != dtype; }
  // P is larger by this power of two: float16 ends at 2^16, below it loses bits from 2^-14 on.
  constexpr i32 weight_log2() const { return is_quantised() ? 6 : 0; }
  // Numbers of records become float16 with their scales: exact where these are powers of two.
  constexpr bool may_round() const { return quantised == DType::kUint8; }
  constexpr bool loses_nan() const { return quantised == DType::kFloat8E4M3 && !converts; }
  constexpr i32 kv_bytes() const { return is_quantised() ? 1 : 2; }
  // Of a row of a tile of K or V, whose heads have so many dims: 16 bits.
  constexpr i32 words(i32 dims) const { return heads * dims * kv_bytes() / 2; }
  // Elements of 16 bytes, dims that a fragment of a tile has: d_qk and d_v are multiples of it.
  constexpr i32 vector() const { return 16 / kv_bytes(); }
  constexpr bool in_warpgroups() const { return box_rows != 0; }
  static constexpr i32 box_dims() { return 64; }
  constexpr i32 dim_unit() const { return in_warpgroups() ? box_dims() : is_quantised() ? 32 : 16; }

  // Whether keys may lie, or rows stand, where only arrays of caches say.
  constexpr bool caches() const { return ragged || paged || placed || tree; }

  constexpr bool has_chunks() const { return chunk_blocks > 1; }

  // Whether a row may not see a key that another row of its tile does; whether rows may have to be
  // computed again, since they met such a key or one that products cannot tell.
  constexpr bool hides_keys() const { return score.mask_kind != MaskKind::kNone || tree; }
  constexpr bool may_recompute() const { return hides_keys() || loses_nan() || may_round(); }

  // Whether scores are in log2 before the softmax, and not dot products.
  constexpr bool scales_scores() const {
    return score.score_mod || score.alibi || score.negative_scale;
  }

  // Blocks of a cluster add up slices of a row tile, each its own: 32 dims of a row.
  constexpr i32 row_slices() const { return (d_v + 31) / 32; }
  constexpr i32 most_slices() const { return (rows() * row_slices() + cluster - 1) / cluster; }
  static constexpr i32 slice_bytes() { return 32 * 4 + 16; }  // then maximum and sum of the row

  // Shared memory, in this order: the rings; of every split Q, in a warpgroup, and at the end of a
  // row tile O in its place; their maxima and sums; words of the whole block; in a cluster an
  // mbarrier, and this block's slices as every block has them; of boxes two mbarriers for every
  // stage. A stage: K, V, and the scales of both.
  constexpr i32 k_bytes() const { return kv_rows * 2 * words(d_qk); }
  constexpr i32 scales_at() const { return kv_rows * 2 * words(d_qk + d_v); }
  constexpr i32 stage_bytes() const { return scales_at() + (scaled ? kv_rows * 8 : 0); }
  constexpr i32 ring_bytes() const { return stages * stage_bytes(); }
  // Floats; the rows that lanes store together begin 8 banks apart.
  constexpr i32 exchange_row() const { return d_v + (transposed ? 4 : 8); }
  constexpr i32 exchange_at() const { return splits * ring_bytes(); }
  constexpr i32 exchange_bytes() const {  // of a split
    const i32 of_o = rows() * exchange_row() * 4;
    return in_warpgroups() ? max(of_o, rows() * 2 * d_qk) : of_o;
  }
  constexpr i32 states_at() const { return exchange_at() + splits * exchange_bytes(); }
  constexpr i32 words_at() const { return states_at() + splits * rows() * 8; }
  static constexpr i32 num_words() { return 36; }
  constexpr i32 barrier_at() const { return words_at() + num_words() * 4; }
  constexpr i32 slices_at() const { return barrier_at() + 16; }
  constexpr i32 landed_at() const {
    return cluster == 1 ? barrier_at() : slices_at() + cluster * most_slices() * slice_bytes();
  }
  constexpr i32 shared_bytes() const {
    return landed_at() + (in_warpgroups() ? splits * stages * 16 : 0);
  }

  // A partial result in the workspace: of each row O, then maximum and sum, once for each slice.
  constexpr i32 part_row() const { return d_v + 4 * row_slices(); }  // floats
  constexpr i32 part_floats() const { return rows() * part_row(); }
};

template <class Each>
constexpr void for_each_field(const DecodeSm80Config& config, Each each) {
  each("dtype", config.dtype);
  each("quantised", config.quantised);
  each("scaled", config.scaled);
  each("converts", config.converts);
  each("score", config.score);
  each("d_qk", config.d_qk);
  each("d_v", config.d_v);
  each("heads", config.heads);
  each("row_warps", config.row_warps);
  each("splits", config.splits);
  each("kv_rows", config.kv_rows);
  each("stages", config.stages);
  each("min_blocks", config.min_blocks);
  each("cluster", config.cluster);
  each("whole", config.whole);
  each("one_query", config.one_query);
  each("transposed", config.transposed);
  each("box_rows", config.box_rows);
  each("chunk_blocks", config.chunk_blocks);
  each("ragged", config.ragged);
  each("paged", config.paged);
  each("placed", config.placed);
  each("tree", config.tree);
  each("mixed", config.mixed);
}

// What dot products count in, as exponents of powers of two and of e; or, where a kernel has mapped
// them, powers of two.
struct ScoreUnit {
  float log2s;
  float nats;
};
constexpr ScoreUnit score_unit(const DecodeSm80Config& config, double scale) {
  if (config.scales_scores()) return {1, kLn2<float>};
  return {static_cast<float>(scale * kLog2E<double>), static_cast<float>(scale)};
}

struct DecodeSm80Params {
  AttentionParams attention;
  i32 group;       // heads of q that share those of k and v of a row tile
  i32 row_tiles;   // of a head of k and v; divides the grid
  u64 stamp;       // of the plan, see ptx::start_counter
  u64* counters;   // (block): how many parts of the row tile that begins in it are there
  float* parts;    // (cluster, 2, part_floats()): of a row tile's later keys, of its first
  ScoreUnit unit;  // of scores, before the softmax
  // Blocks for each row tile where another kernel has chunks of prompts beside; of config.mixed.
  i32 workers_beside;
  // Of boxes: dims (d, row, head, sequence), or, of pools, (d, row of the page, head, page).
  TensorMap k_map, v_map;
};

// How chunks of keys (of one block of keys, or more) are divided among the workers that there are
// for them: evenly, in order; the first workers have one more where it does not come out even
// (Osama et al., "Stream-K", 2023).
struct KeyShares {
  i32 num_chunks;
  i32 num_workers;  // 1 .. num_chunks

  constexpr KeyShares(i32 chunks, i32 workers)
      : num_chunks(chunks), num_workers(max(1, min(chunks, workers))) {}

  constexpr i32 least() const { return num_chunks / num_workers; }
  constexpr i32 larger() const { return num_chunks % num_workers; }  // workers with one more
  constexpr i32 begin(i32 worker) const { return worker * least() + min(worker, larger()); }
  // The worker that has chunk number `chunk`.
  constexpr i32 owner(i32 chunk) const {
    const i32 in_larger = larger() * (least() + 1);
    return chunk < in_larger ? chunk / (least() + 1) : larger() + (chunk - in_larger) / least();
  }
};

}  // namespace fulmen
