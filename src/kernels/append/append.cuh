// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// New rows of keys and values into paged caches, and the rotary embedding of k and q. A block has
// some rows; where each comes from and goes is found once, by one thread a row; then its threads
// walk the pieces of all of them: side by side along the head dimension, then heads, then k, v and
// q. A thread has several pieces in registers before it writes the first, so that enough bytes are
// on their way; it reads all that it writes, so that q may be rotated in place.
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

inline AppendRequest load_request(const AppendParams& p, i64 sequence) {
  AppendRequest request{0, p.extents.rows, 0, p.extents.columns, 0, 0};
  if (p.cu_new.present()) {
    request.begin = load_index(p.cu_new, sequence * p.cu_new.strides[3]);
    request.end = load_index(p.cu_new, (sequence + 1) * p.cu_new.strides[3]);
  }
  if (p.page_indptr.present()) {
    request.table_begin = load_index(p.page_indptr, sequence * p.page_indptr.strides[3]);
    request.table_end = load_index(p.page_indptr, (sequence + 1) * p.page_indptr.strides[3]);
  }
  if (p.kv_lengths.present()) {
    request.length = load_index(p.kv_lengths, sequence * p.kv_lengths.strides[3]);
  }
  return checked(request, p.extents, p.page_table.present());
}

// The last sequence that begins at or before a row; the caller checks that it owns the row.
inline i64 sequence_of_row(const AppendParams& p, i64 row) {
  i64 low = 0;
  i64 high = p.extents.sequences - 1;
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (load_index(p.cu_new, middle * p.cu_new.strides[3]) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Where a row of a request that holds it goes.
inline AppendRow load_row(const AppendParams& p, const AppendRequest& request, i64 sequence,
                          i64 batch, i64 row) {
  const i64 place = request.length + row - request.begin;
  AppendRow found;
  if (p.slots.present()) {
    found = row_at_slot(load_index(p.slots, p.slots.offset(batch, 0, 0, row)), p.extents);
  } else if (p.page_table.present()) {
    const i64 column = request.table_begin + place / p.extents.page_size;
    if (column < request.table_end) {
      const i64 table = p.page_indptr.present() ? 0 : sequence;
      const i64 page = load_index(p.page_table, p.page_table.offset(table, 0, 0, column));
      found = row_at_page(page, place, p.extents);
    } else {
      found.faults = kFaultSlots;
    }
  }
  if (!p.cos.present()) return found;
  const bool has_positions = p.positions.present();
  set_position(
      found, has_positions ? load_index(p.positions, p.positions.offset(batch, 0, 0, row)) : place,
      p.extents);
  return found;
}

// Row `number` of all batch entries.
inline void find_target(const AppendParams& p, i64 number, RowTarget& target) {
  const bool packed = p.cu_new.present();
  const i64 batch = packed ? 0 : number / p.extents.rows;
  const i64 row = number - batch * p.extents.rows;
  AppendRow found;
  if (p.extents.sequences > 0) {
    const i64 sequence = packed ? sequence_of_row(p, row) : batch;
    const AppendRequest request = load_request(p, sequence);
    if (request.faults == 0 && row >= request.begin && row < request.end) {
      found = load_row(p, request, sequence, batch, row);
    }
  }
  target.batch = batch;
  target.row = row;
  target.page = found.page;
  target.page_row = found.page_row;
  target.position = found.position;
  report(p.faults, found.faults);
}

// The threads of the grid look at one request each, for the faults that the host hears of.
inline void record_request_faults(const AppendParams& p, i32 num_threads) {
  const bool has_numbers = p.cu_new.present() || p.page_indptr.present() || p.kv_lengths.present();
  if (p.faults == nullptr || !has_numbers) return;
  const i64 all_threads = static_cast<i64>(ptx::num_blocks()) * num_threads;
  u32 found = 0;
  for (i64 i = static_cast<i64>(ptx::block_index()) * num_threads + ptx::thread_index();
       i < p.extents.sequences; i += all_threads) {
    found |= load_request(p, i).faults;
  }
  report(p.faults, found);
}

// ---- What is moved -----------------------------------------------------------------------------

constexpr i32 kPiecesInFlight = 2;  // of a thread

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

inline double narrow(double x, double) { return x; }
inline float narrow(float x, float) { return x; }
inline f16 narrow(float x, f16) { return to_f16(x); }
inline bf16 narrow(float x, bf16) { return to_bf16(x); }
inline e4m3 narrow(float x, e4m3) { return to_e4m3(x); }
inline e5m2 narrow(float x, e5m2) { return to_e5m2(x); }
inline int8 narrow(float x, int8) { return to_int8(x); }

// (x0, x1) = (x0 cos - x1 sin, x1 cos + x0 sin), no product contracted: as the CPU computes it.
template <class Real>
void rotate_pair(Real& x0, Real& x1, Real cos, Real sin) {
  const Real a = x0;
  const Real b = x1;
  x0 = ptx::rounded_product(a, cos) - ptx::rounded_product(b, sin);
  x1 = ptx::rounded_product(b, cos) + ptx::rounded_product(a, sin);
}

// One thread's share of one head of one row.
template <AppendConfig kConfig>
struct Piece {
  using T = typename ElementOf<kConfig.dtype>::Type;
  using Real = typename ElementOf<kConfig.dtype>::Real;
  using Table = typename ElementOf<kConfig.table>::Type;
  using Cached = typename ElementOf<kConfig.cache_dtype()>::Type;
  static constexpr bool kQuantises = kConfig.quantised != DType::kNone;
  static constexpr i32 kLanes = kConfig.lanes();
  static constexpr bool kRotates = kConfig.rotation != Rotation::kNone;
  // One element at a time, a neighbour is a run of its own, as a half is.
  static constexpr bool kInOneRun = kConfig.rotation == Rotation::kInterleaved && kLanes > 1;
  static constexpr i32 kPairs = kInOneRun ? kLanes / 2 : kLanes;

  Run<T, kLanes> first;
  Run<T, kLanes> second;  // of a piece that rotates: what turns with the first
  u8* to = nullptr;       // null: nothing is written
  i64 second_bytes = 0;   // from the first run to the second, where it goes
  i64 position = -1;      // >= 0: it rotates
  i32 pair = 0;           // the first of its columns of cos and sin

  // Of a quantised cache.
  bool is_quantised = false;
  Real scale = 1;  // what elements are divided by
  Run<Cached, kLanes> first_stored, second_stored;

  // from, to: the head. index: of the piece in the head.
  void load(const AppendParams& p, const u8* from, i64 from_stride, u8* into, i64 into_stride,
            i32 index, i32 rotated, i64 row_position) {
    constexpr i64 kBytes = sizeof(T);
    const i64 into_bytes = is_quantised ? static_cast<i64>(sizeof(Cached)) : kBytes;
    i64 d = static_cast<i64>(index) * kLanes;
    i64 apart = 0;
    if constexpr (kRotates) {
      if (index < rotated) {
        position = row_position;
        pair = kInOneRun ? static_cast<i32>(d) / 2 : static_cast<i32>(d);
        if constexpr (!kInOneRun) {
          const bool halves = kConfig.rotation == Rotation::kHalves;
          apart = halves ? p.rotary_dim / 2 : 1;
          if (!halves) d *= 2;
        }
      } else if constexpr (!kInOneRun) {
        d += p.rotary_dim / 2 * (rotated > 0 ? 1 : 0);  // a rotated piece has two runs
      }
    }
    load_run(first, from + d * from_stride * kBytes);
    if (kRotates && !kInOneRun && apart > 0) {
      load_run(second, from + (d + apart) * from_stride * kBytes);
    }
    to = into + d * into_stride * into_bytes;
    second_bytes = apart * into_stride * into_bytes;
  }

  // call(j, cos, sin) for each pair of elements: 2 j and 2 j + 1 of the first run, or j of both.
  template <class Call>
  void each_pair(const AppendParams& p, const Call& call) const {
    if (!kRotates || position < 0) return;
    Run<Table, kPairs> cos, sin;
    load_run(cos, p.cos.data + p.cos.offset(0, 0, position, pair) * sizeof(Table));
    load_run(sin, p.sin.data + p.sin.offset(0, 0, position, pair) * sizeof(Table));
    for (i32 j = 0; j < kPairs; ++j) {
      call(j, static_cast<Real>(widen(cos.element[j])), static_cast<Real>(widen(sin.element[j])));
    }
  }

  void rotate(const AppendParams& p) {
    if constexpr (kQuantises) {
      if (is_quantised) return quantise(p);
    }
    each_pair(p, [&](i32 j, Real cos, Real sin) {
      T& x0 = kInOneRun ? first.element[2 * j] : first.element[j];
      T& x1 = kInOneRun ? first.element[2 * j + 1] : second.element[j];
      Real a = widen(x0), b = widen(x1);
      rotate_pair(a, b, cos, sin);
      x0 = narrow(a, T{});
      x1 = narrow(b, T{});
    });
  }

  // Rotated, then divided, then rounded once.
  void quantise(const AppendParams& p) {
    const bool has_second = second_bytes > 0;
    Real a[kLanes], b[kLanes] = {};
    for (i32 j = 0; j < kLanes; ++j) {
      a[j] = widen(first.element[j]);
      if (has_second) b[j] = widen(second.element[j]);
    }
    each_pair(p, [&](i32 j, Real cos, Real sin) {
      Real& x0 = kInOneRun ? a[2 * j] : a[j];
      Real& x1 = kInOneRun ? a[2 * j + 1] : b[j];
      rotate_pair(x0, x1, cos, sin);
    });
    for (i32 j = 0; j < kLanes; ++j) {
      first_stored.element[j] = narrow(a[j] / scale, Cached{});
      second_stored.element[j] = narrow(b[j] / scale, Cached{});
    }
  }

  void store() const {
    if (to == nullptr) return;
    if constexpr (kQuantises) {
      if (is_quantised) {
        store_few(first_stored, to);
        if (second_bytes > 0) store_few(second_stored, to + second_bytes);
        return;
      }
    }
    store_run(first, to);
    if (kRotates && second_bytes > 0) store_run(second, to + second_bytes);
  }
};

// Piece `index` of a row: of k, of v or of q.
template <AppendConfig kConfig>
void load_piece(const AppendParams& p, const RowTarget& at, i32 index, Piece<kConfig>& piece) {
  constexpr i64 kBytes = size_bytes(kConfig.dtype);
  constexpr i64 kCacheBytes = size_bytes(kConfig.cache_dtype());
  const bool is_q = index >= p.kv_pieces;
  const bool is_v = !is_q && index >= p.k_pieces;
  if (is_q ? at.position < 0 : at.page < 0) return;
  const u32 of_head = static_cast<u32>(is_v ? p.pieces_of_v_head : p.pieces_of_head);
  const u32 in_array = static_cast<u32>(index - (is_q ? p.kv_pieces : is_v ? p.k_pieces : 0));
  const u32 head = in_array / of_head;
  const ArrayView& from = is_q ? p.q : is_v ? p.v : p.k;
  const ArrayView& to = is_q ? p.q_out : is_v ? p.v_cache : p.k_cache;
  const i64 into =
      is_q ? to.offset(at.batch, head, at.row, 0) : to.offset(at.page, head, at.page_row, 0);
  if constexpr (Piece<kConfig>::kQuantises) {
    const ArrayView& scales = is_v ? p.v_scale : p.k_scale;
    piece.is_quantised = !is_q;
    if (!is_q && scales.present()) {
      const i64 scale = scales.offset(at.page, head, at.page_row, 0);
      piece.scale = load_element<float>(scales.data + scale * static_cast<i64>(sizeof(float)));
    }
  }
  piece.load(p, from.data + from.offset(at.batch, head, at.row, 0) * kBytes, from.strides[3],
             to.data + into * (is_q ? kBytes : kCacheBytes), to.strides[3],
             static_cast<i32>(in_array - head * of_head), is_v ? 0 : p.rotated_of_head,
             at.position);
}

template <AppendConfig kConfig>
void append(const AppendParams& p) {
  RowTarget* const targets = reinterpret_cast<RowTarget*>(ptx::shared_bytes());
  const i32 thread = static_cast<i32>(ptx::thread_index());
  const i64 first_row = static_cast<i64>(ptx::block_index()) * p.rows_of_block;
  const i32 rows = static_cast<i32>(min<i64>(p.rows_of_block, p.all_rows - first_row));
  if (thread < rows) find_target(p, first_row + thread, targets[thread]);
  ptx::block_sync();
  const i64 all = static_cast<i64>(rows) * p.pieces;
  for (i64 begin = thread; begin < all; begin += kConfig.num_threads * kPiecesInFlight) {
    Piece<kConfig> pieces[kPiecesInFlight];
    for (i32 i = 0; i < kPiecesInFlight; ++i) {
      const i64 index = begin + i * kConfig.num_threads;
      if (index >= all) continue;
      const u32 row = static_cast<u32>(index) / static_cast<u32>(p.pieces);
      load_piece(p, targets[row], static_cast<i32>(index - static_cast<i64>(row) * p.pieces),
                 pieces[i]);
    }
    for (Piece<kConfig>& piece : pieces) piece.rotate(p);
    for (const Piece<kConfig>& piece : pieces) piece.store();
  }
  record_request_faults(p, kConfig.num_threads);
}

}  // namespace fulmen
