// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Online softmax of the two query rows that a thread shares with the other three of its quad, on
// scores in a wgmma fragment. Exponents are base 2: p = exp2(s c - m), c = scale log2(e), m =
// `shift`. Exactness does not need m to be the maximum: any m gives the same quotient O / sum as
// long as nothing leaves the range of float32. So full blocks may keep the m of the first block
// (ShiftRule); `in_range` tells afterwards whether that was enough, and where it was not the work
// tile goes to the fallback, with the maximum of every block. Buys 9 to 10 % at d 64 full and d 128
// causal, S 4096 (H100, 2026-11-28, bench/results/2026-11-28-forward-ablation-h100.jsonl).
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Of rows that are merged with what is in memory (softmax_state.cuh).
struct NaturalMath {
  using Real = float;
  static constexpr float kInfinity = fulmen::kInfinity<float>;
  static constexpr float kNatural = 1;
  static float exp(float x) { return ptx::exp2(x * kLog2E<float>); }
  static float log(float x) { return ptx::accurate_log(x); }
};

template <ForwardSm90Config kConfig>
struct RowSoftmax {
  static constexpr i32 kFloats = kConfig.score_floats();
  // log2 of the weight of the maximum: e4m3 ends at 448 and 2^-9, and 2^4 leaves room at both ends.
  static constexpr float kHeadroom = kConfig.has_8_bits() ? 4 - kLog2UnitOf8Bits : 0;
  // The largest sum of weights of a thread in a block that is rounded: of f16, of e4m3.
  static constexpr float kLargestSum = kConfig.has_8_bits() ? 448 / kUnitOf8Bits : 0x1p14f;
  using Scores = float[kFloats];

  // Whether scores come in log2: c is 1.
  static constexpr bool kIsLog2 = kConfig.scales_scores() && !kConfig.score.has_nats();

  float factor;  // scale log2(e), c above; log2(e) where scores come in nats
  float row_max[2] = {-kInfinity<float>, -kInfinity<float>};  // scaled, less kHeadroom; -inf:
                                                              // nothing seen yet
  float sum[2] = {0, 0};  // of this thread's columns; of the row after finish()
  float last_sum[2];      // of the last block

  float raw_max[2] = {-kInfinity<float>, -kInfinity<float>};  // kDifferences: unscaled

  // m: what exponents are taken from; 0 while nothing was seen, so that exp2(-inf - m) = 0.
  float shift(i32 row) const { return row_max[row] == -kInfinity<float> ? 0.f : row_max[row]; }

  float raw_shift(i32 row) const { return raw_max[row] == -kInfinity<float> ? 0.f : raw_max[row]; }

