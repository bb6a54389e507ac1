// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels on pairs of bf16 numbers, for instruction sets that multiply them two at a time, with
// float32 sums; and of f16 as sums of two such numbers, worth it where products cost next to
// nothing. Scores are S = Q K^T in pairs of dimensions, K as it lies in memory; outputs are
// P V in pairs of keys, for which V's rows are interleaved and softmax writes its weights in pairs.
// Products are by vectors here; tile_products.h has those by tiles.
#pragma once

#include "cpu/isa/elements.h"
#include "cpu/isa/few_row_scores.h"
#include "cpu/isa/few_row_values.h"
#include "cpu/isa/products.h"
#include "cpu/isa/softmax.h"

namespace fulmen::cpu {
namespace {

constexpr i64 kHalfWidth = kVectorBytes / static_cast<i64>(sizeof(Half));
typedef Half HalvesVector __attribute__((vector_size(kVectorBytes)));

// How numbers of 16 bits become sums of bf16, and whether all of them were ordinary.

// bf16: 0, or from 2^-64 to 2^64 in magnitude.
struct BFloat16Terms {
  static constexpr int kTerms = 1;
  static constexpr Half kLeast = (127 - 64) << 7;
  static constexpr Half kMost = (127 + 64) << 7;
  HalvesVector odd_ones{};

  void split(HalvesVector bits, HalvesVector* terms) {
    const HalvesVector magnitude = bits & 0x7fff;
    // Below kLeast, the difference wraps and is large.
    odd_ones |= (HalvesVector)((magnitude - kLeast > Half(kMost - kLeast)) & (magnitude != 0));
    terms[0] = bits;
  }
  bool all_ordinary() const { return !any(odd_ones != 0); }
};

// f16: x = high + low exactly, for 11 digits are 8 and 3. Below 64: of larger numbers scores are so
// large that what sums in another order round differently is seen, in a backward pass that widens.
struct Float16Terms {
  static constexpr int kTerms = 2;
  static constexpr Half kTooLarge = (15 + 6) << 10;
  HalvesVector odd_ones{};

