// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What backward_sm90 needs of every query row: delta = sum over dim of dO O, less dlse, and the
// row's softmax in base 2; rows up to the next multiple of kFinishRows are filled up so that they
// count for nothing. Also clears the sums of dQ and the counters. Runs on any GPU; a row is read by
// threads_per_row() neighbouring threads, 16 bytes each.
#pragma once

#include "kernels/backward_config.h"
#include "kernels/faults.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/sequences.cuh"

namespace fulmen {

template <BackwardPrepareConfig kConfig>
struct BackwardPrepare {
  static constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
  static constexpr float kLog2E = 1.44269504088896340736f;
  static constexpr i32 kRowsInFlight = 4;

  struct Row {
    u32 batch, head, row;
    bool inside;
  };

  const BackwardPrepareParams& params;
  i32 lane;  // of the row

  Row row_at(u32 index) const {
    if constexpr (kConfig.sequences) return sequence_row_at(index);
    const u32 line = index / u32(params.padded_q_rows);
    const u32 row = index - line * params.padded_q_rows;
    const u32 batch = line / u32(params.heads_q);
    return {batch, line - batch * params.heads_q, row,
            index < u32(params.num_rows) && row < u32(params.q_len)};
  }

  // The same where sequences differ: which one a padded row belongs to, and whether it is one of
  // its rows.
  Row sequence_row_at(u32 index) const {
    const AttentionParams& p = params.attention;
    if (index >= u32(params.num_rows)) return {0, 0, 0, false};
    const u32 line = index / u32(params.padded_q_rows);
    const i64 padded = index - line * params.padded_q_rows;
    const u32 head = line % u32(params.heads_q);
    i64 low = p.packed ? 0 : line / u32(params.heads_q);
    i64 high = p.packed ? p.num_sequences - 1 : low;
    while (low < high) {  // the last one that begins at or before it
      const i64 middle = (low + high + 1) / 2;
      const i64 begin = load_index(p.cu_q, middle * p.cu_q.strides[3]);
      if (padded_row(true, middle, begin) <= padded) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const Sequence sequence = load_sequence(p, low);
    const i64 row = padded - padded_row(p.packed, low, sequence.q_begin);
    return {u32(sequence.batch), head, u32(sequence.q_begin + row),
            0 <= row && row < sequence.shape.q_len};
  }

  // Rows of dq, dk and dv that belong to nobody are 0; the main kernel writes all others again.
  void clear(const ArrayView& x, i64 heads, i64 rows, i64 dims, i64 id, i64 all) const {
    if (!x.present()) return;
    const i64 units = dims / 8;  // of 16 bytes
    const i64 count = params.attention.batch_extent() * heads * rows * units;
    for (i64 i = id; i < count; i += all) {
      const i64 line = i / units / rows;
      const i64 at = x.offset(line / heads, line % heads, i / units % rows, i % units * 8);
      ptx::store_global_x4(reinterpret_cast<u16*>(x.data) + at, {});
    }
  }

  static float to_float(u32 bits) {
    if constexpr (kConfig.dtype == DType::kBFloat16) {
      return fulmen::to_float(bf16{u16(bits)});
    } else {
      return fulmen::to_float(f16{u16(bits)});
    }
  }

  // Sum over the eight elements of two 16-byte vectors.
  static float dot(const ptx::U32x4& a, const ptx::U32x4& b) {
    float sum = 0;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      sum = ptx::fma(to_float(a.word[w] & 0xffff), to_float(b.word[w] & 0xffff), sum);
      sum = ptx::fma(to_float(a.word[w] >> 16), to_float(b.word[w] >> 16), sum);
    }
    return sum;
  }

