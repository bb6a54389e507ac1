// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// e4m3 of 16-bit q, k and v, for precision "fp8":
//
//   k' = R (k - c) / k_scale    c: a constant of each head and dim, the mean of a sample of keys
//   q' = R q / q_scale          R: Hadamard, orthogonal: it spreads what single dims have
//   v' = v / v_scale            scales: of each head
//
// The softmax of q k differs from that of q (k - c) by a constant of each row alone, so o is the
// same and lse larger by scale q c. Rows past a length are not read. A sample decides c and the
// scales; every number is then looked at, and where one does not fit (config.h), or is not finite,
// `unfit` says so, and forward_sm90 computes the call again from 16 bits. So whatever hidden keys
// hold, the result is that of numbers that e4m3 serves, or that of 16 bits.
#pragma once

#include "kernels/common/sequences.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/quantise/config.h"
#include "kernels/quantise/rows.cuh"

namespace fulmen {

// Rows of q, or of k and v, that count, of a batch entry of the arrays: the first so many.
template <QuantiseConfig kConfig>
inline i32 rows_in_use(const AttentionParams& p, i64 batch, bool of_keys) {
  const i64 extent = of_keys ? p.kv_rows : p.q_rows;
  if constexpr (!kConfig.varlen) return i32(extent);
  const ArrayView& offsets = of_keys ? p.cu_kv : p.cu_q;
  if (offsets.present()) {
    return i32(clamp<i64>(load_index(offsets, p.num_sequences * offsets.strides[3]), 0, extent));
  }
  const ArrayView& lengths = of_keys ? p.kv_lengths : p.q_lengths;
  return i32(rows_of(axis_entry(offsets, lengths, batch), extent, false).length);
}

template <QuantiseConfig kConfig, i32 kDim>
using OperandRows = SourceRows<kConfig.dtype, kDim, true>;
template <QuantiseConfig kConfig, i32 kDim>
inline OperandRows<kConfig, kDim> rows_of_head(const ArrayView& array, i64 batch, i64 head) {
  return {array.data + array.offset(batch, head, 0, 0) * i64{sizeof(u16)}, array.strides[2]};
}

// ---- A sample ----------------------------------------------------------------------------------

// The number that scales `largest` to `to`; 1 where nothing is known.
inline float scale_of(float largest, float to) { return largest > 0 ? largest / to : 1.f; }

// A block for each head of q and each of k and v, of a batch entry each.
template <QuantiseConfig kConfig>
inline void sample_operands(const QuantiseParams& params) {
  const AttentionParams& p = params.attention;
  const u32 shared = ptx::dynamic_shared();
  const i64 of_keys = params.kv_batch() * p.heads_kv;
  const i64 index = ptx::block_index();
  const bool is_first = ptx::thread_index() == 0;
  if (index < of_keys) {
    const i64 batch = index / p.heads_kv, head = index % p.heads_kv;
    const i32 rows = rows_in_use<kConfig>(p, batch, true);
    const RowSample<OperandRows<kConfig, kConfig.d_qk>> keys{
        rows_of_head<kConfig, kConfig.d_qk>(p.k, batch, head), rows, shared};
    const float mean = keys.find_constant(params.keeps_constant);
    const i32 dim = i32(ptx::thread_index());
    if (dim < kConfig.d_qk) params.constant[index * kConfig.d_qk + dim] = mean;
    const float norm = keys.largest_norm(keys.constant());
    const RowSample<OperandRows<kConfig, kConfig.d_v>> values{
        rows_of_head<kConfig, kConfig.d_v>(p.v, batch, head), rows, shared};
    const float value = values.largest_number();
    if (!is_first) return;
    params.k_scale[index] = scale_of(norm, kLargestE4M3);
    params.v_scale[index] = scale_of(value, kSampledValue);
  } else {
    const i64 batch = (index - of_keys) / p.heads_q, head = (index - of_keys) % p.heads_q;
    const RowSample<OperandRows<kConfig, kConfig.d_qk>> queries{
        rows_of_head<kConfig, kConfig.d_qk>(p.q, batch, head),
        rows_in_use<kConfig>(p, batch, false), shared};
    const float norm = queries.largest_norm({});
    if (is_first) params.q_scale[index - of_keys] = scale_of(norm, kLargestE4M3);
  }
}

// ---- All rows ----------------------------------------------------------------------------------

enum class OperandKind : u8 { kQuery, kKey, kValue };

// Rows of a head that a block has.
template <QuantiseConfig kConfig, OperandKind kKind>
struct QuantisedRows {
  static constexpr bool kIsValue = kKind == OperandKind::kValue;
  static constexpr i32 kDim = kIsValue ? kConfig.d_v : kConfig.d_qk;
  static constexpr i32 kLanes = RowLanes::lanes(kDim);
  static constexpr i32 kElements = RowLanes::elements(kDim);
  static constexpr i32 kSlots = RowLanes::kThreads / kLanes;
  using Part = RowPart<kElements>;

  const QuantiseParams& params;
  i64 head_index;  // batch * heads + head
  i64 kv_index;    // of its key head
  OperandRows<kConfig, kDim> source;
  u8* target;  // of the head
  i64 extent;  // rows of the array
  i32 rows;    // that count
  float scale;

