// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the simt passes share beside tiles: the scores of a block of pairs, of which hidden ones are
// -inf. Most blocks are plain: every pair visible, a score scale * dot and nothing more. What
// others need is rolled into loops and calls, once a kernel, and stays out of unrolled loops.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/tile_tasks.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/simt/tile.cuh"

namespace fulmen {

// Rows of arrays on their way into tiles and out of registers: 16 bytes at a time where the array
// allows it, element by element else. Copies into tiles are asynchronous: tiles are complete after
// ptx::wait_for_copies by every thread and a barrier. The rows of one head of one sequence:
struct HeadRows {
  const ArrayView& array;
  i64 first;  // offset of element 0 of row 0
  i32 dim;

  i64 offset(i64 row) const { return first + row * array.strides[2]; }
  u8* address(i64 row) const { return array.data + offset(row) * size_bytes(array.dtype); }
  bool find(i64 row, i64& at) const {
    at = offset(row);
    return true;
  }
  template <class Vector>
  void put_no_page(Vector&) const {}
  // Whether every `count` neighbours lie on a multiple of their size.
  bool in_vectors(i32 count) const {
    const i64 bytes = count * size_bytes(array.dtype);
    return array.strides[3] == 1 && dim % count == 0 && array.strides[2] % count == 0 &&
           reinterpret_cast<u64>(array.data + first * size_bytes(array.dtype)) % bytes == 0;
  }
};

// The same of the keys of a request of a cache: each wherever its page lies.
template <class HeadType>
struct CacheRows {
  const HeadType& head;
  const ArrayView& array;
  i32 dim;
  u32 of_no_page;  // words in place of a row without a page

  // Whether there is a page for a row; if not, the host is told.
  bool find(i64 row, i64& offset) const {
    const KeyRow key = readable_row(head.p, head.sequence, row);
    const bool is_there = has_page(head.p, key);
    if (!is_there) record_bad_page(head.p);
    offset = is_there ? head.kv_row(array, key) : 0;
    return is_there;
  }
  template <class Vector>
  void put_no_page(Vector& vector) const {
    u32* const words = reinterpret_cast<u32*>(&vector);
    for (u32 i = 0; i < sizeof(Vector) / 4; ++i) words[i] = of_no_page;
  }
  bool in_vectors(i32 count) const {
    const i64 bytes = count * size_bytes(array.dtype);
    return array.strides[3] == 1 && dim % count == 0 && array.strides[0] % count == 0 &&
           array.strides[1] % count == 0 && array.strides[2] % count == 0 &&
           reinterpret_cast<u64>(array.data) % bytes == 0;
  }
};

// Up to kLanes neighbours of any dtype, stride and alignment; the rest 0.
template <class Real>
__attribute__((noinline)) SimtVector<Real> load_vector(const ArrayView& array, i64 offset,
                                                       i32 count) {
  SimtVector<Real> value{};
#pragma unroll 1
  for (i32 m = 0; m < min(count, value.kLanes); ++m) {
    value.lane[m] = load_real<Real>(array, offset + m * array.strides[3]);
  }
  return value;
}

// Elements d .. of the row whose element 0 is at `offset`: at once where the array allows it.
template <class Real, class Rows>
SimtVector<Real> vector_at(const Rows& rows, i64 offset, i32 d) {
  constexpr i32 kLanes = SimtVector<Real>::kLanes;
  constexpr DType kReal = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
  if (rows.array.dtype == kReal && rows.in_vectors(kLanes)) {
    const u8* const row = rows.array.data + offset * static_cast<i64>(sizeof(Real));
    return reinterpret_cast<const SimtVector<Real>*>(row)[d / kLanes];
  }
  return load_vector<Real>(rows.array, offset + d * rows.array.strides[3], rows.dim - d);
}
template <class Real>
SimtVector<Real> vector_of(const HeadRows& rows, i64 i, i32 d) {
  return vector_at<Real>(rows, rows.offset(i), d);
}

template <FmaConfig kConfig>
struct SimtRows {
  using Base = Simt<kConfig>;
  using Element = typename ElementOf<kConfig.dtype>::Type;
  using Real = typename Base::Real;
  using Vector = typename Base::Vector;
  static constexpr i32 kLanes = Base::kLanes;

