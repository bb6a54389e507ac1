// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a consumer warpgroup of backward_sm90 holds apart from the order of its products: the five
// matrix products as batches of wgmma, its pipeline states and named barriers, and the steps from
// S^T and dP^T to P^T and dS^T of its 64 keys, which lie in its registers in the layout in which
// P^T and dS^T are left operands again.
#pragma once

#include "kernels/backward_sm90/config.h"
#include "kernels/backward_sm90/dq_accum.cuh"
#include "kernels/backward_sm90/scores.cuh"
#include "kernels/backward_sm90/storage.cuh"
#include "kernels/common/products_sm90.cuh"
#include "kernels/common/scores_sm90.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

template <BackwardSm90Config kConfig>
using BackwardScores = float[kConfig.q_rows / 2];  // S^T, P^T, dP^T: 64 keys by q_rows
template <BackwardSm90Config kConfig>
using BackwardWeights = u32[kConfig.q_rows / 4];  // P^T, dS^T, rounded
template <BackwardSm90Config kConfig>
using BackwardSums = float[kConfig.dims / 2];  // dK, dV: 64 keys by dims
// The first register_dims columns of 64 rows of K or V as left operands.
template <BackwardSm90Config kConfig>
using KRegisters = u32[max(kConfig.register_dims / 4, 1)];

template <BackwardSm90Config kConfig>
inline void load_keys(KRegisters<kConfig>& rK, u32 keys) {
  load_left_columns<kConfig.register_dims>(rK, OperandTile<kConfig.kv_rows(), true>{keys});
}

