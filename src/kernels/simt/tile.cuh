// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the simt kernels in shared memory, and the products that attention is made of, on
// registers.
//   dots   S[r][c] = sum over d of A[r][d] B[c][d]      both row by row in shared memory
//   sums   O[r][x] += sum over c of W[r][c] B[c][x]
// and, for dQ where a block owns keys, sums the other way:
//   turned_sums   O[c][x] += sum over r of W[r][c] B[r][x]
// A warp stands 4 down (y) and 8 across (x). Two warps share groups of 8 rows: a thread has rows
// row(0), row(0) + 8, ... of the block, and of those columns x, x + 8, ... of dots, and vectors x,
// x + 8, ... of sums. So a row belongs to the 8 threads of one warp, which reduce it by shuffles.
// Bit 0 of the lane and bit 4 are y, the others x: a 16-byte load of shared memory takes two passes
// instead of four where in each half of the warp lanes 1 apart, or lanes 2 apart, want the same
// vector (H100, 2026-11-28: 2.0 passes a load; 3.4 with lanes numbered row by row).
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/simt/config.h"

namespace fulmen {

template <class Real>
struct alignas(16) SimtVector {
  static constexpr i32 kLanes = 16 / static_cast<i32>(sizeof(Real));
  Real lane[kLanes];
};

// Rows of kElems elements, seen as 16-byte vectors. Vector v of a row is stored as vector v ^ key,
// where neighbouring rows have different keys: eight of them, read at the same v, meet all banks.
// kKeyStep: 1, or 2 where neighbouring rows are written half a vector's worth of columns at a time.
template <class Real, i32 kElems, i32 kKeyStep = 1>
struct SimtTile {
  using Vector = SimtVector<Real>;
  static constexpr i32 kVectors = kElems / Vector::kLanes;  // of a row
  static constexpr i32 kKeys = kVectors < 8 ? kVectors : 8;
  static_assert(kVectors % kKeys == 0 && (kKeys & (kKeys - 1)) == 0);

  Vector* vectors;

  // Rows 8 apart have the same key: the vector 8 rows on is 8 kVectors further.
  static constexpr i32 index(i32 row, i32 v) {
    const i32 key = row * kKeyStep % kKeys;
    return row * kVectors + (v - v % kKeys) + (v % kKeys ^ key);
  }
  Vector& vector(i32 row, i32 v) const { return vectors[index(row, v)]; }
  Real* reals() const { return vectors->lane; }
  Real& at(i32 row, i32 column) const {
    return vector(row, column / Vector::kLanes).lane[column % Vector::kLanes];
  }
};

template <FmaConfig kConfig>
struct Simt {
  static_assert(kConfig.valid());
  using Real = typename ElementOf<kConfig.dtype>::Real;
  using Vector = SimtVector<Real>;
  static constexpr i32 kLanes = kConfig.lanes();
  static constexpr i32 kRows = kConfig.rows_of_thread();
  static constexpr i32 kColumns = kConfig.columns_of_thread();

  using Pairs = Real[kRows][kColumns];  // of a thread
  template <i32 kDim>
  using Sums = Vector[kRows][kDim / (8 * kLanes)];  // of a thread

  using QkRows = SimtTile<Real, kConfig.max_dim_qk>;
  using VRows = SimtTile<Real, kConfig.max_dim_v>;
  using Weights = SimtTile<Real, kConfig.columns, 2>;

