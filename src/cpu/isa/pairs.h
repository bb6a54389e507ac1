// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels on pairs of bf16 numbers, for instruction sets that multiply them two at a time, with
// float32 sums. Scores are S = Q K^T in pairs of dimensions, K as it lies in memory; outputs are
// P V in pairs of keys, for which V's rows are interleaved and softmax writes its weights in pairs.
// Products are by vectors, or by tiles.
#pragma once

#include "cpu/isa/few_row_scores.h"
#include "cpu/isa/few_row_values.h"
#include "cpu/isa/products.h"
#include "cpu/isa/softmax.h"

namespace fulmen::cpu {
namespace {

constexpr i64 kHalfWidth = kVectorBytes / static_cast<i64>(sizeof(Half));
typedef Half HalvesVector __attribute__((vector_size(kVectorBytes)));

// Collects whether all numbers were 0 or from 2^-64 to 2^64.
struct Ordinary {
  static constexpr Half kLeast = (127 - 64) << 7;
  static constexpr Half kMost = (127 + 64) << 7;
  HalvesVector odd_ones{};

  void add(HalvesVector bits) {
    const HalvesVector magnitude = bits & 0x7fff;
    // Below kLeast, the difference wraps and is large.
    odd_ones |= (HalvesVector)((magnitude - kLeast > Half(kMost - kLeast)) & (magnitude != 0));
  }
  bool holds() const { return !any(odd_ones != 0); }
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

inline bool pack_columns(const Source& source, i64 rows, i64 dims, Pair* out, i64 out_stride) {
  Ordinary ordinary;
  for (i64 row = 0; row < rows; ++row) {
    for (i64 d = 0; d < dims; d += kHalfWidth) {
      const HalvesVector bits = load_halves(source, row, d, dims);
      ordinary.add(bits);
      store(out + row * out_stride + d / 2, (Vector<u32>)bits);
    }
  }
  return ordinary.holds();
}

inline bool pack_rows(const Source& source, i64 rows, i64 dims, Pair* out, i64 out_stride) {
  constexpr auto kAll = std::make_integer_sequence<int, kHalfWidth>();
  Ordinary ordinary;
  for (i64 row = 0; row < rows; row += 2) {
    Pair* const to = out + row / 2 * out_stride;
    for (i64 d = 0; d < dims; d += kHalfWidth) {
      const HalvesVector first = load_halves(source, row, d, dims);
      const HalvesVector second =
          row + 1 < rows ? load_halves(source, row + 1, d, dims) : HalvesVector{};
      ordinary.add(first);
      ordinary.add(second);
      store(to + d, (Vector<u32>)interleaved<0>(first, second, kAll));
      store(to + d + kHalfWidth / 2, (Vector<u32>)interleaved<kHalfWidth / 2>(first, second, kAll));
    }
  }
  return ordinary.holds();
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

struct StoresPairs : PairWeights {
  using PairWeights::PairWeights;
  static constexpr i64 kKeys = 2;
  static void store_keys(const SoftmaxBlock<float>& block, i64 lane, i64 j,
                         const FloatVector* weights) {
    Pair* const pairs = reinterpret_cast<Pair*>(block.scores);
    store(pairs + lane + j / 2 * block.stride, pairs_of(weights[0], weights[1]));
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
template <bool kPlain>
void gradient_pairs_of(const GradientBlock<float>& block, Pair* dS_rows, i64 dS_stride) {
  Pair* const P = reinterpret_cast<Pair*>(block.scores);
  Pair* const dS = reinterpret_cast<Pair*>(block.dP);
  for (i64 i = 0; i < block.rows; i += 2) {
    for (i64 lane = 0; lane < block.keys; lane += kWidth<float>) {
      GradientLanes<float> rows[2] = {gradient_lanes<kPlain>(block, i, lane), {}};
      if (i + 1 < block.rows) rows[1] = gradient_lanes<kPlain>(block, i + 1, lane);
      store(P + i / 2 * block.stride + lane, pairs_of(rows[0].P, rows[1].P));
      if (!dS) continue;
      for (GradientLanes<float>& row : rows) {  // what a pair of keys has past the last is 0
        for (i64 past = block.keys - lane; past < kWidth<float>; ++past) row.dS[past] = 0;
      }
      store(dS + i / 2 * block.stride + lane, pairs_of(rows[0].dS, rows[1].dS));
      StoresPairs::store_lanes(reinterpret_cast<float*>(dS_rows + i * dS_stride), lane, rows[0].dS);
      if (i + 1 == block.rows) continue;
      StoresPairs::store_lanes(reinterpret_cast<float*>(dS_rows + (i + 1) * dS_stride), lane,
                               rows[1].dS);
    }
  }
}

inline void gradient_pairs(const GradientBlock<float>& block, Pair* dS_rows, i64 dS_stride) {
  is_plain(block) ? gradient_pairs_of<true>(block, dS_rows, dS_stride)
                  : gradient_pairs_of<false>(block, dS_rows, dS_stride);
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

constexpr PairKernels kPairKernels = {pack_columns,
                                      pack_rows,
                                      transpose<Pair>,
                                      multiply<float, Pair>,
                                      softmax_block<StoresPairs, float>,
                                      gradient_pairs,
                                      {arrange_rows<Pair>, dot_rows_of<InPairs>,
                                       weigh_rows<StoresPairs, float>, add_rows_of<InPairs>},
                                      are_ordinary};

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

// Products by an instruction on tiles, as AMX has it: 16 rows of 64 bytes, one multiplication of 16
// x 32 by 32 x 16 numbers. A step of two by two sums takes two tiles of A and two of B for four
// multiplications. What does not fill a tile, at the end of the rows or of the depth, is multiplied
// by vectors. Tiles is the instruction set's, or for tests one in plain C++:
//   configure(), release()                   before the first tile of a thread's task, and after
//   zero<T>(), load<T>(rows, stride_bytes), store<T>(rows, stride_bytes)
//   multiply_add<C, A, B>()                  C[i][n] += the dot products of pairs A[i][k] B[k][n]

constexpr i64 kTile = 16;  // rows, and lanes of a row
constexpr int kPanelTiles = kLanes<float> > kTile ? 2 : 1;

constexpr i64 kStripRows = 2 * kTile;

// Depth that is multiplied at once. Where A lies with its rows side by side (weights), so much of a
// strip is transposed first: 8 KiB, read again for each panel of B.
constexpr i64 kStripDepth = 64;

// Rows of A, a row of 16 lanes every `stride`.
struct Strip {
  const Pair* A;
  i64 stride;
  i64 row;  // of C
  i64 first;
  i64 depth;  // in whole tiles
};

// C[i][j] is tile 2 i + j, A[i] 4 + i, B[j] 6 + j.
template <class Tiles, int kRows, int kColumns>
[[gnu::noinline]] void multiply_tiles(const Product<float, Pair>& product, const Strip& strip,
                                      i64 panel) {
  static_assert(kColumns * kTile <= kLanes<float>);
  constexpr i64 kPairBytes = sizeof(Pair);
  const i64 C_bytes = product.C_row_stride * kPairBytes;
  float* const C = product.C + strip.row * product.C_row_stride + panel * kLanes<float>;
  const auto C_tile = [&](i64 i, i64 j) {
    return C + i * kTile * product.C_row_stride + j * kTile;
  };
  const bool starts_from_C = product.accumulates || strip.first > 0;
  const auto start = [&]<int kI, int kJ>(std::integral_constant<int, kI>,
                                         std::integral_constant<int, kJ>) {
    if constexpr (kI < kRows && kJ < kColumns) {
      if (starts_from_C) {
        Tiles::template load<2 * kI + kJ>(C_tile(kI, kJ), C_bytes);
      } else {
        Tiles::template zero<2 * kI + kJ>();
      }
    }
  };
  constexpr std::integral_constant<int, 0> kFirst;
  constexpr std::integral_constant<int, 1> kSecond;
  start(kFirst, kFirst);
  start(kFirst, kSecond);
  start(kSecond, kFirst);
  start(kSecond, kSecond);

  const Pair* A = strip.A;
  const Pair* B = product.B + panel * product.B_panel_stride + strip.first * product.B_depth_stride;
  const Pair* const A_end = A + strip.depth;
  const i64 A_bytes = strip.stride * kPairBytes;
  const i64 B_bytes = product.B_depth_stride * kPairBytes;
  const i64 A_rows = kTile * strip.stride;
  const i64 B_step = kTile * product.B_depth_stride;
  for (; A != A_end; A += kTile, B += B_step) {
    Tiles::template load<4>(A, A_bytes);
    Tiles::template load<6>(B, B_bytes);
    Tiles::template multiply_add<0, 4, 6>();
    if constexpr (kColumns > 1) {
      Tiles::template load<7>(B + kTile, B_bytes);
      Tiles::template multiply_add<1, 4, 7>();
    }
    if constexpr (kRows > 1) {
      Tiles::template load<5>(A + A_rows, A_bytes);
      Tiles::template multiply_add<2, 5, 6>();
      if constexpr (kColumns > 1) Tiles::template multiply_add<3, 5, 7>();
    }
  }

  Tiles::template store<0>(C_tile(0, 0), C_bytes);
  if constexpr (kColumns > 1) Tiles::template store<1>(C_tile(0, 1), C_bytes);
  if constexpr (kRows > 1) Tiles::template store<2>(C_tile(1, 0), C_bytes);
  if constexpr (kRows > 1 && kColumns > 1) Tiles::template store<3>(C_tile(1, 1), C_bytes);
}

template <class Tiles, int kRows>
void multiply_strip(const Product<float, Pair>& product, const Strip& strip) {
  for (i64 panel = 0; panel * kLanes<float> < product.columns; ++panel) {
    if (kPanelTiles > 1 && product.columns - panel * kLanes<float> > kTile) {
      multiply_tiles<Tiles, kRows, kPanelTiles>(product, strip, panel);
    } else {
      multiply_tiles<Tiles, kRows, 1>(product, strip, panel);
    }
  }
}

// C[i] *= row_scale[i]
inline void scale_rows(const Product<float, Pair>& product, i64 rows) {
  for (i64 row = 0; row < rows; ++row) {
    float* const C = product.C + row * product.C_row_stride;
    const FloatVector scale = broadcast(product.row_scale[row]);
    for (i64 n = 0; n < product.columns; n += kWidth<float>) store(C + n, load(C + n) * scale);
  }
}

// The rows and the depth that fill tiles.
template <class Tiles>
void multiply_whole_tiles(const Product<float, Pair>& product, i64 rows, i64 depth) {
  if (product.accumulates && product.row_scale) scale_rows(product, rows);
  const bool transposes = product.A_depth_stride != 1;
  alignas(64) Pair transposed[kStripRows * kStripDepth];
  for (i64 row = 0; row < rows; row += kStripRows) {
    const i64 count = min(kStripRows, rows - row);
    for (i64 first = 0; first < depth; first += kStripDepth) {
      const Pair* const A = product.A + row * product.A_row_stride + first * product.A_depth_stride;
      Strip strip{A, product.A_row_stride, row, first, min(kStripDepth, depth - first)};
      if (transposes) {
        transpose<Pair>({A, product.A_depth_stride}, strip.depth, count, transposed, kLanes<Pair>,
                        kStripDepth);
        strip.A = transposed;
        strip.stride = kStripDepth;
      }
      count > kTile ? multiply_strip<Tiles, 2>(product, strip)
                    : multiply_strip<Tiles, 1>(product, strip);
    }
  }
}

// As multiply of products.h.
template <class Tiles>
void multiply_by_tiles(const Product<float, Pair>& product) {
  const bool lies_in_rows = product.A_depth_stride == 1 || product.A_row_stride == 1;
  const i64 rows = lies_in_rows ? product.rows / kTile * kTile : 0;
  const i64 depth = product.depth / kTile * kTile;
  if (rows == 0 || depth == 0) return multiply<float, Pair>(product);
  multiply_whole_tiles<Tiles>(product, rows, depth);
  multiply_beside(product, rows, depth);
}

// The kernels of an instruction set, with products by tiles.
template <class Tiles>
constexpr PairKernels with_tiles(PairKernels kernels) {
  kernels.multiply = multiply_by_tiles<Tiles>;
  kernels.enter = Tiles::configure;
  kernels.leave = Tiles::release;
  return kernels;
}

}  // namespace
}  // namespace fulmen::cpu
