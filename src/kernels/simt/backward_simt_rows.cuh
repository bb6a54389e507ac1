// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The backward simt kernels whose blocks own query rows. The one whose blocks own keys is
// backward_simt_dkdv.
//
// backward_simt_rows: what each row brings to every pair of its own, once for the kernels that
// follow: the saved softmax, and D = dot(dO, O). One thread a row. D is added up in the order in
// which they add up dP = dO V^T, so that both are equal, bit for bit, where O is V: a row that sees
// one key has dQ = dK = 0 exactly. backward_simt_dsinks: dsinks.
//
// backward_simt_dq: a block owns query rows, keeps Q and dO in shared memory and its part of dQ in
// registers, and meets K and V a tile at a time. Nothing is added by atomics, so results are
// bitwise equal from run to run. Launched as forward_simt. Source: Dao, FlashAttention-2 (2023),
// section 3.1.2; the split into two passes, this one and backward_simt_dkdv, is ours.
//
// backward_simt_dbias: dbias = dS summed over the axes along which the bias was broadcast: a block
// owns a tile of the last two axes, or all of an axis that is summed, and meets every batch entry,
// head, row and column that adds up in it, in a fixed order. Launched with one block for each of
// dbias_tiles.
#pragma once

#include "kernels/common/block_lists.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/head.cuh"
#include "kernels/common/tile_tasks.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/simt/gradient.cuh"

namespace fulmen {

template <class HeadType>
typename HeadType::Real row_dot(const HeadType& head, i64 i) {
  using Real = typename HeadType::Real;
  using Vector = SimtVector<Real>;
  const HeadRows dO = q_rows_of(head, head.p.dout, head.p.dim_v);
  const HeadRows O = q_rows_of(head, head.p.o, head.p.dim_v);
  Real sum = 0;
  for (i32 d = 0; d < dO.dim; d += Vector::kLanes) {
    const Vector a = vector_of<Real>(dO, i, d);
    const Vector b = vector_of<Real>(O, i, d);
#pragma unroll
    for (i32 m = 0; m < Vector::kLanes; ++m) sum += a.lane[m] * b.lane[m];
  }
  return sum;
}

// Row `row` of dQ, counted from the first of the array.
template <class Real>
void clear_dq(const AttentionParams& p, const RowTask& task) {
  constexpr i32 kLanes = SimtVector<Real>::kLanes;
  const HeadRows dQ{p.dq, p.dq.offset(task.batch, task.head, 0, 0), static_cast<i32>(p.dim_qk)};
  const bool in_vectors = dQ.in_vectors(kLanes);
  for (i32 d = 0; d < dQ.dim; d += kLanes) {
    if (in_vectors) {
      reinterpret_cast<SimtVector<Real>*>(dQ.address(task.row))[d / kLanes] = {};
    } else {
      for (i32 m = 0; m < min(kLanes, dQ.dim - d); ++m) {
        store_real(p.dq, dQ.offset(task.row) + (d + m) * p.dq.strides[3], Real(0));
      }
    }
  }
}

template <FmaConfig kConfig>
void backward_simt_rows(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  const i64 number =
      static_cast<i64>(ptx::block_index()) * kConfig.num_threads + ptx::thread_index();
  if (number >= p.batch_extent() * p.heads_q * p.q_rows) return;
  const RowTask task = row_task(number, 1, p.q_rows, p.heads_q);
  using Real = typename ElementOf<kConfig.dtype>::Real;
  if constexpr (kConfig.adds_dq) clear_dq<Real>(p, task);
  const i64 index = p.packed.q ? find_sequence(p, p.cu_q, task.row) : task.batch;
  const BackwardHead<kConfig> head(p, index, task.head);
  const i64 i = task.row - head.sequence.q_begin;
  if (i < 0 || i >= head.sequence.shape.q_len) return;
  const auto state = saved_state(head, i);
  const Real dL = state.row_sum == Real(0) ? Real(0) : lse_gradient(head, i) / state.row_sum;
  saved_rows(head)[i] = {state.shift(), state.normalizer(head.sink), dL, row_dot(head, i)};
}

// dsinks: a block for each head, whose threads share its rows, eight threads a row, and add up
// their parts in a fixed order. Launched with num_threads a multiple of 32.
//
// This thread's part, one of eight, of D = dot(dO, O) of a row.
template <class HeadType>
typename HeadType::Real row_dot_eighth(const HeadType& head, i64 i, i64 part) {
  using Real = typename HeadType::Real;
  const AttentionParams& p = head.p;
  const i64 dout = head.q_row(p.dout, i);
  const i64 o = head.q_row(p.o, i);
  Real sum = 0;
  for (i64 d = part; d < p.dim_v; d += 8) {
    sum += load_real<Real>(p.dout, dout + d * p.dout.strides[3]) *
           load_real<Real>(p.o, o + d * p.o.strides[3]);
  }
  return sum;
}

// dsinks[h] = - sum over all rows of the sink's share of D
template <FmaConfig kConfig>
void backward_simt_dsinks(const AttentionParams& p) {
  using HeadType = BackwardHead<kConfig>;
  using Real = typename HeadType::Real;
  record_faults(p, kConfig.num_threads);
  const i64 thread = ptx::thread_index();
  const i64 h = ptx::block_index();
  Real sum = 0;  // of this thread's eighths
  for (i64 index = 0; index < p.num_sequences; ++index) {
    const HeadType head(p, index, h);
    for (i64 i = thread / 8; i < head.sequence.shape.q_len; i += kConfig.num_threads / 8) {
      const auto state = saved_state(head, i);
      if (state.row_sum == Real(0)) continue;
      sum -= state.sink_share(head.sink) * row_dot_eighth(head, i, thread % 8);
    }
  }
  Real* const sums = reinterpret_cast<Real*>(ptx::shared_bytes());
  sums[thread] = sum;
  for (i64 half = kConfig.num_threads / 2; half > 0; half /= 2) {
    ptx::block_sync();  // the sums so far are there
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) store_real(p.dsinks, p.dsinks.offset(0, h, 0, 0), sums[0]);
}

template <FmaConfig kConfig>
struct BackwardSimtDq : SimtGradient<kConfig> {
  using Base = SimtGradient<kConfig>;
  using Rows = SimtRows<kConfig>;
  using typename Base::HeadType;
  using typename Base::Math;
  using typename Base::Pairs;
  using typename Base::Real;