  // Hands out shared memory, front to back.
  struct Layout {
    u8* next = ptx::shared_bytes();
    template <class Tile>
    Tile tile(i32 rows) {
      const Tile tile{reinterpret_cast<Vector*>(next)};
      next += rows * Tile::kVectors * 16;
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
  static i32 x() { return thread() / 2 % 8; }
  static i32 row(i32 r) {
    const i32 pair_of_warps = thread() / 64;
    const i32 y = thread() % 2 + thread() / 16 % 2 * 2;
    return pair_of_warps * 8 * kRows + thread() / 32 % 2 * 4 + y + 8 * r;
  }
  static i32 column(i32 c) { return x() + 8 * c; }

  // The weight of this thread's pair (r, c): W.at(row(r), column(c)), with one address for every
  // four columns.
  static Real& own(const Weights& W, i32 r, i32 c) {
    constexpr i32 kPerStep = 8 / kLanes;  // vectors from c to c + 1
    const i32 first = Weights::index(row(0), x() / kLanes) * kLanes + x() % kLanes;
    const i32 v = kPerStep * c;
    return W.reals()[(first ^ v % Weights::kKeys * kLanes) +
                     (v - v % Weights::kKeys + 8 * Weights::kVectors * r) * kLanes];
  }

  // call(r, c) for each pair of a thread.
  template <class Call>
  static void each_pair(const Call& call) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 c = 0; c < kColumns; ++c) call(r, c);
    }
  }

  // Scores at the columns outside of their row's limits become -inf. limits_of(r): what row r sees.
  template <class LimitsOf>
  static void hide_outside(Pairs& S, const LimitsOf& limits_of) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const auto limits = limits_of(r);
#pragma unroll
      for (i32 c = 0; c < kColumns; ++c) {
        if (!limits.contains(column(c))) S[r][c] = -kInfinity<Real>;
      }
    }
  }

  static void write_own(const Weights& W, const Pairs& values) {
    each_pair([&](i32 r, i32 c) { own(W, r, c) = values[r][c]; });
  }

  // change(value, r, c) for each of this thread's weights, as a loop, so that its text stands once.
  template <class Change>
  static void change_own(const Weights& W, const Change& change) {
#pragma unroll 1
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll 1
      for (i32 c = 0; c < kColumns; ++c) {
        Real& weight = own(W, r, c);
        weight = change(weight, r, c);
      }
    }
  }

  // The same for registers, by way of shared memory, where a loop may index.
  template <class Change>
  static void change_pairs(const Weights& W, Pairs& values, const Change& change) {
    write_own(W, values);
    change_own(W, change);
    each_pair([&](i32 r, i32 c) { values[r][c] = own(W, r, c); });
  }

  // Over the threads of a row.
  template <class Combine>
  static Real across_row(Real value, const Combine& combine) {
#pragma unroll
    for (u32 mask = 2; mask < 16; mask *= 2) value = combine(value, ptx::shuffle_xor(value, mask));
    return value;
  }
  static Real row_sum(Real value) {
    return across_row(value, [](Real a, Real b) { return a + b; });
  }

  // dim: of the arrays; elements of a tile beyond it are 0.
  template <class Tile>
  static void dots(const Tile& A, const Tile& B, i32 dim, Pairs& S) {
    constexpr i32 kStep = 4;  // vectors
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 c = 0; c < kColumns; ++c) S[r][c] = 0;
    }