// S^T = K Q^T or dP^T = V dO^T. rK, keys: the first columns of K or V, as many as are in registers
// (none in a single word); the warpgroup's first row in a tile of kv_rows() rows.
template <BackwardSm90Config kConfig, i32 kWords>
inline void issue_keys_by_queries(BackwardScores<kConfig>& S, const u32 (&rK)[kWords], u32 keys,
                                  u32 queries) {
  const u32 a = ptx::wgmma_descriptor(keys, 16);
  const u32 b = ptx::wgmma_descriptor(queries, 16);
  ptx::wgmma_fence();
#pragma unroll
  for (i32 d = 0; d < kConfig.dims; d += 16) {
    const u32 a_offset = d / 64 * kConfig.kv_rows() * 128 + d % 64 * 2;
    const u32 b_offset = d / 64 * kConfig.q_rows * 128 + d % 64 * 2;
    if constexpr (kWords > 1) {
      if (d < kWords * 4) {
        const u32* r = rK + d / 4;
        ptx::wgmma_rs<kConfig.dtype, false>(S, r[0], r[1], r[2], r[3], b + (b_offset >> 4), d > 0);
        continue;
      }
    }
    ptx::wgmma_ss<kConfig.dtype, false>(S, a + (a_offset >> 4), b + (b_offset >> 4), d > 0);
  }
  ptx::wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q, over queries [kBegin, kEnd) of the step; without the old value
// unless `accumulate`.
template <BackwardSm90Config kConfig, i32 kBegin = 0, i32 kEnd = kConfig.q_rows>
inline void issue_keys_by_dims(BackwardSums<kConfig>& sums, const BackwardWeights<kConfig>& W,
                               u32 queries, bool accumulate) {
  const u32 b = ptx::wgmma_descriptor(queries, kConfig.q_rows * 128);
  ptx::wgmma_fence();
#pragma unroll
  for (i32 q = kBegin; q < kEnd; q += 16) {
    multiply_columns<kConfig.dtype, ptx::kSwizzledRows>(sums, W + q / 4, b + (q * 128 >> 4),
                                                        kFirstDims / 64 * kConfig.q_rows * 128 >> 4,
                                                        q > 0 || accumulate);
  }
  ptx::wgmma_commit();
}

// This warpgroup's part of dQ = dS K: its 64 rows, or its half of the columns (that the block has).
template <BackwardSm90Config kConfig>
inline void issue_queries_by_dims(float (&dQ)[kConfig.dq_floats()], u32 ds, u32 k, u32 warpgroup) {
  static_assert(kConfig.dq_columns() <= 64);
  const u32 a = ptx::wgmma_descriptor(ds + (kConfig.dq_by_rows() ? warpgroup * 64 * 128 : 0), 16);
  const u32 b = ptx::wgmma_descriptor(
      k + (kConfig.dq_by_rows()         ? 0
           : kConfig.dq_columns() == 64 ? warpgroup * kConfig.kv_rows() * 128
                                        : warpgroup * kConfig.dq_columns() * 2),
      16);
  ptx::wgmma_fence();
#pragma unroll
  for (i32 j = 0; j < kConfig.kv_rows(); j += 16) {
    const u32 a_offset = j / 64 * kConfig.q_rows * 128 + j % 64 * 2;
    ptx::wgmma_ss<kConfig.dtype, true>(dQ, a + (a_offset >> 4), b + (j * 128 >> 4), j > 0);
  }
  ptx::wgmma_commit();
}

// dS^T of a warpgroup becomes its 64 columns of dS in shared memory.
template <BackwardSm90Config kConfig>
inline void store_ds(const BackwardWeights<kConfig>& dS, u32 ds, u32 warpgroup) {
  const u32 thread = ptx::thread_index() % 128;
  const u32 lane = thread % 32;
  const u32 unit = thread / 32 * 2 + lane / 8 % 2;  // 16 bytes, exchanged by row % 8
  const u32 row = lane / 16 * 8 + lane % 8;
  const u32 chunk = ds + warpgroup * kConfig.q_rows * 128;
#pragma unroll
  for (i32 q = 0; q < kConfig.q_rows; q += 16) {
    const u32* w = dS + q / 4;
    ptx::stmatrix_x4_trans(chunk + (q + row) * 128 + ((unit ^ row % 8) << 4),
                           {{w[0], w[1], w[2], w[3]}});
  }
}

template <BackwardSm90Config kConfig>
struct BackwardWarpgroup : ConsumerThread<2, kConfig.ping_pong> {
  using Thread = ConsumerThread<2, kConfig.ping_pong>;
  using Thread::first_column, Thread::first_row, Thread::thread, Thread::warpgroup;
  using Shared = BackwardStorage<kConfig>;
  using Scores = BackwardScores<kConfig>;
  using Weights = BackwardWeights<kConfig>;
  using Sums = BackwardSums<kConfig>;
  // Of the pairs of a step: slopes of the score modifier; bit i: dropout keeps pair i.
  struct Pairs {
    float slopes[kConfig.score.has_slopes() ? kConfig.q_rows / 2 : 1];
    u32 kept;
  };
  static constexpr i32 kFloats = kConfig.q_rows / 2;

  const BackwardParams& params;
  Shared shared;
  typename Shared::QState at;
  typename Shared::DsState ds_at;
  typename Shared::DOutState dout_at;
  typename Shared::KvState kv_at;
  typename Shared::WorkState work_at;
  typename Shared::PState p_at;

  // By every warp, after it has waited for the products that read the tile.
  template <i32 kBuffers>
  void release(Pipeline<kBuffers> pipeline, PipelineState<kBuffers> cursor) const {
    if (thread % 32 == 0) pipeline.consumer_release(cursor);
  }
  // What both blocks of a cluster fill: to both.
  template <i32 kBuffers>
  void release_to_pair(Pipeline<kBuffers> pipeline, PipelineState<kBuffers> cursor) const {
    const u32 lane = thread % 32;
    if (lane < 2) ptx::mbarrier_arrive_read(ptx::map_shared(pipeline.empty(cursor), lane));
  }

  typename Shared::DOutState dout_state() const { return Shared::dout_state(at, dout_at); }
  typename Shared::PState p_state() const {
    if constexpr (kConfig.paired) return p_at;
    if constexpr (kConfig.p_stages() == 1) return {0, at.index};  // a phase a step
    return {at.index, at.phase};
  }

  // S^T = -inf where the interval mask, or lists of blocks, hide the pair; `first`: the warpgroup's
  // first key.
  void apply_mask(Scores& S, i32 first, const BackwardStepInfo& step) const {
    const SequenceShape shape = kConfig.score.varlen ? shared.read_shape(work_at) : params.shape;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = first + first_row() + 8 * half;
      const bool is_hidden = kConfig.score.has_tile_lists() && step.is_hidden(warpgroup);
      const i32 query =
          (is_hidden ? shape.q_len : step.q_block() * kConfig.q_rows) + first_column();
      Interval rows{0, 0};
      if (key < shape.kv_len) {
        rows = visible_rows(effective_mask<kConfig>(params.mask), shape, key);
      }
      hide_outside<true>(S, half, i32(rows.begin) - query, i32(rows.end) - query);
    }
  }

  // S^T = scores in log2, with options that are more than a positive scale. kCuts: what was asked
  // of the step as a whole, documents and a user's mask, may hide pairs whatever the step says.
  template <bool kCuts = false>
  void apply_options(Scores& S, Pairs& pairs, i32 first, const BackwardStepInfo& step) const {
    if constexpr (kConfig.maps_scores() || kConfig.score.dropout) {
      const BackwardTile work_tile = shared.read_tile(work_at);
      const KeyTerms<kConfig> terms{params,
                                    work_tile,
                                    work_tile.batch_kv_head / params.heads_kv,
                                    head_of_step<kConfig>(params, work_tile, step),
                                    first + first_row(),
                                    step.q_block() * kConfig.q_rows + first_column()};
      const bool plain = !kCuts && !step.is_partial(warpgroup);
      if constexpr (kConfig.maps_scores()) {
        const bool exactly = !kConfig.tiled_bias || !kConfig.score.stats || has_large_scores(at);
        terms.map(S, pairs.slopes, plain, exactly, {shared.pairs(at), warpgroup});
      }
      if constexpr (kConfig.score.dropout) pairs.kept = terms.kept();
    }
  }

  // Address of the lse of the rows of S[i] and S[i + 1]; kLseBlock floats on: their row_max.
  u32 lse_address(i32 i) const {
    const i32 row = i * 2;
    return shared.lse(at) + thread % 4 * 8 + i32(kConfig.score.stats ? lse_index(row) : row) * 4;
  }

  // Whether a row of a step is large; every warp reads all rows.
  bool has_large_scores(typename Shared::QState of) const {
    if constexpr (!kConfig.score.stats) return false;
    bool is_large = false;
#pragma unroll
    for (i32 block = 0; block < kConfig.q_rows; block += kLseBlock) {
      const ptx::F32x2 row_max = ptx::load_shared_f32x2(
          shared.lse(of) + i32(lse_index(block) + kLseBlock) * 4 + thread % 32 * 8);
      is_large = is_large || row_max.word[0] != 0 || row_max.word[1] != 0;
    }
    return ptx::any(is_large);
  }

  // The step at `at`.
  BackwardStepInfo read_step() const {
    BackwardStepInfo step = shared.read_step(at);
    if (has_large_scores(at)) step.flags |= BackwardStepInfo::kLargeScores;
    return step;
  }

  // S^T -= row_max in large rows, whose lse is relative to it.
  void shift_large_scores(Scores& S) const {
    if (!has_large_scores(at)) return;
    const LargeScores large(kConfig.scales_scores() ? 1 / kConfig.score.per_nat() : params.scale);
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
      const ptx::F32x2 row_max = ptx::load_shared_f32x2(lse_address(i) + kLseBlock * 4);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) S[i + e] = large.shifted(S[i + e], row_max.word[e % 2]);
    }
  }

  // P^T = exp(scale S^T - lse)
  void exponentiate(Scores& S) const {
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
      const ptx::F32x2 lse = ptx::load_shared_f32x2(lse_address(i));
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        const float factor =
            kConfig.scales_scores() ? kLog2E<float> / kConfig.score.per_nat() : params.scale_log2;
        S[i + e] = ptx::exp2_volatile(ptx::fma(S[i + e], factor, -lse.word[e % 2]));
      }
    }
  }

  // P or dP of a pair after dropout.
  float kept(const Pairs& pairs, i32 i, float x) const {
    if constexpr (!kConfig.score.dropout) return x;
    return (pairs.kept >> i & 1) != 0 ? x * params.kept_scale : 0.f;
  }

  // x of pair i, whose probability is p, times the slope of its score; a user's may be anything
  // where the pair is hidden.
  static float through_slope(const Pairs& pairs, i32 i, float p, float x) {
    if constexpr (!kConfig.score.has_slopes()) return x;
    if (kConfig.score.user.score && p == 0) return 0;
    return x * pairs.slopes[i];
  }

  template <i32 kBegin = 0, i32 kEnd = kConfig.q_rows>
  void round(Weights& W, const Scores& P, const Pairs& pairs) const {
#pragma unroll
    for (i32 i = kBegin / 2; i < kEnd / 2; i += 2) {
      W[i / 2] = ptx::pack<kConfig.dtype>(kept(pairs, i, P[i]), kept(pairs, i + 1, P[i + 1]));
    }
  }

  // dS^T = P^T (dP^T - delta), through the score modifier, rounded
  void form_ds(Weights& dS, const Scores& P, const Scores& dP, const Pairs& pairs) const {
    const u32 deltas = shared.delta(dout_state()) + thread % 4 * 8;
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
      const ptx::F32x2 delta = ptx::load_shared_f32x2(deltas + i * 8);
#pragma unroll
      for (i32 e = 0; e < 4; e += 2) {
        float x[2];
#pragma unroll
        for (i32 c = 0; c < 2; ++c) {
          const i32 at = i + e + c;
          x[c] = P[at] * (kept(pairs, at, dP[at]) - delta.word[c]);
          x[c] = through_slope(pairs, at, P[at], x[c]);
        }
        dS[(i + e) / 2] = ptx::pack<kConfig.dtype>(x[0], x[1]);
      }
    }
  }

  // Where products are divided: P^T, times the modifier's slope, to the other warpgroup, 16 bytes
  // at a time. The sign says what dropout drops.
  static constexpr i32 kPairsPer16Bytes = kConfig.shares_rounded() ? 8 : 4;
  u32 address_of_p() const { return shared.p().address(p_state()) + thread * 16; }
  float shared_p(const Scores& P, const Pairs& pairs, i32 i) const {
    float p = P[i];
    p = through_slope(pairs, i, p, p);
    if constexpr (kConfig.score.dropout) p = (pairs.kept >> i & 1) != 0 ? p : -p;
    return p;
  }
  void share_p(const Scores& P, const Pairs& pairs) const {
    const u32 address = address_of_p();
    ptx::mbarrier_wait(shared.p().empty(p_state()), p_state().phase ^ 1);
#pragma unroll
    for (i32 i = 0; i < kFloats; i += kPairsPer16Bytes) {
      ptx::U32x4 x;
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        if constexpr (kConfig.shares_rounded()) {
          const i32 first = i + 2 * w;
          x.word[w] =
              ptx::pack<kConfig.dtype>(shared_p(P, pairs, first), shared_p(P, pairs, first + 1));
        } else {
          x.word[w] = __builtin_bit_cast(u32, shared_p(P, pairs, i + w));
        }
      }
      ptx::store_shared_x4(address + i / kPairsPer16Bytes * 2048, x);
    }
    ptx::warp_sync();
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared.p().full(p_state()));
  }
  // Pair number `pair` of 16 bytes.
  static ptx::F32x2 pair_of_p(const ptx::U32x4& shared_pairs, i32 pair) {
    if constexpr (kConfig.shares_rounded())
      return ptx::unpack<kConfig.dtype>(shared_pairs.word[pair]);
    return {{__builtin_bit_cast(float, shared_pairs.word[2 * pair]),
             __builtin_bit_cast(float, shared_pairs.word[2 * pair + 1])}};
  }
  // In the other warpgroup: dS^T = P^T (dP^T - delta), rounded.
  void form_shared_ds(Weights& dS, const Scores& dP) const {
    const u32 address = address_of_p();
    const u32 deltas = shared.delta(dout_state()) + thread % 4 * 8;
    shared.p().consumer_wait(p_state());
#pragma unroll
    for (i32 i = 0; i < kFloats; i += kPairsPer16Bytes) {
      const ptx::U32x4 x16 = ptx::load_shared_x4(address + i / kPairsPer16Bytes * 2048);
#pragma unroll
      for (i32 pair = 0; pair < kPairsPer16Bytes / 2; ++pair) {
        const i32 first = i + 2 * pair;
        const ptx::F32x2 delta = ptx::load_shared_f32x2(deltas + first / 4 * 32);
        const ptx::F32x2 p = pair_of_p(x16, pair);
        float x[2];
#pragma unroll
        for (i32 c = 0; c < 2; ++c)
          x[c] = times_difference(p.word[c], dP[first + c], delta.word[c]);
        dS[first / 2] = ptx::pack<kConfig.dtype>(x[0], x[1]);
      }
    }
    ptx::warp_sync();
    release(shared.p(), p_state());
  }
  // P (dP - delta), where the sign of `p` says what dropout drops.
  float times_difference(float p, float dp, float delta) const {
    if constexpr (!kConfig.score.dropout) return p * (dp - delta);
    const bool is_kept = __builtin_bit_cast(u32, p) >> 31 == 0;
    return ptx::abs(p) * ((is_kept ? dp * params.kept_scale : 0) - delta);
  }

  // dS^T to both warpgroups, for dQ a step later.
  void share_ds(const Weights& dS) const {
    ptx::mbarrier_wait(shared.ds().empty(ds_at), ds_at.phase ^ 1);
    store_ds<kConfig>(dS, shared.ds().address(ds_at), warpgroup);
    if constexpr (!kConfig.late_ds()) announce_ds(ds_at);
  }
  void announce_ds(typename Shared::DsState of) const {
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared.ds().full(of));
  }

  // dQ = dS K of a step; then, when the product is done, to the sums.
  void issue_dq(float (&dQ)[kConfig.dq_floats()], typename Shared::DsState of) const {
    wait_full<kConfig>(shared.ds(), of);
    issue_queries_by_dims<kConfig>(dQ, shared.ds().address(of), shared.k().address(kv_at),
                                   warpgroup);
  }
  HeadDq<kConfig> head_dq() const { return {params, shared, warpgroup, thread}; }
  void finish_dq(const float (&dQ)[kConfig.dq_floats()], typename Shared::DsState of,
                 u32 tile) const {
    if constexpr (kConfig.paired) {
      release_to_pair(shared.ds(), of);
    } else {
      release(shared.ds(), of);
    }
    if constexpr (kConfig.whole_heads) return head_dq().add(dQ, tile);
    if constexpr (kConfig.deterministic) shared.dq_semaphore().consumer_wait(of);
    float* part = dq_tile<kConfig>(params, tile) +
                  (first_dq_part<kConfig>() + warpgroup) * DqConverter<kConfig>::kPartFloats;
    add_dq<kConfig>(dQ, part, thread);
    if constexpr (kConfig.deterministic) {
      ptx::warp_sync();
      release(shared.dq_semaphore(), of);
    }
  }
};

}  // namespace fulmen
