// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a call of forward_sm90 is made of, as plain data: ForwardSm90Config, known when the kernel
// is compiled and its only template argument, and ForwardParams, known when it is launched. Read by
// the kernels, by src/gpu/forward_sm90 and by the emulator. A config never holds a length or a
// batch size; the switches marked "ablation" exist to measure what each idea buys.
#pragma once

#include "kernels/params.h"
#include "kernels/score_options.h"
#include "kernels/tile_lists/config.h"

namespace fulmen {

// When the exponent's shift (the running maximum of a row) is brought up to date.
enum class ShiftRule : u8 {
  kEveryBlock,   // ablation: before every block, the textbook online softmax
  kWhenGrown,    // before every block, but only when it grew by more than 2^8
  kWhenSumGrew,  // no maximum of full blocks; when a block's sum could exceed f16 or e4m3
  kFirstBlock,   // no maximum of full blocks at all; a result out of range is computed again
};

// Of e4m3, the unit in which weights and their sums are held: 2^8 (products_sm90.cuh).
inline constexpr float kUnitOf8Bits = 0x1p8f, kLog2UnitOf8Bits = 8;

// Beyond 256 dims O of a warpgroup is two products, up to what its registers hold.
inline constexpr i32 kMostWideDims = 320;

struct ForwardSm90Config {
  DType dtype = DType::kBFloat16;  // of Q, K and V
  DType o_dtype = DType::kNone;    // of O where it has 16 bits; none: dtype
  i32 d_qk = 128;  // as computed with: the arrays' rows may be shorter, zeros fill them up
  i32 d_v = 128;
  i32 warpgroups = 2;       // consumers, 64 query rows each; the producer is one more
  i32 kv_rows = 128;        // keys per block
  i32 stages = 2;           // of K and of V in shared memory
  i32 q_slots = 0;          // buffers for 64 rows of Q; more than warpgroups: the next Q arrives
                            // while this one is in use. 0: as many as warpgroups
  i32 q_register_dims = 0;  // so many dims of Q, a multiple of 16, stay in registers, since every
                            // product reads Q again (measured: 0 to 1 % at d 128 and 256)
  i32 heads_per_tile = 1;   // query heads of one key head that share 64 rows: 1, 2, 4 or 8, for
                            // queries too short to fill a tile
  bool split_dims = false;  // beyond kMostWideDims: two warpgroups share their 64 query rows; each
                            // computes all of S, and O in half of the columns
  bool paired = false;  // likewise: two blocks of a cluster share their query rows; each computes
                        // S of half of the keys, and O in half of the columns (partner.cuh)
  ShiftRule shift_rule = ShiftRule::kFirstBlock;
  bool stage_output = true;  // O leaves through shared memory and TMA, else from registers
  bool cache_hints = false;  // Q leaves the L2 first, K and V stay
  bool specialised = true;   // ablation: the producer is a warp of its own
  bool swizzle = true;       // ablation: tiles in shared memory as the copy engine permutes them
  bool ping_pong = true;     // ablation: one warpgroup at a time issues its products
  bool overlap = true;       // ablation: O += P V of one block runs under the softmax of the next
  bool skip_full_masks = true;  // ablation: no mask arithmetic in blocks that every row sees whole
  bool longest_first = true;    // ablation: query blocks with the most keys come first
  bool folded_scale = true;     // ablation: exp2(s c - m c) as one multiply-add

  bool skips_documents = false;  // blocks of keys of other documents are left out
  bool caches = false;           // requests over caches: left padding and pages
  bool paged = false;            // k and v are pools of pages, looked up by a warp that loads
  bool mixed = false;            // requests of at most kFewRows are left to decode_sm80, which runs
                                 // beside this kernel
  bool gathers = false;          // pages of so few rows that warps copy each row themselves
  bool tiled_bias = false;       // the copy engine brings the bias of a block of pairs, and the
  bool tiled_mask = false;       // boolean mask; else their elements are loaded one by one
  i32 pair_stages = 0;           // of those in shared memory
  bool conditional = false;      // computes where a kernel before it says so, else nothing
  ScoreOptions score;

  constexpr bool has_8_bits() const { return dtype == DType::kFloat8E4M3; }
  constexpr i32 element_bytes() const { return has_8_bits() ? 1 : 2; }
  constexpr DType output() const { return o_dtype == DType::kNone ? dtype : o_dtype; }

