// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of an array into a swizzled tile, by all threads of a block: cp.async where 16-byte vectors
// of the array lie on multiples of 16 bytes, else element by element. Rows past the end and dims
// past the array's become 0, so that products read nothing but data and zeros. Elements have
// kElementBytes, 2 or 4; kDims of a tile counts 16-bit words.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/memory.cuh"

namespace fulmen {

// Rows of one head of one sequence, from its first on.
template <i32 kElementBytes>
struct ElementRows {
  static constexpr i32 kVectorElems = 16 / kElementBytes;

  const u8* data;
  i64 row_stride;  // in elements
  i64 dim_stride;
  i32 num_rows;
  i32 dim;  // elements of a row from `data` on
  bool is_aligned;

  ElementRows(const ArrayView& array, i64 offset, i64 rows, i64 dims)
      : data(array.data + offset * kElementBytes),
        row_stride(array.strides[2]),
        dim_stride(array.strides[3]),
        num_rows(static_cast<i32>(rows)),
        dim(static_cast<i32>(dims)),
        is_aligned(dim_stride == 1 && dim % kVectorElems == 0 && row_stride % kVectorElems == 0 &&
                   reinterpret_cast<u64>(data) % 16 == 0) {}
};

template <i32 kElementBytes>
inline ptx::U32x4 gather_vector(const ElementRows<kElementBytes>& source, i64 row, i32 dim) {
  ptx::U32x4 vector{};
  const u8* from =
      source.data + (row * source.row_stride + dim * source.dim_stride) * kElementBytes;
#pragma unroll
  for (i32 i = 0; i < 16; i += kElementBytes) {
    if (dim + i / kElementBytes < source.dim) {
#pragma unroll
      for (i32 b = 0; b < kElementBytes; ++b) {
        vector.word[(i + b) / 4] |= static_cast<u32>(from[b]) << (8 * ((i + b) % 4));
      }
    }
    from += source.dim_stride * kElementBytes;
  }
  return vector;
}

// Which row of the array, from the tile's first, row `row` of a tile holds. Interleaved: of 32,
// those numbered 8 c to 8 c + 7 are rows 2 c and 2 c + 1 of four fragments of 8.
template <bool kInterleaved>
constexpr i32 source_row(i32 row) {
  return kInterleaved ? (row & ~30) | (row & 6) << 2 | (row & 24) >> 2 : row;
}

// Rows [first, first + kRows). Asynchronous copies belong to the caller's next group.
template <i32 kRows, i32 kThreads, bool kInterleaved = false, i32 kDims, bool kSwizzled,
          i32 kElementBytes>
inline void copy_rows(const SwizzledTile<kDims, kSwizzled>& tile,
                      const ElementRows<kElementBytes>& source, i32 first) {
  constexpr i32 kVectors = kDims / 8;
  constexpr i32 kVectorElems = 16 / kElementBytes;
  const i32 thread = static_cast<i32>(ptx::thread_index());
  if (!source.is_aligned) {
#pragma unroll 1
    for (i32 at = thread; at < kRows * kVectors; at += kThreads) {
      const i32 row = at / kVectors;
      const i32 vector = at % kVectors;
      const i32 from = first + source_row<kInterleaved>(row);
      const bool present = from < source.num_rows && vector * kVectorElems < source.dim;
      ptx::store_shared_x4(
          tile.address(row, vector),
          present ? gather_vector(source, from, vector * kVectorElems) : ptx::U32x4{});
    }
    return;
  }
#pragma unroll
  for (i32 step = 0; step < (kRows * kVectors + kThreads - 1) / kThreads; ++step) {
    const i32 at = thread + step * kThreads;
    if (kRows * kVectors % kThreads != 0 && at >= kRows * kVectors) break;
    const i32 row = at / kVectors;
    const i32 vector = at % kVectors;
    const i32 from = first + source_row<kInterleaved>(row);
    const bool present = from < source.num_rows && vector * kVectorElems < source.dim;
    const i64 offset = present ? from * source.row_stride + vector * kVectorElems : 0;
    ptx::cp_async_16(tile.address(row, vector), source.data + offset * kElementBytes, present);
  }
}

template <i32 kRows, i32 kThreads, i32 kDims, bool kSwizzled, i32 kElementBytes, bool kInterleaved,
          class HeadType, bool kAligned>
class CacheCopy;

// Tile after tile towards row 0: that which begins at row `first`, then those at first - kRows, ...
// Copy::start(tile, first) copies one.
template <class Copy, i32 kRows>
class DescendingCopy {
 public:
  template <class Tile>
  void start_last(const Tile& tile, i32 first) {
    seek(first);
    start_next<true>(tile);
  }
  void seek(i32 first) { next_ = first; }
  template <bool kPredicated, class Tile>
  void start_next(const Tile& tile) {
    static_cast<const Copy*>(this)->start(tile, next_);
    next_ -= kRows;
  }

