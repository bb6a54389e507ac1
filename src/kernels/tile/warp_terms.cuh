// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Scores of a warp's block, with what arrays add to them (boolean masks, documents and biases,
// through shared memory, as numbers to add, -inf where hidden). Called by backward_sm80.
#pragma once

#include "kernels/ptx/memory.cuh"
#include "kernels/tile/warp_dropout.cuh"
#include "kernels/tile/warp_scores.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct WarpTerms : WarpScores<kConfig> {
  using HeadType = Head<kConfig.dtype>;
  using Scores = WarpScores<kConfig>;
  using Scores::column, Scores::head, Scores::kColumns, Scores::row, Scores::warp_row;

  u32 terms;  // shared: this warp's (16, term_stride) floats

  // S = scores, -inf where arrays hide; the structured masks are not looked at.
  template <i32 kFloats>
  void apply_but_intervals(float (&S)[kConfig.row_tiles][kFloats], i64 first_column) const {
    this->map(S, first_column);
    if constexpr (kConfig.terms) {
#pragma unroll
      for (i32 t = 0; t < kConfig.row_tiles; ++t) {
        stage(t, first_column);
        ptx::warp_sync();  // the terms are there
        add(S[t]);
        ptx::warp_sync();  // and read
      }
    }
  }

  template <i32 kFloats>
  void drop(float (&S)[kConfig.row_tiles][kFloats], i64 first_column) const {
    WarpDropout<kConfig>{head, warp_row}.drop(S, first_column);
  }

 private:
  template <i32 kFloats>
  void add(float (&S)[kFloats]) const {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const u32 from = terms + static_cast<u32>(row(0, h) * kConfig.term_stride() + column(0)) * 4;
#pragma unroll
      for (i32 f = 2 * h; f < kFloats; f += 4) {
        const ptx::F32x2 term = ptx::load_shared_f32x2(from + static_cast<u32>(f / 4) * 32);
        S[f] = with_term(S[f], term.word[0]);
        S[f + 1] = with_term(S[f + 1], term.word[1]);
      }
    }
  }
  static float with_term(float s, float term) {
    return term == kMinusInfinity ? kMinusInfinity : s + term;  // even a NaN is hidden
  }

  // Terms of the 16 rows of tile t: each lane takes four neighbouring columns at a time.
  void stage(i32 t, i64 first_column) const {
    constexpr i32 kLanes = kColumns / 4;
#pragma unroll 1
    for (i32 at = static_cast<i32>(lane_index()); at < 16 * kLanes; at += 32) {
      const i32 r = at / kLanes;
      const i32 c = at % kLanes * 4;
      const i64 i = warp_row + 16 * t + r;
      const i64 j = first_column + c;
      const i64 count =
          i < head.sequence.shape.q_len ? min<i64>(4, head.sequence.shape.kv_len - j) : 0;
      float term[4] = {};
      if (count == 4) {
        four_terms(term, i, j);
      } else {
#pragma unroll
        for (i32 w = 0; w < 4; ++w) {
          if (w < count) term[w] = one_term(head, i, j + w);
        }
      }
      ptx::U32x4 x;
#pragma unroll
      for (i32 w = 0; w < 4; ++w) x.word[w] = __builtin_bit_cast(u32, term[w]);
      ptx::store_shared_x4(terms + static_cast<u32>(r * kConfig.term_stride() + c) * 4, x);
    }
  }

  __attribute__((noinline)) static float one_term(const HeadType& head, i64 i, i64 j) {
    return head.sees(i, j) ? head.bias(i, j) : kMinusInfinity;
  }

  // Four keys of one row, all inside the sequence.
  void four_terms(float (&term)[4], i64 i, i64 j) const {
    const AttentionParams& p = head.p;
    if (p.bias.present()) four_biases(term, p.bias, p.bias.offset(head.index, head.head, i, j));
    if (p.mask.present()) {
      const u8* const from = p.mask.data + p.mask.offset(head.index, head.head, i, j);
      u32 bytes = 0;
      if (p.mask.strides[3] == 1 && reinterpret_cast<u64>(from) % 4 == 0) {
        bytes = *reinterpret_cast<const u32*>(from);
      } else {
#pragma unroll
        for (i32 w = 0; w < 4; ++w) {
          bytes |= static_cast<u32>(from[w * p.mask.strides[3]]) << (8 * w);
        }
      }
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        if ((bytes >> (8 * w) & 0xffu) == 0) term[w] = kMinusInfinity;
      }
    }
    if (p.q_ids.present()) {
      const Sequence& sequence = head.sequence;
      const i64 id =
          load_index(p.q_ids, p.q_ids.offset(sequence.batch, 0, 0, sequence.q_begin + i));
      const i64 first = p.kv_ids.offset(sequence.batch, 0, 0, sequence.kv_begin + j);
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        if (load_index(p.kv_ids, first + w * p.kv_ids.strides[3]) != id) term[w] = kMinusInfinity;
      }
    }
  }

  static void four_biases(float (&term)[4], const ArrayView& bias, i64 offset) {
    const i64 bytes = size_bytes(bias.dtype);
    const u8* const from = bias.data + offset * bytes;
    const bool packed = bias.strides[3] == 1 && reinterpret_cast<u64>(from) % (4 * bytes) == 0;
    if (packed && bytes == 4) {
      const ptx::U32x4 x = ptx::load_global_x4(reinterpret_cast<const u16*>(from));
#pragma unroll
      for (i32 w = 0; w < 4; ++w) term[w] = __builtin_bit_cast(float, x.word[w]);
    } else if (packed && bytes == 2) {
      const u64 x = *reinterpret_cast<const u64*>(from);
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        const u16 bits = static_cast<u16>(x >> (16 * w));
        term[w] = bias.dtype == DType::kFloat16 ? to_float(f16{bits}) : to_float(bf16{bits});
      }
    } else {
#pragma unroll
      for (i32 w = 0; w < 4; ++w) term[w] = one_bias(bias, offset + w * bias.strides[3]);
    }
  }
  __attribute__((noinline)) static float one_bias(const ArrayView& bias, i64 offset) {
    return load_real<float>(bias, offset);
  }
};

}  // namespace fulmen
