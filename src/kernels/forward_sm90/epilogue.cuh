// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The epilogue of forward_sm90: asks for the fallback where a row's result is not finite or not
// exact, else writes O, lse and stats of a warpgroup's 64 rows to global memory. Rows between a
// sequence's length and the next sequence become zeros.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/common/products_sm90.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/forward_sm90/consumer.cuh"
#include "kernels/forward_sm90/softmax.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

template <ForwardSm90Config kConfig>
struct ForwardEpilogue {
  using Warpgroup = ForwardWarpgroup<kConfig>;
  using Work = typename Warpgroup::Work;

  const Warpgroup& wg;

  // Sends the work tile to the fallback if a row left the range of float32 or is not finite.
  void request_fallback(const float (&O)[kConfig.o_dims() / 2], const RowSoftmax<kConfig>& softmax,
                        const Interval (&visible)[2], const Work& work) const {
    const i32 q_len = wg.seqlen_info(work).shape.q_len;
    float probe[2] = {0, 0};  // 0, or NaN if an element of the row is inf or NaN
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 2; ++i) {
      probe[i / 2 % 2] = ptx::fma(O[i], 0.f, probe[i / 2 % 2]);
    }
    bool failed = false;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const bool counts = wg.q_row(work, r) < q_len;
      const bool in_range = visible[r].size() == 0 || softmax.in_range(r);
      failed = failed || (counts && !(in_range && probe[r] == 0));
    }
    if (ptx::any(failed) && wg.thread % 32 == 0) {
      ptx::store_shared(wg.shared.failed(work.count), 1);
    }
  }

  // 1 / (sum of the exponentials, with that of the sink).
  float normalizer(const RowSoftmax<kConfig>& softmax, i32 r, i32 head) const {
    if (softmax.sum[r] == 0) return 0;
    float inverse = ptx::reciprocal(softmax.sum[r]);
    if constexpr (kConfig.score.dropout) inverse *= wg.params.kept_scale;
    if constexpr (kConfig.score.sinks) {
      const ArrayView& sinks = wg.params.attention.sinks;
      const float sink = load_real<float>(sinks, sinks.offset(0, head, 0, 0)) * kLog2E<float>;
      inverse *= ptx::reciprocal(1 + ptx::exp2(sink - softmax.lse_log2(r)));
    }
    return inverse;
  }

  // lse and stats of a row: by one thread of its quad. kExactly: in the fallback.
  template <bool kExactly>
  void write_row(const RowSoftmax<kConfig>& softmax, i32 r, const Work& work,
                 const SeqlenInfo& seqlen, i32 q_row, bool is_past_end) const {
    const auto store = [&](const ArrayView& array, i32 index, float x) {
      const i64 at = array.offset(seqlen.batch, wg.head(work, r), seqlen.q_begin + q_row, index);
      reinterpret_cast<float*>(array.data)[at] = x;
    };
    const AttentionParams& arrays = wg.params.attention;
    if (arrays.lse.present())
      store(arrays.lse, 0, is_past_end ? -kInfinity<float> : softmax.lse(r));
    if constexpr (kConfig.score.stats) {
      const auto stats = kExactly ? softmax.exact_stats(r, wg.params.scale) : softmax.stats(r);
      store(arrays.stats, 0, is_past_end ? -kInfinity<float> : stats.row_max);
      store(arrays.stats, 1, is_past_end ? 0.f : stats.row_sum);
    }
  }

  // O / sum, lse and stats, to global memory.
  template <bool kExactly>
  void write(float (&O)[kConfig.o_dims() / 2], const RowSoftmax<kConfig>& softmax,
             const Work& work) const {
    const SeqlenInfo seqlen = wg.seqlen_info(work);
    float inverse[2];
    bool is_past_end[2] = {};
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = wg.q_row(work, r);
      if constexpr (kConfig.score.varlen) is_past_end[r] = q_row >= seqlen.shape.q_len;
      inverse[r] = normalizer(softmax, r, wg.head(work, r));
      if (wg.thread % 4 == 0 && wg.first_dim() == 0 && q_row < seqlen.q_slot) {
        write_row<kExactly>(softmax, r, work, seqlen, q_row, is_past_end[r]);
      }
    }
    scale_rows(O, inverse);
    if constexpr (kConfig.stage_output) {
      write_staged<kExactly>(O, work);
    } else {
      write_directly(O, work, seqlen, is_past_end);
    }
  }

  // From registers.
  void write_directly(float (&O)[kConfig.o_dims() / 2], const Work& work, const SeqlenInfo& seqlen,
                      const bool (&is_past_end)[2]) const {
    const ArrayView& o = wg.params.attention.o;
    const i32 dims = i32(wg.params.attention.dim_v) - wg.first_dim();
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = wg.q_row(work, r);
      const bool inside = q_row < seqlen.q_slot;
      const i64 at =
          o.offset(seqlen.batch, wg.head(work, r), seqlen.q_begin + q_row, 0) + wg.first_dim();
      if (kConfig.score.varlen && is_past_end[r]) clear_row(O, r);
      if constexpr (kConfig.score.fp32_out) {
        store_output_row(O, r, reinterpret_cast<float*>(o.data) + at, inside, dims);
      } else {
        store_output_row<kConfig.dtype>(O, r, reinterpret_cast<u16*>(o.data) + at, inside, dims);
      }
    }
  }

  // Through shared memory and TMA. kAgain: in the fallback, right after the first attempt at the
  // same rows.
  template <bool kAgain>
  void write_staged(const float (&O)[kConfig.o_dims() / 2], const Work& work) const {
    const u32 tile = wg.shared.o() + 64 * 128 * wg.warpgroup;
    constexpr u32 kChunkBytes = 64 * kConfig.q_tiles() * 128;
    if (wg.thread == 0) {  // the previous tile has left
      if (kAgain) ptx::tma_store_wait();
      ptx::tma_store_wait_read();
    }
    wg.sync_warpgroup();
    stage_output_tile<kConfig.dtype, kConfig.swizzle>(O, tile, kChunkBytes);
    ptx::fence_proxy_async();
    wg.sync_warpgroup();
    if (wg.thread == 0) {
      for (i32 d = 0; d < kConfig.d_v; d += 64) {
        ptx::tma_store(wg.maps.o, tile + d / 64 * kChunkBytes, d, work.row, work.block.head,
                       work.block.batch);
      }
      ptx::tma_store_commit();
    }
  }
};

}  // namespace fulmen