  constexpr i32 q_tiles() const { return split_dims ? 1 : warpgroups; }  // of 64 query rows
  constexpr i32 tile_rows() const { return 64 / heads_per_tile; }        // of a head
  constexpr i32 q_rows() const { return tile_rows() * q_tiles(); }
  constexpr i32 o_dims() const { return split_dims || paired ? d_v / 2 : d_v; }  // of a warpgroup
  // Of a block of keys, those whose S a warpgroup computes, and how many S of a thread that is.
  constexpr i32 own_keys() const { return paired ? kv_rows / 2 : kv_rows; }
  constexpr i32 score_floats() const { return own_keys() / 2; }
  constexpr i32 blocks_of_tile() const { return paired ? 2 : 1; }  // of a cluster
  constexpr i32 threads() const { return 128 * (warpgroups + 1); }

  bool operator==(const ForwardSm90Config&) const = default;

  // Registers per thread after the hand-over (setmaxnreg). A block owns at most 65,536; at launch
  // all threads hold the same number, rounded down to a multiple of 8.
  constexpr i32 launch_registers() const { return 65536 / threads() / 8 * 8; }
  constexpr i32 producer_registers() const {
    if (score.varlen) return 56;  // the scheduler looks up sequences
    return warpgroups == 3 ? 32 : adds_in_parts() || has_wide_output() || paired ? 24 : 40;
  }
  constexpr i32 consumer_registers() const {
    if (has_wide_output() && (warpgroups == 1 || !score.varlen)) return warpgroups == 1 ? 256 : 240;
    if (score.varlen) return warpgroups == 3 ? 152 : 224;
    if (warpgroups == 3) return 160;
    return warpgroups == 2 && !adds_in_parts() && !paired ? 232 : 240;
  }

  // Whether scores come to the softmax in log2; else as dot products, which a mask may have hidden.
  constexpr bool scales_scores() const { return score.scales_scores(); }
  // Whether scores go through arithmetic of their own before the softmax sees them.
  constexpr bool maps_scores() const { return maps_every_score() || score.has_pair_terms(); }
  constexpr bool maps_every_score() const {  // in plain tiles, too
    return score.negative_scale || score.score_mod || score.alibi || score.asks_every_pair();
  }

  // Bytes of shared memory, in the order in which they lie there. Tiles come in chunks of 128 bytes
  // of each row. Those of e4m3 values are transposed: a row for each dim.
  constexpr i32 num_q_slots() const { return q_slots > 0 ? q_slots : q_tiles(); }
  constexpr i32 q_bytes() const { return 64 * row_bytes(d_qk); }  // of a slot
  constexpr i32 k_bytes() const { return own_keys() * row_bytes(d_qk); }
  constexpr i32 v_dims() const { return paired ? o_dims() : d_v; }  // of a thread block
  constexpr i32 v_bytes() const {
    return has_8_bits() ? d_v * row_bytes(kv_rows) : kv_rows * row_bytes(v_dims());
  }
  constexpr i32 o_bytes() const { return stage_output ? 64 * q_tiles() * chunked(d_v) * 2 : 0; }
  static constexpr bool stages_floats(i32 dims) { return dims == 64 || dims == 128; }
  constexpr bool pair_tiles() const { return tiled_bias || tiled_mask; }
  constexpr i32 bias_bytes() const {  // of a block of pairs
    return tiled_bias ? 64 * q_tiles() * kv_rows * i32(size_bytes(score.bias)) : 0;
  }
  constexpr i32 mask_bytes() const { return tiled_mask ? 64 * q_tiles() * kv_rows : 0; }
  constexpr i32 pair_bytes() const { return bias_bytes() + mask_bytes(); }
  constexpr i32 found_bytes() const { return gathers ? 2 * 16 * kv_rows : 0; }  // of two blocks
  // Of a pair: what a warpgroup hears of its partner, 16 bytes a thread for 16 keys; two of them.
  constexpr i32 message_bytes() const { return paired ? 64 * own_keys() * 2 : 0; }
  constexpr i32 messages_bytes() const { return 2 * warpgroups * message_bytes(); }
  constexpr i32 work_tile_bytes() const { return 32 * (1 + warpgroups + (score.varlen ? 1 : 0)); }
  constexpr i32 shared_bytes() const {
    return num_q_slots() * q_bytes() + stages * (k_bytes() + v_bytes()) + o_bytes() +
           pair_stages * pair_bytes() + found_bytes() + messages_bytes() + barrier_bytes();
  }
  constexpr i32 barrier_bytes() const {  // and two work tiles
    return 2 * work_tile_bytes() + 48 +
           16 * (num_q_slots() + 2 * stages + (gathers ? 2 : 0) + pair_stages) +
           (fills_tails() ? 8 * stages : 0) + key_step_bytes() + partner_bytes();
  }
  // Of a pair: a barrier for each message, and what the first block claims, with its two.
  constexpr i32 partner_bytes() const { return paired ? 16 * warpgroups + 32 : 0; }
  constexpr i32 key_step_bytes() const { return score.has_tile_lists() ? 8 * stages : 0; }
  static constexpr i32 chunked(i32 dim) { return (dim + 63) / 64 * 64; }
  constexpr i32 row_bytes(i32 columns) const {
    return (columns * element_bytes() + 127) / 128 * 128;
  }
  constexpr i32 weight_words() const { return kv_rows * element_bytes() / 8; }  // of a thread
  // Of e4m3, whether O is so wide that its products come in parts of the columns (output.cuh).
  constexpr bool adds_in_parts() const {
    return has_8_bits() && d_v > (warpgroups == 3 ? 64 : 128);
  }
  constexpr i32 part_dims() const { return d_v / (d_v > 192 ? 4 : 2); }
  // Registers of O, and of a sum that is added to it beside S.
  constexpr i32 sums() const { return o_dims() / 2 * (has_8_bits() && !adds_in_parts() ? 2 : 1); }

