// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the simt kernels: rows of an array in shared memory, and the two products that attention
// is made of, on registers.
//   dots   S[r][c] = sum over d of A[r][d] B[c][d]      both row by row in shared memory
//   sums   O[r][x] += sum over c of W[r][c] B[c][x]
// The side * side threads stand in a square: thread (y, x) has rows y, y + side, ... and columns x,
// x + side, ... of dots, and vectors x, x + side, ... of a row of sums. Reads of shared memory are
// 16 bytes wide: a row of A is the same address for the whole half-warp, rows of B meet all banks.
#pragma once

#include "kernels/array_access.cuh"
#include "kernels/fma_config.h"
#include "kernels/ptx/shared_bytes.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

template <FmaConfig kConfig>
struct Simt {
  using Element = typename ElementOf<kConfig.dtype>::Type;
  using Real = typename ElementOf<kConfig.dtype>::Real;

  static constexpr i32 kSide = kConfig.side;
  static constexpr i32 kLanes = kConfig.lanes();
  static constexpr i32 kRows = kConfig.rows / kSide;        // of a thread
  static constexpr i32 kColumns = kConfig.columns / kSide;  // of a thread
  static_assert(kConfig.valid());

  struct alignas(16) Vector {
    Real lane[kLanes];
  };

  // A tile in shared memory. Rows are row_elems + kLanes apart.
  struct Tile {
    Real* data;
    i32 row_stride;
    Real& at(i32 row, i32 column) const { return data[row * row_stride + column]; }
    Vector& vector(i32 row, i32 column) const {
      return *reinterpret_cast<Vector*>(data + row * row_stride + column);
    }
  };

  // Hands out shared memory, front to back.
  struct Layout {
    u8* next = ptx::shared_bytes();
    Tile tile(i32 rows, i32 row_elems) {
      const Tile tile{reinterpret_cast<Real*>(next), row_elems + kLanes};
      next += kConfig.tile_elems(rows, row_elems) * static_cast<i32>(sizeof(Real));
      return tile;
    }
    Real* reals(i32 count) {
      Real* const array = reinterpret_cast<Real*>(next);
      next += count * static_cast<i32>(sizeof(Real));
      return array;
    }
    u32* word() { return reinterpret_cast<u32*>(next); }
  };

  static i32 thread() { return static_cast<i32>(ptx::thread_index()); }
  static i32 x() { return thread() % kSide; }
  static i32 y() { return thread() / kSide; }
  static i32 row(i32 r) { return y() + kSide * r; }
  static i32 column(i32 c) { return x() + kSide * c; }
  template <i32 kVectors>
  static i32 element(i32 v) {
    return (x() + kSide * v) * kLanes;
  }

  // Over the threads of a row.
  template <class Combine>
  static Real across_row(Real value, const Combine& combine) {
    for (u32 mask = 1; mask < static_cast<u32>(kSide); mask *= 2) {
      value = combine(value, ptx::shuffle_xor(value, mask));
    }
    return value;
  }
  static Real row_sum(Real value) {
    return across_row(value, [](Real a, Real b) { return a + b; });
  }

  // Rows [0, count) of an array from `offset` on into a tile; rows up to `rows` and elements from
  // `dim` up to `row_elems` become 0. *unusual is set where an element is infinite or NaN.
  template <class T>
  static void load_as(const ArrayView& array, i64 offset, i64 row_stride, i64 count, i64 dim,
                      const Tile& tile, i32 rows, i32 row_elems, u32* unusual) {
    const u8* const base = array.data + offset * static_cast<i64>(sizeof(T));
    const bool packed = array.strides[3] == 1 && dim % kLanes == 0 && row_stride % kLanes == 0 &&
                        is_aligned<Pack<T>>(base);
    bool finite = true;
    for (i32 at = thread(); at < rows * row_elems / kLanes; at += kConfig.num_threads) {
      const i32 i = at / (row_elems / kLanes);
      const i32 d = at % (row_elems / kLanes) * kLanes;
      Vector value{};
      if (i < count && d < dim) {
        const u8* const from =
            base + (i * row_stride + d * array.strides[3]) * static_cast<i64>(sizeof(T));
        value = packed ? widened(*reinterpret_cast<const Pack<T>*>(from))
                       : gathered<T>(from, array.strides[3], dim - d);
      }
#pragma unroll
      for (i32 m = 0; m < kLanes; ++m) finite = finite && value.lane[m] - value.lane[m] == Real(0);
      tile.vector(i, d) = value;
    }
    if (!finite) *unusual = 1;
  }

