// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A warp's softmax and O over the keys of its split: S = Q K^T, P = exp(S - max), O += P V, with P
// and O in registers. A warp waits for the other warps of its split alone.
#pragma once

#include "kernels/common/fast_score_mod.cuh"
#include "kernels/decode_sm80/products.cuh"

namespace fulmen {

template <DecodeSm80Config kConfig>
struct DecodeConsumerSm80 {
  using Layout = DecodeLayout<kConfig>;
  static constexpr i32 kFloats = Layout::kFloats;

  const DecodeSm80Params& params;
  typename DecodeProductsKind<kConfig>::Type products;
  float maximum[2], sum[2];  // of this lane's two rows; sum: of this lane's keys alone
  float v_unit[2];           // of O, powers of two
  float alibi[2];
  i32 position[2];
  Keys visible[2];
  i64 tree[2];
  DecodeSequence sequence;
  Keys full;    // keys that all rows of the tile see
  bool is_bad;  // a key has no page

  float row_sum(i32 h) const {
    return Layout::over_row(sum[h], [](float x, float y) { return x + y; });
  }

  void start(const RowTile<kConfig>& tile) {
    const AttentionParams& p = params.attention;
    const SequenceShape& shape = tile.sequence.shape;
    sequence = tile.sequence;
    is_bad = false;
    const i32 last = min(tile.query_of(tile.num_rows() - 1), shape.q_len - 1);
    full = seen_keys<kConfig>(p, sequence, tile.query_of(0), last).all;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = Layout::row_of(h);
      const i32 i = tile.query_of(row);
      const bool counts = tile.counts(row);
      maximum[h] = -kInfinity<float>;
      sum[h] = 0;
      v_unit[h] = kConfig.scaled ? __builtin_bit_cast(float, kSmallestPower) : 1;
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
    }
    products.start(tile);
  }

  // S becomes exp(S - maximum); its keys begin with `first`.
  void softmax(float (&S)[kFloats], i32 first) {
    map(S, first);
    if (first < full.begin || full.end < first + kConfig.kv_rows) hide(S, first);
    const float log2s[] = {params.unit.log2s * row_unit(0), params.unit.log2s * row_unit(1)};
    follow_maximum(S, log2s);
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float shift = maximum[h] == -kInfinity<float> ? 0.f : maximum[h];
      float weights = 0;
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) {
        if (Layout::half_of(f) != h) continue;
        S[f] = ptx::exp2((S[f] - shift) * log2s[h] + kConfig.weight_log2());
        weights += S[f];
      }
      sum[h] += weights;
    }
  }

  // What the maximum of this lane's row of half h is in.
  float row_unit(i32 h) const {
    return kConfig.narrows_q() && !kConfig.scales_scores() ? products.unit(h) : 1;
  }

  // Columns of S by the scales of their keys.
  static void scale(float (&S)[kFloats], u32 scales) {
    float x[kFloats];
    Layout::load_scales(x, scales);
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) S[f] *= x[f];
  }

  // Columns of P by the scales of their values, each row in units of a power of two that follows
  // the largest product: so they stay within float16, whatever the scales of other rows' keys are.
  void scale_weights(float (&P)[kFloats], u32 scales) {
    float x[kFloats];
    Layout::load_scales(x, scales);
    float top[2] = {0, 0};
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) {
      P[f] *= x[f];
      top[Layout::half_of(f)] = ptx::max(top[Layout::half_of(f)], ptx::abs(P[f]));
    }
    if (ptx::any(leaves_unit(top[0], 0) || leaves_unit(top[1], 1))) follow_products(top);
    const float factors[] = {inverse_of_power(v_unit[0]), inverse_of_power(v_unit[1])};
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) P[f] *= factors[Layout::half_of(f)];
  }

  // Calls store(dim, x, y) for neighbouring dims of O of this lane's row of half h, or transposed
  // store(dim, x) for one, but for bytes: there two dims lie in one number.
  template <class Store>
  void each_dim(i32 h, const Store& store) const {
    const auto& O = products.O;
    if constexpr (Layout::kTransposed) {
      const i32 lane = static_cast<i32>(lane_index() / 4);
#pragma unroll
      for (i32 n = 0; n < kConfig.d_v / 16; ++n) {
        const float x = products.own_O(4 * n + h, h);
        const float y = products.own_O(4 * n + h + 2, h);
        if constexpr (kConfig.is_quantised()) {
          store(16 * n + 2 * lane, x, y);
        } else {
          store(16 * n + lane, x);
          store(16 * n + lane + 8, y);
        }
      }
      return;
    }
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
  bool leaves_unit(float product, i32 h) const { return product >= 0x1p15f * v_unit[h]; }
  // All lanes of a warp. A weight of 1 and a scale leave room for weights that exceed it.
  void follow_products(const float (&top)[2]) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float largest = Layout::over_row(top[h], Layout::largest);
      const float weight = 1 << kConfig.weight_log2();
      if (leaves_unit(largest, h)) rescale_O(h, 1.f, largest / weight);
    }
  }

  // O of the row of half h times `factor`, from now on in units of a power of two, that of `size`.
  void rescale_O(i32 h, float factor, float size) {
    if constexpr (kConfig.scaled) {
      const u32 power = __builtin_bit_cast(u32, size) & 0x7f800000;
      const float now = __builtin_bit_cast(float, max(kSmallestPower, min(power, kLargestPower)));
      factor = factor * v_unit[h] * inverse_of_power(now);
      v_unit[h] = now;
    }
#pragma unroll
    for (i32 f = 0; f < Layout::kOFloats; ++f) {
      if (Layout::half_of(f) == h) products.O[f] *= factor;
    }
  }

  // Scores in log2, where dot products do not serve.
  void map(float (&S)[kFloats], i32 first) const {
    if constexpr (!kConfig.scales_scores()) return;
    const AttentionParams& p = params.attention;
    const ScoreMod mod = score_mod_of(p.score_map);
    const float scale = static_cast<float>(p.score_map.scale * kLog2E<double>);
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) {
      const i32 h = Layout::half_of(f);
      if constexpr (kConfig.narrows_q()) S[f] *= products.unit(h);
      S[f] = kConfig.score.score_mod ? modified_log2(mod, S[f]) : S[f] * scale;
      if constexpr (kConfig.score.alibi) {
        S[f] += alibi_bias(alibi[h], position[h], position_of_key(Layout::column(first, f)));
      }
    }
  }

  void hide(float (&S)[kFloats], i32 first) const {
#pragma unroll
    for (i32 f = 0; f < kFloats; ++f) {
      if (!sees(Layout::half_of(f), Layout::column(first, f))) S[f] = -kInfinity<float>;
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
  void follow_maximum(const float (&S)[kFloats], const float (&log2s)[2]) {
    float top[2];
    float grown = -kInfinity<float>;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      top[h] = -kInfinity<float>;
#pragma unroll
      for (i32 f = 0; f < kFloats; ++f) {
        if (Layout::half_of(f) == h) top[h] = ptx::max(top[h], S[f]);
      }
      grown = ptx::max(grown, (top[h] - maximum[h]) * log2s[h]);
    }
    if (!ptx::any(grown > 8)) return;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float now = ptx::max(maximum[h], Layout::over_row(top[h], Layout::largest));
      const float factor =
          maximum[h] == -kInfinity<float> ? 0.f : ptx::exp2((maximum[h] - now) * log2s[h]);
      maximum[h] = now;
      sum[h] *= factor;
      rescale_O(h, factor, v_unit[h] * factor);
    }
  }
};

}  // namespace fulmen
