// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// New rows of keys and values into paged caches, and the rotary embedding of k and q. Threads stand
// side by side along the pieces of a row: along the head dimension, then heads, then k, v and q. A
// thread asks for the same piece of several rows at once; while they come, a warp of its own finds
// where they go. A thread reads all that it writes, so that q may be rotated in place. Records have
// warps of their own kind: records.cuh.
#pragma once

#include "kernels/append/config.h"
#include "kernels/append/params.h"
#include "kernels/append/records.cuh"
#include "kernels/append/runs.cuh"
#include "kernels/append/targets.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// One thread's share of one head: the same of several rows.
template <AppendConfig kConfig>
struct Piece {
  using T = typename ElementOf<kConfig.dtype>::Type;
  using Real = typename ElementOf<kConfig.dtype>::Real;
  using Table = typename ElementOf<kConfig.table>::Type;
  using Cached = typename ElementOf<kConfig.cache_dtype()>::Type;
  static constexpr bool kQuantises = kConfig.quantised != DType::kNone;
  static constexpr i32 kLanes = kConfig.lanes();
  static constexpr bool kRotates = kConfig.rotation != Rotation::kNone;
  static constexpr bool kHalves = kConfig.rotation == Rotation::kHalves;
  // One element at a time, a neighbour is a run of its own, as a half is.
  static constexpr bool kInOneRun = kConfig.rotation == Rotation::kInterleaved && kLanes > 1;
  static constexpr i32 kPairs = kInOneRun ? kLanes / 2 : kLanes;

  // What it has of one row.
  struct Row {
    Run<T, kLanes> first;
    Run<T, kLanes> second;  // of a piece that rotates: what turns with the first
    Run<Table, kPairs> cos, sin;
    u8* to = nullptr;  // null: nothing is written
    Real scale = 1;    // what elements of a quantised cache are divided by
  };

  const AppendParams& p;
  bool is_q;
  bool is_v;
  bool is_rotated = false;
  i32 head;
  i32 dim;        // of the head, where the first run begins
  i32 apart = 0;  // dims from the first run to the second

  // Piece `index` of a row: of k, of v or of q.
  Piece(const AppendParams& params, i32 index) : p(params) {
    is_q = index >= p.kv_pieces;
    is_v = !is_q && index >= p.k_pieces;
    const u32 of_head = static_cast<u32>(is_v ? p.pieces_of_v_head : p.pieces_of_head);
    const u32 in_array = static_cast<u32>(index - (is_q ? p.kv_pieces : is_v ? p.k_pieces : 0));
    head = static_cast<i32>(in_array / of_head);
    const i32 in_head = static_cast<i32>(in_array) - head * static_cast<i32>(of_head);
    dim = in_head * kLanes;
    if (!kRotates || is_v) return;
    is_rotated = in_head < p.rotated_of_head;
    if (kInOneRun) return;
    if (is_rotated) {
      apart = kHalves ? p.rotary_dim / 2 : 1;
      if (!kHalves) dim *= 2;
    } else if (p.rotated_of_head > 0) {
      dim += p.rotary_dim / 2;  // a rotated piece has two runs
    }
  }

  const ArrayView& source() const { return is_q ? p.q : is_v ? p.v : p.k; }
  const ArrayView& cache() const { return is_q ? p.q_out : is_v ? p.v_cache : p.k_cache; }
  i64 bytes_of_stored() const { return kQuantises && !is_q ? sizeof(Cached) : sizeof(T); }

  void load(Row& row, const RowNumber& number) const {
    const ArrayView& from = source();
    const u8* const at =
        from.data + from.offset(number.batch, head, number.row, dim) * i64{sizeof(T)};
    load_run(row.first, at);
    if (kRotates && apart > 0) load_run(row.second, at + apart * from.strides[3] * i64{sizeof(T)});
  }

  // Where it goes, and how it turns.
  void aim(Row& row, const RowTarget& at) const {
    if (is_q ? at.position < 0 : at.page < 0) return;
    const i64 offset = is_q ? cache().offset(at.batch, head, at.row, dim)
                            : cache().offset(at.page, head, at.page_row, dim);
    row.to = cache().data + offset * bytes_of_stored();
    if constexpr (kQuantises) {
      const ArrayView& scales = is_v ? p.v_scale : p.k_scale;
      if (!is_q && scales.present()) {
        const i64 element = scales.offset(at.page, head, at.page_row, 0);
        row.scale = load_element<float>(scales.data + element * i64{sizeof(float)});
      }
    }
    if (!kRotates || !is_rotated) return;
    const i32 pair = kHalves ? dim : dim / 2;
    load_run(row.cos, p.cos.data + p.cos.offset(0, 0, at.position, pair) * i64{sizeof(Table)});
    load_run(row.sin, p.sin.data + p.sin.offset(0, 0, at.position, pair) * i64{sizeof(Table)});
  }