#pragma unroll 1
    for (i32 v = 0; v * kLanes < dim; v += kStep) {
      const i32 at_a = Tile::index(row(0), v);
      const i32 at_b = Tile::index(column(0), v);
#pragma unroll
      for (i32 step = 0; step < kStep; ++step) {
        Vector a[kRows];
#pragma unroll
        for (i32 r = 0; r < kRows; ++r) a[r] = A.vectors[(at_a ^ step) + 8 * Tile::kVectors * r];
#pragma unroll
        for (i32 c = 0; c < kColumns; ++c) {
          const Vector b = B.vectors[(at_b ^ step) + 8 * Tile::kVectors * c];
#pragma unroll
          for (i32 lane = 0; lane < kLanes; ++lane) {
#pragma unroll
            for (i32 r = 0; r < kRows; ++r) S[r][c] += a[r].lane[lane] * b.lane[lane];
          }
        }
      }
    }
  }

  // depth: how many columns of W count; up to the next multiple of 8, W is hidden or B is 0.
  template <i32 kDim, class Tile>
  static void sums(const Weights& W, const Tile& B, i32 depth, Sums<kDim>& O) {
    constexpr i32 kVectors = kDim / (8 * kLanes);
    constexpr i32 kSteps = 8 / kLanes;  // vectors of eight columns
    i32 at_b = x();
#pragma unroll 1
    for (i32 c = 0; c < depth; c += 8) {
      const i32 at_w = Weights::index(row(0), c / kLanes);
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        Vector w[kRows];
#pragma unroll
        for (i32 r = 0; r < kRows; ++r) w[r] = W.vectors[(at_w ^ step) + 8 * Weights::kVectors * r];
#pragma unroll
        for (i32 lane = 0; lane < kLanes; ++lane) {
          const i32 down = step * kLanes + lane;  // 0 .. 7, the key of that row of B
#pragma unroll
          for (i32 u = 0; u < kVectors; ++u) {
            const Vector b = B.vectors[(at_b ^ down) + down * Tile::kVectors + 8 * u];
#pragma unroll
            for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
              for (i32 m = 0; m < kLanes; ++m) O[r][u].lane[m] += w[r].lane[lane] * b.lane[m];
            }
          }
        }
      }
      at_b += 8 * Tile::kVectors;
    }
  }

  // The same where B holds infinities or NaN: entries of W that are hidden meet nothing.
  template <i32 kDim, class Tile>
  static void guarded_sums(const Weights& W, const Tile& B, i32 depth, Sums<kDim>& O) {
#pragma unroll 1
    for (i32 c = 0; c < depth; ++c) {
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const Real w = W.at(row(r), c);
        if (is_hidden(w)) continue;
#pragma unroll
        for (i32 u = 0; u < kDim / (8 * kLanes); ++u) {
          const Vector b = B.vector(c, x() + 8 * u);
#pragma unroll
          for (i32 m = 0; m < kLanes; ++m) O[r][u].lane[m] += w * b.lane[m];
        }
      }
    }
  }

  // What a thread has of turned_sums: kTurnedColumns neighbours of the columns, and of a row
  // vectors turned_x(), turned_x() + kTurnedAcross, ...: wide enough that a thread has a vector of
  // columns.
  static constexpr bool kTurnedWide =
      kConfig.columns * 8 / kConfig.num_threads < kLanes && kConfig.max_dim_qk % (16 * kLanes) == 0;
  static constexpr i32 kTurnedAcross = kTurnedWide ? 16 : 8;
  static constexpr i32 kTurnedDown = kConfig.num_threads / kTurnedAcross;
  static constexpr i32 kTurnedColumns =
      kConfig.columns < kTurnedDown ? 1 : kConfig.columns / kTurnedDown;
  using TurnedSums = Vector[kTurnedColumns][kConfig.max_dim_qk / (kTurnedAcross * kLanes)];
  static i32 turned_x() { return thread() / 2 % kTurnedAcross; }
  static i32 turned_column(i32 i) {
    return (thread() / (2 * kTurnedAcross) * 2 + thread() % 2) * kTurnedColumns + i;
  }

  // kGuarded: B holds infinities or NaN, which entries of W that are hidden must not meet.
  template <bool kGuarded>
  static void turned_sums(const Weights& W, const QkRows& B, TurnedSums& O) {
    if (turned_column(0) >= kConfig.columns) return;
#pragma unroll 1
    for (i32 row = 0; row < kConfig.rows; row += kRowsOfTurnedStep) {
#pragma unroll
      for (i32 step = 0; step < kRowsOfTurnedStep; ++step) {
        Real w[kTurnedColumns];
        load_columns({W.vectors + row * Weights::kVectors}, step, w);
#pragma unroll
        for (i32 u = 0; u < kConfig.max_dim_qk / (kTurnedAcross * kLanes); ++u) {
          const Vector b =
              (B.vectors +
               row * QkRows::kVectors)[QkRows::index(step, turned_x() + kTurnedAcross * u)];
#pragma unroll
          for (i32 i = 0; i < kTurnedColumns; ++i) {
            if (kGuarded && is_hidden(w[i])) continue;
#pragma unroll
            for (i32 m = 0; m < kLanes; ++m) O[i][u].lane[m] += w[i] * b.lane[m];
          }
        }
      }
    }
  }
  static constexpr i32 kRowsOfTurnedStep = 8;  // after which the keys of rows repeat

  static void load_columns(const Weights& W, i32 row, Real (&w)[kTurnedColumns]) {
    if constexpr (kTurnedColumns % kLanes == 0) {
#pragma unroll
      for (i32 i = 0; i < kTurnedColumns; i += kLanes) {
        const Vector vector = W.vector(row, turned_column(i) / kLanes);
#pragma unroll
        for (i32 lane = 0; lane < kLanes; ++lane) w[i + lane] = vector.lane[lane];
      }
    } else {
#pragma unroll
      for (i32 i = 0; i < kTurnedColumns; ++i) w[i] = W.at(row, turned_column(i));
    }
  }

  // The factor of a hidden pair: no weight and no kept probability has these bits.
  static constexpr Real kHidden = Real(-0.0);
  static bool is_hidden(Real factor) {
    if constexpr (sizeof(Real) == 4) return __builtin_bit_cast(u32, factor) == 0x80000000u;
    if constexpr (sizeof(Real) == 8) return __builtin_bit_cast(u64, factor) == 0x8000000000000000u;
  }
};

