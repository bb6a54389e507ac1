// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Few query rows against many keys: K and V are read once, where they lie and in their own type, as
// fast as memory gives them. A key's row is a vector per step of dimensions, so that nothing is
// rearranged; the lanes of a dot product are summed for kWidth products at once.
#pragma once

#include "cpu/isa/exponential.h"
#include "cpu/isa/products.h"
#include "cpu/isa/softmax.h"
#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

// An operand as vectors of kDims dimensions, widened where they are read.
template <class Real_, class Element>
struct Widened {
  using Real = Real_;
  using Lane = Real_;
  static constexpr i64 kDims = kWidth<Real>;
  static constexpr i64 kBytes = kDims * static_cast<i64>(sizeof(typename Element::Stored));
  static Vector<Lane> read(const char* address) {
    typename Element::Stored few[kDims];
    __builtin_memcpy(few, address, sizeof(few));
    return Element::widen(few, Real());
  }

  // Of a row of values, kValueVectors vectors of O at a time.
  static constexpr int kKeys = 1;
  static constexpr int kValueVectors = 1;
  static constexpr i64 kValueBytes = kBytes;
  static void read_values(const char* row, const char*, Vector<Lane>* out) { *out = read(row); }
};

// One value for each of kWidth vectors: the sum of its lanes. Each step adds vector i + kHalf to
// vector i, lanes interleaved, until lane i of the one that is left is the sum of vector i.
template <class Real, int kHalf = kWidth<Real> / 2>
[[gnu::always_inline]] inline Vector<Real> sums_of(Vector<Real> (&vectors)[kWidth<Real>]) {
  constexpr auto kAll = std::make_integer_sequence<int, kWidth<Real>>();
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; ++i) {
    vectors[i] = interleaved<0>(vectors[i], vectors[i + kHalf], kAll) +
                 interleaved<kWidth<Real> / 2>(vectors[i], vectors[i + kHalf], kAll);
  }
  if constexpr (kHalf > 1) return sums_of<Real, kHalf / 2>(vectors);
  return vectors[0];
}

// scores[row][key] = dot(Q[row], K[key]) for kRows rows and kWidth / kRows keys a step. Few of
// those at once, so that memory is read from one end to the other: only then does the processor
// fetch ahead of the loads.
template <class Operand, int kRows>
void dot_some_rows(const typename Operand::Lane* Q, i64 Q_stride, const Source& keys, i64 count,
                   i64 vectors, typename Operand::Real* scores, i64 stride) {
  using Real = typename Operand::Real;
  using Lane = typename Operand::Lane;
  constexpr int kStep = kWidth<Real>;
  constexpr int kKeys = kStep / kRows;
  constexpr int kAtOnce = min(kKeys, max(1, 8 / kRows));
  const i64 row_bytes = keys.row_stride * (Operand::kBytes / Operand::kDims);
  const char* const first = static_cast<const char*>(keys.data);
  for (i64 key = 0; key < count; key += kKeys) {
    Vector<Real> sums[kStep];
#pragma GCC unroll 1
    for (int some = 0; some < kKeys; some += kAtOnce) {
      const char* in[kAtOnce];
      for (int j = 0; j < kAtOnce; ++j) {  // past the last key: that one again, into the padding
        in[j] = first + min(key + some + j, count - 1) * row_bytes;
      }
      Vector<Real> sum[kRows][kAtOnce];
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
        for (int j = 0; j < kAtOnce; ++j) sum[row][j] = Vector<Real>{};
      }
      for (i64 v = 0; v < vectors; ++v) {
        Vector<Lane> k[kAtOnce];
#pragma GCC unroll 8
        for (int j = 0; j < kAtOnce; ++j) k[j] = Operand::read(in[j] + v * Operand::kBytes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const Vector<Lane> q = load(Q + row * Q_stride + v * kWidth<Lane>);
#pragma GCC unroll 8
          for (int j = 0; j < kAtOnce; ++j) sum[row][j] = multiply_add(k[j], q, sum[row][j]);
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
        for (int j = 0; j < kAtOnce; ++j) sums[row * kKeys + some + j] = sum[row][j];
      }
    }
    Real products[kStep];
    store(products, sums_of<Real>(sums));
    for (int row = 0; row < kRows; ++row) {
      __builtin_memcpy(scores + row * stride + key, products + row * kKeys, kKeys * sizeof(Real));
    }
  }
}