  // Each pair of elements with its cos and sin.
  template <class X, class Rotate>
  static void each_pair(const Row& row, X* first, X* second, const Rotate& rotate) {
#pragma unroll
    for (i32 j = 0; j < kPairs; ++j) {
      rotate(kInOneRun ? first[2 * j] : first[j], kInOneRun ? first[2 * j + 1] : second[j],
             static_cast<Real>(widen(row.cos.element[j])),
             static_cast<Real>(widen(row.sin.element[j])));
    }
  }

  void store(Row& row) const {
    if (row.to == nullptr) return;
    u8* const second_to = row.to + apart * cache().strides[3] * bytes_of_stored();
    if constexpr (kQuantises) {
      if (!is_q) return store_quantised(row, second_to);
    }
    if (kRotates && is_rotated) {
      each_pair(row, row.first.element, row.second.element, [](T& x0, T& x1, Real c, Real s) {
        Real a = widen(x0), b = widen(x1);
        rotate_pair(a, b, c, s);
        x0 = narrow(a, T{});
        x1 = narrow(b, T{});
      });
    }
    store_run(row.first, row.to);
    if (kRotates && apart > 0) store_run(row.second, second_to);
  }

  // Rotated, then divided, then rounded once.
  void store_quantised(const Row& row, u8* second_to) const {
    Real a[kLanes], b[kLanes];
#pragma unroll
    for (i32 j = 0; j < kLanes; ++j) {
      a[j] = widen(row.first.element[j]);
      b[j] = apart > 0 ? Real(widen(row.second.element[j])) : Real(0);
    }
    if (kRotates && is_rotated) {
      each_pair(row, a, b, [](Real& x0, Real& x1, Real c, Real s) { rotate_pair(x0, x1, c, s); });
    }
    Run<Cached, kLanes> first_stored, second_stored;
#pragma unroll
    for (i32 j = 0; j < kLanes; ++j) {
      first_stored.element[j] = narrow(a[j] / row.scale, Cached{});
      second_stored.element[j] = narrow(b[j] / row.scale, Cached{});
    }
    store_few(first_stored, row.to);
    if (apart > 0) store_few(second_stored, second_to);
  }
};

// The warp that finds where the rows of a block go, one row a lane, and then looks for faults of
// requests.
template <AppendConfig kConfig>
void find_targets(const AppendParams& p, const RowNumber& first, i32 rows, RowTarget* targets) {
  using Index = IndexLoads<kConfig.vectors>;  // then those arrays are aligned, too
  const i32 lane = static_cast<i32>(ptx::thread_index() % kMaxAppendRows);
  if (lane < rows) find_target<Index>(p, first.plus(p, lane), targets[lane]);
  ptx::block_sync();
  record_request_faults<Index>(p, i64{ptx::block_index()} * kMaxAppendRows + lane,
                               i64{ptx::num_blocks()} * kMaxAppendRows);
}

// The other warps, `thread` of kConfig.movers().
template <AppendConfig kConfig>
void move_rows(const AppendParams& p, const RowNumber& first, i32 rows, const RowTarget* targets,
               i32 thread) {
  constexpr i32 kRows = kConfig.rows_in_flight();
  const i32 own_row = static_cast<i32>(u32(thread) / u32(p.threads_of_row));
  const i32 rows_at_once = kConfig.movers() / p.threads_of_row;
  const i32 first_index = thread - own_row * p.threads_of_row;
  bool waits = true;  // for targets
#pragma unroll 1
  for (i32 index = first_index;; index += p.threads_of_row) {
    const Piece<kConfig> piece(p, index);
    const bool is_inside = index < p.pieces && own_row < rows_at_once;
#pragma unroll 1
    for (i32 begin = own_row; waits || begin < rows; begin += kRows * rows_at_once) {
      typename Piece<kConfig>::Row each[kRows];
#pragma unroll
      for (i32 i = 0; i < kRows; ++i) {
        const i32 row = begin + i * rows_at_once;
        if (is_inside && row < rows) piece.load(each[i], first.plus(p, row));
      }
      if (waits) ptx::block_sync();
      waits = false;
      if (!is_inside) return;
#pragma unroll
      for (i32 i = 0; i < kRows; ++i) {
        const i32 row = begin + i * rows_at_once;
        if (row < rows) piece.aim(each[i], targets[row]);
      }
#pragma unroll
      for (i32 i = 0; i < kRows; ++i) piece.store(each[i]);
    }
    if (!is_inside) return;
  }
}

template <AppendConfig kConfig>
void append(const AppendParams& p) {
  RowTarget* const targets = reinterpret_cast<RowTarget*>(ptx::shared_bytes());
  const i64 first_row = static_cast<i64>(ptx::block_index()) * p.rows_of_block;
  const RowNumber first(p, first_row);
  const i32 rows = static_cast<i32>(min<i64>(p.rows_of_block, p.all_rows - first_row));
  const i32 thread = static_cast<i32>(ptx::thread_index());
  if (thread < kMaxAppendRows) {
    find_targets<kConfig>(p, first, rows, targets);
  } else if constexpr (kConfig.has_records()) {
    move_records<kConfig>(p, first, rows, targets, thread - kMaxAppendRows);
  } else {
    move_rows<kConfig>(p, first, rows, targets, thread - kMaxAppendRows);
  }
}

}  // namespace fulmen
