// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// fulmen_quantise (kernels/attention/quantisation.cuh): values = R (x - c) / scale. Three kernels,
// of which a call launches those that it needs:
//
//   start_quantisation   c of each head, by a sample of its rows; scales are the least that may be
//   find_scales          scales of heads and dims become those of their largest numbers
//   quantise_array       values, and where each row has a scale those
#pragma once

#include "kernels/common/faults.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/quantise/config.h"
#include "kernels/quantise/rows.cuh"

namespace fulmen {

// The rows of a batch entry that count. A length that is out of range counts as 0, and the host is
// told.
inline i32 rows_that_count(const QuantiseArrayParams& p, i64 batch) {
  if (!p.lengths.present()) return i32(p.extents.rows);
  const i64 length = load_index(p.lengths, p.lengths.offset(0, 0, 0, batch));
  if (length >= 0 && length <= p.extents.rows) return i32(length);
  report(p.faults, kFaultKvLengths);
  return 0;
}

// A scale by which the largest number of a group fits.
inline float scale_for(float largest, float part) { return ptx::max(kLeastScale, largest * part); }

template <QuantiseArrayConfig kConfig>
struct ArrayRows {
  using Source = SourceRows<kConfig.dtype, kConfig.dim, kConfig.vectors>;
  using Stored = typename ElementOf<kConfig.values>::Type;
  static constexpr i32 kElements = Source::kElements;
  static constexpr i32 kLanes = RowLanes::lanes(kConfig.dim);
  static constexpr i32 kSlots = RowLanes::kThreads / kLanes;
  static constexpr bool kHasScales = is_quantised(kConfig.values);
  using Part = RowPart<kElements>;

  const QuantiseArrayParams& p;
  i64 batch, head;
  i32 rows;   // that count
  i32 first;  // of the block
  Part constant{};

  static Source source_of(const QuantiseArrayParams& p, i64 batch, i64 head) {
    const i64 size = size_bytes(kConfig.dtype);
    return {p.x.data + p.x.offset(batch, head, 0, 0) * size, p.x.strides[2], p.x.strides[3]};
  }
  // A block for block_rows() rows of a head.
  explicit ArrayRows(const QuantiseArrayParams& params) : p(params) {
    constexpr i32 kBlockRows = RowLanes::block_rows(kConfig.dim);
    const i64 of_head = ceil_div(p.extents.rows, i64{kBlockRows});
    const i64 index = ptx::block_index() / of_head;
    batch = index / p.extents.heads;
    head = index % p.extents.heads;
    rows = rows_that_count(p, batch);
    first = i32(ptx::block_index() % of_head) * kBlockRows;
    if (!p.constant.present()) return;
    for_each_dim([&](i32 i) {
      constant.x[i] = load_element<float>(p.constant.data +
                                          4 * p.constant.offset(batch, head, 0, column() + i));
    });
  }

  static i32 column() { return i32(ptx::thread_index()) % kLanes * kElements; }
  i32 row_of(i32 step) const { return first + i32(ptx::thread_index()) / kLanes + step * kSlots; }
  template <class Each>
  static void for_each_dim(const Each& each) {
#pragma unroll
    for (i32 i = 0; i < kElements; ++i) {
      if (column() + i < kConfig.dim) each(i);
    }
  }

  // R (x - c) of all rows of the thread; of those that do not count zeros.
  void load(Part (&parts)[RowLanes::kRowsOfThread]) const {
    const Source source = source_of(p, batch, head);
#pragma unroll
    for (i32 step = 0; step < RowLanes::kRowsOfThread; ++step) {
      parts[step] = row_of(step) < rows ? source.load(row_of(step), column()) : Part{};
    }
#pragma unroll
    for (i32 step = 0; step < RowLanes::kRowsOfThread; ++step) {
      if (row_of(step) < rows) parts[step].subtract(constant);
      if constexpr (kConfig.rotate) {
        constexpr i32 kDims = rotated_dims(kConfig.dim);
        parts[step].template rotate<kDims>();
        for_each_dim([&](i32 i) { parts[step].x[i] *= inverse_root(kDims); });
      }
    }
  }

  float* scale_at(i32 row, i32 dim) const {
    return reinterpret_cast<float*>(p.scale.data) + p.scale.offset(batch, head, row, dim);
  }