 private:
  i32 next_ = 0;
};

// The same for an array whose rows are 16-byte vectors on multiples of 16 bytes, tile after tile:
// what does not change from one to the next is found once. Neighbouring threads copy the vectors of
// a row that change places with each other, kDims / (8 kGroup) times.
template <i32 kRows, i32 kThreads, i32 kDims, bool kSwizzled, i32 kElementBytes, bool kInterleaved>
class VectorCopy {
 public:
  template <class HeadType, bool kAligned>
  using OverCache =
      CacheCopy<kRows, kThreads, kDims, kSwizzled, kElementBytes, kInterleaved, HeadType, kAligned>;

  VectorCopy(const ArrayView& array, i64 offset, i64 rows, i64 dims)
      : data_(array.data + (offset + own_row() * array.strides[2]) * kElementBytes + vector() * 16),
        row_bytes_(array.strides[2] * kElementBytes),
        num_rows_(static_cast<i32>(rows) - own_row()),
        num_vectors_(static_cast<i32>(dims) / (16 / kElementBytes) - vector()) {}

  // Rows [first, first + kRows) of the array.
  void start(const SwizzledTile<kDims, kSwizzled>& tile, i32 first) const {
    copy(tile, data_ + first * row_bytes_, num_rows_ - first);
  }

  // Tile after tile towards row 0: that which begins at row `first`, then those at first - kRows,
  // ..., whose rows are all there. With checks all are alike, after seek().
  void start_last(const SwizzledTile<kDims, kSwizzled>& tile, i32 first) {
    start(tile, first);
    next_ = data_ + first * row_bytes_;
  }
  void seek(i32 first) {
    next_ = data_ + first * row_bytes_;
    left_ = num_rows_ - first;
  }
  template <bool kPredicated>
  void start_next(const SwizzledTile<kDims, kSwizzled>& tile) {
    if constexpr (kPredicated) {
      copy(tile, next_, left_);
      next_ -= kRows * row_bytes_;
      left_ += kRows;
    } else {
      next_ -= kRows * row_bytes_;
      copy(tile, next_, kRows);
    }
  }

 private:
  static constexpr i32 kGroup = SwizzledTile<kDims, kSwizzled>::kGroup;
  static constexpr i32 kRowsAtOnce = kThreads / kGroup;

  static i32 row() { return static_cast<i32>(ptx::thread_index()) / kGroup; }
  static i32 vector() { return static_cast<i32>(ptx::thread_index()) % kGroup; }

  // Of the array, from a tile's first.
  static i32 own_row() { return source_row<kInterleaved>(row()); }

  // From `from`, this thread's first unit; the array has `left` rows from there on.
  void copy(const SwizzledTile<kDims, kSwizzled>& tile, const u8* from, i32 left) const {
    const u32 first = tile.address(static_cast<u32>(row()), static_cast<u32>(vector()));
#pragma unroll
    for (i32 r = 0; r < kRows; r += kRowsAtOnce) {
      if (r + kRowsAtOnce > kRows && row() >= kRows - r) break;
      const i32 further = source_row<kInterleaved>(r);  // r and row() have no bit in common
      // Rows eight further exchange their vectors alike.
      const u32 to = kRowsAtOnce % 8 == 0
                         ? first + static_cast<u32>(r) * kRowBytes
                         : tile.address(static_cast<u32>(r + row()), static_cast<u32>(vector()));
#pragma unroll
      for (i32 u = 0; u < kDims / 8; u += kGroup) {
        ptx::cp_async_16(to + static_cast<u32>(u) * 16, from + u * 16,
                         further < left && u < num_vectors_);
      }
      from += (source_row<kInterleaved>(r + kRowsAtOnce) - further) * row_bytes_;
    }
  }

  static constexpr u32 kRowBytes = SwizzledTile<kDims, kSwizzled>::kRowBytes;

