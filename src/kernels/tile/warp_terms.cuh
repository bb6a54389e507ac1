// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What happens to the scores of a warp's block beside their product, in mma fragments: intervals of
// visible keys, boolean masks, documents and biases (through shared memory, as numbers to add, -inf
// where hidden), scale and softcap, ALiBi; and dropout. All by position in the sequence, so that
// nothing depends on tiles. Called by forward_sm80.
#pragma once

#include "kernels/head.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/tile/tanh.cuh"
#include "kernels/tile/transpose_quad.cuh"
#include "kernels/tile/warp_products.cuh"
#include "kernels/tile/warp_softmax.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct WarpTerms {
  using HeadType = Head<kConfig.dtype>;
  static constexpr i32 kColumns = kConfig.columns;

  const HeadType& head;
  i64 warp_row;  // first row of this warp in its sequence
  u32 terms;     // shared: this warp's (16, term_stride) floats

  static i32 row(i32 t, i32 h) { return 16 * t + 8 * h + static_cast<i32>(lane_index() / 4); }
  static i32 column(i32 i) { return 8 * (i / 4) + 2 * static_cast<i32>(lane_index() % 4) + i % 2; }

  // S = scores, -inf where hidden.
  template <i32 kFloats>
  void apply(float (&S)[kConfig.row_tiles][kFloats], i64 first_column, bool is_full) const {
    apply_but_intervals(S, first_column);
    if (is_full) return;
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) hide(S[t], t, first_column);
  }

  // The same without the structured masks.
  template <i32 kFloats>
  void apply_but_intervals(float (&S)[kConfig.row_tiles][kFloats], i64 first_column) const {
    map(S, first_column);
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

  // Scale where scores are natural, softcap, ALiBi; in units of WarpSoftmax.
  template <i32 kFloats>
  void map(float (&S)[kConfig.row_tiles][kFloats], i64 first_column) const {
    if constexpr (kConfig.softcap) {
      cap(S);
    } else if constexpr (kConfig.natural) {
#pragma unroll
      for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
        for (i32 f = 0; f < kFloats; ++f) S[t][f] *= head.map.scale;
      }
    }
    if constexpr (kConfig.alibi) add_alibi(S, first_column);
  }

  // Decides 8 columns with one draw: lane q of a quad draws for every fourth fragment, and the quad
  // hands the words round. Dropped weights become 0; the caller scales the kept.
  template <i32 kFloats>
  void drop(float (&S)[kConfig.row_tiles][kFloats], i64 first_column) const {
    const u32 q = lane_index() % 4;
    const u32 batch_head = static_cast<u32>(head.index * head.p.heads_q + head.head);
#pragma unroll
    for (i32 n = 0; n < kFloats / 4; n += 4) {
      const u32 group = static_cast<u32>(first_column / 8) + static_cast<u32>(n) + q;
      Philox4x32 drawn[2 * kConfig.row_tiles];  // of row (t, h): number 2 t + h
#pragma unroll
      for (i32 at = 0; at < 2 * kConfig.row_tiles; ++at) {
        const u32 i = static_cast<u32>(warp_row + row(at / 2, at % 2));
        drawn[at] = Philox4x32{{group, i, batch_head, head.dropout.offset}};
      }
      philox4x32_10(drawn, head.dropout.seed);
#pragma unroll
      for (i32 at = 0; at < 2 * kConfig.row_tiles; ++at) {
        drop_where(&S[at / 2][2 * (at % 2)], kFloats, n, drawn[at]);
      }
    }
  }

 private:
  // Fragments n to n + 3 of one row, whose first two floats are row[0] and row[1].
  void drop_where(float* row, i32 num_floats, i32 n, const Philox4x32& drawn) const {
    ptx::U32x4 words{{drawn.word[0], drawn.word[1], drawn.word[2], drawn.word[3]}};
    transpose_quad(words);
#pragma unroll
    for (i32 m = 0; m < 4; ++m) {
      if (4 * (n + m) >= num_floats) break;
      float* const pair = row + 4 * (n + m);
      if ((words.word[m] & 0xffffu) < head.dropout.threshold) pair[0] = 0;
      if ((words.word[m] >> 16) < head.dropout.threshold) pair[1] = 0;
    }
  }

  // The structured masks.
  template <i32 kFloats>
  void hide(float (&S)[kFloats], i32 t, i64 first_column) const {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i64 i = warp_row + row(t, h);
      const bool counts = i < head.sequence.shape.q_len;
      const Interval columns = counts ? head.columns(i) : Interval{0, 0};
      const i32 begin = static_cast<i32>(clamp<i64>(columns.begin - first_column, 0, kColumns));
      const i32 end = static_cast<i32>(clamp<i64>(columns.end - first_column, 0, kColumns));
#pragma unroll
      for (i32 f = 2 * h; f < kFloats; f += 4) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          const i32 at = 8 * (f / 4) + e;  // further than column(0)
          if (at < begin - column(0) || at >= end - column(0)) S[f + e] = kMinusInfinity;
        }
      }
    }
  }

  // What one unit of a score is worth in nats.
  float unit() const { return kConfig.natural ? 1.f : head.map.scale; }

  // Where all scores of the warp stay below half the cap, tanh is a polynomial.
  template <i32 kFloats>
  void cap(float (&S)[kConfig.row_tiles][kFloats]) const {
    const float inner = head.map.scale / head.map.softcap;
    const float outer = head.map.softcap / unit();
    float largest = 0;
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) largest = ptx::max(largest, ptx::abs(S[t][f]));
    }
    if (kConfig.dtype == DType::kFloat32 ||
        ptx::any(largest * ptx::abs(inner) > 0.5f || largest > 0x1p60f)) {
#pragma unroll
      for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
        for (i32 f = 0; f < kFloats; ++f) {
          S[t][f] = outer * cap_tanh(S[t][f] * inner);
        }
      }
      return;
    }
    const TanhNearZero tanh(inner, outer);
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) S[t][f] = tanh(S[t][f]);
    }
  }

  static float cap_tanh(float x) {
    if constexpr (kConfig.dtype == DType::kFloat32) return AccurateMath<float>::tanh(x);
    return tanh_log2(x * (2 * kWarpLog2E));
  }

  template <i32 kFloats>
  void add_alibi(float (&S)[kConfig.row_tiles][kFloats], i64 first_column) const {
    const float slope = head.alibi / unit();
    const i32 first =
        static_cast<i32>(head.sequence.shape.position(warp_row) - first_column);  // of (0, 0)
    if (first >= kColumns - 1) {  // no key is after a query
      add_distances(S, first, [=](float x, float s) { return ptx::fma(-slope, x, s); });
    } else if (first <= 1 - kConfig.warp_rows()) {  // none before
      add_distances(S, first, [=](float x, float s) { return ptx::fma(slope, x, s); });
    } else {
      add_distances(S, first, [=](float x, float s) { return ptx::fma(-slope, ptx::abs(x), s); });
    }
  }

  // S = term(position - kv_row, S)
  template <i32 kFloats, class Term>
  static void add_distances(float (&S)[kConfig.row_tiles][kFloats], i32 first, const Term& term) {
    const float own = static_cast<float>(first + row(0, 0) - column(0));
#pragma unroll
    for (i32 t = 0; t < kConfig.row_tiles; ++t) {
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) {
        const i32 further = 16 * t + 8 * (f / 2 % 2) - 8 * (f / 4) - f % 2;
        S[t][f] = term(own + static_cast<float>(further), S[t][f]);
      }
    }
  }

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
