// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The first rung on the GPU: every value straight from the equations, with every option of the
// library, and nothing shared between threads: scores are computed again by whoever needs them.
// Slow, and therefore the oracle of the faster kernels on the same device. Nothing but gradients of
// what an expression reads is added by atomics, so other results are bitwise equal from run to run.
// The entries of the gradients are launched only for those that are asked for:
//   forward_naive          a thread for each (batch, head, q_row, 32 dimensions of dim_v)
//   backward_naive_dq      for each (batch, head, q_row, 32 dimensions of dim_qk)
//   backward_naive_dkdv    for each (batch, kv_head, kv_row, 32 of dim_qk, then of dim_v)
//   backward_naive_dbias   for each element of dbias
//   backward_naive_dsinks  for each head
//   backward_naive_captures  for each (batch, head, q_row)
#pragma once

#include "kernels/common/caches.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/tile_tasks.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/simt/config.h"

namespace fulmen {

// o, and from the first chunk's thread lse and stats, of one row.
template <class HeadType>
void forward_naive_row(const AttentionParams& p, const RowTask& task) {
  constexpr bool kCaches = HeadType::kHasCaches;
  using Real = typename HeadType::Real;
  const i64 index = p.packed.q ? find_sequence(p, p.cu_q, task.row) : task.batch;
  const HeadType head(p, index, task.head);
  const i64 i = task.row - head.sequence.q_begin;
  const bool counts = 0 <= i && i < head.sequence.shape.q_len;
  const i64 first = task.chunk * kNaiveChunk;
  const i64 num_dims = min<i64>(kNaiveChunk, p.dim_v - first);

  typename HeadType::State state;
  Real O[kNaiveChunk] = {};
  Interval columns = counts ? head.columns(i) : Interval{0, 0};
  if (kCaches && p.cache_layout.paged && counts && head.sees_no_page(i)) {
    record_bad_page(p);
    columns = {0, 0};
  }
  for (i64 j = columns.begin; j < columns.end; ++j) {
    if (!head.sees(i, j)) continue;
    const Real s = head.score(head.capped_score(i, j), i, j);
    const Real rescale = state.update(s);
    const Real weight = state.weight(s);
    state.row_sum += weight;
    const Real kept = weight * head.keep(i, j);
    const auto v = head.numbers(p.v, p.v_scale, j);
    for (i32 d = 0; d < kNaiveChunk; ++d) {  // O = rescale O + P V
      if (d < num_dims) O[d] = O[d] * rescale + kept * v[first + d];
    }
  }

  typename HeadType::State::MergeFactors share{state.normalizer(head.sink), 0};
  if (p.accumulates) {
    if (state.row_sum == Real(0) && !p.sinks.present()) return;  // what is there stays
    share = state.join(saved_state(head, i), head.sink);
  }
  const i64 o = p.o.offset(task.batch, task.head, task.row, first);
  for (i32 d = 0; d < kNaiveChunk; ++d) {
    if (d >= num_dims) break;
    const i64 at = o + d * p.o.strides[3];
    Real sum = O[d] * share.mine;
    if (share.other != Real(0)) sum += share.other * load_real<Real>(p.o, at);
    store_real(p.o, at, sum);
  }
  if (task.chunk != 0) return;
  if (p.lse.present()) {
    store_real(p.lse, p.lse.offset(task.batch, task.head, task.row, 0), state.lse());
  }
  if (p.stats.present()) {
    const i64 stats = p.stats.offset(task.batch, task.head, task.row, 0);
    store_real(p.stats, stats, state.row_max);
    store_real(p.stats, stats + p.stats.strides[3], state.row_sum);
  }
}

// The number of this thread in the whole launch.
template <FmaConfig kConfig>
i64 naive_task() {
  return static_cast<i64>(ptx::block_index()) * kConfig.num_threads + ptx::thread_index();
}

template <FmaConfig kConfig>
void forward_naive(const AttentionParams& p) {
  using HeadType =
      Head<kConfig.dtype, kConfig.caches, kConfig.kv_dtype(), kConfig.q_dtype(), kConfig.user>;
  kConfig.caches ? record_cache_faults(p, kConfig.num_threads)
                 : record_faults(p, kConfig.num_threads);
  if constexpr (kConfig.user.mask) {
    record_segment_faults<typename HeadType::User>(p, expression_of(p), kConfig.num_threads);
  }
  const i64 task = naive_task<kConfig>();
  if (task >= forward_naive_tasks(p)) return;
  RowTask row = row_task(task, num_chunks(p.dim_v), p.q_rows, p.heads_q);
  if (!p.accumulates) return forward_naive_row<HeadType>(p, row);
  if (row.chunk != 0) return;  // one thread reads stats for all chunks before it writes them
  for (row.chunk = num_chunks(p.dim_v) - 1; row.chunk >= 0; --row.chunk) {
    forward_naive_row<HeadType>(p, row);
  }
}

// What the backward pass knows of a row: the softmax that the forward pass kept, and
// D = dot(dO, O), dL = the gradient that arrives through lse.
template <class HeadType>
struct RowGradient {
  using Real = typename HeadType::Real;
  using State = typename HeadType::State;