  // Neighbouring 16-bit elements, loaded at once.
  struct alignas(kLanes * sizeof(Element)) Pack {
    Element lane[kLanes];
  };

  // Rows of a cache, likewise.
  template <i32 kTileRows, class HeadType, class Tile>
  static void load(const CacheRows<HeadType>& from, i64 row, i64 count, const Tile& tile) {
    const i32 present = static_cast<i32>(clamp<i64>(count, 0, kTileRows));
    if (from.array.dtype != kConfig.real() || !from.in_vectors(kLanes)) {
      convert<kTileRows>(from, row, present, tile);
      return;
    }
#pragma unroll 1
    for (i32 at = Base::thread(); at < kTileRows * Tile::kVectors; at += kConfig.num_threads) {
      const i32 i = at / Tile::kVectors;
      const i32 v = at % Tile::kVectors;
      const bool counts = i < present && v * kLanes < from.dim;
      i64 offset = 0;
      if (counts && !from.find(row + i, offset)) {
        from.put_no_page(tile.vector(i, v));
      } else {
        const u8* const vector = from.array.data + offset * static_cast<i64>(sizeof(Real)) + v * 16;
        ptx::copy_vector(&tile.vector(i, v), counts ? vector : from.array.data, counts);
      }
    }
  }

  // Quantised rows, likewise: values go into the tile.
  template <i32 kTileRows, class HeadType, class Rows, class Tile>
  static void load(const QuantisedRows<HeadType, Rows>& from, i64 row, i64 count,
                   const Tile& tile) {
    load_values<kTileRows>(from, row, count, tile);
  }
  template <i32 kTileRows, class HeadType, class Tile>
  static void load(const QuantisedQueries<HeadType, HeadRows>& from, i64 row, i64 count,
                   const Tile& tile) {
    load_values<kTileRows>(from, row, count, tile);
  }
  template <i32 kTileRows, class From, class Tile>
  static void load_values(const From& from, i64 row, i64 count, const Tile& tile) {
    const i32 present = static_cast<i32>(clamp<i64>(count, 0, kTileRows));
    const bool packed = from.rows.in_vectors(kLanes);
#pragma unroll 1
    for (i32 at = Base::thread(); at < kTileRows * Tile::kVectors; at += kConfig.num_threads) {
      const i32 i = at / Tile::kVectors;
      const i32 v = at % Tile::kVectors;
      Vector value{};
      if (i < present && v * kLanes < from.rows.dim) {
        value = from.values(row + i, v * kLanes, packed);
      }
      tile.vector(i, v) = value;
    }
  }

  // Rows [row, row + count) into a tile of kTileRows rows; rows and elements beyond become 0.
  template <i32 kTileRows, class Tile>
  static void load(const HeadRows& from, i64 row, i64 count, const Tile& tile) {
    const i32 present = static_cast<i32>(clamp<i64>(count, 0, kTileRows));
    if (from.array.dtype != kConfig.real() || !from.in_vectors(kLanes)) {
      convert<kTileRows>(from, row, present, tile);
      return;
    }
    const i64 row_bytes = from.array.strides[2] * static_cast<i64>(sizeof(Real));
    const u8* const base = from.address(row);
    if constexpr (kConfig.num_threads % Tile::kVectors == 0) {
      if (present == kTileRows && from.dim == Tile::kVectors * kLanes) {
        copy_whole<kTileRows>(base, row_bytes, tile);
        return;
      }
    }
#pragma unroll 1
    for (i32 at = Base::thread(); at < kTileRows * Tile::kVectors; at += kConfig.num_threads) {
      const i32 i = at / Tile::kVectors;
      const i32 v = at % Tile::kVectors;
      const bool counts = i < present && v * kLanes < from.dim;
      ptx::copy_vector(&tile.vector(i, v), counts ? base + i * row_bytes + v * 16 : base, counts);
    }
  }

