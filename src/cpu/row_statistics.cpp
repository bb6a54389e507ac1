// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// See row_statistics.h.

#include "cpu/row_statistics.h"

#include "cpu/backward_tile.h"
#include "cpu/libm_math.h"
#include "kernels/attention/block_range.cuh"
#include "kernels/attention/softmax_state.cuh"

namespace fulmen::cpu {
namespace {

// A row's few numbers cost nothing, so they are computed in float64 whatever the working type.
using Math = LibmMath<double>;
using State = SoftmaxState<Math>;

// What the forward pass kept of a row: stats, or the lse alone.
State saved_state(const Problem& problem, i64 batch, i64 head, i64 row) {
  if (problem.has(Array::kStats)) {
    const Tensor& stats = problem.arrays[Array::kStats];
    return {stats.real(batch, head, row, 0), stats.real(batch, head, row, 1)};
  }
  const double lse = problem.arrays[Array::kLse].real(batch, head, row, 0);
  return {lse, lse == -Math::kInfinity ? 0.0 : 1.0};
}

template <class Real>
double dot(const Real* a, const Real* b, i64 size) {
  double sum = 0;
  for (i64 d = 0; d < size; ++d) sum += static_cast<double>(a[d]) * static_cast<double>(b[d]);
  return sum;
}

}  // namespace

template <class Real>
void prepare_rows(const Problem& problem, const TileSizes& sizes,
                  const BackwardShared<Real>& shared, const BackwardScratch<Real>& scratch,
                  const HeadBlock& at) {
  const Sequence sequence = problem.sequence(at.sequence_index);
  const Interval rows = rows_of_block(at.block, sizes.rows, sequence.shape.q_len);
  const Interval owned = rows_of_block(at.block, sizes.rows, sequence.q_slot);
  const Tensor& sinks = problem.arrays[Array::kSinks];
  const double sink = sinks.present() ? sinks.real(0, at.head, 0, 0) : -Math::kInfinity;
  const i64 stride = sizes.padded_dim_v;
  const auto load = [&](Array array, Real* to) {
    return rows_of(
        kernels<Real>(),
        source_of(problem.arrays[array], sequence.batch, at.head, sequence.q_begin + rows.begin),
        rows.size(), problem.dim_v, Reads::kElements, to, stride);
  };
  const View<Real> dO = load(Array::kDOut, scratch.dO);
  const View<Real> O = load(Array::kO, scratch.O);
  for (i64 i = owned.begin; i < owned.end; ++i) {
    const i64 to = shared_row(problem, sequence, at.head, i);
    const i64 row = sequence.q_begin + i;
    State state;
    if (i < rows.end) state = saved_state(problem, sequence.batch, at.head, row);
    const bool saw_keys = state.row_sum != 0;
    const i64 local = i - rows.begin;
    const double delta =
        saw_keys ? dot(dO.data + local * dO.stride, O.data + local * O.stride, problem.dim_v) : 0.0;
    shared.row_max[to] = static_cast<Real>(state.shift());
    shared.normalizer[to] = static_cast<Real>(state.normalizer(sink));
    shared.delta[to] = static_cast<Real>(delta);
    if (shared.lse_term) {
      const double dlse = problem.arrays[Array::kDLse].real(sequence.batch, at.head, row, 0);
      shared.lse_term[to] = saw_keys ? static_cast<Real>(dlse / state.row_sum) : Real(0);
    }
    if (shared.sink_term) shared.sink_term[to] = saw_keys ? -state.sink_share(sink) * delta : 0.0;
  }
  if (!shared.dQ) return;
  shared.visits[(shared.q_blocks[at.sequence_index] + at.block) * problem.heads_q + at.head] = 0;
  // dq = 0 for rows past the length, and for blocks that no key block will visit.
  const bool is_visited =
      rows.size() > 0 &&
      visible_column_blocks(problem.mask, sequence.shape, rows, sizes.columns).visit.size() > 0;
  const Interval cleared{is_visited ? rows.end : owned.begin, owned.end};
  if (cleared.size() <= 0) return;
  clear_rows(kernels<Real>(),
             destination_of(problem.arrays[Array::kDQ], sequence.batch, at.head,
                            sequence.q_begin + cleared.begin),
             cleared.size(), problem.dim_qk);
}

template <class Real>
void store_dsinks(const Problem& problem, const BackwardShared<Real>& shared) {
  for (i64 head = 0; head < problem.heads_q; ++head) {
    double sum = 0;
    for (i64 index = 0; index < problem.num_sequences; ++index) {
      const Sequence sequence = problem.sequence(index);
      const double* const terms = shared.sink_term + shared_row(problem, sequence, head, 0);
      for (i64 i = 0; i < sequence.shape.q_len; ++i) sum += terms[i];
    }
    problem.arrays[Array::kDSinks].set_real(0, head, 0, 0, sum);
  }
}

template void prepare_rows(const Problem&, const TileSizes&, const BackwardShared<float>&,
                           const BackwardScratch<float>&, const HeadBlock&);
template void prepare_rows(const Problem&, const TileSizes&, const BackwardShared<double>&,
                           const BackwardScratch<double>&, const HeadBlock&);
template void store_dsinks(const Problem&, const BackwardShared<float>&);
template void store_dsinks(const Problem&, const BackwardShared<double>&);

}  // namespace fulmen::cpu