  // Whether O of a warpgroup is wider than a product.
  constexpr bool has_wide_output() const { return o_dims() > 256; }

  // Whether a warp sets rows of V past the end of a sequence to zero.
  constexpr bool fills_tails() const { return score.varlen && !gathers && !has_8_bits(); }

  // Widths of a product of a warpgroup (ptx/mma.cuh).
  static constexpr bool is_product_width(i32 n) {
    return n == 48 || n == 64 || n == 80 || n == 96 || n == 112 || n == 128 || n == 160 ||
           n == 176 || n == 192 || n == 256;
  }

  // Why no kernel can have this config; "" where one can.
  constexpr const char* why_invalid() const {
    if (dtype != DType::kBFloat16 && dtype != DType::kFloat16 && !has_8_bits()) {
      return "the dtype has 16 bits or is e4m3";
    }
    if (d_qk % 16 != 0 || d_qk < 16 || d_qk > 512) return "d_qk is a multiple of 16 up to 512";
    if (!is_product_width(o_dims()) && o_dims() != kMostWideDims) {
      return "no product is as wide as the columns of O";
    }
    if (!is_product_width(kv_rows) || (own_keys() < 48 && own_keys() != 32)) {
      return "no product is as wide as a block of keys";
    }
    if (warpgroups < 1 || warpgroups > 3) return "1 to 3 warpgroups compute";
    if (stages < 1 || stages > 6) return "there are 1 to 6 stages";
    if (num_q_slots() < q_tiles() || num_q_slots() > 6) {
      return "there are as many slots of Q as warpgroups, and at most 6";
    }
    if (q_register_dims % 16 != 0 || q_register_dims < 0 || q_register_dims > d_qk) {
      return "q_register_dims is a multiple of 16 up to d_qk";
    }
    if (shared_bytes() > 232448) return "a block has 232,448 bytes of shared memory";
    if (dtype == DType::kFloat16 && shift_rule == ShiftRule::kFirstBlock) {
      return "float16 does not hold every probability relative to the first block";
    }
    if (producer_registers() + warpgroups * consumer_registers() >
        (warpgroups + 1) * min(launch_registers(), 248)) {
      return "setmaxnreg would wait for ever";
    }
    if (sums() + score_floats() >= consumer_registers()) return "O and S exceed the registers";
    if (paired && *why_pair_invalid() != 0) return why_pair_invalid();
    if (split_dims && (warpgroups != 2 || stage_output || o_dims() % 64 != 0)) {
      return "split_dims takes two warpgroups, multiples of 128 dims, and O from registers";
    }
    if (has_8_bits() && *why_8_bits_invalid() != 0) return why_8_bits_invalid();
    return why_options_invalid();
  }
  constexpr const char* why_pair_invalid() const {
    if (split_dims || warpgroups != 2 || stage_output || o_dims() % 64 != 0) {
      return "a pair takes two warpgroups, multiples of 128 dims, and O from registers";
    }
    if (has_8_bits() || shift_rule == ShiftRule::kWhenSumGrew) {
      return "a pair takes 16 bits, and no sum of a block of keys: each has that of a half";
    }
    if (maps_scores() || score.dropout || score.varlen || score.has_tile_lists() || !specialised) {
      return "a pair takes masks of intervals alone";
    }
    return "";
  }
  constexpr const char* why_8_bits_invalid() const {
    if (kv_rows > 128 || kv_rows % 32 != 0 || d_qk % 32 != 0) {
      return "e4m3 takes up to 128 keys at a time, 32 of them or 32 dims a product";
    }
    if (o_dtype == DType::kNone) return "e4m3 has sums of another type";
    if (adds_in_parts() && !is_product_width(part_dims())) return "part of a wide O is a product";
    if (heads_per_tile > 1) return "the heads of a tile of e4m3 have one scale";
    if (q_register_dims > 0 || split_dims || !specialised || !swizzle) {
      return "e4m3 takes Q from swizzled tiles, and a warp that loads";
    }
    if (maps_scores() || score.dropout || caches || score.blocks) {
      return "e4m3 takes masks of intervals alone";
    }
    if (shift_rule == ShiftRule::kFirstBlock) {
      return "e4m3 does not hold every probability relative to the first block";
    }
    return "";
  }
  constexpr const char* why_options_invalid() const {
    const i32 heads = heads_per_tile;
    if (heads != 1 && heads != 2 && heads != 4 && heads != 8) return "1, 2, 4 or 8 heads share";
    if (heads > 1 && (stage_output || score.alibi || score.has_pair_terms() || score.dropout)) {
      return "heads share a tile without ALiBi, bias, mask, documents, dropout and staged O";
    }
    if (skips_documents && !score.documents) return "there are no documents to skip";
    if (score.has_tile_lists() && (heads > 1 || caches || !specialised || q_tiles() > 2)) {
      return "lists of tiles take a warp that loads, two warpgroups, and no heads that share a "
             "tile";
    }
    if (score.mask_tiles && (score.blocks || !score.user.mask || kv_rows > 128)) {
      return "a mask says which tiles are met where lists do not, of up to 128 keys";
    }
    if (caches && (!score.varlen || score.has_pair_terms())) {
      return "caches have lengths, and no bias, mask and documents";
    }
    if (pair_tiles() != (pair_stages > 0) || (tiled_bias && score.bias == DType::kNone) ||
        (tiled_mask && !score.mask)) {
      return "tiles of bias and mask have stages";
    }
    if (pair_tiles() && (kv_rows != 64 || !specialised || heads_per_tile > 1)) {
      return "tiles of bias and mask are 64 keys wide, loaded by a warp of its own";
    }
    if (score.accumulate && (!score.stats || !score.fp32_out || split_dims || paired || caches)) {
      return "a part is merged with stats, in float32, by the warp that has its rows";
    }
    if (mixed && !caches) return "kernels run side by side over caches";
    if (paged && (!caches || !specialised || !swizzle)) {
      return "pages are of caches, looked up by a warp of its own, and swizzled";
    }
    if (gathers && !paged) return "rows are gathered from pages";
    if (stage_output && (score.varlen || (score.fp32_out && !stages_floats(d_v)))) {
      return "TMA stores O of sequences that are alike, in float32 in halves of whole chunks";
    }
    return "";
  }
  constexpr bool valid() const { return *why_invalid() == 0; }
};

template <class Each>
constexpr void for_each_field(const ForwardSm90Config& config, Each each) {
  each("dtype", config.dtype);
  each("o_dtype", config.o_dtype);
  each("d_qk", config.d_qk);
  each("d_v", config.d_v);
  each("warpgroups", config.warpgroups);
  each("kv_rows", config.kv_rows);
  each("stages", config.stages);
  each("q_slots", config.q_slots);
  each("q_register_dims", config.q_register_dims);
  each("heads_per_tile", config.heads_per_tile);
  each("split_dims", config.split_dims);
  each("paired", config.paired);
  each("shift_rule", config.shift_rule);
  each("stage_output", config.stage_output);
  each("cache_hints", config.cache_hints);
  each("specialised", config.specialised);
  each("swizzle", config.swizzle);
  each("ping_pong", config.ping_pong);
  each("overlap", config.overlap);
  each("skip_full_masks", config.skip_full_masks);
  each("longest_first", config.longest_first);
  each("folded_scale", config.folded_scale);
  each("skips_documents", config.skips_documents);
  each("caches", config.caches);
  each("paged", config.paged);
  each("mixed", config.mixed);
  each("gathers", config.gathers);
  each("tiled_bias", config.tiled_bias);
  each("tiled_mask", config.tiled_mask);
  each("pair_stages", config.pair_stages);
  each("conditional", config.conditional);
  each("score", config.score);
}

// Q: box (64, tile_rows), K: (64, kv_rows), V: (64, kv_rows), O: (64, 64); dims (d, rows, heads,
// batch), 16-bit elements, 128-byte swizzle, zero fill. Without config.swizzle the boxes of Q, K
// and V are 8 wide. Of e4m3 boxes of Q and K are 128 wide, and V is what transpose_values_sm90
// makes: boxes (128, d_v), dims (key of a block, d, kv_head, block of keys). The map of O is used
// with stage_output only. Of pools of pages the boxes of K and V are (64, key_box_rows()), and
// their dims (d, row of the page, head, page). Bias and mask, where they come in tiles: boxes of
// q_rows() rows and 128 bytes of keys, of the mask 64; dims (key, row, head, sequence), axes that
// are broadcast with an extent of 1.
struct ForwardTensorMaps {
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap o;
  TensorMap bias;
  TensorMap mask;
};

// Rows of a box of K and V in pools of pages: they divide a page and a block of keys, so that no
// box lies in two pages. Left padding begins anywhere in a page.
constexpr i32 key_box_rows(const AttentionParams& p, i32 kv_rows) {
  if (p.kv_start.present()) return 1;
  i32 rows = kv_rows;
  for (i32 rest = static_cast<i32>(p.cache_layout.page_rows); rest != 0;) {
    const i32 next = rows % rest;  // Euclid's algorithm
    rows = rest;
    rest = next;
  }
  return rows;
}

// The documents that a block of rows can belong to, as an interval of ids.
struct IdRange {
  i64 least = 0x7fffffffffffffff;
  i64 largest = -0x7fffffffffffffff - 1;

