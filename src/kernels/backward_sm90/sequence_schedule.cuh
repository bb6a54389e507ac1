// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Two tables that backward_preprocess_sm90 leaves for backward_sm90. For sequences whose lengths
// only the device knows: the order of their blocks of keys, sequences with the most queries first
// (KeyBlockInfo); rows of the gradients that belong to no sequence become 0 here too. For
// documents: the blocks of queries that share a document with each block of keys (DocumentBlocks).
#pragma once

#include "kernels/backward_sm90/config.h"
#include "kernels/common/documents_sm90.cuh"
#include "kernels/common/sequences.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

struct SequenceScheduler {
  const BackwardPreprocessParams& params;
  i32 lane;

  // Lengths beyond the upper bounds, which a caller promised not to have, are cut off.
  Sequence sequence(i64 index) const {
    Sequence sequence = load_sequence(params.attention, index);
    sequence.shape.q_len = min(sequence.shape.q_len, params.bounds.q_len);
    sequence.shape.kv_len = min(sequence.shape.kv_len, params.bounds.kv_len);
    return sequence;
  }

  // One block for a sequence without keys, so that a work tile writes its dQ.
  i32 num_blocks(const SequenceShape& shape) const {
    return max(i32(ceil_div(shape.kv_len, params.kv_rows)), 1);
  }

  void place(i32 index) const {
    const Sequence own = sequence(index);
    const i32 blocks = num_blocks(own.shape);
    u32 before = 0, all = 0;
#pragma unroll 1
    for (i32 other = lane; other < i32(params.attention.num_sequences); other += 32) {
      const SequenceShape shape = sequence(other).shape;
      const bool is_longer = shape.q_len > own.shape.q_len;
      const u32 count = u32(num_blocks(shape));
      all += count;
      if (is_longer || (shape.q_len == own.shape.q_len && other < index)) before += count;
    }
#pragma unroll
    for (u32 distance = 16; distance >= 1; distance /= 2) {
      before += ptx::shuffle_xor(before, distance);
      all += ptx::shuffle_xor(all, distance);
    }
    const KeyBlockInfo place{
        index, i32(before), blocks, i32(all), i32(own.q_begin), i32(own.kv_begin), own.shape};
    for (i32 block = lane; block < blocks; block += 32)
      params.key_block_infos[i32(before) + block] = place;
  }

  // The last sequence for which `holds`, where it holds up to some sequence and for none after it;
  // sequence 0 if for none. All lanes of a warp, 32 sequences at once.
  template <class Holds>
  i64 last_of_sequences(const Holds& holds) const {
    i64 low = 0, high = params.attention.num_sequences - 1;
#pragma unroll 1
    while (low < high) {
      const i64 step = ceil_div(high - low, 32), index = low + step * (lane + 1);
      const i64 count = ptx::count_ones(ptx::ballot(index <= high && holds(index)));
      low += count * step;
      high = min(high, low + step - 1);
    }
    return low;
  }

  // Rows of the queries, or of the keys, that a sequence has.
  Interval rows_of(bool is_query, i64 index) const {
    const Sequence owner = sequence(index);
    const i64 begin = is_query ? owner.q_begin : owner.kv_begin;
    return {begin, begin + (is_query ? owner.shape.q_len : owner.shape.kv_len)};
  }

  // Whether rows [row, row + 32) are all of one sequence; all lanes of a warp.
  bool are_owned(bool is_query, i64 batch, i64 row) const {
    const AttentionParams& p = params.attention;
    const ArrayView& offsets = is_query ? p.cu_q : p.cu_kv;
    const auto begins = [&](i64 index) {
      return load_index(offsets, index * offsets.strides[3]) <= row;
    };
    const Interval rows = rows_of(is_query, p.packed ? last_of_sequences(begins) : batch);
    return rows.begin <= row && row + 32 <= rows.end;
  }

  // Whether a row of the queries, or of the keys, is a row of a sequence.
  bool is_owned(bool is_query, i64 batch, i64 row) const {
    const AttentionParams& p = params.attention;
    const ArrayView& offsets = is_query ? p.cu_q : p.cu_kv;
    return rows_of(is_query, p.packed ? find_sequence(p, offsets, row) : batch).contains(row);
  }

  void clear_row(const ArrayView& x, i64 batch, i64 heads, i64 row, i32 dims) const {
    if (!x.present()) return;
    for (i64 head = 0; head < heads; ++head) {
      for (i32 d = 8 * lane; d < dims; d += 256) {
        ptx::store_global_x4(reinterpret_cast<u16*>(x.data) + x.offset(batch, head, row, d), {});
      }
    }
  }