template <class Operand>
void dot_rows_of(const typename Operand::Lane* Q, i64 Q_stride, i64 rows, const Source& keys,
                 i64 count, i64 dims, typename Operand::Real* scores, i64 stride) {
  const i64 vectors = dims / Operand::kDims;
  const auto some = [&]<int kRows>(std::integral_constant<int, kRows>) {
    for (; rows >= kRows; rows -= kRows, Q += kRows * Q_stride, scores += kRows * stride) {
      dot_some_rows<Operand, kRows>(Q, Q_stride, keys, count, vectors, scores, stride);
    }
  };
  if constexpr (kWidth<typename Operand::Real> >= 8) some(std::integral_constant<int, 8>());
  if constexpr (kWidth<typename Operand::Real> >= 4) some(std::integral_constant<int, 4>());
  some(std::integral_constant<int, 2>());
  some(std::integral_constant<int, 1>());
}

// Keys whose values stay in the first cache while slice after slice of them is read.
constexpr i64 kChunk = 32;

// What add_rows is given.
template <class Real, class Lane>
struct WeightedRows {
  const Lane* weights;  // a row per query row
  i64 stride;
  const char* V;
  i64 row_bytes;
  i64 count;
  Real* O;
  i64 O_stride;
  i64 rest_bytes;  // of a row: asked for with its first slice, so that memory is read in order
};

