// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The outputs of few query rows over many keys: V is read once, where it lies and in its own type,
// a strip of dimensions of a chunk of keys at a time, while the next chunk is asked for.
#pragma once

#include "cpu/isa/few_row_scores.h"
#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

// Bytes of the values that stay in the first cache while slice after slice of them is read.
constexpr i64 kChunkBytes = 16384;

// What add_rows is given.
template <class Real, class Lane>
struct WeightedRows {
  const Lane* weights;  // a row per query row
  i64 stride;
  const char* const* V;
  i64 count;
  i64 at;  // of the slice, in bytes
  Real* O;
  i64 O_stride;
  const char* const* next;  // as many rows, to be asked for; null: none
};

// O[row][slice] += sum over keys of weights[row][key] V[key][slice], of kVectors vectors.
template <class Operand, int kRows, int kVectors>
void add_slice(const WeightedRows<typename Operand::Real, typename Operand::Lane>& some) {
  using Real = typename Operand::Real;
  using Lane = typename Operand::Lane;
  constexpr int kStep = kWidth<Real>;
  constexpr i64 kSliceBytes = kVectors * Operand::kValueBytes;
  Vector<Real> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[row][v] = load(some.O + row * some.O_stride + v * kStep);
  }
  for (i64 key = 0; key < some.count; key += Operand::kKeys) {
    const bool has_next = key + 1 < some.count;
    Vector<Lane> values[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v += Operand::kValueVectors) {
      const i64 at = some.at + v * Operand::kValueBytes;
      Operand::read_values(some.V[key] + at, has_next ? some.V[key + 1] + at : nullptr, values + v);
    }
    if (some.next) {
#pragma GCC unroll 8
      for (i64 at = 0; at < kSliceBytes; at += kLine) {
        for (int i = 0; i < Operand::kKeys && key + i < some.count; ++i) {
          __builtin_prefetch(some.next[key + i] + some.at + at);
        }
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
    some.at += kVectors * Operand::kValueBytes;
    some.O += kVectors * kWidth<typename Operand::Real>;
  }
  if constexpr (kVectors > Operand::kValueVectors) {
    add_slices<Operand, kRows, kVectors / 2>(some, vectors);
  }
}

// The keys in chunks that stay in the first cache, of those the rows in groups. The first group
// asks for the next chunk.
template <class Operand>
void add_rows_of(const typename Operand::Lane* weights, i64 stride, i64 rows, const KeyList& values,
                 i64 dims, typename Operand::Real* O, i64 O_stride) {
  using Real = typename Operand::Real;
  constexpr int kSums = kVectorBytes == 64 ? 16 : 8;  // registers
  const auto list = reinterpret_cast<const char* const*>(values.rows);
  const i64 vectors = dims / kWidth<Real>;
  const i64 chunk = clamp<i64>(kChunkBytes / (vectors * Operand::kValueBytes) / 8 * 8, 8, 64);
  for (i64 key = 0; key < values.count; key += chunk) {
    const i64 count = min(chunk, values.count - key);
    const i64 left_keys = values.count - key - count;
    WeightedRows<Real, typename Operand::Lane> some{
        weights + key / Operand::kKeys, stride, list + key, count, 0, O, O_stride,
        // A last chunk is shorter: those before its end are asked for again.
        left_keys > 0 ? list + key + min(count, left_keys) : nullptr};
    i64 left = rows;
    const auto add = [&]<int kRows>(std::integral_constant<int, kRows>) {
      constexpr int kVectors = min(8, kSums / kRows);
      for (; left >= kRows; left -= kRows) {
        add_slices<Operand, kRows, kVectors>(some, vectors);
        some.weights += kRows * stride;
        some.O += kRows * O_stride;
        some.next = nullptr;
      }
    };
    add(std::integral_constant<int, 8>());
    add(std::integral_constant<int, 4>());
    add(std::integral_constant<int, 2>());
    add(std::integral_constant<int, 1>());
  }
}

template <class Real>
void add_rows(const Real* weights, i64 stride, i64 rows, const KeyList& values, i64 dims, Real* O,
              i64 O_stride) {
  with_element<Real>(values.dtype, [&]<class Element>(Element) {
    add_rows_of<Widened<Real, Element>>(weights, stride, rows, values, dims, O, O_stride);
  });
}

}  // namespace
}  // namespace fulmen::cpu
