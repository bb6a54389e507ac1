// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A warp's softmax and O over the keys of its split: S = Q K^T, P = exp(S - max), O += P V, with Q,
// P and O in registers. A warp waits for the other warps of its split alone.
#pragma once

#include "kernels/common/fast_score_mod.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/decode_sm80/producer.cuh"

namespace fulmen {

// The rows of a row tile: (query row, head of the group), heads next to each other.
template <DecodeSm80Config kConfig>
struct RowTile {
  const AttentionParams& p;
  i32 group;
  i32 kv_head;
  i32 index;  // of the sequence
  i32 first;  // row
  DecodeSequence sequence;

  RowTile(const DecodeSm80Params& params, i32 row_tile, const KeyCursor<kConfig>& cursor)
      : RowTile(params, row_tile, cursor.kv_head, cursor.index, cursor.sequence) {}
  RowTile(const DecodeSm80Params& params, i32 row_tile, i32 kv_head_, i32 index_,
          const DecodeSequence& sequence_)
      : p(params.attention),
        group(params.group),
        kv_head(kv_head_),
        index(index_),
        first(row_tile * kConfig.rows()),
        sequence(sequence_) {}

  i32 head_of(i32 row) const { return kv_head * group + (first + row) % group; }
  i32 query_of(i32 row) const { return (first + row) / group; }
  // Rows that the arrays have here, and those that count.
  i32 num_rows() const {
    const i32 queries = p.packed.q ? sequence.shape.q_len : static_cast<i32>(p.q_rows);
    return max(0, min(kConfig.rows(), queries * group - first));
  }
  bool counts(i32 row) const { return row < num_rows() && query_of(row) < sequence.shape.q_len; }
  i64 offset(const ArrayView& array, i32 row, i32 dim) const {
    return array.offset(sequence.batch, head_of(row), i64{sequence.q_begin} + query_of(row), dim);
  }
};

// What a unit of scores is in powers of two, and in nats.
template <DecodeSm80Config kConfig>
float score_log2(const AttentionParams& p) {
  return kConfig.scales_scores() ? 1.f : static_cast<float>(p.score_map.scale * kLog2E<double>);
}
template <DecodeSm80Config kConfig>
float score_nats(const AttentionParams& p) {
  return kConfig.scales_scores() ? kLn2<float> : static_cast<float>(p.score_map.scale);
}

template <DecodeSm80Config kConfig>
struct DecodeConsumerSm80 {
  static constexpr i32 kFloats = kConfig.kv_rows / 2;
  using Producer = DecodeProducerSm80<kConfig>;

  const DecodeSm80Params& params;
  float O[kConfig.d_v / 2];
  ptx::U32x4 Q[kConfig.d_qk / 16];
  float maximum[2], sum[2];  // of this lane's two rows; sum: of this lane's keys alone
  float alibi[2];
  i32 position[2];
  Keys visible[2];
  i64 tree[2];
  DecodeSequence sequence;
  Keys full;    // keys that all rows of the tile see
  bool is_bad;  // a key has no page
  u32 lost;     // NaN and infinities of 8 bits, under kLostBits

  // This lane's row of half h, in the row tile.
  static i32 row_of(i32 h) {
    return 16 * Split<kConfig>::row_warp() + static_cast<i32>(lane_index()) / 4 + 8 * h;
  }

  void start(const RowTile<kConfig>& tile) {
    const AttentionParams& p = params.attention;
    const SequenceShape& shape = tile.sequence.shape;
    // By index: with iterators over more than 64 floats NVRTC 13.0 keeps O in memory.
#pragma unroll
    for (i32 f = 0; f < kConfig.d_v / 2; ++f) O[f] = 0;
    sequence = tile.sequence;
    is_bad = false;
    lost = 0;
    const i32 last = min(tile.query_of(tile.num_rows() - 1), shape.q_len - 1);
    full = seen_keys<kConfig>(p, sequence, tile.query_of(0), last).all;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = row_of(h);
      const i32 i = tile.query_of(row);
      const bool counts = tile.counts(row);
      maximum[h] = -kInfinity<float>;
      sum[h] = 0;
      visible[h] = {0, counts ? shape.kv_len : 0};
      if (kConfig.score.mask_kind != MaskKind::kNone && counts) {
        visible[h] = keys_seen_by<kConfig>(p, sequence, i);
      }
      if constexpr (kConfig.tree) tree[h] = counts ? tree_word<AlignedIndex>(p, sequence, i) : 0;
      if constexpr (kConfig.score.alibi || kConfig.tree) {
        position[h] = counts ? row_position<kConfig>(p, sequence, i) : 0;
      }
      if constexpr (kConfig.score.alibi) {
        const i64 slope = p.alibi_slopes.offset(tile.index, tile.head_of(row), 0, 0);
        alibi[h] = counts ? load_real_called<float>(p.alibi_slopes, slope) * kLog2E<float> : 0;
      }
      load_q(tile, row, h, counts);
    }
  }

