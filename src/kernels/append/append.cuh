// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// New rows of keys and values into paged caches, and the rotary embedding of k and q. Threads stand
// side by side along the pieces of a row: along the head dimension, then heads, then k, v and q. A
// thread asks for the same piece of several rows at once; while they come, a warp of its own finds
// where they go. A thread reads all that it writes, so that q may be rotated in place.
#pragma once

#include "kernels/append/config.h"
#include "kernels/append/params.h"
#include "kernels/common/array_access.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// ---- Where rows go -----------------------------------------------------------------------------

// One row of a block, in shared memory.
struct RowTarget {
  i64 batch;
  i64 row;   // of the batch entry, in k, v and q
  i64 page;  // < 0: not appended
  i64 page_row;
  i64 position;  // in cos and sin; < 0: not rotated, and its q is not written
};
static_assert(sizeof(RowTarget) == kRowTargetBytes);

template <class Index>
AppendRequest load_request(const AppendParams& p, i64 sequence) {
  AppendRequest request{0, p.extents.rows, 0, p.extents.columns, 0, 0};
  if (p.cu_new.present()) {
    request.begin = Index::load(p.cu_new, sequence * p.cu_new.strides[3]);
    request.end = Index::load(p.cu_new, (sequence + 1) * p.cu_new.strides[3]);
  }
  if (p.page_indptr.present()) {
    request.table_begin = Index::load(p.page_indptr, sequence * p.page_indptr.strides[3]);
    request.table_end = Index::load(p.page_indptr, (sequence + 1) * p.page_indptr.strides[3]);
  }
  if (p.kv_lengths.present()) {
    request.length = Index::load(p.kv_lengths, sequence * p.kv_lengths.strides[3]);
  }
  return checked(request, p.extents, p.page_table.present());
}

