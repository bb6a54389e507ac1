// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Up to 16 query rows against many keys of bf16 by tiles, where vectors multiply more slowly than
// memory gives keys. S^T = K Q^T: 16 keys are the rows of A, a query row is a column of B. O += P
// V: query rows are those of A, and 32 keys, in pairs, are the depth. Keys are copied to where
// tiles read them as they come from memory, and what comes next is asked for meanwhile.
#pragma once

#include "cpu/isa/pairs.h"

namespace fulmen::cpu {
namespace {

template <class Tiles>
struct FewRowTiles {
  static constexpr i64 kSide = 16;          // rows of a tile, lanes of a row, pairs of a depth
  static constexpr i64 kTileBytes = 64;     // of a row
  static constexpr i64 kKeys = 2 * kSide;   // that weights are multiplied with at once
  static constexpr i64 kDims = 128;         // that are copied at once
  static constexpr i64 kDepth = 2 * kSide;  // dimensions of a tile
  static constexpr i64 kStep = kWidth<float>;

  static constexpr i64 kLeastRows = 3;  // with fewer, vectors are as fast

  static bool multiplies(i64 rows, i64 dims) {
    return rows >= kLeastRows && rows <= kSide && dims % kDepth == 0;
  }

  // Q^T, a row per lane; rows that are not there are 0.
  static void arrange(const Pair* Q, i64 Q_stride, i64 rows, i64 lanes, Pair* out) {
    if (!multiplies(rows, 2 * lanes)) return arrange_rows(Q, Q_stride, rows, lanes, out);
    for (i64 at = 0; at < lanes; ++at) {
      for (i64 row = 0; row < kSide; ++row) {
        *out++ = row < rows ? Q[row * Q_stride + at] : Pair{};
      }
    }
  }

  static void dot(const Pair* Q, i64 rows, const KeyList& keys, i64 dims, float* scores,
                  i64 stride) {
    if (!multiplies(rows, dims)) return dot_rows_of<InPairs>(Q, rows, keys, dims, scores, stride);
    for (i64 key = 0; key < keys.count; key += kSide) {
      alignas(64) float sums[kSide * kSide];
      multiply_keys(Q, keys, key, dims, sums);
      store_scores(sums, rows, min(kSide, keys.count - key), scores + key, stride);
    }
  }

  static void add(const Pair* weights, i64 stride, i64 rows, const KeyList& values, i64 dims,
                  float* O, i64 O_stride) {
    if (!multiplies(rows, dims)) {
      return add_rows_of<InPairs>(weights, stride, rows, values, dims, O, O_stride);
    }
    for (i64 key = 0; key < values.count; key += kKeys) {
      alignas(64) Pair P[kSide * kSide], V[kSide * kDims];
      load_weights(weights + key / 2, stride, rows, ceil_div(values.count - key, i64{2}), P);
      Tiles::template load<4>(P, kTileBytes);
      for (i64 first = 0; first < dims; first += kDims) {
        const i64 count = min(kDims, dims - first);
        interleave_values(values, key, first, count, V);
        add_products(V, rows, count, O + first, O_stride);
      }
    }
  }

 private:
  // sums (key, row) of 16 keys; of keys past the last they are 0.
  static void multiply_keys(const Pair* Q, const KeyList& keys, i64 key, i64 dims, float* sums) {
    alignas(64) Pair K[kSide * kDims / 2];  // tile by tile
    Tiles::template zero<0>();
    for (i64 first = 0; first < dims; first += kDims) {
      const i64 count = min(kDims, dims - first);
      for (i64 row = 0; row < kSide; ++row) {
        copy_key(keys, key + row, first, count, K + row * kSide);
      }
      for (i64 tile = 0; tile < count / kDepth; ++tile) {
        Tiles::template load<4>(K + tile * kSide * kSide, kTileBytes);
        Tiles::template load<5>(Q + (first / kDepth + tile) * kSide * kSide, kTileBytes);
        Tiles::template multiply_add<0, 4, 5>();
      }
    }
    Tiles::template store<0>(sums, kTileBytes);
  }

  // A row of each of some tiles.
  static void copy_key(const KeyList& keys, i64 key, i64 first, i64 count, Pair* out) {
    constexpr i64 kBytes = sizeof(Pair) / 2;  // of a dimension
    if (key >= keys.count) {
      for (i64 d = 0; d < count; d += kDepth) __builtin_memset(out + d / 2 * kSide, 0, kTileBytes);
      return;
    }
    const char* const row = static_cast<const char*>(keys.rows[key]) + keys.offset + first * kBytes;
    const char* const next = row_ahead(keys, key, first * kBytes);
    for (i64 d = 0; d < count; d += kDepth) {
      __builtin_memcpy(out + d / 2 * kSide, row + d * kBytes, kTileBytes);
      fetch_line(next + d * kBytes);
    }
  }