// Elements d .. of a row of 8-bit numbers, as many as a vector holds; those past the last are 0.
// first: offset of its element 0. packed: rows.in_vectors of as many.
template <class Real, class Element, class Rows>
SimtVector<Real> widened_vector(const Rows& rows, i64 first, i32 d, bool packed) {
  static_assert(sizeof(Element) == 1);
  constexpr i32 kLanes = SimtVector<Real>::kLanes;
  struct alignas(kLanes) Pack {
    Element lane[kLanes];
  };
  SimtVector<Real> value{};
  if (packed) {
    const Pack pack = reinterpret_cast<const Pack*>(rows.array.data + first)[d / kLanes];
#pragma unroll
    for (i32 m = 0; m < kLanes; ++m) value.lane[m] = widen(pack.lane[m]);
    return value;
  }
#pragma unroll
  for (i32 m = 0; m < kLanes; ++m) {
    const u8* const address = rows.array.data + first + (d + m) * rows.array.strides[3];
    if (d + m < rows.dim) value.lane[m] = widen(load_element<Element>(address));
  }
  return value;
}

// Keys or values of 8 bits, with their scales, or records.
template <class HeadType, class Rows_>
struct QuantisedRows {
  using Real = typename HeadType::Real;

  Rows_ rows;
  const HeadType& head;
  const ArrayView& scales;

  SimtVector<Real> values(i64 row, i32 d, bool packed) const {
    SimtVector<Real> value{};
    i64 first = 0;
    if (!rows.find(row, first)) {
      rows.put_no_page(value);
      return value;
    }
    if constexpr (HeadType::kHasRecords) {
      const auto numbers = head.numbers(rows.array, scales, row);
      for (i32 m = 0; m < min(value.kLanes, rows.dim - d); ++m) value.lane[m] = numbers[d + m];
      return value;
    }
    value = widened_vector<Real, typename HeadType::KvElement>(rows, first, d, packed);
    const bool by_dim = scales.strides[3] != 0;
    Real scale = head.kv_scale(scales, row, by_dim ? d : 0);
#pragma unroll
    for (i32 m = 0; m < value.kLanes; ++m) {
      if (by_dim && d + m < rows.dim) scale = head.kv_scale(scales, row, d + m);
      value.lane[m] *= scale;
    }
    return value;
  }
};

// Queries of 8 bits, likewise.
template <class HeadType, class Rows>
struct QuantisedQueries {
  using Real = typename HeadType::Real;

  Rows rows;
  const HeadType& head;

  SimtVector<Real> values(i64 row, i32 d, bool packed) const {
    SimtVector<Real> value =
        widened_vector<Real, typename HeadType::QElement>(rows, rows.offset(row), d, packed);
    const Real scale = head.q_scale(row);
#pragma unroll
    for (i32 m = 0; m < value.kLanes; ++m) value.lane[m] *= scale;
    return value;
  }
};

}  // namespace fulmen
