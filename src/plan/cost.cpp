// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a problem costs in arithmetic and in bytes: the two sides of its roofline.

#include "plan/plan.h"

namespace fulmen {
namespace {

// Sum over rows of the size of the visible interval.
double visible_pairs(const IntervalMask& mask, const SequenceShape& shape) {
  const bool all = !mask.causal && mask.window_left == kNoLimit && mask.window_right == kNoLimit &&
                   mask.chunk == 0;
  if (all) return static_cast<double>(shape.q_len) * static_cast<double>(shape.kv_len);
  double pairs = 0;
  for (i64 i = 0; i < shape.q_len; ++i) {
    pairs += static_cast<double>(visible_columns(mask, shape, i).size());
  }
  return pairs;
}

// Bytes that an array spans, counting a broadcast axis once.
double distinct_bytes(const Tensor& tensor) {
  if (!tensor.present()) return 0;
  double count = static_cast<double>(size_bytes(tensor.dtype));
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.strides[axis] != 0 || tensor.shape[axis] == 0) {
      count *= static_cast<double>(tensor.shape[axis]);
    }
  }
  return count;
}

}  // namespace

Cost cost(const Problem& problem) {
  const i64 shift =
      problem.alignment == Alignment::kBottomRight ? problem.max_kv - problem.max_q : 0;
  const SequenceShape longest{static_cast<i32>(problem.max_q), static_cast<i32>(problem.max_kv),
                              static_cast<i32>(shift)};
  double pairs = visible_pairs(problem.mask, longest) * static_cast<double>(problem.heads_q);
  if (!problem.packed) {
    pairs *= static_cast<double>(problem.num_sequences);
  } else if (problem.max_q > 0) {  // as many longest sequences as the rows hold
    pairs *= static_cast<double>(problem.q_rows) / static_cast<double>(problem.max_q);
  }
  Cost total;
  total.pairs = pairs;
  const double passes = problem.operation == Operation::kForward ? 1.0 : 2.5;
  total.flops = passes * 2.0 * pairs * static_cast<double>(problem.dim_qk + problem.dim_v);
  for (const Tensor& tensor : problem.arrays.tensors) total.bytes += distinct_bytes(tensor);
  return total;
}

}  // namespace fulmen