  const AttentionParams& p;
  const HeadType& head;
  i64 first_row;  // of the block, in its sequence
  bool pair_terms;
  HeadRows k_rows, v_rows;
  typename Base::QkRows Q, K;
  typename Base::VRows dO, V;
  u32* word;  // shared
  SavedRow<Real> rows[Base::kRows];
  typename Base::template Sums<kConfig.max_dim_qk> dQ = {};

  BackwardSimtDq(const HeadType& head_, i64 first_row_)
      : p(head_.p),
        head(head_),
        first_row(first_row_),
        pair_terms(has_pair_terms<kConfig>(head_.p)),
        k_rows(kv_rows_of(head_, p.k, p.dim_qk)),
        v_rows(kv_rows_of(head_, p.v, p.dim_v)) {
    typename Base::Layout layout;
    Q = layout.template tile<typename Base::QkRows>(kConfig.rows);
    dO = layout.template tile<typename Base::VRows>(kConfig.rows);
    K = layout.template tile<typename Base::QkRows>(kConfig.columns);
    V = layout.template tile<typename Base::VRows>(kConfig.columns);
    this->factors = layout.template tile<typename Base::Weights>(kConfig.rows);
    word = layout.word();
  }

  i64 q_row(i32 r) const { return first_row + Base::row(r); }
  i64 num_keys(i64 first_column) const { return head.sequence.shape.kv_len - first_column; }

  struct Pass {
    const BackwardSimtDq& block;
    i64 first_column;
    i64 query(i32 r, i32) const { return block.q_row(r); }
    i64 key(i32, i32 c) const { return first_column + Base::column(c); }
    const SavedRow<Real>& saved(i32 r, i32) const { return block.rows[r]; }
    Limits limits(i32 r) const { return row_limits(block.head, block.q_row(r), first_column); }
  };

  // Q, dO and V of the first block on their way, and what is saved of the rows.
  void load_first(i64 first_column) {
    const i64 count = head.sequence.shape.q_len - first_row;
    Rows::template load<kConfig.rows>(q_rows_of(head, p.q, p.dim_qk), first_row, count, Q);
    Rows::template load<kConfig.rows>(q_rows_of(head, p.dout, p.dim_v), first_row, count, dO);
    Rows::template load<kConfig.columns>(v_rows, first_column, num_keys(first_column), V);
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      rows[r] = Base::row(r) < count ? saved_rows(head)[q_row(r)] : SavedRow<Real>{};
    }
  }