  void store(const Part& part, i32 row, float scale) const {
    u8* const address =
        p.values.data + p.values.offset(batch, head, row, column()) * i64{sizeof(Stored)};
    struct Row {
      Stored x[kElements];
    } stored;
#pragma unroll
    for (i32 i = 0; i < kElements; ++i) {
      float by = scale;
      if (kHasScales && p.extents.scales_dims && column() + i < kConfig.dim) {
        by = *scale_at(row, column() + i);
      }
      stored.x[i] = narrow(kHasScales ? part.x[i] / by : part.x[i], Stored{});
    }
    if constexpr (kConfig.vectors) {
      if (column() >= kConfig.dim) return;
      struct Words {
        u64 word[kElements * sizeof(Stored) / 8];
      };
      const Words words = __builtin_bit_cast(Words, stored);
#pragma unroll
      for (u32 w = 0; w < kElements * sizeof(Stored) / 8; ++w) {
        reinterpret_cast<u64*>(address)[w] = words.word[w];
      }
    } else {
      for_each_dim([&](i32 i) {
        store_element(address + i * p.values.strides[3] * i64{sizeof(Stored)}, stored.x[i]);
      });
    }
  }
};

// A block for each head of a batch entry.
template <QuantiseArrayConfig kConfig>
inline void start_quantisation(const QuantiseArrayParams& p) {
  using Rows = ArrayRows<kConfig>;
  const i64 batch = ptx::block_index() / p.extents.heads,
            head = ptx::block_index() % p.extents.heads;
  const i32 thread = i32(ptx::thread_index());
  if (p.extents.find_constant) {
    const RowSample<typename Rows::Source> sample{Rows::source_of(p, batch, head),
                                                  rows_that_count(p, batch), ptx::dynamic_shared()};
    const float mean = sample.find_constant(false);
    if (thread < kConfig.dim) {
      store_element(p.constant.data + 4 * p.constant.offset(batch, head, 0, thread), mean);
    }
  }
  // Each number that heads share has one that begins it.
  const bool begins =
      (batch == 0 || p.scale.strides[0] != 0) && (head == 0 || p.scale.strides[1] != 0);
  if (!p.extents.find_scale || p.extents.scales_rows || !begins) return;
  if (thread < (p.extents.scales_dims ? kConfig.dim : 1)) {
    reinterpret_cast<float*>(p.scale.data)[p.scale.offset(batch, head, 0, thread)] = kLeastScale;
  }
}

// Scales that rows share.
template <QuantiseArrayConfig kConfig>
inline void find_scales(const QuantiseArrayParams& p) {
  using Rows = ArrayRows<kConfig>;
  const Rows block(p);
  typename Rows::Part parts[RowLanes::kRowsOfThread];
  block.load(parts);
  typename Rows::Part most{};
#pragma unroll
  for (i32 step = 0; step < RowLanes::kRowsOfThread; ++step) most.raise_to(parts[step]);
  const i32 lane = i32(ptx::thread_index()) % 32;
  if (p.extents.scales_dims) {
#pragma unroll
    for (i32 distance = Rows::kLanes; distance < 32; distance *= 2) {
#pragma unroll
      for (i32 i = 0; i < Rows::kElements; ++i) {
        most.x[i] = ptx::max(most.x[i], ptx::shuffle_xor(most.x[i], u32(distance)));
      }
    }
    if (lane >= Rows::kLanes) return;
    Rows::for_each_dim([&](i32 i) {
      ptx::raise_to(block.scale_at(0, Rows::column() + i), scale_for(most.x[i], p.extents.part));
    });
  } else {
    const float largest = largest_of_lanes<32>(most.largest());
    if (lane == 0) ptx::raise_to(block.scale_at(0, 0), scale_for(largest, p.extents.part));
  }
}

template <QuantiseArrayConfig kConfig>
inline void quantise_array(const QuantiseArrayParams& p) {
  using Rows = ArrayRows<kConfig>;
  const Rows block(p);
  typename Rows::Part parts[RowLanes::kRowsOfThread];
  block.load(parts);
#pragma unroll
  for (i32 step = 0; step < RowLanes::kRowsOfThread; ++step) {
    const i32 row = block.row_of(step);
    const bool finds = p.extents.find_scale && p.extents.scales_rows;
    float scale = 1;
    if (Rows::kHasScales && finds) {
      typename Rows::Part most{};
      most.raise_to(parts[step]);
      scale = scale_for(largest_of_lanes<Rows::kLanes>(most.largest()), p.extents.part);
    }
    if (row >= p.extents.rows) continue;
    if constexpr (Rows::kHasScales) {
      if (finds) {
        if (Rows::column() == 0) *block.scale_at(row, 0) = scale;
      } else if (p.scale.present() && !p.extents.scales_dims) {
        scale = load_element<float>(reinterpret_cast<const u8*>(block.scale_at(row, 0)));
      }
    }
    block.store(parts[step], row, scale);
  }
}

}  // namespace fulmen
