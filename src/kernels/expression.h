// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a kernel with a user's expression gets beside its own parameters: the arrays that it reads,
// its scalars, and where gradients of those arrays are summed. No other kernel knows of it.
#pragma once

#include "kernels/params.h"
#include "kernels/score_options.h"

namespace fulmen {

constexpr i32 kMaxCaptures = 8;
constexpr i32 kMaxReads = kMaxCaptures + 1;  // and the slopes of ALiBi beside segments

// Positions of rows, or of keys (attention/segments.cuh).
struct SegmentsView {
  ArrayView words;  // (sequence, 1, segment, 3)
  i64 count;        // of a sequence; 0: there are none

  constexpr bool present() const { return count > 0; }
};

struct ExpressionParams {
  ArrayView captures[kMaxReads];  // four axes; those that the array lacks come first
  i64 extents[kMaxReads][4];
  SegmentsView q_segments, kv_segments;
  double* sums[kMaxCaptures];  // of the gradients asked for, one element behind the other; or null
  double scalars[kMaxCaptures];
  float scalars32[kMaxCaptures];
  FaultBytes* faults;  // of the device, or null

  constexpr double scalar(i32 index, double) const { return scalars[index]; }
  constexpr float scalar(i32 index, float) const { return scalars32[index]; }
};

// Of the kernel that ends a backward pass: sums, rounded, become gradients.
struct CaptureGradients {
  ArrayView gradients[kMaxCaptures];  // of those that are asked for
  i64 extents[kMaxCaptures][4];
  const double* sums[kMaxCaptures];
};

template <class Params>
struct WithExpression {
  Params params;
  ExpressionParams expression;
};

// Of parameters that are the first member of such a struct: those that a kernel is launched with.
template <class Params>
const ExpressionParams& expression_of(const Params& params) {
  return reinterpret_cast<const WithExpression<Params>&>(params).expression;
}

}  // namespace fulmen
