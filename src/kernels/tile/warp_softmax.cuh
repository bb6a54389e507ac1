// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Online softmax of the rows that a thread of a warp shares with the other three of its quad, on
// accumulators of mma. Scores are raw dot products, or nats where the config says natural; `unit`
// and `log2_unit` are what one is worth in nats and in powers of two.
//   weight = exp2(s log2_unit - shift log2_unit)
// Any shift gives the same quotient O / sum as long as nothing leaves the range of float32, so it
// follows the maximum only when that grew by more than 2^8 (Milakov and Gimelshein 2018 for the
// recurrence, FlashAttention-4 for the threshold), or, where no statistics are asked for, when the
// sum of a block's weights says that it must. For statistics the true maximum is kept beside it.
#pragma once

#include "kernels/accurate_math.cuh"
#include "kernels/attention/softmax_state.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/sm80_config.h"

namespace fulmen {

inline constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xff800000u);
inline constexpr float kWarpLog2E = 1.4426950408889634f;

template <Sm80Config kConfig>
struct WarpSoftmax {
  static constexpr i32 kTiles = kConfig.row_tiles;
  static constexpr i32 kFloats = kConfig.columns / 2;
  using Scores = float[kTiles][kFloats];
  using State = SoftmaxState<AccurateMath<float>>;

  float unit;
  float log2_unit;
  float shift[kTiles][2];
  float row_max[kTiles][2];
  float sum[kTiles][2];  // of this thread's columns; of the row after finish()
  bool is_blind = true;  // some row of the warp has seen nothing yet, and has no shift to keep
  bool is_far = false;   // some shift times log2_unit is not exact enough; the same for the warp

  explicit WarpSoftmax(float scale)
      : unit(kConfig.natural ? 1.f : scale),
        log2_unit(kConfig.natural ? kWarpLog2E : static_cast<float>(scale * 1.4426950408889634)) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        shift[t][h] = row_max[t][h] = kMinusInfinity;
        sum[t][h] = 0;
      }
    }
  }

  // Brings the shift up to date with a block. Returns whether earlier results must be multiplied by
  // `rescale`.
  bool update(const Scores& S, float (&rescale)[kTiles][2]) {
    float grown = kMinusInfinity;
    float block_max[kTiles][2];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        float m = S[t][2 * h];
#pragma unroll
        for (i32 i = 2 * h; i < kFloats; i += 4) m = ptx::max(m, ptx::max(S[t][i], S[t][i + 1]));
        m = ptx::max(m, ptx::shuffle_xor(m, 1));
        m = ptx::max(m, ptx::shuffle_xor(m, 2));
        block_max[t][h] = m;
        if constexpr (kConfig.stats) row_max[t][h] = ptx::max(row_max[t][h], m);
        grown = ptx::max(grown, m - shift[t][h]);
      }
    }
    if (kConfig.lazy_rescale && !ptx::any(grown * log2_unit > 8)) return false;
    float largest = 0;
    bool blind = false;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float old = shift[t][h];
        shift[t][h] = ptx::max(old, block_max[t][h]);
        const bool same = old == shift[t][h];  // both may be -inf
        rescale[t][h] = same ? 1.f : ptx::exp2((old - shift[t][h]) * log2_unit);
        sum[t][h] *= rescale[t][h];
        if constexpr (!kConfig.stats) row_max[t][h] = shift[t][h];
        const float base = base_of(t, h);
        largest = ptx::max(largest, ptx::max(base, -base));
        blind = blind || shift[t][h] == kMinusInfinity;
      }
    }
    is_far = ptx::any(largest * log2_unit > 1024);
    is_blind = ptx::any(blind);
    return true;
  }

  // S becomes weights; block_sum their sums over this thread's columns. Where a shift is so large
  // that its product with log2_unit is no longer exact enough, differences come first.
  void exponentiate(Scores& S, float (&block_sum)[kTiles][2]) const {
    if (kConfig.exact || is_far) {
      weigh(S, block_sum, [&](float s, i32 t, i32 h) { return (s - base_of(t, h)) * log2_unit; });
    } else {
      float scaled[kTiles][2];
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        scaled[t][0] = -base_of(t, 0) * log2_unit;
        scaled[t][1] = -base_of(t, 1) * log2_unit;
      }
      weigh(S, block_sum,
            [&](float s, i32 t, i32 h) { return ptx::fma(s, log2_unit, scaled[t][h]); });
    }
  }

  // Whether a block's weights are so large that the shift must follow; the same for the warp.
  static bool is_outgrown(const float (&block_sum)[kTiles][2]) {
    float largest = 0;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      largest = ptx::max(largest, ptx::max(block_sum[t][0], block_sum[t][1]));
    }
    return ptx::any(largest > 0x1p14f);  // far below what f16 holds
  }

  void accumulate(const float (&block_sum)[kTiles][2]) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      sum[t][0] += block_sum[t][0];
      sum[t][1] += block_sum[t][1];
    }
  }

  // Adds up the quad. After this, sum belongs to the whole row.
  void finish() {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        sum[t][h] += ptx::shuffle_xor(sum[t][h], 1);
        sum[t][h] += ptx::shuffle_xor(sum[t][h], 2);
      }
    }
  }

  // exp(shift - row_max): what the sum is multiplied by to be that of exp(s - row_max).
  float to_row_max(i32 t, i32 h) const {
    if (shift[t][h] == kMinusInfinity) return 1;
    const float difference = (shift[t][h] - row_max[t][h]) * log2_unit;
    // Weights were taken from -(shift * log2_unit) as rounded, unless that was too far off.
    const bool folded = !kConfig.exact && !is_far;
    const float product = shift[t][h] * log2_unit;
    const float rounding = folded ? ptx::fma(shift[t][h], log2_unit, -product) : 0.f;
    return ptx::exp2(difference - rounding);
  }

  // The row's softmax in nats.
  State state(i32 t, i32 h) const { return {row_max[t][h] * unit, sum[t][h] * to_row_max(t, h)}; }

 private:
  // The shift, 0 where nothing was seen, so that -inf - base = -inf.
  float base_of(i32 t, i32 h) const { return shift[t][h] == kMinusInfinity ? 0.f : shift[t][h]; }

  template <class Exponent>
  static void weigh(Scores& S, float (&block_sum)[kTiles][2], const Exponent& exponent) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        float even = 0, odd = 0;
#pragma unroll
        for (i32 i = 2 * h; i < kFloats; i += 4) {
          S[t][i] = ptx::exp2(exponent(S[t][i], t, h));
          S[t][i + 1] = ptx::exp2(exponent(S[t][i + 1], t, h));
          even += S[t][i];
          odd += S[t][i + 1];
        }
        block_sum[t][h] = even + odd;
      }
    }
  }
};

}  // namespace fulmen
