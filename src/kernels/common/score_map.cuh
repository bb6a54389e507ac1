// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// From dot products in a wgmma fragment to scores in units of log2, for problems in which that is
// more than one positive factor (kConfig.maps_scores()): a scale of 0 or below, softcap, ALiBi,
// bias, in the order of attention/score_mod.cuh. Runs before anything is hidden, since -inf times a
// factor would be hidden no longer. Called by forward_sm90.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/common/pair_terms.cuh"
#include "kernels/common/tanh.cuh"
#include "kernels/forward_sm90/config.h"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

template <AttentionConfig kConfig>
struct FragmentScores {
  const ForwardParams& params;
  float slope_log2 = 0;    // of the head
  float position[2] = {};  // of the thread's two rows among the keys, less its first column

  PairTerms<kConfig> pairs;

  // first_row: of this thread in the sequence.
  FragmentScores(const ForwardParams& params_, const Place& place, const QueryBlock& block,
                 i32 first_row)
      : params(params_), pairs(params_.attention, place, block, first_row) {
    if constexpr (kConfig.alibi) {
      const ArrayView& slopes = params.attention.alibi_slopes;
      slope_log2 = load_real<float>(slopes, slopes.offset(block.batch, block.head, 0, 0)) * kLog2E;
      const i32 column = ptx::thread_index() % 4 * 2;
      for (i32 r = 0; r < 2; ++r) {
        position[r] = static_cast<float>(place.shape.position(first_row + 8 * r) - column);
      }
    }
  }

  // first_key: of the block. kOneDocument: its keys and all rows are of one.
  template <bool kOneDocument = false>
  void apply(float (&S)[kConfig.kv_rows / 2], i32 first_key) const {
    if constexpr (!kConfig.maps_scores()) return;
    const float distance[2] = {position[0] - static_cast<float>(first_key),
                               position[1] - static_cast<float>(first_key)};
#pragma unroll
    for (i32 i = 0; i < kConfig.kv_rows / 2; ++i) {
      float s = S[i];
      if constexpr (kConfig.softcap) {
        s = tanh_log2(s * params.softcap_in) * params.softcap_out;
      } else {
        s *= params.scale_log2;
      }
      if constexpr (kConfig.alibi) {
        const float away = distance[i / 2 % 2] - static_cast<float>(i / 4 * 8 + i % 2);
        s = ptx::fma(-slope_log2, away < 0 ? -away : away, s);
      }
      S[i] = s;
    }
    pairs.template apply<kOneDocument>(S, first_key);
  }
};

}  // namespace fulmen
