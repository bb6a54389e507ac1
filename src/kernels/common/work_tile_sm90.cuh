// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a work tile of the Hopper kernels is about: which rows of which query head, where these lie
// in the arrays, and which bounds of the mask have to be computed.
#pragma once

#include "kernels/base.cuh"
#include "kernels/common/array_access.cuh"
#include "kernels/common/caches.cuh"
#include "kernels/forward_sm90/config.h"

namespace fulmen {

struct QueryBlock {
  i32 q_block;  // rows q_block * q_rows and on
  i32 head;
  i32 batch;
};

// The rows that a block of queries belongs to, in the arrays.
struct SeqlenInfo {
  i32 batch;     // entry of the arrays
  i32 q_begin;   // its first row in q, o, lse
  i32 kv_begin;  // in k, v
  i32 q_slot;    // rows of o from q_begin on that are written: zeros past q_len
  SequenceShape shape;
  i32 kv_batch;  // as batch, of k and v; of pools, the first entry along the page table's last axis
};

template <ForwardSm90Config kConfig>
inline SeqlenInfo seqlen_info_of(const ForwardParams& params, const QueryBlock& block) {
  if constexpr (kConfig.caches) {
    const CacheSequence sequence = load_cache_sequence(params.attention, block.batch);
    return {i32(sequence.batch),    i32(sequence.q_begin),
            i32(sequence.kv_begin), i32(sequence.q_slot),
            sequence.shape,         i32(kConfig.paged ? sequence.first_page : sequence.kv_batch)};
  }
  if constexpr (kConfig.score.varlen) {
    const Sequence sequence = load_sequence(params.attention, block.batch);
    return {i32(sequence.batch),  i32(sequence.q_begin), i32(sequence.kv_begin),
            i32(sequence.q_slot), sequence.shape,        i32(sequence.batch)};
  }
  return {block.batch, 0, 0, params.shape.q_len, params.shape, block.batch};
}

// The entry of the page table for a key, and its row in that page. The key is in the sequence.
struct PageRow {
  i64 id;
  i32 row;
};
inline PageRow page_of_key(const AttentionParams& p, const QueryBlock& q, const SeqlenInfo& seqlen,
                           i32 key) {
  const u32 page_rows = static_cast<u32>(p.cache_layout.page_rows);
  const u32 in_cache = static_cast<u32>(seqlen.kv_begin + key);
  const u32 entry = in_cache / page_rows;
  const i64 at = p.page_table.offset(q.batch, 0, 0, seqlen.kv_batch + i64{entry});
  return {load_aligned_index(p.page_table, at), static_cast<i32>(in_cache - entry * page_rows)};
}

// Rows of a block of keys that are inside the sequence.
template <ForwardSm90Config kConfig>
constexpr i32 rows_inside(const SeqlenInfo& seqlen, i32 key_block) {
  return clamp(seqlen.shape.kv_len - key_block * kConfig.kv_rows, 0, kConfig.kv_rows);
}

template <auto kConfig>
constexpr IntervalMask effective_mask(const IntervalMask& mask) {
  if constexpr (kConfig.score.mask_kind == MaskKind::kNone) return IntervalMask{};
  if constexpr (kConfig.score.mask_kind == MaskKind::kRight) return mask.right_bounds();
  return mask;
}

template <bool kIs>
struct Flag {
  static constexpr bool kValue = kIs;
};

}  // namespace fulmen