// The last sequence that begins at or before a row; the caller checks that it owns the row.
template <class Index>
i64 sequence_of_row(const AppendParams& p, i64 row) {
  i64 low = 0;
  i64 high = p.extents.sequences - 1;
#pragma unroll 1
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (Index::load(p.cu_new, middle * p.cu_new.strides[3]) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Where the row goes that stands at `place` of its request.
template <class Index>
AppendRow row_in_table(const AppendParams& p, const AppendRequest& request, i64 sequence,
                       i64 place) {
  AppendRow found;
  const i64 column = request.table_begin + place / p.extents.page_size;
  if (column >= request.table_end) {
    found.faults = kFaultSlots;
    return found;
  }
  const i64 table = p.page_indptr.present() ? 0 : sequence;
  const i64 page = Index::load(p.page_table, p.page_table.offset(table, 0, 0, column));
  return row_at_page(page, place, p.extents);
}

// A row of all batch entries: which one of which entry.
struct RowNumber {
  i64 batch = 0;
  i64 row;

  RowNumber(const AppendParams& p, i64 number) : row(number) {
    if (p.cu_new.present()) return;
    batch = number / p.extents.rows;
    row = number - batch * p.extents.rows;
  }

  // The one `count` rows further, by steps, which are few: a division takes longer.
  RowNumber plus(const AppendParams& p, i32 count) const {
    RowNumber next = *this;
    next.row += count;
#pragma unroll 1
    while (!p.cu_new.present() && next.row >= p.extents.rows) {
      next.row -= p.extents.rows;
      ++next.batch;
    }
    return next;
  }
};

// Where a row goes. What depends on no other number is asked for first: each answer takes as long
// as all of them together.
template <class Index>
void find_target(const AppendParams& p, const RowNumber& number, RowTarget& target) {
  const auto [batch, row] = number;
  const auto of_row = [&](const ArrayView& array) {
    return array.present() ? Index::load(array, array.offset(batch, 0, 0, row)) : -1;
  };
  const i64 slot = of_row(p.slots);
  const i64 position = of_row(p.positions);
  AppendRow found;
  if (p.extents.sequences > 0) {
    const i64 sequence = p.cu_new.present() ? sequence_of_row<Index>(p, row) : batch;
    const AppendRequest request = load_request<Index>(p, sequence);
    if (request.faults == 0 && row >= request.begin && row < request.end) {
      const i64 place = request.length + row - request.begin;
      if (p.slots.present()) {
        found = row_at_slot(slot, p.extents);
      } else if (p.page_table.present()) {
        found = row_in_table<Index>(p, request, sequence, place);
      }
      if (p.cos.present()) set_position(found, p.positions.present() ? position : place, p.extents);
    }
  }
  target = {batch, row, found.page, found.page_row, found.position};
  report(p.faults, found.faults);
}

// Some threads of the grid look at one request each, for the faults that the host hears of.
template <class Index>
void record_request_faults(const AppendParams& p, i64 thread, i64 all_threads) {
  const bool has_numbers = p.cu_new.present() || p.page_indptr.present() || p.kv_lengths.present();
  if (p.faults == nullptr || !has_numbers) return;
  u32 found = 0;
#pragma unroll 1
  for (i64 i = thread; i < p.extents.sequences; i += all_threads) {
    found |= load_request<Index>(p, i).faults;
  }
  report(p.faults, found);
}

// ---- What is moved -----------------------------------------------------------------------------

// N elements that lie side by side, or one. As bits: what does not rotate is never converted.
template <class T, i32 kCount>
struct Run {
  static constexpr i32 kVectors = kCount * static_cast<i32>(sizeof(T)) / 16;
  static constexpr bool kIsWhole = kVectors * 16 == kCount * static_cast<i32>(sizeof(T));
  T element[kCount];
};

template <class T, i32 kCount>
void load_run(Run<T, kCount>& run, const u8* address) {
  if constexpr (Run<T, kCount>::kIsWhole && kCount > 1) {
    struct Vectors {
      ptx::U32x4 vector[Run<T, kCount>::kVectors];
    } all;
    for (i32 i = 0; i < Run<T, kCount>::kVectors; ++i) {
      all.vector[i] = ptx::load_global_x4(reinterpret_cast<const u16*>(address) + 8 * i);
    }
    run = __builtin_bit_cast(Run<T, kCount>, all);
  } else {
    for (i32 i = 0; i < kCount; ++i) run.element[i] = load_element<T>(address + i * sizeof(T));
  }
}

template <class T, i32 kCount>
void store_run(const Run<T, kCount>& run, u8* address) {
  if constexpr (Run<T, kCount>::kIsWhole && kCount > 1) {
    ptx::store_global_x4(reinterpret_cast<u16*>(address), __builtin_bit_cast(ptx::U32x4, run));
  } else {
    for (i32 i = 0; i < kCount; ++i) store_element(address + i * sizeof(T), run.element[i]);
  }
}

// Elements of a byte.
template <class T, i32 kCount>
void store_few(const Run<T, kCount>& run, u8* address) {
  static_assert(sizeof(T) == 1);
  if constexpr (kCount == 8) {
    store_element(address, __builtin_bit_cast(u64, run));
  } else if constexpr (kCount == 4) {
    store_element(address, __builtin_bit_cast(u32, run));
  } else {
    for (i32 i = 0; i < kCount; ++i) store_element(address + i, run.element[i]);
  }
}

// (x0, x1) = (x0 cos - x1 sin, x1 cos + x0 sin), no product contracted: as the CPU computes it.
template <class Real>
void rotate_pair(Real& x0, Real& x1, Real cos, Real sin) {
  const Real a = x0;
  const Real b = x1;
  x0 = ptx::rounded_product(a, cos) - ptx::rounded_product(b, sin);
  x1 = ptx::rounded_product(b, cos) + ptx::rounded_product(a, sin);
}

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
  } else {
    move_rows<kConfig>(p, first, rows, targets, thread - kMaxAppendRows);
  }
}

}  // namespace fulmen