  // Each thread keeps to one vector of a row, and goes down.
  template <i32 kTileRows, class Tile>
  static void copy_whole(const u8* base, i64 row_bytes, const Tile& tile) {
    constexpr i32 kStep = kConfig.num_threads / Tile::kVectors;
    const i32 v = Base::thread() % Tile::kVectors;
    const i32 first = Base::thread() / Tile::kVectors;
    const u8* from = base + first * row_bytes + v * 16;
#pragma unroll
    for (i32 i = 0; i < kTileRows; i += kStep) {
      if (kTileRows % kStep == 0 || first + i < kTileRows) {
        ptx::copy_vector(&tile.vector(first + i, v), from, true);
      }
      from += kStep * row_bytes;
    }
  }

  template <i32 kTileRows, class Rows, class Tile>
  static void convert(const Rows& from, i64 row, i32 present, const Tile& tile) {
    const bool packed =
        sizeof(Element) == 2 && from.array.dtype == kConfig.dtype && from.in_vectors(kLanes);
#pragma unroll 1
    for (i32 at = Base::thread(); at < kTileRows * Tile::kVectors; at += kConfig.num_threads) {
      const i32 i = at / Tile::kVectors;
      const i32 v = at % Tile::kVectors;
      Vector value{};
      if (i < present && v * kLanes < from.dim) {
        i64 offset = 0;
        if (!from.find(row + i, offset)) {
          from.put_no_page(value);
        } else if (packed) {
          const u8* const elements = from.array.data + offset * static_cast<i64>(sizeof(Element));
          const Pack pack = reinterpret_cast<const Pack*>(elements)[v];
#pragma unroll
          for (i32 m = 0; m < kLanes; ++m) value.lane[m] = widen(pack.lane[m]);
        } else {
          value = vector_at<Real>(from, offset, v * kLanes);
        }
      }
      tile.vector(i, v) = value;
    }
  }

  // Whether this thread's share of a tile is free of infinities and NaN.
  template <i32 kTileRows, class Tile>
  static bool is_finite(const Tile& tile) {
    bool finite = true;
#pragma unroll 1
    for (i32 at = Base::thread(); at < kTileRows * Tile::kVectors; at += kConfig.num_threads) {
      const Vector value = tile.vectors[at];
#pragma unroll
      for (i32 m = 0; m < kLanes; ++m) finite = finite && value.lane[m] - value.lane[m] == Real(0);
    }
    return finite;
  }

  // The same for the whole block. *word is shared; all threads come here together.
  template <i32 kTileRows, class Tile>
  static bool all_finite(const Tile& tile, u32* word) {
    if (Base::thread() == 0) *word = 1;
    ptx::block_sync();  // before a thread clears it
    if (!is_finite<kTileRows>(tile)) *word = 0;
    ptx::block_sync();  // all have looked
    return *word != 0;
  }

  // What a row of a result is multiplied by, and what is added of the row that is in memory.
  struct Shares {
    Real mine, other;
  };

  // Rows [row, row + count) of a block's result, by the shares of each; rows from there to `slot`
  // become 0.
  template <i32 kDim, class SharesOf>
  static void store(const HeadRows& to, i64 row, i64 count, i64 slot,
                    const typename Base::template Sums<kDim>& O, const SharesOf& shares) {
    constexpr i32 kVectors = kDim / (8 * kLanes);
    const bool in_vectors = to.array.dtype == kConfig.real() && to.in_vectors(kLanes);
    Vector scaled[Base::kRows][kVectors];
    Real others[Base::kRows];
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      const bool counts = Base::row(r) < count;
      const Shares of_row = counts ? shares(r) : Shares{};
      const Real factor = of_row.mine;
      others[r] = of_row.other;
#pragma unroll
      for (i32 u = 0; u < kVectors; ++u) {
#pragma unroll
        for (i32 m = 0; m < kLanes; ++m) {
          scaled[r][u].lane[m] = counts ? O[r][u].lane[m] * factor : Real(0);
        }
      }
    }
    if (in_vectors) {
#pragma unroll
      for (i32 r = 0; r < Base::kRows; ++r) {
        if (Base::row(r) >= slot) continue;
        Vector* const out = reinterpret_cast<Vector*>(to.address(row + Base::row(r)));
#pragma unroll
        for (i32 u = 0; u < kVectors; ++u) {
          const i32 v = Base::x() + 8 * u;
          if (v * kLanes >= to.dim) continue;
          if (others[r] != Real(0)) add_scaled(scaled[r][u], others[r], out[v]);
          out[v] = scaled[r][u];
        }
      }
      return;
    }
#pragma unroll 1
    for (i32 at = 0; at < Base::kRows * kVectors * kLanes; ++at) {
      const i32 r = at / (kVectors * kLanes);
      const i32 u = at / kLanes % kVectors;
      const i32 d = (Base::x() + 8 * u) * kLanes + at % kLanes;
      if (Base::row(r) >= slot || d >= to.dim) continue;
      const i64 element = to.offset(row + Base::row(r)) + d * to.array.strides[3];
      Real x = scaled[r][u].lane[at % kLanes];
      if (others[r] != Real(0)) x += others[r] * load_real_called<Real>(to.array, element);
      store_real(to.array, element, x);
    }
  }

