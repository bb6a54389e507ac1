// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Caches as kernels read them: page tables, left padding, positions and trees in device memory;
// what they mean is in sequence.cuh. Kernels that are compiled for caches load a request, check its
// pages, and then ask where its keys lie and which of them a row sees. No other kernel includes any
// of this in its code.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/sequences.cuh"

namespace fulmen {

inline CacheEntry cache_entry(const AttentionParams& p, i64 index) {
  CacheEntry entry{axis_entry(p.cu_kv, p.kv_lengths, index), 0, p.cache_layout.table_pages, 0};
  if (p.page_indptr.present()) {
    const AxisEntry pages = axis_entry(p.page_indptr, ArrayView{}, index);
    entry.page_begin = pages.begin;
    entry.page_end = pages.end;
  }
  if (p.kv_start.present()) entry.start = load_index(p.kv_start, index * p.kv_start.strides[3]);
  return entry;
}

// The id in entry `page` of a request's page table.
inline i64 load_page(const AttentionParams& p, const CacheSequence& sequence, i64 page) {
  return load_index(p.page_table, p.page_table.offset(sequence.kv_batch, 0, 0, page));
}

// Where key j of a request lies in k, v and what is like them: what every kernel over caches asks.
inline KeyRow key_row(const AttentionParams& p, const CacheSequence& sequence, i64 j) {
  return key_row(p.cache_layout, sequence, j,
                 [&](i64 page) { return load_page(p, sequence, page); });
}

// A request whose pages were not looked at yet (check_pages below).
inline CacheSequence load_cache_sequence(const AttentionParams& p, i64 index) {
  const bool is_last = index + 1 == p.num_sequences;
  return cache_sequence_of(p.cache_layout, cache_entry(p, index), p.kv_rows, p.packed.q ? 0 : index,
                           p.packed.kv ? 0 : index,
                           rows_of(axis_entry(p.cu_q, p.q_lengths, index), p.q_rows, is_last),
                           is_last, p.bottom_right);
}

// Whether one of the entries first, first + step, ... that a request uses names no page.
inline bool finds_bad_page(const AttentionParams& p, const CacheSequence& sequence, i64 first,
                           i64 step) {
  const Interval used = pages_in_use(p.cache_layout, sequence);
  for (i64 page = used.begin + first; page < used.end; page += step) {
    if (is_bad_page(load_page(p, sequence, page), p.num_pages)) return true;
  }
  return false;
}

// Where query row i of a request stands, and key j, for causal, window, chunk and ALiBi.
inline i64 row_position(const AttentionParams& p, const CacheSequence& sequence, i64 i) {
  if (!p.positions.present()) return sequence.shape.position(i);
  return clamped_position(
      load_index(p.positions, p.positions.offset(sequence.batch, 0, 0, sequence.q_begin + i)));
}
inline i64 key_position(const AttentionParams& p, const CacheSequence& sequence, i64 j) {
  const i64 draft = j - first_drafted(sequence.shape);
  const bool is_drafted = p.tree.present() && p.positions.present() && draft >= 0;
  return is_drafted ? row_position(p, sequence, draft) : j;
}

// Whether causal, window, prefix, chunk and tree let row i see key j.
inline bool sees_key(const AttentionParams& p, const CacheSequence& sequence, i64 i, i64 j) {
  if (p.tree.present()) {
    const i64 tree = p.tree.offset(sequence.batch, 0, 0, sequence.q_begin + i);
    if (!tree_shows(sequence.shape, load_index(p.tree, tree), j)) return false;
  }
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

// The same for calls over caches, but for ids of pages, which those find that read them.
inline __attribute__((noinline)) void record_cache_faults(const AttentionParams& p,
                                                          i32 num_threads) {
  if (p.faults == nullptr) return;
  record_faults(p, num_threads);
  const i64 thread = static_cast<i64>(ptx::block_index()) * num_threads + ptx::thread_index();
  const i64 all_threads = static_cast<i64>(ptx::num_blocks()) * num_threads;
  u32 found = 0;
  for (i64 i = thread; i < p.num_sequences; i += all_threads) {
    const AxisEntry q = axis_entry(p.cu_q, p.q_lengths, i);
    found |= cache_faults(p.cache_layout, cache_entry(p, i), p.kv_rows);
    if (p.tree.present() && rows_of(q, p.q_rows, false).length > kMaxTreeRows) {
      found |= q.has_length ? kFaultQLengths : kFaultQOffsets;
    }
  }
  if (p.positions.dtype == DType::kInt64) {
    for (i64 i = thread; i < p.batch_extent() * p.q_rows; i += all_threads) {
      const i64 at = p.positions.offset(i / p.q_rows, 0, 0, i % p.q_rows);
      const i64 position = load_index(p.positions, at);
      if (position != clamped_position(position)) found |= kFaultPositions;
    }
  }
  if (found != 0) ptx::set_bits(p.faults, found);
}

// A request that uses an id of no page is empty, and the host is told. By a thread; by all lanes of
// a warp together.
inline void check_pages(const AttentionParams& p, CacheSequence& sequence) {
  if (!finds_bad_page(p, sequence, 0, 1)) return;
  if (p.faults != nullptr) ptx::set_bits(p.faults, kFaultPages);
  sequence.shape.kv_len = 0;
}
inline void check_pages_of_warp(const AttentionParams& p, CacheSequence& sequence) {
  const i64 lane = ptx::thread_index() % 32;
  if (!ptx::any(finds_bad_page(p, sequence, lane, 32))) return;
  if (p.faults != nullptr && lane == 0) ptx::set_bits(p.faults, kFaultPages);
  sequence.shape.kv_len = 0;
}

}  // namespace fulmen
