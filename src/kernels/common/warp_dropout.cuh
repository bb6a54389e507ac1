// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Dropout of a warp's weights in mma fragments, by position in the sequence. Called by forward_sm80
// and backward_sm80.
#pragma once

#include "kernels/common/head.cuh"
#include "kernels/common/transpose_quad.cuh"
#include "kernels/common/warp_scores.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct WarpDropout {
  const Head<kConfig.dtype>& head;
  i64 warp_row;  // first row of this warp in its sequence

  // Decides 8 columns with one draw: those of lane q of a quad, or, where they lie spread over the
  // quad, of every fourth fragment, and the quad hands the words round. Dropped weights become 0;
  // the caller scales the kept.
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
        const u32 i = static_cast<u32>(warp_row + WarpScores<kConfig>::row(at / 2, at % 2));
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
    if constexpr (!kConfig.interleaved) transpose_quad(words);
    // Numbers of 16 bits, compared as the upper halves of words. Where all are dropped, what is
    // kept here is multiplied by 0.
    const u32 bound = head.dropout.threshold == 65536 ? ~0u : head.dropout.threshold << 16;
#pragma unroll
    for (i32 m = 0; m < 4; ++m) {
      if (4 * (n + m) >= num_floats) break;
      float* const pair = row + 4 * (n + m);
      if (words.word[m] << 16 < bound) pair[0] = 0;
      if (words.word[m] < bound) pair[1] = 0;
    }
  }
};

}  // namespace fulmen