  // What is asked for while a key is read: the key itself where there is nothing.
  static const char* row_ahead(const KeyList& keys, i64 key, i64 at) {
    const bool asks = key < keys.num_ahead;
    const void* const row = asks ? keys.ahead[key] : keys.rows[key];
    return static_cast<const char*>(row) + (asks ? keys.ahead_offset : keys.offset) + at;
  }

  // Scores of 16 keys, of which `keys` are there.
  static void store_scores(const float* sums, i64 rows, i64 keys, float* scores, i64 stride) {
    for (i64 key = 0; key < keys; key += kStep) {
      for (i64 row = 0; row < rows; row += kStep) {
        FloatVector square[kStep];
#pragma GCC unroll 16
        for (i64 i = 0; i < kStep; ++i) square[i] = load(sums + (key + i) * kSide + row);
        transpose_square<float>(square);
#pragma GCC unroll 16
        for (i64 i = 0; i < kStep; ++i) {
          if (row + i < rows) store(scores + (row + i) * stride + key, square[i]);
        }
      }
    }
  }

  // (row, pair of keys): A; what is not there is 0.
  static void load_weights(const Pair* weights, i64 stride, i64 rows, i64 pairs, Pair* P) {
    __builtin_memset(P, 0, kSide * kTileBytes);
    for (i64 row = 0; row < rows; ++row) {
      for (i64 pair = 0; pair < min(kSide, pairs); ++pair) {
        P[row * kSide + pair] = weights[row * stride + pair];
      }
    }
  }

  // (pair of keys, dimension): B; keys past the last are 0.
  static void interleave_values(const KeyList& values, i64 key, i64 first, i64 count, Pair* V) {
    constexpr i64 kBytes = sizeof(Pair) / 2;
    for (i64 pair = 0; pair < kSide; ++pair, key += 2, V += kDims) {
      if (key >= values.count) {
        __builtin_memset(V, 0, static_cast<size_t>(count) * sizeof(Pair));
        continue;
      }
      const auto row = [&](i64 of) {
        return static_cast<const char*>(values.rows[of]) + values.offset + first * kBytes;
      };
      const char* const even = row(key);
      const char* const odd = key + 1 < values.count ? row(key + 1) : nullptr;
      const i64 last = odd ? key + 1 : key;
      const char* const next[] = {row_ahead(values, key, first * kBytes),
                                  row_ahead(values, last, first * kBytes)};
      for (i64 d = 0; d < count; d += InPairs::kDims) {
        Vector<Pair> pairs[2];
        InPairs::read_values(even + d * kBytes, odd ? odd + d * kBytes : nullptr, pairs);
        store(V + d, pairs[0]);
        store(V + d + kStep, pairs[1]);
        if (d * kBytes % kLine != 0) continue;
        fetch_line(next[0] + d * kBytes);
        fetch_line(next[1] + d * kBytes);
      }
    }
  }

  // O[row] += P V of `count` dimensions; P is in tile 4.
  static void add_products(const Pair* V, i64 rows, i64 count, float* O, i64 O_stride) {
    constexpr i64 kColumns = 2 * kSide, kRowBytes = 2 * kTileBytes, kV_bytes = kDims * 4;
    alignas(64) float sums[kSide * kColumns];
    for (i64 d = 0; d < count; d += kColumns) {
      Tiles::template zero<0>();
      Tiles::template load<5>(V + d, kV_bytes);
      Tiles::template multiply_add<0, 4, 5>();
      Tiles::template zero<1>();
      Tiles::template load<6>(V + d + kSide, kV_bytes);
      Tiles::template multiply_add<1, 4, 6>();
      Tiles::template store<0>(sums, kRowBytes);
      Tiles::template store<1>(sums + kSide, kRowBytes);
      for (i64 row = 0; row < rows; ++row) {
#pragma GCC unroll 4
        for (i64 i = 0; i < kColumns; i += kStep) {
          float* const to = O + row * O_stride + d + i;
          store(to, load(to) + load(sums + row * kColumns + i));
        }
      }
    }
  }
};

}  // namespace
}  // namespace fulmen::cpu
