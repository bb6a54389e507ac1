// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Online softmax of the rows that a lane of a warp shares with the other three of its quad, on
// accumulators of mma. Scores are raw dot products, or in nats where config.scales_scores();
// `scale` and `scale_log2` are how many nats, and how many powers of two, a score of 1 is.
//   P = exp2(s scale_log2 - shift scale_log2)
// Any shift gives the same quotient O / sum as long as nothing leaves the range of float32, so it
// follows the maximum only when that grew by more than 2^8 (Milakov and Gimelshein 2018 for the
// recurrence, FlashAttention-4 for the threshold), or, without statistics, when the sum of a
// block's P says that it must. For statistics the true maximum is computed as well.
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/common/accurate_math.cuh"
#include "kernels/common/warp_mma_sm80.cuh"
#include "kernels/forward_sm80/row_group.cuh"
#include "kernels/ptx/math.cuh"

namespace fulmen {

// What a weight is two to the power of, for scores that are scaled and nothing else: offset() of a
// row (t, h), once, then of each of its scores, number f of the thread's.
struct ScaledExponent {
  float scale_log2;
  float offset(float offset, i32, i32) const { return offset; }
  float operator()(float s, float offset, i32) const { return ptx::fma(s, scale_log2, offset); }
};

template <ForwardSm80Config kConfig>
struct ForwardSoftmaxSm80 {
  static constexpr i32 kTiles = kConfig.row_tiles;
  static constexpr i32 kFloats = kConfig.warp_columns() / 2;
  using Group = RowGroupSm80<kConfig>;
  using Scores = float[kTiles][kFloats];
  using State = SoftmaxState<AccurateMath<float>>;

  float scale;
  float scale_log2;
  float shift[kTiles][2];
  float row_max[kTiles][2];  // for statistics alone
  float sum[kTiles][2];      // of this thread's columns; of the row after finish()
  // The same for the warp:
  bool has_fully_masked;  // some row has seen nothing yet, and has no shift to keep
  bool has_large_max;     // some shift times scale_log2 is not exact enough
  bool has_kept_max;      // some block was weighed without a look at its maximum

  explicit ForwardSoftmaxSm80(float scale)
      : scale(kConfig.scales_scores() ? 1.f : scale),
        scale_log2(kConfig.scales_scores() ? kLog2E<float>
                                           : static_cast<float>(scale * kLog2E<double>)) {}

