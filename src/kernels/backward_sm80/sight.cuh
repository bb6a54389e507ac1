// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the structured masks let the rows of a part of a step of backward_sm80 see of its keys
// (backward_rows_sm80 has found it row by row): a part that is seen whole needs no mask arithmetic.
#pragma once

#include "kernels/backward_sm80/documents.cuh"
#include "kernels/common/head.cuh"

namespace fulmen {

// Whether a warp's rows see all of its keys, and whether some row's interval begins after the
// first.
struct PartSight {
  bool all, begins;
};

// Whether every number met is finite: 0 times it is 0.
class FiniteCheck {
 public:
  void meet(float x) {
    sums_[next_] = ptx::fma(x, 0.f, sums_[next_]);
    next_ = (next_ + 1) % kSums;
  }
  template <i32 kTiles, i32 kFloats>
  void meet(const float (&S)[kTiles][kFloats]) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kFloats; ++i) meet(S[t][i]);
    }
  }
  bool fails() const { return sums_[0] + sums_[1] + sums_[2] + sums_[3] != 0; }

 private:
  static constexpr i32 kSums = 4;  // side by side, so that none waits for the one before
  float sums_[kSums] = {};
  i32 next_ = 0;  // known when compiled, in loops that are unrolled
};

template <Sm80BackwardConfig kConfig>
struct BackwardSightSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;

  BackwardTilesSm80<kConfig> tiles;
  BackwardDocumentsSm80<kConfig> documents{tiles};

  // Keys of the step that a row of it sees.
  Sm80Columns columns(const Step& step, i32 row) const {
    const u32 from = tiles.columns_at(step.stage) + static_cast<u32>(row) * 8;
    return {static_cast<i32>(ptx::load_shared(from)) - step.first_key,
            static_cast<i32>(ptx::load_shared(from + 4)) - step.first_key};
  }

  // Whether no row's maximum is so large that a product with it would not be exact enough.
  bool is_moderate(const Step& step) const {
    float largest = 0;
#pragma unroll
    for (i32 at = 0; at < kConfig.rows; at += 32) {
      const i32 row = min(at + static_cast<i32>(lane_index()), kConfig.rows - 1);
      const u32 row_max = ptx::load_shared(tiles.rows_at(step.stage) + static_cast<u32>(row) * 16);
      largest = ptx::max(largest, ptx::abs(__builtin_bit_cast(float, row_max)));
    }
    return !ptx::any(largest * kWarpLog2E > 1024);
  }

  PartSight of(const Step& step, const Part& part) const {
    if (step.is_full) return {true, false};
    const i32 first = part.column, end = first + kConfig.s_columns;
    const i32 lane = static_cast<i32>(lane_index());
    bool all = true, begins = false;
#pragma unroll
    for (i32 row = 0; row < kConfig.s_rows; row += 32) {
      const Sm80Columns seen = columns(step, part.row + min(row + lane, kConfig.s_rows - 1));
      all = all && seen.begin <= first && end <= seen.end;
      begins = begins || seen.begin > first;
    }
    if constexpr (kConfig.documents) all = all && documents.are_one(step, part);
    return {!ptx::any(!all), ptx::any(begins)};
  }

  // What is hidden becomes -inf.
  void hide(typename Step::Scores& S, const Step& step, const Part& part,
            const PartSight& sight) const {
    if (sight.all) return;
    if (sight.begins) {
      hide_outside<true>(S, step, part);
    } else {
      hide_outside<false>(S, step, part);
    }
    if constexpr (kConfig.documents) documents.hide(S, step, part);
  }

 private:
  template <bool kBegins>
  void hide_outside(typename Step::Scores& S, const Step& step, const Part& part) const {
    const i32 own = part.column + Step::Fragments::column(0);
#pragma unroll
    for (i32 t = 0; t < Step::kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const Sm80Columns seen = columns(step, part.row + Step::Fragments::row(t, h));
        const i32 begin = seen.begin - own, end = seen.end - own;
#pragma unroll
        for (i32 f = 2 * h; f < Step::kFloats; f += 4) {
#pragma unroll
          for (i32 e = 0; e < 2; ++e) {
            const i32 at = 8 * (f / 4) + e;
            if (at >= end || (kBegins && at < begin)) S[t][f + e] = kMinusInfinity;
          }
        }
      }
    }
  }
};

}  // namespace fulmen