// O[row][slice] += sum over keys of weights[row][key] V[key][slice], of kVectors vectors.
template <class Operand, int kRows, int kVectors>
void add_slice(const WeightedRows<typename Operand::Real, typename Operand::Lane>& some) {
  using Real = typename Operand::Real;
  using Lane = typename Operand::Lane;
  constexpr int kStep = kWidth<Real>;
  Vector<Real> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[row][v] = load(some.O + row * some.O_stride + v * kStep);
  }
  const char* V = some.V;
  for (i64 key = 0; key < some.count; key += Operand::kKeys, V += Operand::kKeys * some.row_bytes) {
    Vector<Lane> values[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v += Operand::kValueVectors) {
      const char* const at = V + v * Operand::kValueBytes;
      Operand::read_values(at, key + 1 < some.count ? at + some.row_bytes : nullptr, values + v);
    }
    constexpr i64 kSliceBytes = kVectors * Operand::kValueBytes;
    for (i64 at = kSliceBytes; at < some.rest_bytes; at += 64) {
      for (int next = 0; next < Operand::kKeys; ++next) {
        __builtin_prefetch(V + next * some.row_bytes + at);
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vector<Lane> weight = broadcast(some.weights[row * some.stride + key / Operand::kKeys]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[row][v] = multiply_add(weight, values[v], sum[row][v]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(some.O + row * some.O_stride + v * kStep, sum[row][v]);
  }
}

template <class Operand, int kRows, int kVectors>
void add_slices(WeightedRows<typename Operand::Real, typename Operand::Lane> some, i64 vectors) {
  for (; vectors >= kVectors; vectors -= kVectors) {
    add_slice<Operand, kRows, kVectors>(some);
    some.V += kVectors * Operand::kValueBytes;
    some.O += kVectors * kWidth<typename Operand::Real>;
    some.rest_bytes = 0;
  }
  if constexpr (kVectors > Operand::kValueVectors) {
    add_slices<Operand, kRows, kVectors / 2>(some, vectors);
  }
}

// The keys in chunks that stay in the first cache, of those the rows in groups.
template <class Operand>
void add_rows_of(const typename Operand::Lane* weights, i64 stride, i64 rows, const Source& values,
                 i64 count, i64 dims, typename Operand::Real* O, i64 O_stride) {
  using Real = typename Operand::Real;
  constexpr int kSums = kVectorBytes == 64 ? 16 : 8;  // registers
  const i64 vectors = dims / kWidth<Real>;
  const i64 row_bytes = values.row_stride * (Operand::kBytes / Operand::kDims);
  for (i64 key = 0; key < count; key += kChunk) {
    WeightedRows<Real, typename Operand::Lane> some{
        weights + key / Operand::kKeys,
        stride,
        static_cast<const char*>(values.data) + key * row_bytes,
        row_bytes,
        min(kChunk, count - key),
        O,
        O_stride,
        vectors * Operand::kValueBytes};
    i64 left = rows;
    const auto add = [&]<int kRows>(std::integral_constant<int, kRows>) {
      constexpr int kVectors = min(8, kSums / kRows);
      for (; left >= kRows; left -= kRows) {
        add_slices<Operand, kRows, kVectors>(some, vectors);
        some.weights += kRows * stride;
        some.O += kRows * O_stride;
        some.rest_bytes = 0;
      }
    };
    add(std::integral_constant<int, 8>());
    add(std::integral_constant<int, 4>());
    add(std::integral_constant<int, 2>());
    add(std::integral_constant<int, 1>());
  }
}

// scores[row][key] = scale[key] scores[row][key]
template <class Real>
void scale_scores(Real* scores, i64 stride, i64 rows, const Source& keys, i64 count) {
  for (i64 key = 0; key < count; ++key) {
    const Real scale = scale_of(keys, key);
    for (i64 row = 0; row < rows; ++row) scores[row * stride + key] *= scale;
  }
}

// As add_rows_of, with weights that take on the scales of the values, a chunk of keys at a time.
template <class Operand>
void add_scaled_rows(const typename Operand::Real* weights, i64 stride, i64 rows, Source values,
                     i64 count, i64 dims, typename Operand::Real* O, i64 O_stride) {
  using Real = typename Operand::Real;
  constexpr i64 kRows = 8;
  for (i64 first = 0; first < count; first += kChunk) {
    const i64 keys = min(kChunk, count - first);
    for (i64 row = 0; row < rows; row += kRows) {
      const i64 some = min(kRows, rows - row);
      Real scaled[kRows * kChunk];
      for (i64 i = 0; i < some; ++i) {
        for (i64 key = 0; key < keys; ++key) {
          scaled[i * kChunk + key] =
              weights[(row + i) * stride + first + key] * scale_of(values, first + key);
        }
      }
      Source chunk = values;
      chunk.data = static_cast<const char*>(values.data) + first * values.row_stride;
      add_rows_of<Operand>(scaled, kChunk, some, chunk, keys, dims, O + row * O_stride, O_stride);
    }
  }
}

template <class Real>
void dot_rows(const Real* Q, i64 Q_stride, i64 rows, const Source& keys, i64 count, i64 dims,
              Real* scores, i64 stride) {
  with_element<Real>(keys.dtype, [&]<class Element>(Element) {
    dot_rows_of<Widened<Real, Element>>(Q, Q_stride, rows, keys, count, dims, scores, stride);
    if constexpr (kIsQuantised<Element>) {
      if (keys.scales) scale_scores<Real>(scores, stride, rows, keys, count);
    }
  });
}

template <class Real>
void add_rows(const Real* weights, i64 stride, i64 rows, const Source& values, i64 count, i64 dims,
              Real* O, i64 O_stride) {
  with_element<Real>(values.dtype, [&]<class Element>(Element) {
    using Operand = Widened<Real, Element>;
    if constexpr (kIsQuantised<Element>) {
      if (values.scales) {
        return add_scaled_rows<Operand>(weights, stride, rows, values, count, dims, O, O_stride);
      }
    }
    add_rows_of<Operand>(weights, stride, rows, values, count, dims, O, O_stride);
  });
}

template <class Real>
[[gnu::always_inline]] inline Real largest_of(Vector<Real> lanes) {
  Real largest = lanes[0];
  for (int lane = 1; lane < kWidth<Real>; ++lane) {
    largest = lanes[lane] > largest ? lanes[lane] : largest;
  }
  return largest;
}

// s = softcap(scale dot) + addend, keys past the last -inf;  returns max over the keys.
template <class Real>
Real finish_scores(Real* s, i64 keys, const ScoreMap<Real>& map, const Real* addend) {
  constexpr i64 kStep = kWidth<Real>;
  Vector<Real> largest = broadcast(-kInfinity<Real>);
  for (i64 j = 0; j < keys; j += kStep) {
    Vector<Real> score = modified(load(s + j) * map.scale, map.softcap);
    if (addend) score = with_addend<Real>(score, load(addend + j));
    for (i64 lane = keys - j; lane < kStep; ++lane) score[lane] = -kInfinity<Real>;
    store(s + j, score);
    largest = larger(largest, score);
  }
  return largest_of<Real>(largest);
}

// A key per lane: m = max s, P = exp(s - m) keep, l = sum of exp(s - m), of every row.
template <class Weights, class Real>
void weigh_rows(const FewRowsBlock<Real>& block) {
  constexpr i64 kStep = kWidth<Real>;
  for (i64 row = 0; row < block.rows; ++row) {
    const i64 at = row * block.stride;
    Real* const s = block.scores + at;
    const Real* const addend = block.terms.addend ? block.terms.addend + at : nullptr;
    const Real row_max = finish_scores(s, block.keys, block.terms.map, addend);
    const Real shift = row_max == -kInfinity<Real> ? Real(0) : row_max;
    Vector<Real> sum{};
    for (i64 j = 0; j < block.keys; j += kStep) {
      Vector<Real> weight = exponential<Real>(load(s + j) - shift);
      sum += weight;
      if (block.terms.keep) {
        weight *= load(block.terms.keep + at + j);
        for (i64 lane = block.keys - j; lane < kStep; ++lane) weight[lane] = 0;
      }
      Weights::store_lanes(s, j, weight);
    }
    Real total = 0;
    for (int lane = 0; lane < kStep; ++lane) total += sum[lane];
    block.row_max[row] = row_max;
    block.row_sum[row] = total;
  }
}

}  // namespace
}  // namespace fulmen::cpu
