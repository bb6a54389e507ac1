// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dbias = dS summed over the axes along which the bias was broadcast: a block owns a tile of the
// last two axes, or all of an axis that is summed, and meets every batch entry, head, row and
// column that adds up in it, in a fixed order. Launched with one block for each of dbias_tiles.
#pragma once

#include "kernels/simt/gradient.cuh"

namespace fulmen {

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
      if (range.visible.contains(block)) add_tile(head, i, block * kConfig.columns);
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
