// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of callers' arrays as the tiled kernels want them: taken where they lie when that is the
// working type with unit stride, else loaded into scratch; and which rows a task works on.
//
// The tasks of a tiled pass: blocks of consecutive rows (of q, or of k and v) of every head of
// every sequence, numbered through. The table of first blocks is made at the start of a run, from
// lengths that may have changed since the plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/problem.h"
#include "cpu/kernels.h"
#include "plan/plan.h"

namespace fulmen::cpu {

template <class Real>
inline constexpr DType kDTypeOf = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;

inline Source source_of(const Tensor& tensor, i64 batch, i64 head, i64 row) {
  return {tensor.address(batch, head, row, 0), tensor.dtype, tensor.strides[2], tensor.strides[3]};
}

// The same of quantised rows, with their scales where there are any.
inline Source source_of(const Tensor& tensor, const Tensor& scales, i64 batch, i64 head, i64 row) {
  Source source = source_of(tensor, batch, head, row);
  if (scales.present()) {
    source.scales = scales.address(batch, head, row, 0);
    source.scale_stride = scales.strides[2];
  }
  return source;
}

inline Source query_source(const Problem& problem, i64 batch, i64 head, i64 row) {
  return source_of(problem.arrays[Array::kQ], problem.arrays[Array::kQScale], batch, head, row);
}

// The rows of a source from one of them on.
inline Source rows_from(Source source, i64 row) {
  source.data =
      static_cast<const char*>(source.data) + row * source.row_stride * size_bytes(source.dtype);
  if (source.scales) source.scales += row * source.scale_stride * static_cast<i64>(sizeof(float));
  return source;
}

inline Destination destination_of(const Tensor& tensor, i64 batch, i64 head, i64 row) {
  return {tensor.address(batch, head, row, 0), tensor.dtype, tensor.strides[2], tensor.strides[3]};
}

// How rows will be read: element by element, or in whole panels of lanes, which must then exist.
enum class Reads { kElements, kPanels };

template <class Real>
View<Real> rows_of(const Kernels<Real>& kernels, const Source& source, i64 rows, i64 dims,
                   Reads reads, Real* scratch, i64 scratch_stride) {
  const bool is_working_type = source.dtype == kDTypeOf<Real> &&
                               (source.dim_stride == 1 || dims <= 1) &&
                               reinterpret_cast<std::uintptr_t>(source.data) % sizeof(Real) == 0;
  if (is_working_type && (reads == Reads::kElements || dims % kernels.lanes == 0)) {
    return {static_cast<const Real*>(source.data), source.row_stride};
  }
  kernels.load_rows(source, rows, dims, scratch, scratch_stride);
  return {scratch, scratch_stride};
}

// rows [0, rows) of the destination = 0
template <class Real>
void clear_rows(const Kernels<Real>& kernels, const Destination& destination, i64 rows, i64 dims) {
  constexpr i64 kAtOnce = 64;
  alignas(64) const Real zeros[kAtOnce] = {};
  const Real one = 1;
  for (i64 d = 0; d < dims; d += kAtOnce) {
    Destination part = destination;
    part.data = static_cast<char*>(part.data) + d * part.dim_stride * size_bytes(part.dtype);
    kernels.store_rows({zeros, 0}, rows, min(kAtOnce, dims - d), &one, 0, part);
  }
}

// rows [0, rows) of a gradient = factor sums; with accumulate, where the destination has the
// working type, += those.
template <class Real>
void give_rows(const Kernels<Real>& kernels, const Problem& problem, View<Real> sums, i64 rows,
               i64 dims, Real factor, const Destination& to) {
  if (!problem.accumulate) return kernels.store_rows(sums, rows, dims, &factor, 0, to);
  for (i64 i = 0; i < rows; ++i) {
    char* const row = static_cast<char*>(to.data) + i * to.row_stride * i64{sizeof(Real)};
    for (i64 d = 0; d < dims; ++d) {
      char* const at = row + d * to.dim_stride * i64{sizeof(Real)};
      Real sum;
      std::memcpy(&sum, at, sizeof(Real));  // at any address
      sum += factor * sums.data[i * sums.stride + d];
      std::memcpy(at, &sum, sizeof(Real));
    }
  }
}

// The same of rows that nothing is known of: 0.
template <class Real>
void give_nothing(const Kernels<Real>& kernels, const Problem& problem, i64 rows, i64 dims,
                  const Destination& to) {
  if (!problem.accumulate) clear_rows(kernels, to, rows, dims);
}

enum class Side { kQuery, kKey };

// first[s] = number of blocks of the sequences before s; returns the number of all.
// Blocks cover the rows that a sequence owns, also those past its length, which are zero-filled.
inline i64 number_blocks(const Problem& problem, Side side, i64 block_rows, i64* first) {
  i64 blocks = 0;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const Sequence sequence = problem.sequence(index);
    first[index] = blocks;
    blocks += ceil_div(side == Side::kQuery ? sequence.q_slot : sequence.kv_slot, block_rows);
  }
  first[problem.num_sequences] = blocks;
  return blocks;
}

struct HeadBlock {
  i64 sequence_index;
  i64 head;
  i64 block;       // within its sequence
  i64 num_blocks;  // of its sequence
};

inline i64 sequence_of(const i64* first, i64 num_sequences, i64 block) {
  return std::upper_bound(first, first + num_sequences + 1, block) - first - 1;
}

// All blocks of a head together, its last block first: with causal masks that one sees most keys,
// and the longest tasks must not come last.
inline HeadBlock head_by_head(const Problem& problem, const i64* first, i64 heads, i64 task) {
  const i64 index = sequence_of(first, problem.num_sequences, task / heads);
  const i64 num_blocks = first[index + 1] - first[index];
  const i64 local = task - first[index] * heads;
  return {index, local / num_blocks, num_blocks - 1 - local % num_blocks, num_blocks};
}

// Block 0 of every head, then block 1 of every head, and so on.
inline HeadBlock block_by_block(const Problem& problem, const i64* first, i64 heads, i64 task) {
  const i64 index = sequence_of(first, problem.num_sequences, task / heads);
  const i64 local = task - first[index] * heads;
  return {index, local % heads, local / heads, first[index + 1] - first[index]};
}

// Slots that a pass is worth: one, on the caller's thread, where waking others would take longer
// than the work (about 20 microseconds of arithmetic).
inline int slots_for(const Plan& plan, const Problem& problem, i64 num_tasks) {
  constexpr double kWorthSharing = 1e6;  // multiply-adds
  const double pairs = static_cast<double>(problem.q_rows) * static_cast<double>(problem.max_kv) *
                       static_cast<double>(problem.heads_q) *
                       static_cast<double>(problem.batch_extent());
  const double adds = pairs * static_cast<double>(problem.dim_qk + problem.dim_v);
  if (adds < kWorthSharing) return 1;
  return static_cast<int>(min<i64>(plan.device.num_threads, num_tasks));
}

// Rows of block `block`, those within `length` of them.
inline Interval rows_of_block(i64 block, i64 block_rows, i64 length) {
  return clamped(block * block_rows, (block + 1) * block_rows, length);
}

}  // namespace fulmen::cpu