  // Rows of dq, or of dk and dv, that belong to no sequence become 0; backward_sm90 writes all
  // others. 32 rows a warp at a time.
  void clear(bool is_query, u32 warp, u32 warps) const {
    const AttentionParams& p = params.attention;
    const u32 rows = u32(is_query ? p.q_rows : p.kv_rows), all = u32(p.batch_extent()) * rows;
    for (u32 begin = 32 * warp; begin < all; begin += 32 * warps) {
      if (are_owned(is_query, begin / rows, begin % rows)) continue;
      const u32 mine = min(begin + u32(lane), all - 1);
      u32 unowned = ptx::ballot(!is_owned(is_query, mine / rows, mine % rows));
      for (u32 i = begin; unowned != 0 && i < all; ++i, unowned >>= 1) {
        if ((unowned & 1) == 0) continue;
        if (is_query) {
          clear_row(p.dq, i / rows, p.heads_q, i % rows, i32(p.dim_qk));
        } else {
          clear_row(p.dk, i / rows, p.heads_kv, i % rows, i32(p.dim_qk));
          clear_row(p.dv, i / rows, p.heads_kv, i % rows, i32(p.dim_v));
        }
      }
    }
  }

  // By all warps of the grid.
  void run(u32 warp, u32 warps) const {
    for (u32 i = warp; i < u32(params.attention.num_sequences); i += warps) place(i32(i));
    clear(true, warp, warps);
    clear(false, warp, warps);
  }
};

struct FindDocumentBlocks {
  const BackwardPreprocessParams& params;
  u32 lane;

  // Of keys [first, first + count) of a sequence.
  IdRange ids(const Sequence& sequence, i32 first, i32 count) const {
    const i32 begin = i32(sequence.kv_begin) + first;
    const i32 end = i32(sequence.kv_begin) + min(first + count, sequence.shape.kv_len);
    return ids_of_rows(params.attention.kv_ids, sequence.batch, begin, end, lane);
  }

  // Of keys from `first` on, by blocks of all of the sequence's queries.
  DocumentBlocks blocks_of(const Sequence& sequence, i64 index, i32 first) const {
    const AttentionParams& p = params.attention;
    const IdRange* const queries =
        params.query_ranges +
        first_range(p.packed, p.q_rows, params.q_rows, index, sequence.q_begin);
    const IdRange all = ids(sequence, first, params.kv_rows);
    const auto meets = [&](i32 i) { return queries[i].meets(all); };
    Interval blocks{0, ceil_div(sequence.shape.q_len, params.q_rows)};
    blocks.end = find_block<true>(blocks, lane, meets) + 1;
    blocks.begin = find_block<false>(blocks, lane, meets);
    DocumentBlocks found{i32(blocks.begin), i32(blocks.end), {}, {}};
#pragma unroll
    for (i32 warpgroup = 0; warpgroup < 2; ++warpgroup) {
      const IdRange own = ids(sequence, first + warpgroup * (params.kv_rows - 64), 64);
      const auto is_one = [&](i32 i) { return queries[i].is_one_with(own); };
      Interval full = blocks;
      full.begin = find_block<false>(full, lane, is_one);
      full.end = find_block<false>(full, lane, [&](i32 i) { return !is_one(i); });
      found.full_begin[warpgroup] = i32(full.begin);
      found.full_end[warpgroup] = i32(full.end);
    }
    return found;
  }

  // By all warps of the grid. sequence_at(index): number `index` of the sequences.
  template <class SequenceAt>
  void run(u32 warp, u32 warps, const SequenceAt& sequence_at) const {
    const AttentionParams& p = params.attention;
    const i64 count = num_key_ranges(p.kv_rows, p.num_sequences, p.packed, params.kv_rows);
    for (i64 number = warp; number < count; number += warps) {
      const i64 index = sequence_of_key_range(p, params.kv_rows, number);
      const Sequence sequence = sequence_at(index);
      const i64 block = number - first_key_range(p, params.kv_rows, index, sequence.kv_begin);
      const i64 first = block * params.kv_rows;
      if (first < 0 || first >= sequence.shape.kv_len) continue;
      const DocumentBlocks found = blocks_of(sequence, index, i32(first));
      if (lane == 0) params.document_blocks[number] = found;
    }
  }
};

}  // namespace fulmen