  // S = Q K^T
  void multiply_q_k(float (&S)[kFloats], const typename Producer::KTile& k) {
#pragma unroll
    for (float& s : S) s = 0;
    const auto keys = right_rows(k);
    if constexpr (kConfig.is_quantised()) return multiply_bytes(S, keys);
#pragma unroll
    for (i32 step = 0; step < kConfig.d_qk / 16; ++step) {
#pragma unroll
      for (i32 n = 0; n < kConfig.kv_rows / 16; ++n) {
        const ptx::U32x4 b = ptx::ldmatrix_x4(keys.at(step, 16 * n));
        ptx::mma_m16n8k16<kConfig.dtype>(&S[8 * n], Q[step].word, b.word[0], b.word[1]);
        ptx::mma_m16n8k16<kConfig.dtype>(&S[8 * n + 4], Q[step].word, b.word[2], b.word[3]);
      }
    }
  }

  // S becomes exp(S - maximum); its keys begin with `first`.
  void softmax(float (&S)[kFloats], i32 first) {
    map(S, first);
    if (first < full.begin || full.end < first + kConfig.kv_rows) hide(S, first);
    const float log2s = score_log2<kConfig>(params.attention);
    follow_maximum(S, log2s);
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float shift = maximum[h] == -kInfinity<float> ? 0.f : maximum[h];
      float weights = 0;
#pragma unroll
      for (i32 f = 2 * h; f < kFloats; f += 4) {
        S[f] = ptx::exp2((S[f] - shift) * log2s);
        S[f + 1] = ptx::exp2((S[f + 1] - shift) * log2s);
        weights += S[f] + S[f + 1];
      }
      sum[h] += weights;
    }
  }

  // Columns of S by the scales of their keys, of K before the softmax, of V after it.
  static void scale(float (&S)[kFloats], u32 scales) {
#pragma unroll
    for (i32 f = 0; f < kFloats; f += 4) {
      const ptx::F32x2 x = ptx::load_shared_f32x2(scales + static_cast<u32>(column(0, f)) * 4);
      S[f] *= x.word[0];
      S[f + 1] *= x.word[1];
      S[f + 2] *= x.word[0];
      S[f + 3] *= x.word[1];
    }
  }

  // O += P V, P in S
  void multiply_p_v(const float (&S)[kFloats], const typename Producer::VTile& v) {
    const auto values = right_columns(v);
#pragma unroll
    for (i32 k = 0; k < kConfig.kv_rows / 16; ++k) {
      ptx::U32x4 P{};
#pragma unroll
      for (i32 part = 0; part < 2; ++part) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          const float* const s = &S[8 * k + 4 * part + 2 * h];
          P.word[h + 2 * part] = ptx::pack<kConfig.dtype>(s[0], s[1]);
        }
      }
