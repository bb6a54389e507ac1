// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Caches as kernels read them: page tables, left padding, positions and trees in device memory;
// what they mean is in sequence.cuh. Kernels that are compiled for caches load a request and then
// ask where its keys lie and which of them a row sees. No other kernel includes any of this in its
// code. Index: how an entry of an array is read (array_access.cuh).
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/sequences.cuh"

namespace fulmen {

template <class Index = AnyIndex>
CacheEntry cache_entry(const AttentionParams& p, i64 index) {
  CacheEntry entry{axis_entry<Index>(p.cu_kv, p.kv_lengths, index), 0, p.cache_layout.table_pages,
                   0};
  if (p.page_indptr.present()) {
    const AxisEntry pages = axis_entry<Index>(p.page_indptr, ArrayView{}, index);
    entry.page_begin = pages.begin;
    entry.page_end = pages.end;
  }
  if (p.kv_start.present()) entry.start = Index::load(p.kv_start, index * p.kv_start.strides[3]);
  return entry;
}

template <class Index = AnyIndex>
CacheSequence load_cache_sequence(const AttentionParams& p, i64 index) {
  return cache_sequence_of(p.cache_layout, axis_entry<Index>(p.cu_q, p.q_lengths, index), p.q_rows,
                           cache_entry<Index>(p, index), p.kv_rows, p.packed.q ? 0 : index,
                           p.packed.kv ? 0 : index, index + 1 == p.num_sequences, p.bottom_right);
}

// Where key j of a request lies in k, v and what is like them: what every kernel over caches asks.
inline KeyRow key_row(const AttentionParams& p, const CacheSequence& sequence, i64 j) {
  return key_row(p.cache_layout, sequence, j, [&](i64 page) {
    return load_index(p.page_table, p.page_table.offset(sequence.kv_batch, 0, 0, page));
  });
}

// The same for a read.
inline KeyRow readable_row(const AttentionParams& p, const CacheSequence& sequence, i64 j) {
  return readable(p.cache_layout, key_row(p, sequence, j));
}

// Whether a key has a page. A row that sees one without is empty, whatever else it sees: kernels
// that copy tiles put zeros for such a key and NaN for its value, which shows in O, and then ask
// which keys the row saw.
inline bool has_page(const AttentionParams& p, const KeyRow& key) {
  return !p.cache_layout.paged || !is_bad_page(key.batch, p.num_pages);
}
constexpr u32 kValueOfNoPage = ~0u;  // NaN in every floating-point type
inline void record_bad_page(const AttentionParams& p) { report(p.faults, kFaultPages); }

// Where query row i of a request stands, and key j, for causal, window, chunk and ALiBi.
template <class Index = AnyIndex, class SequenceType>
i64 row_position(const AttentionParams& p, const SequenceType& sequence, i64 i) {
  if (!p.positions.present()) return sequence.shape.position(i);
  return clamped_position(
      Index::load(p.positions, p.positions.offset(sequence.batch, 0, 0, sequence.q_begin + i)));
}
template <class Index = AnyIndex, class SequenceType>
i64 key_position(const AttentionParams& p, const SequenceType& sequence, i64 j) {
  const i64 draft = j - first_drafted(sequence.shape);
  const bool is_drafted =
      p.tree.present() && p.positions.present() && 0 <= draft && draft < sequence.shape.q_len;
  return is_drafted ? row_position<Index>(p, sequence, draft) : j;
}

// The word of a tree mask of row i.
template <class Index = AnyIndex, class SequenceType>
i64 tree_word(const AttentionParams& p, const SequenceType& sequence, i64 i) {
  return Index::load(p.tree, p.tree.offset(sequence.batch, 0, 0, sequence.q_begin + i));
}

// Whether causal, window, prefix, chunk and tree let row i see key j.
inline bool sees_key(const AttentionParams& p, const CacheSequence& sequence, i64 i, i64 j) {
  if (p.tree.present() && !tree_shows(sequence.shape, tree_word(p, sequence, i), j)) return false;
  return sees_at(p.mask_options, row_position(p, sequence, i), key_position(p, sequence, j), j);
}

// Keys outside of which row i sees none. Where drafts stand at positions of their own, all of them
// are inside, and sees_key tells which.
inline Interval columns_of_row(const AttentionParams& p, const CacheSequence& sequence, i64 i) {
  const i64 kv_len = sequence.shape.kv_len;
  const Interval seen = visible_columns_at(p.mask_options, kv_len, row_position(p, sequence, i));
  if (!p.tree.present() || !p.positions.present()) return seen;
  const i64 drafted = max<i64>(first_drafted(sequence.shape), 0);
  return {seen.size() > 0 ? min(seen.begin, drafted) : drafted, kv_len};
}

// The blocks of keys that rows [rows.begin, rows.end) of a request must read.
inline BlockRange key_blocks(const AttentionParams& p, const CacheSequence& sequence, Interval rows,
                             i64 block_cols) {
  const SequenceShape& shape = sequence.shape;
  if (!p.positions.present() && !p.tree.present()) {
    return visible_column_blocks(p.mask_options, shape, rows, block_cols);
  }
  Interval some{shape.kv_len, 0}, all{0, shape.kv_len};
  for (i64 i = rows.begin; i < rows.end; ++i) {  // positions may come in any order
    const Interval seen = columns_of_row(p, sequence, i);
    if (seen.size() > 0) some = {min(some.begin, seen.begin), max(some.end, seen.end)};
    all = {max(all.begin, seen.begin), min(all.end, seen.end)};
  }
  if (p.tree.present()) all.end = min(all.end, max<i64>(first_drafted(shape), 0));
  return blocks_of(some, all, block_cols, shape.kv_len);
}

// ---- Faults ------------------------------------------------------------------------------------

// Those of positions: threads of the grid look at one each.
template <class Index = AnyIndex>
void record_position_faults(const AttentionParams& p, i32 num_threads) {
  if (p.faults == nullptr || p.positions.dtype != DType::kInt64) return;
  const i64 thread = static_cast<i64>(ptx::block_index()) * num_threads + ptx::thread_index();
  const i64 all_threads = static_cast<i64>(ptx::num_blocks()) * num_threads;
  bool is_outside = false;
  for (i64 i = thread; i < p.batch_extent() * p.q_rows; i += all_threads) {
    const i64 position =
        Index::load(p.positions, p.positions.offset(i / p.q_rows, 0, 0, i % p.q_rows));
    is_outside |= position != clamped_position(position);
  }
  if (is_outside) report(p.faults, kFaultPositions);
}

// record_faults for calls over caches, but for ids of pages, which those find that read them.
inline __attribute__((noinline)) void record_cache_faults(const AttentionParams& p,
                                                          i32 num_threads) {
  if (p.faults == nullptr) return;
  record_rng_fault(p);
  const i64 thread = static_cast<i64>(ptx::block_index()) * num_threads + ptx::thread_index();
  const i64 all_threads = static_cast<i64>(ptx::num_blocks()) * num_threads;
  u32 found = 0;
  for (i64 i = thread; i < p.num_sequences; i += all_threads) {
    found |= load_cache_sequence(p, i).faults;
  }
  report(p.faults, found);
  record_position_faults(p, num_threads);
}

}  // namespace fulmen
