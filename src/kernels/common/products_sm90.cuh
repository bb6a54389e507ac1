// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Operands of wgmma in shared memory, and the two matrix products of attention on one warpgroup's
// 64 query rows, as batches of wgmma that are issued and committed here and waited for by the
// caller.
#pragma once

#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

template <i32 kRows, bool kSwizzle>
struct OperandTile {
  u32 base;

  constexpr u32 unit(u32 row, u32 unit) const {
    if constexpr (!kSwizzle) return base + (unit * kRows + row) * 16;
    return base + unit / 8 * kRows * 128 + row * 128 + ((unit % 8 ^ row % 8) << 4);
  }

  // As rows of an operand: A, or B as N x K. Columns from `dim` on, a multiple of 16.
  static constexpr u32 kUpper = kSwizzle ? ptx::kSwizzledRows : ptx::plain_strides(128);
  constexpr u32 descriptor() const {
    return ptx::wgmma_descriptor(base, kSwizzle ? 16 : kRows * 16);
  }
  static constexpr u32 columns_from(i32 dim) {
    return (kSwizzle ? dim / 64 * kRows * 128 + dim % 64 * 2 : dim * kRows * 2) >> 4;
  }

  // As a transposed B, K x N. Rows from `row` on, a multiple of 16.
  static constexpr u32 kUpperTransposed =
      kSwizzle ? ptx::kSwizzledRows : ptx::plain_strides(kRows * 16);
  constexpr u32 descriptor_transposed() const {
    return ptx::wgmma_descriptor(base, kSwizzle ? kRows * 128 : 128);
  }
  static constexpr u32 rows_from(i32 row) { return (kSwizzle ? row * 128 : row * 16) >> 4; }
};

// The first kDims columns of a tile's first 64 rows as left operands of a warpgroup: four registers
// for 16 columns.
template <i32 kDims, i32 kRows, bool kSwizzle, i32 kWords>
inline void load_left_columns(u32 (&words)[kWords], OperandTile<kRows, kSwizzle> tile) {
  const u32 thread = ptx::thread_index() % 128;
  const u32 row = thread / 32 * 16 + thread % 16;
#pragma unroll
  for (i32 d = 0; d < kDims; d += 16) {
    const ptx::U32x4 x = ptx::ldmatrix_x4(tile.unit(row, d / 8 + thread % 32 / 16));
#pragma unroll
    for (i32 w = 0; w < 4; ++w) words[d / 4 + w] = x.word[w];
  }
}

template <ForwardSm90Config kConfig>
using QTile = OperandTile<64, kConfig.swizzle>;  // of a warpgroup
template <ForwardSm90Config kConfig>
using KvTile = OperandTile<kConfig.kv_rows, kConfig.swizzle>;
template <ForwardSm90Config kConfig>
using KTile = OperandTile<kConfig.own_keys(), kConfig.swizzle>;

// The first q_register_dims columns of a warpgroup's 64 rows of Q as left operands: four registers
// for 16 columns.
template <ForwardSm90Config kConfig>
using QRegisters = u32[kConfig.q_register_dims > 0 ? kConfig.q_register_dims / 4 : 1];

// q: the warpgroup's tile of Q, 64 rows.
template <ForwardSm90Config kConfig>
inline void load_q_registers(QRegisters<kConfig>& rQ, u32 q) {
  load_left_columns<kConfig.q_register_dims>(rQ, QTile<kConfig>{q});
}

// S = Q K^T. rQ, q: the two parts of Q; k: the K tile.
template <ForwardSm90Config kConfig>
inline void issue_scores(float (&S)[kConfig.score_floats()], const QRegisters<kConfig>& rQ, u32 q,
                         u32 k) {
  u32 q_descriptor = QTile<kConfig>{q}.descriptor();
  if constexpr (kConfig.paired) ptx::compute_here(q_descriptor);  // else one register a product
  const u32 k_descriptor = KTile<kConfig>{k}.descriptor();
  constexpr u32 kUpper = KTile<kConfig>::kUpper;
  constexpr i32 kHalves = kConfig.d_qk * kConfig.element_bytes() / 2;  // 16 bits each
  ptx::wgmma_fence();
#pragma unroll
  for (i32 d = 0; d < kHalves; d += 16) {
    const u32 k_part = k_descriptor + KTile<kConfig>::columns_from(d);
    if constexpr (kConfig.q_register_dims > 0) {
      if (d < kConfig.q_register_dims) {
        const u32* a = rQ + d / 4;
        ptx::wgmma_rs<kConfig.dtype, false, kUpper>(S, a[0], a[1], a[2], a[3], k_part, d > 0);
        continue;
      }
    }
    const u32 q_part = q_descriptor + QTile<kConfig>::columns_from(d);
    ptx::wgmma_ss<kConfig.dtype, false, kUpper>(S, q_part, k_part, d > 0);
  }
  ptx::wgmma_commit();
}

// Of a pair of thread blocks: the first of the keys of a block whose scores this one computes.
template <ForwardSm90Config kConfig>
inline i32 first_own_key() {
  if constexpr (kConfig.paired) return i32(ptx::cluster_rank()) * kConfig.own_keys();
  return 0;
}