#pragma unroll
      for (i32 n = 0; n < kConfig.words(kConfig.d_v) / 16; ++n) {
        const ptx::U32x4 b = ptx::ldmatrix_x4_trans(values.at(n, 16 * k));
        if constexpr (kConfig.is_quantised()) {
          multiply_bytes(&O[16 * n], P, b);
          continue;
        }
        ptx::mma_m16n8k16<kConfig.dtype>(&O[8 * n], P.word, b.word[0], b.word[1]);
        ptx::mma_m16n8k16<kConfig.dtype>(&O[8 * n + 4], P.word, b.word[2], b.word[3]);
      }
    }
  }

  // Calls store(dim, x, y) for neighbouring dims of O of this lane's row of half h.
  template <class Store>
  void each_pair_of_dims(i32 h, const Store& store) const {
    const i32 lane = static_cast<i32>(lane_index() % 4);
    if constexpr (kConfig.is_quantised()) {  // even dims, then odd ones: multiply_bytes
#pragma unroll
      for (i32 n = 0; n < kConfig.d_v / 16; ++n) {
        const float* const even = &O[8 * n + 2 * h];
        store(16 * n + 4 * lane, even[0], even[4]);
        store(16 * n + 4 * lane + 2, even[1], even[5]);
      }
      return;
    }
#pragma unroll
    for (i32 n = 0; n < kConfig.d_v / 8; ++n) {
      store(8 * n + 2 * lane, O[4 * n + 2 * h], O[4 * n + 2 * h + 1]);
    }
  }

 private:
  WidenedPairs widened(u32 bytes) {
    if constexpr (may_lose<kConfig.kv_dtype(), kConfig.dtype>()) {
      lost |= fulmen::lost<kConfig.kv_dtype(), kConfig.dtype>(bytes);
    }
    return widen_bytes<kConfig.kv_dtype(), kConfig.dtype>(bytes);
  }

  // S = Q K^T of bytes. A matrix of ldmatrix has 8 keys and 16 dims, of which a lane gets four
  // neighbours: the two even ones and the two odd ones are what it has in a fragment, see load_q.
  template <class Rows>
  void multiply_bytes(float (&S)[kFloats], const Rows& keys) {
#pragma unroll
    for (i32 step = 0; step < kConfig.d_qk / 32; ++step) {
#pragma unroll
      for (i32 n = 0; n < kConfig.kv_rows / 16; ++n) {
        const ptx::U32x4 b = ptx::ldmatrix_x4(keys.at(step, 16 * n));
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
          const WidenedPairs k = widened(b.word[i]);
          ptx::mma_m16n8k16<kConfig.dtype>(&S[8 * n + i / 2 * 4], Q[2 * step + i % 2].word, k.even,
                                           k.odd);
        }
      }
    }
  }

  // O += P V over 16 keys and 32 dims of bytes. Transposed as if neighbouring dims were one number,
  // the even dims and the odd dims of 16 are the columns of two fragments.
  void multiply_bytes(float* sums, const ptx::U32x4& P, const ptx::U32x4& b) {
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const WidenedPairs first = widened(b.word[2 * half]);
      const WidenedPairs last = widened(b.word[2 * half + 1]);
      ptx::mma_m16n8k16<kConfig.dtype>(sums + 8 * half, P.word, first.even, last.even);
      ptx::mma_m16n8k16<kConfig.dtype>(sums + 8 * half + 4, P.word, first.odd, last.odd);
    }
  }

  void load_q(const RowTile<kConfig>& tile, i32 row, i32 h, bool counts) {
    const AttentionParams& p = params.attention;
    const u8* const q = p.q.data + (counts ? tile.offset(p.q, row, 0) * 2 : 0);
#pragma unroll
    for (i32 k = 0; k < kConfig.d_qk / 16; ++k) {
#pragma unroll
      for (i32 part = 0; part < 2; ++part) {
        Q[k].word[h + 2 * part] = counts ? load_pair_of_q(q, 16 * k, part) : 0;
      }
    }
  }
  // Two numbers from the 16 dims from `first` on: those that a fragment of K has.
  u32 load_pair_of_q(const u8* q, i32 first, i32 part) const {
    const i32 lane = static_cast<i32>(lane_index() % 4);
    const i64 dim_qk = params.attention.dim_qk;
    if constexpr (kConfig.is_quantised()) {
      const i32 dim = first + 4 * lane + part;
      const u16* const at = reinterpret_cast<const u16*>(q) + dim;
      return dim < dim_qk ? u32{at[0]} | u32{at[2]} << 16 : 0;  // dim_qk is a multiple of 16
    }
    const i32 dim = first + 8 * part + 2 * lane;
    return dim < dim_qk ? *reinterpret_cast<const u32*>(q + dim * 2) : 0;
  }

  static i32 column(i32 first, i32 f) {
    return first + f / 4 * 8 + 2 * static_cast<i32>(lane_index() % 4) + f % 2;
  }

  // Scores in log2, where dot products do not serve.
  void map(float (&S)[kFloats], i32 first) const {
    if constexpr (!kConfig.scales_scores()) return;
    const AttentionParams& p = params.attention;
    const ScoreMod mod = score_mod_of(p.score_map);
    const float scale = static_cast<float>(p.score_map.scale * kLog2E<double>);
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) {
      const i32 h = f / 2 % 2;
      S[f] = kConfig.score.score_mod ? modified_log2(mod, S[f]) : S[f] * scale;
      if constexpr (kConfig.score.alibi) {
        S[f] += alibi_bias(alibi[h], position[h], position_of_key(column(first, f)));
      }
    }
  }

  void hide(float (&S)[kFloats], i32 first) const {
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) {
      if (!sees(f / 2 % 2, column(first, f))) S[f] = -kInfinity<float>;
    }
  }

  // Whether this lane's row of half h sees key j.
  bool sees(i32 h, i32 j) const {
    const SequenceShape& shape = sequence.shape;
    if (!kConfig.tree || j < first_drafted(shape)) return visible[h].contains(j);
    if (j >= shape.kv_len || !tree_shows(shape, tree[h], j)) return false;
    if constexpr (!kConfig.placed) return visible[h].contains(j);
    return sees_at(params.attention.mask_options, position[h], position_of_key(j), j);
  }
  i32 position_of_key(i32 j) const { return key_position<kConfig>(params.attention, sequence, j); }

  // A maximum follows its row when that grew by more than 2^8, by vote of the warp (Milakov and
  // Gimelshein 2018; the threshold: FlashAttention-4).
  void follow_maximum(const float (&S)[kFloats], float log2s) {
    float top[2];
    float grown = -kInfinity<float>;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      top[h] = S[2 * h];
#pragma unroll
      for (i32 f = 2 * h; f < kFloats; f += 4) top[h] = ptx::max(top[h], ptx::max(S[f], S[f + 1]));
      grown = ptx::max(grown, top[h] - maximum[h]);
    }
    if (!ptx::any(grown * log2s > 8)) return;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      top[h] = ptx::max(top[h], ptx::shuffle_xor(top[h], 1));
      top[h] = ptx::max(top[h], ptx::shuffle_xor(top[h], 2));
      const float now = ptx::max(maximum[h], top[h]);
      const float factor =
          maximum[h] == -kInfinity<float> ? 0.f : ptx::exp2((maximum[h] - now) * log2s);
      maximum[h] = now;
      sum[h] *= factor;
#pragma unroll
      for (i32 f = 2 * h; f < kConfig.d_v / 2; f += 4) {
        O[f] *= factor;
        O[f + 1] *= factor;
      }
    }
  }
};

}  // namespace fulmen