  static void add_scaled(Vector& sum, Real factor, const Vector& x) {
#pragma unroll
    for (i32 m = 0; m < kLanes; ++m) sum.lane[m] += factor * x.lane[m];
  }
};

// Options that act pair by pair, so that a score is more than scale * dot.
template <FmaConfig kConfig>
bool has_pair_terms(const AttentionParams& p) {
  return kConfig.user.any() || p.mask.present() || p.q_ids.present() || p.bias.present() ||
         p.alibi_slopes.present() || p.score_map.is_modified();
}

template <class HeadType>
HeadRows q_rows_of(const HeadType& head, const ArrayView& array, i64 dim) {
  return {array, head.q_row(array, 0), static_cast<i32>(dim)};
}
template <class HeadType>
HeadRows kv_rows_of(const HeadType& head, const ArrayView& array, i64 dim) {
  return {array, head.kv_row(array, 0), static_cast<i32>(dim)};
}

// Keys and values as a forward kernel reads them: in a cache, quantised, neither or both.
// of_no_page: words in place of a row without a page.
template <class HeadType, bool kCaches = HeadType::kHasCaches,
          bool kQuantised = HeadType::kIsQuantised>
struct KeyRowsOf {
  using Type = HeadRows;
  static Type make(const HeadType& head, const ArrayView& array, const ArrayView&, i64 dim, u32) {
    return {array, head.kv_row(array, 0), static_cast<i32>(dim)};
  }
};
template <class HeadType>
struct KeyRowsOf<HeadType, true, false> {
  using Type = CacheRows<HeadType>;
  static Type make(const HeadType& head, const ArrayView& array, const ArrayView&, i64 dim,
                   u32 of_no_page) {
    return {head, array, static_cast<i32>(dim), of_no_page};
  }
};
template <class HeadType, bool kCaches>
struct KeyRowsOf<HeadType, kCaches, true> {
  using Rows = KeyRowsOf<HeadType, kCaches, false>;
  using Type = QuantisedRows<HeadType, typename Rows::Type>;
  static Type make(const HeadType& head, const ArrayView& array, const ArrayView& scales, i64 dim,
                   u32 of_no_page) {
    return {Rows::make(head, array, scales, dim, of_no_page), head, scales};
  }
};

// Keys that row i sees, counted from `first`; none where it is no row of the sequence.
struct Limits {
  i32 begin;
  i32 end;
  bool contains(i32 column) const { return begin <= column && column < end; }
};
template <class HeadType>
__attribute__((noinline)) Limits row_limits(const HeadType& head, i64 i, i64 first) {
  if (i >= head.sequence.shape.q_len) return {0, 0};
  const Interval columns = head.columns(i);
  return {static_cast<i32>(columns.begin - first), static_cast<i32>(columns.end - first)};
}

// Query rows that see key j, counted from `first`; none where it is no row of the sequence.
template <class HeadType>
__attribute__((noinline)) Limits query_limits(const HeadType& head, i64 j, i64 first) {
  if (j >= head.sequence.shape.kv_len) return {0, 0};
  const Interval rows = visible_rows(head.p.mask_options, head.sequence.shape, j);
  return {static_cast<i32>(rows.begin - first), static_cast<i32>(rows.end - first)};
}

}  // namespace fulmen