  // V of this block is on its way; leaves with V of the next one, if it is not the last, on its
  // way.
  void step(i64 first_column, bool is_full, i64 next_column, bool is_last) {
    const bool plain = is_full && !pair_terms;
    Pairs S, dP;
    ptx::wait_for_copies();
    ptx::block_sync();  // V is there, and all are done with K
    Rows::template load<kConfig.columns>(k_rows, first_column, num_keys(first_column), K);
    Base::dots(dO, V, static_cast<i32>(p.dim_v), dP);  // dP = dO V^T
    ptx::wait_for_copies();
    ptx::block_sync();  // K is there, and all are done with V
    if (!is_last) {
      Rows::template load<kConfig.columns>(v_rows, next_column, num_keys(next_column), V);
    }
    Base::dots(Q, K, static_cast<i32>(p.dim_qk), S);  // S = Q K^T
    Base::template prepare<true>(head, Pass{*this, first_column}, is_full, pair_terms, S, dP);
    Base::each_pair([&](i32 r, i32 c) {  // dX = e G, never -0
      dP[r][c] = Base::weight(S[r][c], rows[r].shift) * dP[r][c] + Real(0);
      if (!plain && S[r][c] == -Math::kInfinity) dP[r][c] = Base::kHidden;
    });
    Base::write_own(this->factors, dP);
    ptx::warp_sync();  // dX of the warp's rows is there
    const i32 depth = static_cast<i32>(min<i64>(kConfig.columns, num_keys(first_column)));
    if (!plain && !Rows::template all_finite<kConfig.columns>(K, word)) {
      Base::template guarded_sums<kConfig.max_dim_qk>(this->factors, K, depth, dQ);
    } else {
      Base::template sums<kConfig.max_dim_qk>(this->factors, K, depth, dQ);  // dQ += dX K
    }
  }

  void run() {
    const SequenceShape& shape = head.sequence.shape;
    if (first_row < shape.q_len) {
      const BlockRange range = visible_column_blocks(
          p.mask_options, shape, {first_row, min(first_row + kConfig.rows, i64{shape.q_len})},
          kConfig.columns);
      const i64 end = range.visible.end;
      const auto next = [&](i64 block) {
        return next_key_tile<kConfig.columns>(head, first_row, block, end);
      };
      i64 block = next(range.visible.begin);
      if (block < end) load_first(block * kConfig.columns);
      for (i64 then = block; block < end; block = then) {
        then = next(block + 1);
        step(block * kConfig.columns, range.is_full(block), then * kConfig.columns, then >= end);
      }
    }
    Rows::template store<kConfig.max_dim_qk>(
        q_rows_of(head, p.dq, p.dim_qk), first_row, shape.q_len - first_row,
        head.sequence.q_slot - first_row, dQ, [](i32) { return typename Rows::Shares{1, 0}; });
  }
};

template <FmaConfig kConfig>
void backward_simt_dq(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  if constexpr (kConfig.user.mask) {
    record_segment_faults<typename BackwardHead<kConfig>::User>(p, expression_of(p),
                                                                kConfig.num_threads);
  }
  const TileTask task = tile_task(ptx::block_index(), p.batch_extent(), p.heads_q,
                                  num_q_slots(p, kConfig.rows), true);
  const TilePlace origin = find_tile(p, p.cu_q, task, kConfig.rows);
  const BackwardHead<kConfig> head(p, origin.index, task.head);
  if (origin.first_row >= head.sequence.q_slot) return;
  BackwardSimtDq<kConfig>(head, origin.first_row).run();
}

template <FmaConfig kConfig>
struct BackwardSimtDbias : SimtGradient<kConfig> {
  using Base = SimtGradient<kConfig>;
  using Rows = SimtRows<kConfig>;
  using typename Base::HeadType;
  using typename Base::Math;
  using typename Base::Pairs;
  using typename Base::Real;

  const AttentionParams& p;
  bool sums_rows, sums_columns;
  typename Base::QkRows Q, K;
  typename Base::VRows dO, V;
  Pairs dbias = {};

  explicit BackwardSimtDbias(const AttentionParams& params)
      : p(params), sums_rows(p.dbias_extents[2] == 1), sums_columns(p.dbias_extents[3] == 1) {
    typename Base::Layout layout;
    Q = layout.template tile<typename Base::QkRows>(kConfig.rows);
    dO = layout.template tile<typename Base::VRows>(kConfig.rows);
    K = layout.template tile<typename Base::QkRows>(kConfig.columns);
    V = layout.template tile<typename Base::VRows>(kConfig.columns);
    this->factors = layout.template tile<typename Base::Weights>(kConfig.rows);
  }

  struct Pass {
    const HeadType& head;
    i64 first_row, first_column;
    const SavedRow<Real> (&rows)[Base::kRows];
    i64 query(i32 r, i32) const { return first_row + Base::row(r); }
    i64 key(i32, i32 c) const { return first_column + Base::column(c); }
    const SavedRow<Real>& saved(i32 r, i32) const { return rows[r]; }
    Limits limits(i32 r) const { return row_limits(head, query(r, 0), first_column); }
  };

