// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// A part of a row is a softmax state of row_max = lse and row_sum = 1 beside its output, and states
// merge by the one law (softmax_state.cuh). A row is read from all parts before it is written, so
// that a part may be merged in place.

#include <vector>

#include "cpu/backend.h"
#include "cpu/libm_math.h"
#include "cpu/thread_pool.h"
#include "kernels/attention/softmax_state.cuh"

namespace fulmen::cpu {
namespace {

using Math = LibmMath<double>;
using State = SoftmaxState<Math>;

constexpr i64 kRowsPerTask = 64;  // enough work to claim a task for, few enough to share

struct Row {
  i64 batch;
  i64 head;
  i64 row;
};

double widen(double x) { return x; }
double widen(float x) { return static_cast<double>(x); }
double widen(f16 x) { return static_cast<double>(to_float(x)); }
double widen(bf16 x) { return static_cast<double>(to_float(x)); }

// output[d] = output[d] * mine + element[d] * other
template <class T>
void accumulate(const char* elements, i64 stride_bytes, i64 dim, State::MergeFactors factors,
                double* output) {
  for (i64 d = 0; d < dim; ++d) {
    const double element = widen(load_bytes<T>(elements + d * stride_bytes));
    output[d] = output[d] * factors.mine + element * factors.other;
  }
}

void accumulate(const Tensor& o, const Row& at, State::MergeFactors factors, double* output) {
  const char* const elements = o.address(at.batch, at.head, at.row, 0);
  const i64 stride = o.strides[3] * size_bytes(o.dtype);
  switch (o.dtype) {
    case DType::kFloat64:
      return accumulate<double>(elements, stride, o.shape[3], factors, output);
    case DType::kFloat32:
      return accumulate<float>(elements, stride, o.shape[3], factors, output);
    case DType::kFloat16:
      return accumulate<f16>(elements, stride, o.shape[3], factors, output);
    default:
      return accumulate<bf16>(elements, stride, o.shape[3], factors, output);
  }
}

// A NaN goes into row_sum, as everywhere: it is not an empty row.
State state_of(double lse) {
  if (lse != lse) return {-Math::kInfinity, lse};
  return {lse, lse == -Math::kInfinity ? 0.0 : 1.0};
}

// output: scratch of dim elements.
void merge_row(const MergeProblem& problem, const Row& at, double* output) {
  const i64 dim = problem.o.shape[3];
  for (i64 d = 0; d < dim; ++d) output[d] = 0;
  State state;
  for (const MergePart& part : problem.parts) {
    const State other = state_of(part.lse.real(at.batch, at.head, at.row, 0));
    if (other.row_sum == 0) continue;  // saw nothing: its o says nothing, whatever it holds
    accumulate(part.o, at, state.merge(other), output);
  }
  const double sink =
      problem.sinks.present() ? problem.sinks.real(0, at.head, 0, 0) : -Math::kInfinity;
  const double normalizer = state.normalizer(sink);
  for (i64 d = 0; d < dim; ++d) {
    problem.o.set_real(at.batch, at.head, at.row, d, output[d] * normalizer);
  }
  if (problem.lse.present()) problem.lse.set_real(at.batch, at.head, at.row, 0, state.lse());
}

}  // namespace

void merge(const MergeProblem& problem) {
  const i64* extent = problem.o.shape;
  const i64 dim = extent[3];
  const i64 tasks_per_head = ceil_div(extent[2], kRowsPerTask);
  const int slots = num_threads();
  std::vector<double> outputs(static_cast<size_t>(slots * dim));
  for_each_task(slots, extent[0] * extent[1] * tasks_per_head, [&](int slot, i64 task) {
    const i64 batch_head = task / tasks_per_head;
    const i64 begin = task % tasks_per_head * kRowsPerTask;
    const i64 end = min(begin + kRowsPerTask, extent[2]);
    for (i64 row = begin; row < end; ++row) {
      const Row at{batch_head / extent[1], batch_head % extent[1], row};
      merge_row(problem, at, outputs.data() + slot * dim);
    }
  });
}

}  // namespace fulmen::cpu
