// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The outputs of few query rows over many keys: V is read once, where it lies and in its own type,
// a strip of dimensions of all keys at a time, while other keys are asked for.
#pragma once

#include "cpu/isa/few_row_scores.h"
#include "cpu/isa/vector.h"
#include "cpu/kernels.h"

namespace fulmen::cpu {
namespace {

// What add_rows is given.
template <class Real, class Lane>
struct WeightedRows {
  const Lane* weights;  // a row per query row
  i64 stride;
  KeyList values;
  i64 at;            // of the slice, in bytes from where rows are listed
  i64 ahead_offset;  // so many bytes further on than those that are multiplied
  Real* O;
  i64 O_stride;

  const char* row(i64 key) const { return static_cast<const char*>(values.rows[key]) + at; }

  // As much of a row as a slice has.
  template <i64 kBytes>
  [[gnu::always_inline]] void fetch_ahead(i64 key) const {
    if (key >= values.num_ahead) return;
    const char* const next = static_cast<const char*>(values.ahead[key]) + at + ahead_offset;
#pragma GCC unroll 8
    for (i64 line = 0; line < kBytes; line += kLine) fetch_line(next + line);
  }
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
  for (i64 key = 0; key < some.values.count; key += Operand::kKeys) {
    const bool has_next = key + 1 < some.values.count;
    Vector<Lane> values[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v += Operand::kValueVectors) {
      const i64 at = v * Operand::kValueBytes;
      Operand::read_values(some.row(key) + at, has_next ? some.row(key + 1) + at : nullptr,
                           values + v);
    }
#pragma GCC unroll 2
    for (int i = 0; i < Operand::kKeys; ++i) {
      some.template fetch_ahead<kVectors * Operand::kValueBytes>(key + i);
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

// The rows in groups; the first one asks for the rows ahead.
template <class Operand>
void add_rows_of(const typename Operand::Lane* weights, i64 stride, i64 rows, const KeyList& values,
                 i64 dims, typename Operand::Real* O, i64 O_stride) {
  using Real = typename Operand::Real;
  constexpr int kSums = kTileRows > 8 ? 16 : 8;  // registers, of 32 or of 16
  const i64 vectors = dims / kWidth<Real>;
  WeightedRows<Real, typename Operand::Lane> some{
      weights, stride, values, values.offset, values.ahead_offset - values.offset, O, O_stride};
  const auto add = [&]<int kRows>(std::integral_constant<int, kRows>) {
    constexpr int kVectors = max(Operand::kValueVectors, min(8, kSums / kRows));
    for (; rows >= kRows; rows -= kRows) {
      add_slices<Operand, kRows, kVectors>(some, vectors);
      some.values.num_ahead = 0;
      some.weights += kRows * stride;
      some.O += kRows * O_stride;
    }
  };
  add(std::integral_constant<int, 8>());
  add(std::integral_constant<int, 4>());
  add(std::integral_constant<int, 2>());
  add(std::integral_constant<int, 1>());
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