  // S = exp2(c S - m); block_sum: its sums over this thread's columns. kDifferences: the exponent
  // is c (S - raw_max), so that equal scores have weight 1 however large they are.
  template <bool kDifferences = false>
  void exponentiate(Scores& S, float (&block_sum)[2]) const {
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      const float m = kDifferences ? raw_shift(row) : shift(row);
      float even = 0, odd = 0;
#pragma unroll
      for (i32 i = 2 * row; i < kFloats; i += 4) {
        S[i] = ptx::exp2(exponent<kDifferences>(S[i], m));
        S[i + 1] = ptx::exp2(exponent<kDifferences>(S[i + 1], m));
        even += S[i];
        odd += S[i + 1];
      }
      block_sum[row] = even + odd;
    }
  }

  // m = max(m, row maximum of c S), S = exp2(c S - m), sum += row sums of S. Returns whether m
  // grew, so that earlier results must be multiplied by `rescale`. kAlways: m becomes the maximum
  // itself, however little it grew. join: makes the maxima of a row's scores here those of all.
  template <bool kAlways = kConfig.shift_rule == ShiftRule::kEveryBlock, bool kDifferences = false,
            class Join>
  bool max_exp_sum(Scores& S, float (&rescale)[2], const Join& join) {
    static_assert(kAlways || !kDifferences);
    float block_max[2], old_raw[2];
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      block_max[row] = S[2 * row];
#pragma unroll
      for (i32 i = 2 * row; i < kFloats; i += 4) {
        block_max[row] = ptx::max(block_max[row], ptx::max(S[i], S[i + 1]));
      }
      block_max[row] = ptx::max(block_max[row], ptx::shuffle_xor(block_max[row], 1));
      block_max[row] = ptx::max(block_max[row], ptx::shuffle_xor(block_max[row], 2));
    }
    join(block_max);
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      if constexpr (kDifferences) {
        old_raw[row] = raw_max[row];
        raw_max[row] = ptx::max(raw_max[row], block_max[row]);
      }
      block_max[row] = scaled_maximum(block_max[row]);
    }
    if constexpr (kHeadroom != 0) {
      block_max[0] -= kHeadroom;
      block_max[1] -= kHeadroom;
    }
    // log2: p stays below 2^8, no overflow in f16 or e4m3
    constexpr float kGrowth = kConfig.has_8_bits() ? 4 : 8;
    const bool grown = kAlways || ptx::any(block_max[0] - row_max[0] > kGrowth ||
                                           block_max[1] - row_max[1] > kGrowth);
    if (grown) {
#pragma unroll
      for (i32 row = 0; row < 2; ++row) {
        const float old_max = row_max[row];
        row_max[row] = ptx::max(old_max, block_max[row]);
        rescale[row] = ptx::exp2(kDifferences ? (old_raw[row] - raw_shift(row)) * factor
                                              : old_max - shift(row));  // 0 for the first block
        sum[row] *= rescale[row];
      }
    }
    float block_sum[2];
    exponentiate<kDifferences>(S, block_sum);
    sum[0] += block_sum[0];
    sum[1] += block_sum[1];
    return grown;
  }

  // The same with the m of the blocks before.
  void exp_sum(Scores& S) {
    exponentiate(S, last_sum);
    sum[0] += last_sum[0];
    sum[1] += last_sum[1];
  }

  // After exp_sum: whether m was too small for S to be rounded to f16. If so, S and the sums
  // are divided by a power of two; so must be O, by `rescale`, and S rounded again. Asked after the
  // rounding, which it would otherwise hold up.
  bool outgrew(Scores& S, float (&rescale)[2]) {
    if constexpr (kConfig.shift_rule != ShiftRule::kWhenSumGrew) return false;
    if (!ptx::any(ptx::max(last_sum[0], last_sum[1]) > kLargestSum)) return false;
    shrink(S, rescale);
    return true;
  }

  // Adds up the quad. After this, sum belongs to the whole row.
  void finish() {
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      sum[row] += ptx::shuffle_xor(sum[row], 1);
      sum[row] += ptx::shuffle_xor(sum[row], 2);
    }
  }

  // Whether float32 held a row (NaN: no). Without a running maximum it may leave at both ends;
  // where stats are asked for, lse must also be small enough to stand for both of them, and where m
  // is folded into the exponent, its rounding must be small.
  bool in_range(i32 row) const {
    if (kTracksMaximum && row_max[row] == -kInfinity<float>) return !kMayHideFinite;
    if (!kTracksMaximum && !(0x1p-100f <= sum[row] && sum[row] <= 0x1p100f)) return false;
    // Blocks that all rows see whole may be the first that a row sees: it had no maximum then.
    if (kConfig.shift_rule == ShiftRule::kWhenSumGrew && row_max[row] == -kInfinity<float>) {
      return false;
    }
    const float m = kConfig.score.has_tile_lists() ? shift(row) : row_max[row];
    if constexpr (kConfig.score.stats) return is_within(m, 1024);
    return kIsLog2 || !kConfig.folded_scale || is_within(m, 0x1p24f);
  }

  // Natural logarithm of the sum of exponentials; -inf for a row that saw nothing.
  float lse(i32 row) const { return nats(top(row)) + ptx::accurate_log(relative_sum(row)); }
  float lse_log2(i32 row) const { return top(row) + ptx::log2(relative_sum(row)); }

  // A row of the array stats: no score lies above row_max, and row_sum is the sum of exponentials
  // relative to it. stats: from lse; exact_stats, after max_exp_sum<true> alone: from the maximum,
  // exactly as a backward kernel computes scale * s.
  struct RowStats {
    float row_max, row_sum;
  };
  RowStats stats(i32 row) const {
    return {lse(row), sum[row] == 0 ? 0.f : sum[row] == sum[row] ? 1.f : sum[row]};
  }
  RowStats exact_stats(i32 row, float scale) const {
    if (row_max[row] == -kInfinity<float>) return {row_max[row], sum[row]};
    if constexpr (kConfig.scales_scores()) {
      const float maximum = nats(row_max[row]);
      if (is_saturated(row_max[row])) return {maximum, sum[row]};
      return {maximum, sum[row] * ptx::exp2(ptx::fma(-maximum, kLog2E<float>, row_max[row]))};
    }
    if constexpr (kConfig.has_8_bits()) {
      return {nats(raw_max[row] * factor), relative_sum(row)};
    }
    return {raw_max[row] * scale, sum[row]};
  }

 private:
  // In log2 a finite bias can have become -inf (scores_sm90.cuh).
  static constexpr bool kMayHideFinite =
      kConfig.tiled_bias && kConfig.score.bias != DType::kFloat16;
  static constexpr bool kTracksMaximum =
      kConfig.shift_rule == ShiftRule::kEveryBlock || kConfig.shift_rule == ShiftRule::kWhenGrown;

  // The exponent of weight 1, and the sum in weights as large: by the weight of the maximum as the
  // instruction gives it, so that equal scores have their number as sum.
  float top(i32 row) const { return shift(row) + kHeadroom; }
  float relative_sum(i32 row) const {
    return kHeadroom == 0 ? sum[row] : sum[row] / ptx::exp2(kHeadroom);
  }

  // In log2. With a bias what is finite stays so, as far as it goes.
  float scaled_maximum(float x) const {
    const float scaled = x * factor;
    if constexpr (!kConfig.score.has_nats() || kConfig.score.bias == DType::kNone) return scaled;
    if (!is_within(x, kLargestFloat)) return scaled;
    return ptx::max(-kLargestFloat, -ptx::max(-scaled, -kLargestFloat));
  }

  static bool is_within(float x, float limit) { return -limit <= x && x <= limit; }

  // Nats, of a score in log2. The largest floats stand for themselves: a bias as large is
  // cut to them (scores_sm90.cuh).
  static bool is_saturated(float x) { return x == kLargestFloat || x == -kLargestFloat; }
  static float nats(float x) {
    if constexpr (kConfig.score.bias != DType::kNone) return is_saturated(x) ? x : x * kLn2<float>;
    return x * kLn2<float>;
  }

  template <bool kDifferences>
  float exponent(float s, float m) const {
    if constexpr (kIsLog2) return s - m;
    if constexpr (kDifferences && kHeadroom != 0) return ptx::fma(s - m, factor, kHeadroom);
    if constexpr (kDifferences) return (s - m) * factor;
    if constexpr (kConfig.folded_scale) return ptx::fma(s, factor, -m);
    return ptx::mul(s, factor) - m;
  }

  // Divides a block's p and the sums so far by the power of two in the row's block sum; of e4m3, by
  // the next, since half of what the sum may be is already more than 448.
  void shrink(Scores& S, float (&rescale)[2]) {
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      float total = last_sum[row];
      total += ptx::shuffle_xor(total, 1);
      total += ptx::shuffle_xor(total, 2);
      const i32 exponent = static_cast<i32>(__builtin_bit_cast(u32, total) >> 23) - 127;
      const i32 drop = clamp(exponent + (kConfig.has_8_bits() ? 1 : 0), 0, 126);
      rescale[row] = __builtin_bit_cast(float, static_cast<u32>(127 - drop) << 23);
      if (drop > 0) row_max[row] = shift(row) + static_cast<float>(drop);
      sum[row] *= rescale[row];
#pragma unroll
      for (i32 i = 2 * row; i < kFloats; i += 4) {
        S[i] *= rescale[row];
        S[i + 1] *= rescale[row];
      }
    }
  }
};

}  // namespace fulmen