  // Neighbouring elements of an array, loaded at once.
  template <class T>
  struct alignas(kLanes * sizeof(T)) Pack {
    T lane[kLanes];
  };
  template <class T>
  static Vector widened(const Pack<T>& pack) {
    Vector value;
#pragma unroll
    for (i32 m = 0; m < kLanes; ++m) value.lane[m] = static_cast<Real>(widen(pack.lane[m]));
    return value;
  }
  template <class T>
  __attribute__((noinline)) static Vector gathered(const u8* from, i64 stride, i64 count) {
    Vector value{};
#pragma unroll
    for (i32 m = 0; m < kLanes; ++m) {
      if (m >= count) break;
      const u8* const element = from + m * stride * static_cast<i64>(sizeof(T));
      value.lane[m] = static_cast<Real>(widen(load_element<T>(element)));
    }
    return value;
  }

  // The same for an array of another dtype (o, dout may be float32 beside 16-bit q, k, v).
  static void load(const ArrayView& array, i64 offset, i64 row_stride, i64 count, i64 dim,
                   const Tile& tile, i32 rows, i32 row_elems, u32* unusual) {
    if (array.dtype == kConfig.dtype) {
      load_as<Element>(array, offset, row_stride, count, dim, tile, rows, row_elems, unusual);
    } else {
      load_as<float>(array, offset, row_stride, count, dim, tile, rows, row_elems, unusual);
    }
  }

  // depth: the head dimension; elements up to the next multiple of kLanes are 0.
  static void dots(const Tile& A, const Tile& B, i64 depth, Real (&S)[kRows][kColumns]) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 c = 0; c < kColumns; ++c) S[r][c] = 0;
    }
    for (i32 d = 0; d < depth; d += kLanes) {
      Vector a[kRows];
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) a[r] = A.vector(row(r), d);
#pragma unroll
      for (i32 c = 0; c < kColumns; ++c) {
        const Vector b = B.vector(column(c), d);
#pragma unroll
        for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
          for (i32 lane = 0; lane < kLanes; ++lane) S[r][c] += a[r].lane[lane] * b.lane[lane];
        }
      }
    }
  }

  // depth: how many columns of W count; up to the next multiple of kLanes W is hidden or B is 0.
  // kGuarded: entries of W that are -0 are hidden and meet nothing, not even NaN.
  template <bool kGuarded, i32 kVectors>
  static void sums_as(const Tile& W, const Tile& B, i64 depth, Vector (&O)[kRows][kVectors]) {
    for (i32 c = 0; c < depth; c += kLanes) {
      Vector w[kRows];
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) w[r] = W.vector(row(r), c);
#pragma unroll
      for (i32 lane = 0; lane < kLanes; ++lane) {
#pragma unroll
        for (i32 v = 0; v < kVectors; ++v) {
          const Vector b = B.vector(c + lane, element<kVectors>(v));
#pragma unroll
          for (i32 r = 0; r < kRows; ++r) {
            if (kGuarded && is_hidden(w[r].lane[lane])) continue;
#pragma unroll
            for (i32 m = 0; m < kLanes; ++m) O[r][v].lane[m] += w[r].lane[lane] * b.lane[m];
          }
        }
      }
    }
  }

  template <i32 kVectors>
  static void sums(const Tile& W, const Tile& B, i64 depth, bool guarded,
                   Vector (&O)[kRows][kVectors]) {
    if (guarded) {
      sums_as<true>(W, B, depth, O);
    } else {
      sums_as<false>(W, B, depth, O);
    }
  }

  // The factor of a hidden pair: no weight and no kept probability has these bits.
  static constexpr Real kHidden = Real(-0.0);
  static bool is_hidden(Real factor) {
    if constexpr (sizeof(Real) == 4) return __builtin_bit_cast(u32, factor) == 0x80000000u;
    if constexpr (sizeof(Real) == 8) return __builtin_bit_cast(u64, factor) == 0x8000000000000000u;
  }

  // Writes rows [0, count) of a block's result, scaled row by row; rows from there to `slot` become
  // 0.
  template <i32 kVectors, class Scale>
  static void store(const ArrayView& array, i64 offset, i64 row_stride, i64 count, i64 slot,
                    i64 dim, const Vector (&O)[kRows][kVectors], const Scale& scale) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      if (row(r) >= slot) continue;
      const bool counts = row(r) < count;
#pragma unroll
      for (i32 v = 0; v < kVectors; ++v) {
#pragma unroll
        for (i32 m = 0; m < kLanes; ++m) {
          const i64 d = element<kVectors>(v) + m;
          const Real value = counts ? O[r][v].lane[m] * scale(r) : Real(0);
          if (d < dim)
            store_real_called(array, offset + row(r) * row_stride + d * array.strides[3], value);
        }
      }
    }
  }
};

}  // namespace fulmen