  void run(i32 first) const {
    const i32 lane = i32(ptx::thread_index()) % kLanes;
    const i32 column = lane * kElements;
    const bool has_columns = column < kDim;
    const float inverse = (kIsValue ? 1.f : inverse_root(rotated_dims(kDim))) / scale;
    Part constant{};
    if (!kIsValue && has_columns) {
#pragma unroll
      for (i32 i = 0; i < kElements; ++i) {
        constant.x[i] = params.constant[kv_index * kConfig.d_qk + column + i];
      }
    }
    const i32 first_row = first + i32(ptx::thread_index()) / kLanes;
    Part parts[RowLanes::kRowsOfThread] = {};
#pragma unroll
    for (i32 step = 0; step < RowLanes::kRowsOfThread; ++step) {
      const i64 row = first_row + step * kSlots;
      if (row < rows) parts[step] = source.load(row, column);
    }
    bool fits = true;
#pragma unroll
    for (i32 step = 0; step < RowLanes::kRowsOfThread; ++step) {
      const i32 row = first_row + step * kSlots;
      const bool counts = row < rows;
      Part& part = parts[step];
      fits = quantise(part, constant, row, lane, counts) && fits;
      if (counts && has_columns) {
#pragma unroll
        for (i32 i = 0; i < kElements; ++i) {
          part.x[i] *= inverse;
          fits = fits && ptx::abs(part.x[i]) <= kLargestE4M3;
        }
        const u64 low = ptx::pack_e4m3(part.x[0], part.x[1], part.x[2], part.x[3]);
        const u64 high = ptx::pack_e4m3(part.x[4], part.x[5], part.x[6], part.x[7]);
        *reinterpret_cast<u64*>(target + i64{row} * kDim + column) = high << 32 | low;
      }
    }
    if (ptx::any(!fits) && ptx::thread_index() % 32 == 0) *params.unfit = 1;
  }

 private:
  // What comes before the scale. Whether e4m3 serves the row, but for its largest number.
  bool quantise(Part& part, const Part& constant, i32 row, i32 lane, bool counts) const {
    const float largest = largest_of_lanes<kLanes>(part.largest());
    if constexpr (kIsValue) return largest == 0 || largest >= kSmallestValue * scale;
    float square = sum_of_lanes<kLanes>(part.square());
    bool fits = true;
    if constexpr (kKind == OperandKind::kQuery) {
      if (params.difference != nullptr) {
        const float dot = sum_of_lanes<kLanes>(part.dot(constant));
        if (counts && lane == 0) params.difference[head_index * extent + row] = params.scale * dot;
      }
    } else {
      if (counts) part.subtract(constant);
      const float rest = sum_of_lanes<kLanes>(part.square());
      fits = rest <= 4 * square;  // c takes more off the row than it adds
      square = rest;
    }
    const float least = kSmallestNorm * scale;
    part.template rotate<rotated_dims(kDim)>();
    return fits && (largest == 0 || square >= least * least);
  }
};

// A block for block_rows() rows of a head: of q, then of k, then of v.
template <QuantiseConfig kConfig>
inline void quantise_operands(const QuantiseParams& params) {
  const AttentionParams& p = params.attention;
  i64 block = ptx::block_index();
  const auto run = [&]<OperandKind kKind>(const ArrayView& array, i64 batch_extent, i64 heads,
                                          i64 extent, u8* target, const float* scales) {
    using Rows = QuantisedRows<kConfig, kKind>;
    constexpr i32 kBlockRows = RowLanes::block_rows(Rows::kDim);
    const i64 of_head = ceil_div(extent, i64{kBlockRows});
    if (block >= of_head * heads * batch_extent) {
      block -= of_head * heads * batch_extent;
      return false;
    }
    const i64 index = block / of_head, batch = index / heads, head = index % heads;
    const bool is_query = kKind == OperandKind::kQuery;
    const i64 kv_index =
        is_query ? (p.packed.kv ? 0 : batch) * p.heads_kv + head / p.group_size() : index;
    const Rows rows{params,
                    index,
                    kv_index,
                    rows_of_head<kConfig, Rows::kDim>(array, batch, head),
                    target + index * extent * Rows::kDim,
                    extent,
                    rows_in_use<kConfig>(p, batch, !is_query),
                    scales[index]};
    rows.run(i32(block % of_head) * kBlockRows);
    return true;
  };
  if (run.template operator()<OperandKind::kQuery>(p.q, params.q_batch(), p.heads_q, p.q_rows,
                                                   params.q, params.q_scale) ||
      run.template operator()<OperandKind::kKey>(p.k, params.kv_batch(), p.heads_kv, p.kv_rows,
                                                 params.k, params.k_scale)) {
    return;
  }
  run.template operator()<OperandKind::kValue>(p.v, params.kv_batch(), p.heads_kv, p.kv_rows,
                                               params.v, params.v_scale);
}

// lse of scores before the constant was taken off k.
template <QuantiseConfig kConfig>
inline void restore_constant(const QuantiseParams& params) {
  const AttentionParams& p = params.attention;
  const i64 number = i64{ptx::block_index()} * RowLanes::kThreads + ptx::thread_index();
  if (number >= params.q_batch() * p.heads_q * p.q_rows) return;
  const i64 row = number % p.q_rows, head = number / p.q_rows % p.heads_q;
  const i64 batch = number / p.q_rows / p.heads_q;
  float& lse = reinterpret_cast<float*>(p.lse.data)[p.lse.offset(batch, head, row, 0)];
  if (lse != -kInfinity<float>) lse += params.difference[number];  // else nothing was seen
}

}  // namespace fulmen