  void split(HalvesVector bits, HalvesVector* terms) {
    odd_ones |= (HalvesVector)((bits & 0x7fff) >= kTooLarge);
    Half numbers[kHalfWidth], high[kHalfWidth], low[kHalfWidth];
    __builtin_memcpy(numbers, &bits, sizeof(bits));
    for (i64 i = 0; i < kHalfWidth; i += kWidth<float>) {
      const FloatVector x = widen_f16(numbers + i);
      const HalvesOfFloats upper = rounded_halves(x);
      __builtin_memcpy(high + i, &upper, sizeof(upper));
      const HalvesOfFloats rest = rounded_halves(x - widen_bf16(high + i));
      __builtin_memcpy(low + i, &rest, sizeof(rest));
    }
    __builtin_memcpy(&terms[0], high, sizeof(high));
    __builtin_memcpy(&terms[1], low, sizeof(low));
  }
  bool all_ordinary() const { return !any(odd_ones != 0); }
};

// kHalfWidth elements of a row from d on; 0 from `dims` on.
inline HalvesVector load_halves(const Source& source, i64 row, i64 d, i64 dims) {
  const char* const in = static_cast<const char*>(source.data);
  const i64 at = row * source.row_stride + d * source.dim_stride;
  HalvesVector few{};
  if (source.dim_stride == 1 && d + kHalfWidth <= dims) {
    __builtin_memcpy(&few, in + at * 2, sizeof(few));
    return few;
  }
  Half each[kHalfWidth] = {};
  for (i64 i = 0; i < kHalfWidth && d + i < dims; ++i) {
    __builtin_memcpy(each + i, in + (at + i * source.dim_stride) * 2, sizeof(Half));
  }
  __builtin_memcpy(&few, each, sizeof(few));
  return few;
}

template <class Terms>
bool pack_columns(const Source& source, i64 rows, i64 dims, Pair* out, i64 out_stride) {
  Terms numbers;
  for (i64 row = 0; row < rows; ++row) {
    for (i64 d = 0; d < dims; d += kHalfWidth) {
      HalvesVector terms[Terms::kTerms];
      numbers.split(load_halves(source, row, d, dims), terms);
      for (i64 term = 0; term < Terms::kTerms; ++term) {
        Pair* const to = out + row * out_stride + term * (out_stride / Terms::kTerms);
        store(to + d / 2, (Vector<u32>)terms[term]);
      }
    }
  }
  return numbers.all_ordinary();
}

template <class Terms>
bool pack_rows(const Source& source, i64 rows, i64 dims, Pair* out, i64 out_stride) {
  constexpr auto kAll = std::make_integer_sequence<int, kHalfWidth>();
  Terms numbers;
  for (i64 row = 0; row < rows; row += 2) {
    for (i64 d = 0; d < dims; d += kHalfWidth) {
      HalvesVector first[Terms::kTerms], second[Terms::kTerms];
      numbers.split(load_halves(source, row, d, dims), first);
      numbers.split(row + 1 < rows ? load_halves(source, row + 1, d, dims) : HalvesVector{},
                    second);
      for (i64 term = 0; term < Terms::kTerms; ++term) {
        Pair* const to = out + row / 2 * out_stride + term * (out_stride / Terms::kTerms) + d;
        store(to, (Vector<u32>)interleaved<0>(first[term], second[term], kAll));
        store(to + kHalfWidth / 2,
              (Vector<u32>)interleaved<kHalfWidth / 2>(first[term], second[term], kAll));
      }
    }
  }
  return numbers.all_ordinary();
}

#if defined(__AVX512F__)
struct PairWeights : StoresWeights<float> {
  using StoresWeights::StoresWeights;
  FloatVector of(FloatVector s) const {
    return power_of_2((s * scale - shift) * ExpConstants<float>::kLog2E);
  }
};
#else
using PairWeights = StoresWeights<float>;
#endif

// As sums of kTerms numbers of bf16, of which all but the last leave what they rounded off.
template <int kTerms>
struct StoresPairs : PairWeights {
  using PairWeights::PairWeights;
  static constexpr i64 kKeys = 2;
  static void store_keys(const SoftmaxBlock<float>& block, i64 lane, i64 j,
                         const FloatVector* weights) {
    Pair* const out = reinterpret_cast<Pair*>(block.scores) + lane + j / 2 * kTerms * block.stride;
    FloatVector first = weights[0], second = weights[1];
    for (i64 term = 0; term < kTerms; ++term) {
      const Vector<u32> pairs = pairs_of(first, second);
      store(out + term * block.stride, pairs);
      first -= (FloatVector)(pairs << 16);
      second -= (FloatVector)(pairs & 0xffff0000u);
    }
  }
  static void store_lanes(float* row, i64 j, FloatVector weights) {
    const HalvesOfFloats halves = rounded_halves(weights);
    __builtin_memcpy(reinterpret_cast<char*>(row) + j * 2, &halves, sizeof(halves));
  }
};

// bf16 as it is stored: 32 dimensions of a key at a time, two keys of a value.
struct InPairs {
  using Real = float;
  using Lane = Pair;
  static constexpr bool kWidens = false;
  static constexpr i64 kDims = kHalfWidth;
  static constexpr i64 kBytes = kVectorBytes;
  static Vector<Pair> read(const char* address) {
    Vector<Pair> few;
    __builtin_memcpy(&few, address, sizeof(few));
    return few;
  }

