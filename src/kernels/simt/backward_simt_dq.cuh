// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dQ on CUDA cores: a block owns query rows, keeps Q and dO in shared memory and
// its part of dQ in registers, and meets K and V a tile at a time. Nothing is added by atomics, so
// results are bitwise equal from run to run. Launched as forward_simt. Source: Dao,
// FlashAttention-2 (2023), section 3.1.2; the split into two passes, this one and
// backward_simt_dkdv, is ours.
#pragma once

#include "kernels/simt/gradient.cuh"

namespace fulmen {

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
        pair_terms(has_pair_terms(head_.p)),
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

  // V of this block is on its way; leaves with V of the next one on its way.
  void step(i64 first_column, bool is_full, bool is_last) {
    const bool plain = is_full && !pair_terms;
    const i64 next_column = first_column + kConfig.columns;
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
      if (range.visible.size() > 0) load_first(range.visible.begin * kConfig.columns);
      for (i64 block = range.visible.begin; block < range.visible.end; ++block) {
        step(block * kConfig.columns, range.is_full(block), block + 1 == range.visible.end);
      }
    }
    Rows::template store<kConfig.max_dim_qk>(
        q_rows_of(head, p.dq, p.dim_qk), first_row, shape.q_len - first_row,
        head.sequence.q_slot - first_row, dQ, [](i32) { return Real(1); });
  }
};

template <FmaConfig kConfig>
void backward_simt_dq(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  const TileTask task = tile_task(ptx::block_index(), p.batch_extent(), p.heads_q,
                                  num_tile_slots(p, p.q_rows, kConfig.rows), true);
  const TilePlace origin = find_tile(p, p.cu_q, task, kConfig.rows);
  const Head<kConfig.dtype> head(p, origin.index, task.head);
  if (origin.first_row >= head.sequence.q_slot) return;
  BackwardSimtDq<kConfig>(head, origin.first_row).run();
}

}  // namespace fulmen