// D += A B, or D = A B unless `accumulate`: A of 16 columns in registers, B transposed. Beyond 256
// columns of D two products; the second's begin `first_columns` behind b.
inline constexpr i32 kFirstDims = 192;
template <DType kDType, u32 kUpper, i32 kFloats>
inline void multiply_columns(float (&D)[kFloats], const u32* a, u32 b, u32 first_columns,
                             bool accumulate) {
  const auto multiply = [&](auto& d, u32 columns) {
    ptx::wgmma_rs<kDType, true, kUpper>(d, a[0], a[1], a[2], a[3], columns, accumulate);
  };
  if constexpr (kFloats > 128) {
    constexpr i32 kFirst = kFirstDims / 2;
    multiply(reinterpret_cast<float (&)[kFirst]>(D[0]), b);
    multiply(reinterpret_cast<float (&)[kFloats - kFirst]>(D[kFirst]), b + first_columns);
  } else {
    multiply(D, b);
  }
}

// O += P V, or O = P V unless `accumulate`. v: the columns of V that O has. Of a pair of thread
// blocks the weights of its own keys come first.
template <ForwardSm90Config kConfig, i32 kFloats>
inline void issue_output(float (&O)[kFloats], const u32 (&P)[kConfig.weight_words()], u32 v,
                         bool accumulate) {
  if constexpr (kConfig.has_8_bits()) {
    using Tile = OperandTile<kConfig.d_v, true>;
    const u32 v_descriptor = Tile{v}.descriptor();
    ptx::wgmma_fence();
#pragma unroll
    for (i32 j = 0; j < kConfig.kv_rows; j += 32) {
      const u32* a = P + j / 8;
      const u32 v_part = v_descriptor + Tile::columns_from(j / 2);
      ptx::wgmma_rs<kConfig.dtype, false>(O, a[0], a[1], a[2], a[3], v_part, j > 0 || accumulate);
    }
  } else {
    const u32 v_descriptor = KvTile<kConfig>{v}.descriptor_transposed();
    constexpr u32 kUpper = KvTile<kConfig>::kUpperTransposed;
    const u32 halves[2] = {v_descriptor + KvTile<kConfig>::rows_from(first_own_key<kConfig>()),
                           v_descriptor - KvTile<kConfig>::rows_from(first_own_key<kConfig>())};
    ptx::wgmma_fence();
#pragma unroll
    for (i32 j = 0; j < kConfig.kv_rows; j += 16) {
      const u32 v_part = halves[j / kConfig.own_keys()] + KvTile<kConfig>::rows_from(j);
      multiply_columns<kConfig.dtype, kUpper>(
          O, P + j / 4, v_part, KvTile<kConfig>::columns_from(kFirstDims), j > 0 || accumulate);
    }
  }
  ptx::wgmma_commit();
}

// P = S, rounded: the accumulator of the first product becomes the left operand of the second
// without leaving the thread.
template <ForwardSm90Config kConfig>
inline void round_probabilities(u32 (&P)[kConfig.weight_words()],
                                const float (&S)[kConfig.score_floats()]) {
#pragma unroll
  for (i32 i = 0; i < kConfig.score_floats() / 2; ++i) {
    P[i] = ptx::pack<kConfig.dtype>(S[2 * i], S[2 * i + 1]);
  }
}

// The same of e4m3, of S in units of kUnitOf8Bits: such a number of float16 has the fields of P one
// bit further up, and half of P's last bit is added before the rest is left behind. A thread's four
// keys in a row of 16 are four neighbours of the operand: values.cuh puts the keys of V in that
// order.
template <ForwardSm90Config kConfig>
inline void round_to_8_bits(u32 (&P)[kConfig.weight_words()],
                            const float (&S)[kConfig.score_floats()]) {
  constexpr u32 kHalf = 0x00800080u;
#pragma unroll
  for (i32 i = 0; i < kConfig.weight_words(); ++i) {
    const float* const s = S + i / 2 * 8 + i % 2 * 2;
    const u32 near = ptx::pack<DType::kFloat16>(s[0], s[1]);
    const u32 far = ptx::pack<DType::kFloat16>(s[4], s[5]);
    P[i] = ptx::permute(2 * near + kHalf, 2 * far + kHalf, 0x7531);
  }
}

template <ForwardSm90Config kConfig>
inline void round_weights(u32 (&P)[kConfig.weight_words()],
                          const float (&S)[kConfig.score_floats()]) {
  if constexpr (kConfig.has_8_bits()) return round_to_8_bits<kConfig>(P, S);
  if constexpr (!kConfig.has_8_bits()) round_probabilities<kConfig>(P, S);
}

// O *= factor, row by row.
template <i32 kFloats>
inline void scale_rows(float (&O)[kFloats], const float (&factor)[2]) {
#pragma unroll
  for (i32 i = 0; i < kFloats; ++i) O[i] *= factor[i / 2 % 2];
}

}  // namespace fulmen
