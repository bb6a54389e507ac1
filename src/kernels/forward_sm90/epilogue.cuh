// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The end of a block of queries in forward_sm90: whether its result can stand, and the way of O,
// lse and stats of a warpgroup's 64 rows to global memory. Rows past a sequence's length, as far as
// the output has them, become zeros.
#pragma once

#include "kernels/common/array_access.cuh"
#include "kernels/common/products_sm90.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/forward_sm90/consumer.cuh"
#include "kernels/forward_sm90/softmax.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

template <AttentionConfig kConfig>
struct ForwardOutput {
  using Own = ForwardWarpgroup<kConfig>;
  using Task = typename Own::Task;

  const Own& own;

  // Asks for a second attempt where a row left the range of float32 or is not finite.
  void report(const float (&O)[kConfig.o_dims() / 2], const RowSoftmax<kConfig>& softmax,
              const Interval (&visible)[2], const Task& task) const {
    const i32 q_len = own.place_of_task(task).shape.q_len;
    float probe[2] = {0, 0};  // 0, or NaN if an element of the row is inf or NaN
#pragma unroll
    for (i32 i = 0; i < kConfig.o_dims() / 2; ++i) {
      probe[i / 2 % 2] = ptx::fma(O[i], 0.f, probe[i / 2 % 2]);
    }
    bool failed = false;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const bool counts = own.q_row(task, r) < q_len;
      const bool in_range = visible[r].size() == 0 || softmax.in_range(r);
      failed = failed || (counts && !(in_range && probe[r] == 0));
    }
    if (ptx::any(failed) && own.thread % 32 == 0) {
      ptx::store_shared(own.shared.failed(task.count), 1);
    }
  }

  // 1 / (sum of the exponentials, with that of the sink).
  float normalizer(const RowSoftmax<kConfig>& softmax, i32 r, i32 head) const {
    if (softmax.sum[r] == 0) return 0;
    float inverse = ptx::reciprocal(softmax.sum[r]);
    if constexpr (kConfig.dropout) inverse *= own.params.kept_scale;
    if constexpr (kConfig.sinks) {
      const ArrayView& sinks = own.params.attention.sinks;
      const float sink = load_real<float>(sinks, sinks.offset(0, head, 0, 0)) * kLog2E;
      inverse *= ptx::reciprocal(1 + ptx::exp2(sink - softmax.lse_log2(r)));
    }
    return inverse;
  }

  // lse and stats of a row: by one thread of its quad. kExactly: after the careful attempt.
  template <bool kExactly>
  void write_row(const RowSoftmax<kConfig>& softmax, i32 r, const Task& task, const Place& place,
                 i32 q_row, bool blank) const {
    const auto store = [&](const ArrayView& array, i32 index, float x) {
      const i64 at = array.offset(place.batch, own.head(task, r), place.q_begin + q_row, index);
      reinterpret_cast<float*>(array.data)[at] = x;
    };
    const AttentionParams& arrays = own.params.attention;
    if (arrays.lse.present()) store(arrays.lse, 0, blank ? kNegativeInfinity : softmax.lse(r));
    if constexpr (kConfig.stats) {
      const auto saved = kExactly ? softmax.saved_exactly(r, own.params.scale) : softmax.saved(r);
      store(arrays.stats, 0, blank ? kNegativeInfinity : saved.row_max);
      store(arrays.stats, 1, blank ? 0.f : saved.row_sum);
    }
  }

  // O / sum, lse and stats, to global memory.
  template <bool kExactly>
  void write(float (&O)[kConfig.o_dims() / 2], const RowSoftmax<kConfig>& softmax,
             const Task& task) const {
    const Place place = own.place_of_task(task);
    float inverse[2];
    bool blank[2] = {};  // rows past the sequence's length
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = own.q_row(task, r);
      if constexpr (kConfig.sequences) blank[r] = q_row >= place.shape.q_len;
      inverse[r] = normalizer(softmax, r, own.head(task, r));
      if (own.thread % 4 == 0 && own.first_dim() == 0 && q_row < place.q_slot) {
        write_row<kExactly>(softmax, r, task, place, q_row, blank[r]);
      }
    }
    scale_rows(O, inverse);
    if constexpr (kConfig.stage_output) {
      write_staged<kExactly>(O, task);
    } else {
      write_directly(O, task, place, blank);
    }
  }

  // From registers.
  void write_directly(float (&O)[kConfig.o_dims() / 2], const Task& task, const Place& place,
                      const bool (&blank)[2]) const {
    const ArrayView& o = own.params.attention.o;
    const i32 dims = i32(own.params.attention.dim_v) - own.first_dim();
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = own.q_row(task, r);
      const bool inside = q_row < place.q_slot;
      const i64 at =
          o.offset(place.batch, own.head(task, r), place.q_begin + q_row, 0) + own.first_dim();
      if (kConfig.sequences && blank[r]) clear_row(O, r);
      if constexpr (kConfig.wide_output) {
        store_output_row(O, r, reinterpret_cast<float*>(o.data) + at, inside, dims);
      } else {
        store_output_row<kConfig.dtype>(O, r, reinterpret_cast<u16*>(o.data) + at, inside, dims);
      }
    }
  }

  // Through shared memory. kAgain: right after the first attempt at the same rows.
  template <bool kAgain>
  void write_staged(const float (&O)[kConfig.o_dims() / 2], const Task& task) const {
    const u32 tile = own.shared.o() + 64 * 128 * own.warpgroup;
    constexpr u32 kChunkBytes = 64 * kConfig.q_tiles() * 128;
    if (own.thread == 0) {  // the previous tile has left
      if (kAgain) ptx::tma_store_wait();
      ptx::tma_store_wait_read();
    }
    own.meet();
    stage_output_tile<kConfig.dtype, kConfig.swizzle>(O, tile, kChunkBytes);
    ptx::fence_proxy_async();
    own.meet();
    if (own.thread == 0) {
      for (i32 d = 0; d < kConfig.d_v; d += 64) {
        ptx::tma_store(own.maps.o, tile + d / 64 * kChunkBytes, d, task.row, task.block.head,
                       task.block.batch);
      }
      ptx::tma_store_commit();
    }
  }
};

}  // namespace fulmen
