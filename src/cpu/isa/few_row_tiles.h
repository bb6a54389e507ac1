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
    for (i64 key = 0; key < keys.count; key += kKeys) {
      LinesOfKeys next(keys, key, dims);
      alignas(64) float sums[2][kSide * kSide];
      for (i64 half = 0; half < 2; ++half) {
        multiply_keys(Q, keys, key + half * kSide, dims, sums[half], next);
      }
      for (i64 half = 0; half < 2; ++half) {
        const i64 first = key + half * kSide;
        store_scores(sums[half], rows, min(kSide, keys.count - first), scores + first, stride,
                     next);
      }
      next.ask_rest();
    }
  }

  static void add(const Pair* weights, i64 stride, i64 rows, const KeyList& values, i64 dims,
                  float* O, i64 O_stride) {
    if (!multiplies(rows, dims)) {
      return add_rows_of<InPairs>(weights, stride, rows, values, dims, O, O_stride);
    }
    for (i64 key = 0; key < values.count; key += kKeys) {
      LinesOfKeys next(values, key, dims);
      alignas(64) Pair P[kSide * kSide], V[kSide * kDims];
      load_weights(weights + key / 2, stride, rows, ceil_div(values.count - key, i64{2}), P);
      for (i64 first = 0; first < dims; first += kDims) {
        const i64 count = min(kDims, dims - first);
        interleave_values(values, key, first, count, V, next);
        alignas(64) float sums[kSide * kDims];
        multiply_values(P, V, count, sums, next);
        for (i64 row = 0; row < rows; ++row) {
          add_row(sums + row * kDims, count, O + row * O_stride + first);
          next.ask(kKeys / 4 * count / kDims);
        }
      }
      next.ask_rest();
    }
  }

 private:
  static constexpr i64 kDimBytes = 2;

  // Of 32 keys what is asked for while others are multiplied, some lines at a time: all at once
  // would fill the buffers that misses wait in, and hold up all that follows.
  class LinesOfKeys {
   public:
    LinesOfKeys(const KeyList& keys, i64 first, i64 dims)
        : keys_(keys),
          key_(first),
          end_(min(first + kKeys, keys.num_ahead)),
          bytes_(dims * kDimBytes) {}

    [[gnu::always_inline]] void ask(i64 lines) {
      for (; lines > 0 && key_ < end_; --lines) {
        constexpr int kReads = 0, kIntoSecondCache = 2;
        __builtin_prefetch(static_cast<const char*>(keys_.ahead[key_]) + keys_.ahead_offset + at_,
                           kReads, kIntoSecondCache);
        at_ += kLine;
        if (at_ < bytes_) continue;
        at_ = 0;
        ++key_;
      }
    }
    void ask_rest() { ask(kKeys * bytes_); }

   private:
    const KeyList& keys_;
    i64 key_;
    i64 end_;
    i64 bytes_;  // of a row
    i64 at_ = 0;
  };

  static const char* row_of(const KeyList& keys, i64 key, i64 first) {
    return static_cast<const char*>(keys.rows[key]) + keys.offset + first * kDimBytes;
  }

  // Of 16 keys as tiles read them.
  struct Rows {
    const char* first;
    i64 stride;
  };

  // Where they lie, if that is at equal distances; else copied. Keys past the last are 0.
  static Rows rows_of(const KeyList& keys, i64 key, i64 first, i64 count, Pair* copies) {
    if (key + kSide <= keys.count) {
      const i64 stride = row_of(keys, key + 1, 0) - row_of(keys, key, 0);
      bool is_even = true;
      for (i64 i = 2; i < kSide; ++i) {
        is_even = is_even && row_of(keys, key + i, 0) - row_of(keys, key + i - 1, 0) == stride;
      }
      if (is_even) return {row_of(keys, key, first), stride};
    }
    constexpr i64 kRowBytes = kDims * kDimBytes;
    char* const out = reinterpret_cast<char*>(copies);
    for (i64 i = 0; i < kSide; ++i) {
      const size_t bytes = static_cast<size_t>(count * kDimBytes);
      if (key + i < keys.count) {
        __builtin_memcpy(out + i * kRowBytes, row_of(keys, key + i, first), bytes);
      } else {
        __builtin_memset(out + i * kRowBytes, 0, bytes);
      }
    }
    return {out, kRowBytes};
  }

  // sums (key, row) of 16 keys.
  static void multiply_keys(const Pair* Q, const KeyList& keys, i64 key, i64 dims, float* sums,
                            LinesOfKeys& next) {
    alignas(64) Pair copies[kSide * kDims / 2];
    Tiles::template zero<0>();
    for (i64 first = 0; first < dims; first += kDims) {
      const i64 count = min(kDims, dims - first);
      const Rows K = rows_of(keys, key, first, count, copies);
      for (i64 d = 0; d < count; d += kDepth) {
        Tiles::template load<4>(K.first + d * kDimBytes, K.stride);
        Tiles::template load<5>(Q + (first + d) / 2 * kSide, kTileBytes);
        Tiles::template multiply_add<0, 4, 5>();
        next.ask(kSide / 2);
      }
    }
    Tiles::template store<0>(sums, kTileBytes);
  }

  // Scores of 16 keys, of which `keys` are there.
  static void store_scores(const float* sums, i64 rows, i64 keys, float* scores, i64 stride,
                           LinesOfKeys& next) {
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
        next.ask(kSide);
      }
    }
  }

  // (row, pair of keys): A; what is not there is 0.
  static void load_weights(const Pair* weights, i64 stride, i64 rows, i64 pairs, Pair* P) {
    __builtin_memset(P, 0, kSide * kTileBytes);
    for (i64 row = 0; row < rows; ++row) {
      const Pair* const from = weights + row * stride;
      Pair* const to = P + row * kSide;
      if (pairs >= kSide) {
        __builtin_memcpy(to, from, kTileBytes);
        continue;
      }
      for (i64 pair = 0; pair < pairs; ++pair) to[pair] = from[pair];
    }
  }

  // (pair of keys, dimension): B; keys past the last are 0.
  static void interleave_values(const KeyList& values, i64 key, i64 first, i64 count, Pair* V,
                                LinesOfKeys& next) {
    for (i64 pair = 0; pair < kSide; ++pair, key += 2, V += kDims) {
      if (key >= values.count) {
        __builtin_memset(V, 0, static_cast<size_t>(count) * sizeof(Pair));
        continue;
      }
      const char* const even = row_of(values, key, first);
      const char* const odd = key + 1 < values.count ? row_of(values, key + 1, first) : nullptr;
      for (i64 d = 0; d < count; d += InPairs::kDims) {
        const i64 at = d * kDimBytes;
        Vector<Pair> pairs[2];
        InPairs::read_values(even + at, odd ? odd + at : nullptr, pairs);
        store(V + d, pairs[0]);
        store(V + d + kStep, pairs[1]);
      }
      next.ask(kKeys * count / kDims / 8);
    }
  }

  // sums (row, dimension) = P V of `count` dimensions.
  static void multiply_values(const Pair* P, const Pair* V, i64 count, float* sums,
                              LinesOfKeys& next) {
    constexpr i64 kRowBytes = kDims * 4;
    Tiles::template load<4>(P, kTileBytes);
    for (i64 d = 0; d < count; d += kSide) {
      Tiles::template zero<0>();
      Tiles::template load<5>(V + d, kRowBytes);
      Tiles::template multiply_add<0, 4, 5>();
      Tiles::template store<0>(sums + d, kRowBytes);
      next.ask(kKeys / 8);
    }
  }

  static void add_row(const float* sums, i64 count, float* O) {
    for (i64 d = 0; d < count; d += kStep) store(O + d, load(O + d) + load(sums + d));
  }
};

}  // namespace
}  // namespace fulmen::cpu