  const u8* data_;  // this thread's first vector of row row()
  i64 row_bytes_;
  i32 num_rows_;     // from this thread's first on
  i32 num_vectors_;  // likewise
  const u8* next_ = nullptr;
  i32 left_ = 0;  // rows from there on, where they are checked
};

// The same for any array.
template <i32 kRows, i32 kThreads, i32 kDims, bool kSwizzled, i32 kElementBytes, bool kInterleaved>
class ElementCopy
    : public DescendingCopy<
          ElementCopy<kRows, kThreads, kDims, kSwizzled, kElementBytes, kInterleaved>, kRows> {
 public:
  template <class HeadType, bool kAligned>
  using OverCache =
      CacheCopy<kRows, kThreads, kDims, kSwizzled, kElementBytes, kInterleaved, HeadType, kAligned>;

  ElementCopy(const ArrayView& array, i64 offset, i64 rows, i64 dims)
      : source_(array, offset, rows, dims) {}
  void start(const SwizzledTile<kDims, kSwizzled>& tile, i32 first) const {
    copy_rows<kRows, kThreads, kInterleaved>(tile, source_, first);
  }

 private:
  ElementRows<kElementBytes> source_;
};

template <bool kAligned>
struct CopyKind;
template <>
struct CopyKind<true> {
  template <i32 kRows, i32 kThreads, i32 kDims, bool kSwizzled, i32 kElementBytes,
            bool kInterleaved>
  using Type = VectorCopy<kRows, kThreads, kDims, kSwizzled, kElementBytes, kInterleaved>;
};
template <>
struct CopyKind<false> {
  template <i32 kRows, i32 kThreads, i32 kDims, bool kSwizzled, i32 kElementBytes,
            bool kInterleaved>
  using Type = ElementCopy<kRows, kThreads, kDims, kSwizzled, kElementBytes, kInterleaved>;
};
template <bool kAligned, i32 kRows, i32 kThreads, i32 kDims, bool kSwizzled, i32 kElementBytes = 2,
          bool kInterleaved = false>
using TileCopy = typename CopyKind<kAligned>::template Type<kRows, kThreads, kDims, kSwizzled,
                                                            kElementBytes, kInterleaved>;

// The same for the keys of a request of a cache, each row of which is found by itself. HeadType:
// common/head.cuh.
template <i32 kRows, i32 kThreads, i32 kDims, bool kSwizzled, i32 kElementBytes, bool kInterleaved,
          class HeadType, bool kAligned>
class CacheCopy : public DescendingCopy<CacheCopy<kRows, kThreads, kDims, kSwizzled, kElementBytes,
                                                  kInterleaved, HeadType, kAligned>,
                                        kRows> {
 public:
  // of_no_page: words in place of a key's without a page, of which the host is told.
  CacheCopy(const HeadType& head, const ArrayView& array, i32 first_dim, i64 rows, i64 dims,
            u32 of_no_page)
      : head_(head),
        array_(array),
        first_dim_(first_dim),
        of_no_page_(of_no_page),
        source_(array, 0, rows, dims) {}

  void start(const SwizzledTile<kDims, kSwizzled>& tile, i32 first) const {
    const i32 own = static_cast<i32>(ptx::thread_index());
    const i32 own_row = own / kGroup, own_vector = own % kGroup;
#pragma unroll
    for (i32 r = 0; r < kRows; r += kRowsAtOnce) {
      const i32 row = r + own_row;
      if (row >= kRows) break;
      const i32 from = first + source_row<kInterleaved>(row);
      const bool present = from < source_.num_rows;
      const KeyRow row_of_key = present ? key_row(head_.p, head_.sequence, from) : KeyRow{0, 0};
      const bool is_there = has_page(head_.p, row_of_key);
      if (!is_there) record_bad_page(head_.p);
      ElementRows<kElementBytes> key = source_;
      if (present && is_there) key.data = address(row_of_key);
#pragma unroll
      for (i32 u = own_vector; u < kDims / 8; u += kGroup) {
        const bool counts = present && u * kVectorElems < source_.dim;
        if (!is_there) {
          const u32 x = counts ? of_no_page_ : 0;
          ptx::store_shared_x4(tile.address(row, u), {{x, x, x, x}});
        } else if constexpr (kAligned) {
          ptx::cp_async_16(tile.address(row, u), counts ? key.data + u * 16 : array_.data, counts);
        } else {
          ptx::store_shared_x4(tile.address(row, u),
                               counts ? gather_vector(key, 0, u * kVectorElems) : ptx::U32x4{});
        }
      }
    }
  }

 private:
  static constexpr i32 kGroup = SwizzledTile<kDims, kSwizzled>::kGroup;
  static constexpr i32 kRowsAtOnce = kThreads / kGroup;
  static constexpr i32 kVectorElems = 16 / kElementBytes;

  // Of a key's dim first_dim_.
  const u8* address(const KeyRow& key) const {
    return array_.data +
           (head_.kv_row(array_, key) + first_dim_ * array_.strides[3]) * kElementBytes;
  }

  const HeadType& head_;
  const ArrayView& array_;
  i32 first_dim_;
  u32 of_no_page_;
  ElementRows<kElementBytes> source_;  // its extents
};

// Copies of keys: as those of other rows, or over a cache.
template <bool kCaches>
struct KeyCopyKind;
template <>
struct KeyCopyKind<false> {
  template <class Copy, class HeadType, bool kAligned>
  using Type = Copy;
};
template <>
struct KeyCopyKind<true> {
  template <class Copy, class HeadType, bool kAligned>
  using Type = typename Copy::template OverCache<HeadType, kAligned>;
};

}  // namespace fulmen