  // Nothing seen yet. Of this thread's rows, those from `num_rows` on are none: whatever they get,
  // they never count as fully masked.
  void start(i32 num_rows) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        shift[t][h] = row_max[t][h] = 16 * t + 8 * h < num_rows ? -kInfinity<float> : 0.f;
        sum[t][h] = 0;
      }
    }
    has_fully_masked = true;
    has_large_max = has_kept_max = false;
  }

  // Whether a block that all rows see whole can be weighed with the shift that there is.
  bool can_keep_max() const { return kConfig.lazy_max && !has_fully_masked && !has_large_max; }

  // Brings the shift up to date with a block. Returns whether earlier results must be multiplied by
  // `rescale`.
  bool update(const Scores& S, const Group& group, float (&rescale)[kTiles][2]) {
    float block_max[kTiles][2];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        float m = S[t][2 * h];
#pragma unroll
        for (i32 i = 2 * h; i < kFloats; i += 4) m = ptx::max(m, ptx::max(S[t][i], S[t][i + 1]));
        m = ptx::max(m, ptx::shuffle_xor(m, 1));
        block_max[t][h] = ptx::max(m, ptx::shuffle_xor(m, 2));
      }
    }
    group.all_reduce(block_max, [](float a, float b) { return ptx::max(a, b); });
    float grown = -kInfinity<float>;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        if constexpr (kConfig.score.stats) row_max[t][h] = ptx::max(row_max[t][h], block_max[t][h]);
        grown = ptx::max(grown, block_max[t][h] - shift[t][h]);
      }
    }
    if (kConfig.lazy_rescale && !ptx::any(grown * scale_log2 > kConfig.log2_growth())) return false;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        rescale[t][h] = raise(t, h, ptx::max(shift[t][h], block_max[t][h]));
      }
    }
    update_flags();
    return true;
  }

  // After blocks that kept the shift: where sums have grown far, it goes up by their logarithm.
  // Returns as update() does.
  bool rescale_by_sum(const Group& group, float (&rescale)[kTiles][2]) {
    float largest = 0;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      largest = ptx::max(largest, ptx::max(sum[t][0], sum[t][1]));
    }
    if (!group.any(ptx::any(largest > 0x1p64f))) return false;
    float most[kTiles][2];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        float m = ptx::max(1.f, sum[t][h]);
        m = ptx::max(m, ptx::shuffle_xor(m, 1));
        most[t][h] = ptx::max(m, ptx::shuffle_xor(m, 2));
      }
    }
    group.all_reduce(most, [](float a, float b) { return ptx::max(a, b); });
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        rescale[t][h] = raise(t, h, shift[t][h] + ptx::log2(most[t][h]) / scale_log2);
      }
    }
    update_flags();
    return true;
  }

  // S becomes weights; block_sum their sums over this thread's columns. Where a shift is so large
  // that its product with scale_log2 is no longer exact enough, differences come first.
  // `has_shift`: can_keep_max() holds. `exponent` maps scores, see ScaledExponent.
  template <class Exponent>
  void exponentiate(Scores& S, float (&block_sum)[kTiles][2], bool has_shift,
                    const Exponent& exponent) const {
    const bool subtracts = kConfig.subtracts_max() || (!has_shift && has_large_max);
    if (subtracts) subtract(S);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float base = has_shift ? shift[t][h] : base_of(t, h);
        const float offset =
            exponent.offset(kConfig.log2_unit() - (subtracts ? 0.f : base * scale_log2), t, h);
        block_sum[t][h] = 0;
#pragma unroll
        for (i32 i = 2 * h; i < kFloats; i += 4) {
          S[t][i] = ptx::exp2(exponent(S[t][i], offset, i));
          S[t][i + 1] = ptx::exp2(exponent(S[t][i + 1], offset, i + 1));
          block_sum[t][h] += S[t][i] + S[t][i + 1];
        }
      }
    }
  }

  void exponentiate(Scores& S, float (&block_sum)[kTiles][2], bool has_shift) const {
    exponentiate(S, block_sum, has_shift, ScaledExponent{scale_log2});
  }

  // Whether a block's weights are so large that the shift must follow; the same for the warp.
  static bool is_too_large(const float (&block_sum)[kTiles][2]) {
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

  // Whether the sums have left the range in which results can be trusted; NaN too.
  bool has_overflowed(i32 t, i32 h) const { return !(sum[t][h] < 0x1p100f); }

  // Adds up the quad and the group. After this, sum belongs to the whole row. Where maxima were not
  // looked at, the row's logarithm stands for the maximum, rounded up: no score is larger.
  void finish(const Group& group) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        sum[t][h] += ptx::shuffle_xor(sum[t][h], 1);
        sum[t][h] += ptx::shuffle_xor(sum[t][h], 2);
      }
    }
    group.all_reduce(sum, [](float a, float b) { return a + b; });
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        if (kConfig.score.stats && has_kept_max && sum[t][h] != 0) {
          const float top = shift[t][h] + ptx::log2(sum[t][h]) / scale_log2;
          row_max[t][h] = top + ptx::max(top, -top) * 0x1p-22f;
        }
      }
    }
  }

  // One row at the end.
  struct Row {
    float shift, row_max, sum, scale, scale_log2;
    bool is_folded;  // weights were taken from -(shift * scale_log2) as rounded

    // exp(shift - row_max): what the sum is multiplied by to be that of exp(s - row_max).
    float to_row_max() const {
      if (shift == -kInfinity<float>) return 1;
      const float product = shift * scale_log2;
      const float rounding = is_folded ? ptx::fma(shift, scale_log2, -product) : 0.f;
      return ptx::exp2((shift - row_max) * scale_log2 - rounding - kConfig.log2_unit());
    }
    // The row's softmax in nats.
    State state() const { return {row_max * scale, sum * to_row_max()}; }
  };
  // Row number 2 t + h.
  Row row(i32 number) const {
    const auto& top = kConfig.score.stats ? row_max : shift;
    Row row{shift[0][0], top[0][0],  sum[0][0],
            scale,       scale_log2, !kConfig.subtracts_max() && !has_large_max};
#pragma unroll
    for (i32 at = 1; at < 2 * kTiles; ++at) {
      if (at != number) continue;
      row.shift = shift[at / 2][at % 2];
      row.row_max = top[at / 2][at % 2];
      row.sum = sum[at / 2][at % 2];
    }
    return row;
  }

 private:
  // Sets a row's shift. Returns what earlier results must be multiplied by.
  float raise(i32 t, i32 h, float to) {
    const float old = shift[t][h];
    shift[t][h] = to;
    const float factor = old == to ? 1.f : ptx::exp2((old - to) * scale_log2);  // both may be -inf
    sum[t][h] *= factor;
    return factor;
  }

  void update_flags() {
    float largest = 0;
    bool fully_masked = false;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float base = base_of(t, h);
        largest = ptx::max(largest, ptx::max(base, -base));
        fully_masked = fully_masked || shift[t][h] == -kInfinity<float>;
      }
    }
    has_large_max = ptx::any(largest * scale_log2 > 1024);
    has_fully_masked = ptx::any(fully_masked);
  }

  // The shift, 0 where nothing was seen, so that -inf - base = -inf.
  float base_of(i32 t, i32 h) const { return shift[t][h] == -kInfinity<float> ? 0.f : shift[t][h]; }

  void subtract(Scores& S) const {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) S[t][i] -= base_of(t, i / 2 % 2);
    }
  }
};

}  // namespace fulmen