  State state;
  Real normalizer;
  Real D;
  Real dL;

  RowGradient(const HeadType& head, i64 i, Real D_)
      : state(saved_state(head, i)),
        normalizer(state.normalizer(head.sink)),
        D(D_),
        dL(lse_gradient(head, i)) {}

  RowGradient(const HeadType& head, i64 i) : RowGradient(head, i, Real(0)) {
    const AttentionParams& p = head.p;
    const i64 dout = head.q_row(p.dout, i);
    const i64 o = head.q_row(p.o, i);
    for (i64 d = 0; d < p.dim_v; ++d) {
      D += load_real<Real>(p.dout, dout + d * p.dout.strides[3]) *
           load_real<Real>(p.o, o + d * p.o.strides[3]);
    }
  }

  bool saw_something() const { return state.row_sum != Real(0); }
};

// One visible pair: P after dropout, dS' = d loss / d score, the same of the score before a
// user's, and dX = d loss / d dot(q, k).
template <class Real>
struct PairGradient {
  Real P_kept;
  Real dS_user;
  Real dS;
  Real dX;
};

// From the capped score and dP = dot(dO_i, v_j).
template <class HeadType, class Real>
PairGradient<Real> pair_gradient(const HeadType& head, const RowGradient<HeadType>& row, i64 i,
                                 i64 j, Real capped, Real dP) {
  const Real exponent = min(head.score(capped, i, j) - row.state.shift(), Real(0));
  const Real weight = HeadType::Math::exp(exponent);
  const Real P = weight * row.normalizer;
  const Real keep = head.keep(i, j);
  const Real dS_user = P * (dP * keep - row.D) + weight / row.state.row_sum * row.dL;
  const Real dS = dS_user * head.user_slope(capped, i, j);
  return {P * keep, dS_user, dS, dS * head.map.slope(capped) * head.map.scale};
}

template <class HeadType>
auto pair_gradient(const HeadType& head, const RowGradient<HeadType>& row, i64 i, i64 j) {
  using Real = typename HeadType::Real;
  const AttentionParams& p = head.p;
  const i64 dout = head.q_row(p.dout, i);
  const i64 v = head.kv_row(p.v, j);
  Real dP = 0;
  for (i64 d = 0; d < p.dim_v; ++d) {
    dP += load_real<Real>(p.dout, dout + d * p.dout.strides[3]) *
          head.element(p.v, v + d * p.v.strides[3]);
  }
  return pair_gradient(head, row, i, j, head.capped_score(i, j), dP);
}

// dQ[i] = sum over visible j of dX[i,j] K[j]
template <class HeadType>
void backward_naive_dq_row(const AttentionParams& p, const RowTask& task) {
  using Real = typename HeadType::Real;
  const i64 index = p.packed.q ? find_sequence(p, p.cu_q, task.row) : task.batch;
  const HeadType head(p, index, task.head);
  const i64 i = task.row - head.sequence.q_begin;
  const i64 first = task.chunk * kNaiveChunk;
  const i64 num_dims = min<i64>(kNaiveChunk, p.dim_qk - first);
  Real dQ[kNaiveChunk] = {};
  if (0 <= i && i < head.sequence.shape.q_len) {
    const RowGradient<HeadType> row(head, i);
    const Interval columns = row.saw_something() ? head.columns(i) : Interval{0, 0};
    for (i64 j = columns.begin; j < columns.end; ++j) {
      if (!head.sees(i, j)) continue;
      const Real dX = pair_gradient(head, row, i, j).dX;
      const i64 k = head.kv_row(p.k, j) + first * p.k.strides[3];
      for (i32 d = 0; d < kNaiveChunk; ++d) {
        if (d < num_dims) dQ[d] += dX * head.element(p.k, k + d * p.k.strides[3]);
      }
    }
  }
  const i64 dq = p.dq.offset(task.batch, task.head, task.row, first);
  for (i32 d = 0; d < kNaiveChunk; ++d) {
    if (d < num_dims) store_real(p.dq, dq + d * p.dq.strides[3], dQ[d]);
  }
}

// dK[j] = sum of dX[i,j] Q[i], dV[j] = sum of P[i,j] keep dO[i], over the rows i of all heads of
// the group that see j.
template <class HeadType>
void backward_naive_dkdv_row(const AttentionParams& p, const RowTask& task) {
  using Real = typename HeadType::Real;
  const bool is_dk = task.chunk < dk_chunks(p);
  const ArrayView& gradient = is_dk ? p.dk : p.dv;
  const i64 first = (is_dk ? task.chunk : task.chunk - dk_chunks(p)) * kNaiveChunk;
  const i64 num_dims = min<i64>(kNaiveChunk, (is_dk ? p.dim_qk : p.dim_v) - first);
  const i64 index = p.packed.kv ? find_sequence(p, p.cu_kv, task.row) : task.batch;
  Real sum[kNaiveChunk] = {};
  for (i64 member = 0; member < p.group_size(); ++member) {
    const HeadType head(p, index, task.head * p.group_size() + member);
    const i64 j = task.row - head.sequence.kv_begin;
    if (j < 0 || j >= head.sequence.shape.kv_len) break;
    const Interval rows = visible_rows(p.mask_options, head.sequence.shape, j);
    for (i64 i = rows.begin; i < rows.end; ++i) {
      if (!head.sees(i, j)) continue;
      const RowGradient<HeadType> row(head, i);
      if (!row.saw_something()) continue;
      const PairGradient<Real> pair = pair_gradient(head, row, i, j);
      const Real factor = is_dk ? pair.dX : pair.P_kept;
      const ArrayView& other = is_dk ? p.q : p.dout;
      const i64 x = head.q_row(other, i) + first * other.strides[3];
      for (i32 d = 0; d < kNaiveChunk; ++d) {
        if (d < num_dims) sum[d] += factor * load_real<Real>(other, x + d * other.strides[3]);
      }
    }
  }
  const i64 out = gradient.offset(task.batch, task.head, task.row, first);
  for (i32 d = 0; d < kNaiveChunk; ++d) {
    if (d < num_dims) store_real(gradient, out + d * gradient.strides[3], sum[d]);
  }
}

// dS summed over the axes along which the bias was broadcast, for one element.
template <class HeadType>
void backward_naive_dbias_element(const AttentionParams& p, i64 task) {
  using Real = typename HeadType::Real;
  const i64* extent = p.dbias_extents;
  const i64 column = task % extent[3];
  const i64 row_at = task / extent[3] % extent[2];
  const i64 head_at = task / extent[3] / extent[2] % extent[1];
  const i64 batch_at = task / extent[3] / extent[2] / extent[1];
  Real sum = 0;
  const Interval sequences = summed(batch_at, extent[0], p.num_sequences);
  const Interval heads = summed(head_at, extent[1], p.heads_q);
  for (i64 index = sequences.begin; index < sequences.end; ++index) {
    for (i64 h = heads.begin; h < heads.end; ++h) {
      const HeadType head(p, index, h);
      const SequenceShape& shape = head.sequence.shape;
      const Interval rows = summed(row_at, extent[2], shape.q_len);
      for (i64 i = rows.begin; i < rows.end; ++i) {
        const RowGradient<HeadType> row(head, i);
        if (!row.saw_something()) continue;
        const Interval wanted = summed(column, extent[3], shape.kv_len);
        const Interval columns = head.columns(i);
        const i64 end = min(wanted.end, columns.end);
        for (i64 j = max(wanted.begin, columns.begin); j < end; ++j) {
          if (head.sees(i, j)) sum += pair_gradient(head, row, i, j).dS;
        }
      }
    }
  }
  store_real(p.dbias, p.dbias.offset(batch_at, head_at, row_at, column), sum);
}

// dsinks[h] = - sum over all rows of the sink's share of D
template <class HeadType>
void backward_naive_dsinks_head(const AttentionParams& p, i64 h) {
  using Real = typename HeadType::Real;
  Real sum = 0;
  for (i64 index = 0; index < p.num_sequences; ++index) {
    const HeadType head(p, index, h);
    for (i64 i = 0; i < head.sequence.shape.q_len; ++i) {
      const RowGradient<HeadType> row(head, i);
      if (row.saw_something()) sum -= row.state.sink_share(head.sink) * row.D;
    }
  }
  store_real(p.dsinks, p.dsinks.offset(0, h, 0, 0), sum);
}

// dC[what row i reads] += dS' d s' / d C, over the keys that it sees.
template <class HeadType>
void backward_naive_captures_row(const AttentionParams& p, const RowTask& task) {
  const i64 index = p.packed.q ? find_sequence(p, p.cu_q, task.row) : task.batch;
  const HeadType head(p, index, task.head);
  const i64 i = task.row - head.sequence.q_begin;
  if (i < 0 || i >= head.sequence.shape.q_len) return;
  const RowGradient<HeadType> row(head, i);
  const Interval columns = row.saw_something() ? head.columns(i) : Interval{0, 0};
  CaptureSums<typename HeadType::Real, HeadType::User::kNumDerivatives> sums;
  for (i64 j = columns.begin; j < columns.end; ++j) {
    if (!head.sees(i, j)) continue;
    const auto dS_user = pair_gradient(head, row, i, j).dS_user;
    head.differentiate(head.capped_score(i, j), i, j, [&](i32 n, double* element, auto slope) {
      sums.add(n, element, dS_user * slope);
    });
  }
  sums.flush();
}

template <FmaConfig kConfig>
void backward_naive_dq(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  if constexpr (kConfig.user.mask) {
    record_segment_faults<typename BackwardHead<kConfig>::User>(p, expression_of(p),
                                                                kConfig.num_threads);
  }
  const i64 task = naive_task<kConfig>();
  if (task >= backward_naive_dq_tasks(p)) return;
  const i64 chunks = num_chunks(p.dim_qk);
  backward_naive_dq_row<BackwardHead<kConfig>>(p, row_task(task, chunks, p.q_rows, p.heads_q));
}

template <FmaConfig kConfig>
void backward_naive_dkdv(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  if constexpr (kConfig.user.mask) {
    record_segment_faults<typename BackwardHead<kConfig>::User>(p, expression_of(p),
                                                                kConfig.num_threads);
  }
  const i64 task = naive_task<kConfig>();
  if (task >= backward_naive_dkdv_tasks(p)) return;
  const i64 chunks = dkdv_chunks(p);
  backward_naive_dkdv_row<BackwardHead<kConfig>>(p, row_task(task, chunks, p.kv_rows, p.heads_kv));
}

template <FmaConfig kConfig>
void backward_naive_dbias(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  const i64 task = naive_task<kConfig>();
  if (task < backward_naive_dbias_tasks(p))
    backward_naive_dbias_element<BackwardHead<kConfig>>(p, task);
}

template <FmaConfig kConfig>
void backward_naive_captures(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  const i64 task = naive_task<kConfig>();
  if (task >= backward_naive_captures_tasks(p)) return;
  backward_naive_captures_row<BackwardHead<kConfig>>(p, row_task(task, 1, p.q_rows, p.heads_q));
}

template <FmaConfig kConfig>
void backward_naive_dsinks(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  const i64 task = naive_task<kConfig>();
  if (task < p.heads_q) backward_naive_dsinks_head<BackwardHead<kConfig>>(p, task);
}

}  // namespace fulmen
