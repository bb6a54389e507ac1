// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a warp of forward_sm80 does when it has met all keys: O / l, lse and statistics, and rows
// that must be computed again by forward_naive. A hidden key has weight 0, and 0 times NaN is NaN:
// rows of O that come out NaN or infinite though their sum is finite have met something hidden.
// Runs before any other use of shared memory by the warps of a team, all of them together.
#pragma once

#include "kernels/common/warp_scores.cuh"
#include "kernels/common/warp_softmax.cuh"
#include "kernels/forward_sm80/float32_output.cuh"
#include "kernels/forward_sm80/warp_output.cuh"
#include "kernels/naive/forward_naive.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct ForwardFinish {
  static constexpr i32 kTiles = kConfig.row_tiles;
  using Team = WarpTeam<kConfig>;
  using Output = float[kTiles][kConfig.warp_dims() / 2];
  using State = typename WarpSoftmax<kConfig>::State;

  const Head<kConfig.dtype>& head;
  i32 warp_row;   // the warp's first, in its sequence
  i32 first_dim;  // of V and O
  u32 shared;     // Q's tile
  Team team;

  // Rows of this thread whose result cannot be trusted, bit 2 t + h: sums that left their range, O
  // that is infinite or NaN.
  u32 spoiled_rows(const WarpSoftmax<kConfig>& softmax, const Output& O) const {
    u32 spoiled = 0;
#pragma unroll
    for (i32 at = 0; at < 2 * kTiles; ++at) {
      const i32 t = at / 2, h = at % 2;
      const bool counts = warp_row + WarpScores<kConfig>::row(t, h) < head.sequence.shape.q_len;
      if (counts && (softmax.is_lost(t, h) || !all_finite(O[t], h))) spoiled |= 1u << at;
    }
    return spoiled;
  }

  // A lane of a quad finishes one of its rows, number lane % 4, and hands the others its factor.
  void store(WarpSoftmax<kConfig>& softmax, Output& O, u32 spoiled) const {
    softmax.finish(team);
    const i32 own = static_cast<i32>(lane_index() % (2 * kTiles));
    const i64 i = warp_row + WarpScores<kConfig>::row(own / 2, own % 2);
    const bool counts = i < head.sequence.shape.q_len;
    const auto row = softmax.row(own);
    const State state = row.state();
    float factor = row.to_row_max() * state.normalizer(head.sink);
    if (kConfig.dropout) factor *= static_cast<float>(head.dropout.kept_scale());
    if (Team::member() == 0) store_statistics(i, counts ? state : State{});
    normalize(O, factor);
    spoiled = spoiled_of_all(spoiled);
    // Something hidden is infinite or NaN: the sum does not show it.
    const bool repeat = counts && (spoiled >> own & 1) != 0 &&
                        (kConfig.dtype == DType::kFloat32 || state.row_sum - state.row_sum == 0);
    if constexpr (kConfig.dtype == DType::kFloat32) {
      Float32Output<kConfig>{head, warp_row, first_dim}.store(O);
    } else {
      WarpOutput<kConfig>{head, warp_row, first_dim, shared, team}.store(O);
    }
    if (!ptx::any(repeat)) return;
    ptx::warp_sync();  // what the warp wrote is there to be written over
    team.meet();       // and what the team wrote
    if (repeat && Team::member() == 0 && lane_index() % 4 == static_cast<u32>(own)) repeat_row(i);
  }

 private:
  static void normalize(Output& O, float factor) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
      const float factors[2] = {quad_value(factor, 2 * t), quad_value(factor, 2 * t + 1)};
#pragma unroll
      for (i32 at = 0; at < kConfig.warp_dims() / 2; ++at) O[t][at] *= factors[at / 2 % 2];
    }
  }

  // That of lane `lane` of the quad.
  static float quad_value(float x, i32 lane) {
    const i32 from = static_cast<i32>(lane_index() / 4 * 4) + lane;
    return __builtin_bit_cast(float,
                              ptx::shuffle(__builtin_bit_cast(i32, x), static_cast<u32>(from)));
  }

  // Those of the quad and of the team.
  u32 spoiled_of_all(u32 spoiled) const {
    spoiled |= ptx::shuffle_xor(spoiled, 1);
    spoiled |= ptx::shuffle_xor(spoiled, 2);
    if constexpr (!Team::kIsOne) {
      float is_spoiled[kTiles][2];
#pragma unroll
      for (i32 at = 0; at < 2 * kTiles; ++at) {
        is_spoiled[at / 2][at % 2] = static_cast<float>(spoiled >> at & 1);
      }
      team.share(is_spoiled, [](float a, float b) { return ptx::max(a, b); });
      spoiled = 0;
#pragma unroll
      for (i32 at = 0; at < 2 * kTiles; ++at) {
        if (is_spoiled[at / 2][at % 2] != 0) spoiled |= 1u << at;
      }
    }
    return spoiled;
  }

  static bool all_finite(const float (&row)[kConfig.warp_dims() / 2], i32 h) {
    float sum = 0;  // infinities and NaN stay; an overflow of its own costs a repetition
#pragma unroll
    for (i32 i = 2 * h; i < kConfig.warp_dims() / 2; i += 4) sum += row[i] + row[i + 1];
    return sum - sum == 0;
  }

  void repeat_row(i64 i) const {
    const AttentionParams& p = head.p;
    const i64 last = min(num_chunks(p.dim_v), ceil_div(first_dim + kConfig.d_v, kNaiveChunk));
    for (i64 chunk = first_dim / kNaiveChunk; chunk < last; ++chunk) {
      naive_chunk(p, {head.sequence.batch, head.head, head.sequence.q_begin + i, chunk});
    }
  }
  __attribute__((noinline)) static void naive_chunk(const AttentionParams& p, const RowTask& task) {
    forward_naive_row<kConfig.dtype>(p, task);
  }

  void store_statistics(i64 i, const State& state) const {
    const AttentionParams& p = head.p;
    if (first_dim != 0 || lane_index() % 4 >= 2 * kTiles || i >= head.sequence.q_slot) return;
    if (p.lse.present()) store_float(p.lse, head.q_row(p.lse, i), state.lse());
    if (kConfig.stats && p.stats.present()) {
      store_float(p.stats, head.q_row(p.stats, i), state.row_max);
      store_float(p.stats, head.q_row(p.stats, i) + p.stats.strides[3], state.row_sum);
    }
  }
  static void store_float(const ArrayView& array, i64 offset, float x) {
    store_element(array.data + offset * 4, x);
  }
};

}  // namespace fulmen
