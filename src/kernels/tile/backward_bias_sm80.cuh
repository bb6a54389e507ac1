// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dbias, from a warp's part of dS: stored where each pair has an element of its own, else added to
// float32 sums, which backward_dbias_sm80 rounds. Called by backward_pairs_sm80.
#pragma once

#include "kernels/ptx/grid.cuh"
#include "kernels/tile/backward_sight_sm80.cuh"

namespace fulmen {

template <Sm80BackwardConfig kConfig>
struct BackwardBiasSm80 {
  using Step = BackwardStepSm80<kConfig>;
  using Part = BackwardPartSm80;
  using Fragments = WarpScores<kConfig.scores()>;
  static constexpr i32 kTiles = kConfig.s_rows / 16;
  static constexpr i32 kFloats = kConfig.s_columns / 2;

  const Sm80BackwardParams& params;

  // A hidden pair has P = 0, whatever dS is.
  void take(const float (&dS)[kTiles][kFloats], const float (&P)[kTiles][kFloats], const Step& step,
            const Part& part) const {
    const SequenceShape& shape = step.head.sequence.shape;
    const i64 key = step.first_key + part.column + Fragments::column(0);
    const i32 num_keys = static_cast<i32>(shape.kv_len - key);
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i64 row = step.first_row + part.row + Fragments::row(t, h);
        if (row < shape.q_len) take_row(dS[t], P[t], h, step, row, key, num_keys);
      }
    }
  }

 private:
  // Row h of the thread's two, of which `num_keys` count.
  void take_row(const float (&dS)[kFloats], const float (&P)[kFloats], i32 h, const Step& step,
                i64 row, i64 key, i32 num_keys) const {
    const AttentionParams& p = params.attention;
    const i64 index = p.dbias_extents[0] == 1 ? 0 : step.head.index;
    const i64 head = p.dbias_extents[1] == 1 ? 0 : step.head.head;
    if constexpr (kConfig.sums_dbias) {
      float* const to =
          params.dbias_sums +
          ((index * p.dbias_extents[1] + head) * p.dbias_extents[2] + row) * p.dbias_extents[3] +
          key;
      each(dS, P, h, num_keys, [&](i32 at, float x) { ptx::reduce_add(to + at, x); });
    } else {
      const i64 to = p.dbias.offset(index, head, row, key);
      each(dS, P, h, num_keys, [&](i32 at, float x) { store(to + at * p.dbias.strides[3], x); });
    }
  }

  template <class Take>
  static void each(const float (&dS)[kFloats], const float (&P)[kFloats], i32 h, i32 num_keys,
                   const Take& take_one) {
#pragma unroll
    for (i32 f = 2 * h; f < kFloats; f += 4) {
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        const i32 at = 8 * (f / 4) + e;
        if (at < num_keys) take_one(at, P[f + e] == 0 ? 0.f : dS[f + e]);
      }
    }
  }

  void store(i64 to, float x) const {
    const ArrayView& dbias = params.attention.dbias;
    if constexpr (kConfig.pair_units && kConfig.dtype != DType::kFloat32) {
      if (dbias.dtype == kConfig.dtype) {
        reinterpret_cast<u16*>(dbias.data)[to] = static_cast<u16>(ptx::pack<kConfig.dtype>(x, x));
        return;
      }
    }
    store_real_called(dbias, to, x);
  }
};

}  // namespace fulmen