  void write(u32 index, const Row& at, float delta) const {
    if (at.inside && params.dlse != nullptr) {
      delta -= params.dlse[at.batch * params.dlse_stride_batch + at.head * params.dlse_stride_head +
                           at.row * params.dlse_stride_row];
    }
    params.delta[index] = at.inside ? delta : 0.f;
    const float* kept = params.kept + at.batch * params.kept_stride_batch +
                        at.head * params.kept_stride_head + at.row * params.kept_stride_row;
    if constexpr (kConfig.has_stats) {
      float row_max = at.inside ? kept[0] : 0.f;
      float row_sum = at.inside ? kept[params.kept_stride_part] : 0.f;
      const bool sees_nothing = row_sum == 0;
      if constexpr (kConfig.sinks) {
        const float sink = sink_of(at.head);
        const float top = ptx::max(row_max, sink);
        row_sum = row_sum * ptx::exp2((row_max - top) * kLog2E) + ptx::exp2((sink - top) * kLog2E);
        row_max = top;
      }
      const bool is_huge = !sees_nothing && !(-kHugeScore <= row_max && row_max <= kHugeScore);
      const float total = ptx::fma(is_huge ? 0.f : row_max, kLog2E, ptx::log2(row_sum));
      params.rows[kept_row(index)] = sees_nothing ? kInfinity : total;
      params.rows[kept_row(index) + kKeptBlock] = is_huge ? row_max : 0.f;
    } else {
      const float lse = at.inside ? *kept : -kInfinity;
      float total = lse * kLog2E;
      if constexpr (kConfig.sinks) {
        const float sink = sink_of(at.head) * kLog2E;
        const float top = ptx::max(total, sink);
        total = top + ptx::log2(ptx::exp2(total - top) + ptx::exp2(sink - top));
      }
      params.rows[index] = lse == -kInfinity ? kInfinity : total;
    }
  }

  float sink_of(u32 head) const {
    const ArrayView& sinks = params.attention.sinks;
    return load_real<float>(sinks, sinks.offset(0, head, 0, 0));
  }

  void run() const {
    constexpr i32 kThreadsPerRow = kConfig.threads_per_row();
    const i64 id = i64(ptx::block_index()) * kConfig.kThreads + ptx::thread_index();
    const i64 all = i64(ptx::num_blocks()) * kConfig.kThreads;
    for (i64 i = id; i < params.num_zeros; i += all)
      ptx::store_global_x4(reinterpret_cast<u16*>(params.zeros + 4 * i), {});
    if constexpr (kConfig.sequences) {
      const AttentionParams& p = params.attention;
      clear(p.dq, p.heads_q, p.q_rows, p.dim_qk, id, all);
      clear(p.dk, p.heads_kv, p.kv_rows, p.dim_qk, id, all);
      clear(p.dv, p.heads_kv, p.kv_rows, p.dim_v, id, all);
    }
    const u32 step = u32(all) / kThreadsPerRow;
    for (u32 begin = u32(id) / kThreadsPerRow; begin < u32(params.num_rows);
         begin += step * kRowsInFlight) {
      Row rows[kRowsInFlight];
      ptx::U32x4 o[kRowsInFlight], dout[kRowsInFlight];
#pragma unroll
      for (i32 i = 0; i < kRowsInFlight; ++i) {
        rows[i] = row_at(begin + i * step);
        o[i] = dout[i] = {};
        if (!rows[i].inside || lane * 8 >= params.dim_v) continue;
        o[i] = ptx::load_global_x4(params.o + rows[i].batch * params.o_stride_batch +
                                   rows[i].head * params.o_stride_head +
                                   rows[i].row * params.o_stride_row + lane * 8);
        dout[i] = ptx::load_global_x4(params.dout + rows[i].batch * params.dout_stride_batch +
                                      rows[i].head * params.dout_stride_head +
                                      rows[i].row * params.dout_stride_row + lane * 8);
      }
#pragma unroll
      for (i32 i = 0; i < kRowsInFlight; ++i) {
        float sum = dot(o[i], dout[i]);
#pragma unroll
        for (i32 distance = 1; distance < kThreadsPerRow; distance *= 2) {
          sum += ptx::shuffle_xor(sum, distance);
        }
        if (lane == 0 && begin + i * step < u32(params.num_rows))
          write(begin + i * step, rows[i], sum);
      }
    }
  }
};

// Launched with threads() threads a block, any number of blocks. The loop's trip count is the same
// for all threads of a row but not of a warp, so num_rows is a multiple of 32.
template <BackwardPrepareConfig kConfig>
inline void backward_prepare_sm90(const BackwardPrepareParams& params) {
  ptx::grid_dependents_launch();
  if constexpr (kConfig.sequences) record_faults(params.attention, kConfig.threads());
  BackwardPrepare<kConfig>{params, i32(ptx::thread_index()) % kConfig.threads_per_row()}.run();
}

}  // namespace fulmen
