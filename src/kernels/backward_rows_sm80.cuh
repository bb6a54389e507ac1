// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What backward_sm80 needs of every query row (Sm80Row), from the softmax that the forward pass
// kept, sinks, the gradient that arrives through lse, and D = dot(dO, O). Rows of a tile that are
// past the end of their sequence are filled up so that they count for nothing. Any dtype, stride
// and alignment. Launched with one block for each of num_q_tiles(), before backward_sm80.
#pragma once

#include "kernels/faults.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/saved_row.cuh"
#include "kernels/sm80_backward_config.h"
#include "kernels/tile/copy.cuh"
#include "kernels/tile_place.cuh"

namespace fulmen {

inline constexpr i32 kSm80RowsThreads = 256;
inline constexpr i32 kSm80ThreadsPerRow = 8;

// Number of a tile of queries among all, and of its slot.
inline i64 row_tile_number(const AttentionParams& p, i64 batch, i64 head, i64 slot, i64 num_slots) {
  return (batch * p.heads_q + head) * num_slots + slot;
}

template <Sm80BackwardConfig kConfig>
struct BackwardRowsSm80 {
  using HeadType = Head<kConfig.dtype>;
  static constexpr float kLog2E = 1.44269504088896341f;

  const AttentionParams& p;
  const HeadType& head;
  RowSource o, dout;
  bool in_units;
  i32 lane = static_cast<i32>(ptx::thread_index()) % kSm80ThreadsPerRow;  // of the row

  BackwardRowsSm80(const AttentionParams& params, const HeadType& head_)
      : p(params),
        head(head_),
        o(p.o, head.q_row(p.o, 0), head.sequence.shape.q_len, p.dim_v),
        dout(p.dout, head.q_row(p.dout, 0), head.sequence.shape.q_len, p.dim_v),
        in_units(p.o.dtype == kConfig.dtype && p.dout.dtype == kConfig.dtype && o.in_units &&
                 dout.in_units) {}

  // Sum over the eight elements of two units.
  static float unit_dot(const ptx::U32x4& a, const ptx::U32x4& b) {
    const auto number = [](u32 bits) {
      return widen(typename HeadType::Element{static_cast<u16>(bits)});
    };
    float sum = 0;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      sum = ptx::fma(number(a.word[w] & 0xffff), number(b.word[w] & 0xffff), sum);
      sum = ptx::fma(number(a.word[w] >> 16), number(b.word[w] >> 16), sum);
    }
    return sum;
  }

  // This thread's part of dot(dO, O).
  float part_of_dot(i64 i) const {
    float sum = 0;
    if (in_units) {
      const auto unit = [&](const RowSource& from, i32 d) {
        return ptx::load_global_x4(
            reinterpret_cast<const u16*>(from.data + (i * from.row_stride + d) * 2));
      };
      for (i32 d = 8 * lane; d < o.dim; d += 8 * kSm80ThreadsPerRow) {
        sum += unit_dot(unit(o, d), unit(dout, d));
      }
    } else {
      const i64 o_row = head.q_row(p.o, i), dout_row = head.q_row(p.dout, i);
      for (i64 d = lane; d < p.dim_v; d += kSm80ThreadsPerRow) {
        sum += load_real_called<float>(p.o, o_row + d * p.o.strides[3]) *
               load_real_called<float>(p.dout, dout_row + d * p.dout.strides[3]);
      }
    }
    return sum;
  }

  Sm80Row row_of(i64 i, float D) const {
    const auto state = saved_state(head, i);
    Sm80Row row{0, __builtin_bit_cast(float, 0x7f800000u), 0, 1};
    if (state.row_sum == 0) return row;
    const float dL = lse_gradient(head, i);
    row.row_max = state.row_max;
    float sum = state.row_sum;
    if (p.sinks.present()) {
      const float top = ptx::max(row.row_max, head.sink);
      const float keys = sum * ptx::exp2((row.row_max - top) * kLog2E);
      const float total = keys + ptx::exp2((head.sink - top) * kLog2E);
      if constexpr (kConfig.split_sum) {
        row.share = keys / total;
      } else {
        row.row_max = top;
        sum = total;
      }
    }
    row.sum_log2 = ptx::log2(sum);
    if (state.row_max != state.row_max) row.sum_log2 = state.row_max;  // NaN reaches every pair
    row.offset = dL - row.share * D;
    return row;
  }

  // The rows of the tile that begins at row `first`.
  void run(i64 first, Sm80Row* rows) const {
    constexpr i32 kStep = kSm80RowsThreads / kSm80ThreadsPerRow;
    const i32 thread = static_cast<i32>(ptx::thread_index()) / kSm80ThreadsPerRow;
#pragma unroll 2
    for (i32 r = thread; r < (kConfig.rows + kStep - 1) / kStep * kStep; r += kStep) {
      const bool counts = r < kConfig.rows && first + r < head.sequence.shape.q_len;
      float D = counts ? part_of_dot(first + r) : 0;
#pragma unroll
      for (u32 distance = 1; distance < kSm80ThreadsPerRow; distance *= 2) {
        D += ptx::shuffle_xor(D, distance);
      }
      if (lane != 0 || r >= kConfig.rows) continue;
      rows[r] =
          counts ? row_of(first + r, D) : Sm80Row{0, __builtin_bit_cast(float, 0x7f800000u), 0, 1};
    }
  }
};

template <Sm80BackwardConfig kConfig>
void backward_rows_sm80(const Sm80BackwardParams& params) {
  const AttentionParams& p = params.attention;
  record_faults(p, kSm80RowsThreads);
  const i64 num_slots = num_tile_slots(p, p.q_rows, kConfig.rows);
  const TileTask task =
      tile_task(ptx::block_index(), p.batch_extent(), p.heads_q, num_slots, false);
  const TilePlace place = find_tile(p, p.cu_q, task, kConfig.rows);
  if (place.first_row < 0) return;  // offsets out of order
  const Head<kConfig.dtype> head(p, place.index, task.head);
  const i64 tile = row_tile_number(p, task.batch, task.head, task.slot, num_slots);
  BackwardRowsSm80<kConfig>(p, head).run(place.first_row, params.rows + tile * kConfig.rows);
}

}  // namespace fulmen