  static constexpr int kKeys = 2;
  static constexpr int kValueVectors = 2;
  static constexpr i64 kValueBytes = kVectorBytes / 2;
  static void read_values(const char* row, const char* next, Vector<Pair>* out) {
    constexpr auto kAll = std::make_integer_sequence<int, kHalfWidth>();
    const auto first = (HalvesVector)read(row);
    const auto second = next ? (HalvesVector)read(next) : HalvesVector{};
    out[0] = (Vector<Pair>)interleaved<0>(first, second, kAll);
    out[1] = (Vector<Pair>)interleaved<kHalfWidth / 2>(first, second, kAll);
  }
};

// Two rows at a time: P and dS in pairs of rows over the scores and dP, and dS in pairs of keys.
template <Beside kBeside>
void gradient_pairs_of(const GradientBlock<float>& block, Pair* dS_rows, i64 dS_stride) {
  Pair* const P = reinterpret_cast<Pair*>(block.scores);
  Pair* const dS = reinterpret_cast<Pair*>(block.dP);
  for (i64 i = 0; i < block.rows; i += 2) {
    for (i64 lane = 0; lane < block.keys; lane += kWidth<float>) {
      GradientLanes<float> rows[2] = {gradient_lanes<kBeside>(block, i, lane), {}};
      if (i + 1 < block.rows) rows[1] = gradient_lanes<kBeside>(block, i + 1, lane);
      store(P + i / 2 * block.stride + lane, pairs_of(rows[0].P, rows[1].P));
      if (!dS) continue;
      for (GradientLanes<float>& row : rows) {  // what a pair of keys has past the last is 0
        for (i64 past = block.keys - lane; past < kWidth<float>; ++past) row.dS[past] = 0;
      }
      store(dS + i / 2 * block.stride + lane, pairs_of(rows[0].dS, rows[1].dS));
      StoresPairs<1>::store_lanes(reinterpret_cast<float*>(dS_rows + i * dS_stride), lane,
                                  rows[0].dS);
      if (i + 1 == block.rows) continue;
      StoresPairs<1>::store_lanes(reinterpret_cast<float*>(dS_rows + (i + 1) * dS_stride), lane,
                                  rows[1].dS);
    }
  }
}

inline void gradient_pairs(const GradientBlock<float>& block, Pair* dS_rows, i64 dS_stride) {
  switch (beside_scale(block)) {
    case Beside::kNothing:
      return gradient_pairs_of<Beside::kNothing>(block, dS_rows, dS_stride);
    case Beside::kHidden:
      return gradient_pairs_of<Beside::kHidden>(block, dS_rows, dS_stride);
    case Beside::kAnything:
      return gradient_pairs_of<Beside::kAnything>(block, dS_rows, dS_stride);
  }
}

inline bool are_ordinary(View<float> sums, i64 rows, i64 dims) {
  constexpr float kLeast = 0x1p-80f;
  if (!all_finite(sums, rows, dims)) return false;
  for (i64 row = 0; row < rows; ++row) {
    FloatVector largest{};
    for (i64 d = 0; d < dims; d += kWidth<float>) {
      const FloatVector x = load(sums.data + row * sums.stride + d);
      largest = larger(largest, larger(x, -x));
    }
    if (!any(largest >= kLeast)) return false;
  }
  return true;
}

constexpr PairKernels kPairKernels = {
    .terms = 1,
    .pack_columns = pack_columns<BFloat16Terms>,
    .pack_rows = pack_rows<BFloat16Terms>,
    .transpose = transpose<Pair>,
    .multiply = multiply<float, Pair>,
    .softmax = softmax_block<StoresPairs<1>, float>,
    .gradient = gradient_pairs,
    .few_rows = {arrange_rows<Pair>, dot_rows_of<InPairs>, weigh_rows<StoresPairs<1>, float>,
                 add_rows_of<InPairs>},
    .are_ordinary = are_ordinary};

// The forward pass of f16.
constexpr PairKernels kSplitPairKernels = {.terms = 2,
                                           .pack_columns = pack_columns<Float16Terms>,
                                           .pack_rows = pack_rows<Float16Terms>,
                                           .transpose = transpose<Pair>,
                                           .multiply = multiply<float, Pair>,
                                           .softmax = softmax_block<StoresPairs<2>, float>};

// What a product has beside its first `rows` rows by its first `depth`, which are done.
inline void multiply_beside(const Product<float, Pair>& product, i64 rows, i64 depth) {
  Product<float, Pair> rest = product;
  if (depth < product.depth) {
    rest.rows = rows;
    rest.depth = product.depth - depth;
    rest.A += depth * product.A_depth_stride;
    rest.B += depth * product.B_depth_stride;
    rest.accumulates = true;
    rest.row_scale = nullptr;
    multiply<float, Pair>(rest);
  }
  if (rows < product.rows) {
    rest = product;
    rest.rows = product.rows - rows;
    rest.A += rows * product.A_row_stride;
    rest.C += rows * product.C_row_stride;
    if (rest.row_scale) rest.row_scale += rows;
    multiply<float, Pair>(rest);
  }
}

}  // namespace
}  // namespace fulmen::cpu