  constexpr void add(i64 id) {
    least = min(least, id);
    largest = max(largest, id);
  }
  constexpr bool meets(const IdRange& other) const {
    return least <= other.largest && other.least <= largest;
  }
  // Whether all ids of both are the same one.
  constexpr bool is_one_with(const IdRange& other) const {
    return least == largest && other.least == other.largest && least == other.least;
  }
};

// Blocks of keys are numbered through all sequences (common/documents_sm90.cuh): numbers in use,
// and some more where sequences are packed.
constexpr i64 num_key_ranges(i64 kv_rows, i64 num_sequences, bool packed, i64 block_rows) {
  if (packed) return kv_rows / block_rows + num_sequences;
  return ceil_div(kv_rows, block_rows) * num_sequences;
}

inline constexpr i32 kKeyRangeThreads = 128;  // of a block of document_ranges_sm90
inline constexpr i32 kValueThreads = 256;     // of transpose_values_sm90

struct ForwardParams {
  i32 batch;  // or the number of sequences
  i32 heads_q;
  i32 heads_kv;         // divides heads_q
  SequenceShape shape;  // of every batch entry; unused with score.varlen
  IntervalMask mask;
  float scale_log2;     // softmax scale * log2(e), > 0 unless negative_scale or score_mod
  i32 num_q_blocks;     // ceil(q_len / q_rows); unused with score.varlen
  i32 heads_per_group;  // heads that share the L2: their K and V take 32 MB or less
  u32* next_block;      // one counter, 0 before the first launch; every launch leaves it at 0;
                        // null where each thread block has one block of queries
  float scale;          // softmax scale
  ScoreMod score_mod;
  float kept_scale;      // of probabilities that dropout keeps; 1 without
  IdRange* key_ranges;   // with config.skips_documents: the documents of each block of keys
  u8* values;            // of e4m3: V by blocks of keys, transposed (values.cuh)
  TileLists tile_lists;  // with score.has_tile_lists(): of blocks of queries
  const u32* condition;  // with config.conditional: 0 where there is nothing to compute

  // o, lse and stats, which the epilogue writes, and the arrays of the options: alibi_slopes,
  // sinks, lengths, offsets, bias, mask, ids. q, k and v are read through the tensor maps.
  AttentionParams attention;
};

// What a launch is given, by value.
struct ForwardArguments {
  ForwardTensorMaps maps;
  ForwardParams params;
};

}  // namespace fulmen