  // Adds dS of one tile of pairs of one head.
  void add_tile(const HeadType& head, i64 i, i64 j) {
    const SequenceShape& shape = head.sequence.shape;
    ptx::block_sync();  // all are done with the tiles before
    Rows::template load<kConfig.rows>(q_rows_of(head, p.q, p.dim_qk), i, shape.q_len - i, Q);
    Rows::template load<kConfig.rows>(q_rows_of(head, p.dout, p.dim_v), i, shape.q_len - i, dO);
    Rows::template load<kConfig.columns>(kv_rows_of(head, p.k, p.dim_qk), j, shape.kv_len - j, K);
    Rows::template load<kConfig.columns>(kv_rows_of(head, p.v, p.dim_v), j, shape.kv_len - j, V);
    ptx::wait_for_copies();
    ptx::block_sync();  // the tiles are there
    SavedRow<Real> rows[Base::kRows];
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      const i64 row = i + Base::row(r);
      rows[r] = row < shape.q_len ? saved_rows(head)[row] : SavedRow<Real>{};
    }
    Pairs S, dP;
    Base::dots(dO, V, static_cast<i32>(p.dim_v), dP);
    Base::dots(Q, K, static_cast<i32>(p.dim_qk), S);
    Base::template prepare<false>(head, Pass{head, i, j, rows}, false, true, S, dP);
    Base::each_pair([&](i32 r, i32 c) {
      if (S[r][c] == -Math::kInfinity) return;
      dbias[r][c] += Base::weight(S[r][c], rows[r].shift) * dP[r][c];
    });
  }

  // Rows [i, i + rows) of a head against the columns of this block.
  void add_rows(const HeadType& head, i64 i, i64 column) {
    const SequenceShape& shape = head.sequence.shape;
    const BlockRange range = visible_column_blocks(
        p.mask_options, shape, {i, min(i + kConfig.rows, i64{shape.q_len})}, kConfig.columns);
    const i64 own = column / kConfig.columns;
    const Interval wanted = sums_columns ? range.visible : Interval{own, own + 1};
    for (i64 block = wanted.begin; block < wanted.end; ++block) {
      if (!range.visible.contains(block)) continue;
      const bool is_listed = next_key_tile<kConfig.columns>(head, i, block, block + 1) == block;
      if (is_listed) add_tile(head, i, block * kConfig.columns);
    }
  }

  void run(const DbiasTile& tile) {
    const Interval sequences = summed(tile.batch, p.dbias_extents[0], p.num_sequences);
    const Interval heads = summed(tile.head, p.dbias_extents[1], p.heads_q);
    for (i64 index = sequences.begin; index < sequences.end; ++index) {
      for (i64 h = heads.begin; h < heads.end; ++h) {
        const HeadType head(p, index, h);
        const i64 q_len = head.sequence.shape.q_len;
        const i64 end = sums_rows ? q_len : min(tile.row + 1, q_len);
        for (i64 i = tile.row; i < end; i += kConfig.rows) add_rows(head, i, tile.column);
      }
    }
    store(tile);
  }

  void store(const DbiasTile& tile) {
    ptx::block_sync();  // all are done with the factors
    if (sums_columns) {
#pragma unroll
      for (i32 r = 0; r < Base::kRows; ++r) {
        Real sum = 0;
#pragma unroll
        for (i32 c = 0; c < Base::kColumns; ++c) sum += dbias[r][c];
        dbias[r][0] = Base::row_sum(sum);  // in every thread of the row
      }
    }
    Base::write_own(this->factors, dbias);
    ptx::block_sync();  // the block's sums are there
    const i32 num_rows = sums_rows ? 1 : kConfig.rows;
    const i32 num_columns = sums_columns ? 1 : kConfig.columns;
#pragma unroll 1
    for (i32 at = Base::thread(); at < num_rows * num_columns; at += kConfig.num_threads) {
      const i32 r = at / num_columns;
      const i32 c = at % num_columns;
      if (tile.row + r >= p.dbias_extents[2] || tile.column + c >= p.dbias_extents[3]) continue;
      Real sum = 0;
      for (i32 down = r; down < (sums_rows ? kConfig.rows : r + 1); ++down) {
        sum += this->factors.at(down, c);
      }
      store_real(p.dbias, p.dbias.offset(tile.batch, tile.head, tile.row + r, tile.column + c),
                 sum);
    }
  }
};

template <FmaConfig kConfig>
void backward_simt_dbias(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  BackwardSimtDbias<kConfig>(p).run(
      dbias_tile(p, ptx::block_index(), kConfig.rows, kConfig.columns));
}

}  // namespace fulmen
