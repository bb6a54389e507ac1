// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients of the arrays that a user's score reads, in a pass of their own: a block owns query
// rows, keeps Q and dO in shared memory, and meets K and V a tile at a time. What a pair adds goes
// where the pair has read, by atomics: sums of 64 bits in the workspace, which store_captures
// rounds into the arrays. A thread adds neighbours that read one element before that. Launched as
// forward_simt, after backward_simt_rows.
#pragma once

#include "kernels/common/block_lists.cuh"
#include "kernels/simt/gradient.cuh"

namespace fulmen {

// dC[what pair (i, j) reads] += dS' d s' / d C, where dS' = e G (gradient.cuh).
template <class HeadType, class Real, class Sums>
__attribute__((noinline)) void add_captures(const HeadType& head, i64 i, i64 j, Real dot, Real G,
                                            Real shift, Sums& sums) {
  using Math = typename HeadType::Math;
  if (!head.sees(i, j)) return;
  const Real capped = head.map.template score<Math>(dot);
  const Real dS = Math::exp(min(head.score(capped, i, j) - shift, Real(0))) * G;
  head.differentiate(capped, i, j,
                     [&](i32 n, double* element, Real slope) { sums.add(n, element, dS * slope); });
}

template <FmaConfig kConfig>
struct BackwardSimtCaptures : SimtGradient<kConfig> {
  using Base = SimtGradient<kConfig>;
  using Rows = SimtRows<kConfig>;
  using typename Base::HeadType;
  using typename Base::Pairs;
  using typename Base::Real;

  const AttentionParams& p;
  const HeadType& head;
  i64 first_row;  // of the block, in its sequence
  typename Base::QkRows Q, K;
  typename Base::VRows dO, V;
  SavedRow<Real> rows[Base::kRows];
  CaptureSums<Real, HeadType::User::kNumDerivatives> sums;

  BackwardSimtCaptures(const HeadType& head_, i64 first_row_)
      : p(head_.p), head(head_), first_row(first_row_) {
    typename Base::Layout layout;
    Q = layout.template tile<typename Base::QkRows>(kConfig.rows);
    dO = layout.template tile<typename Base::VRows>(kConfig.rows);
    K = layout.template tile<typename Base::QkRows>(kConfig.columns);
    V = layout.template tile<typename Base::VRows>(kConfig.columns);
    this->factors = layout.template tile<typename Base::Weights>(kConfig.rows);
  }

  i64 q_row(i32 r) const { return first_row + Base::row(r); }

  struct Pass {
    const BackwardSimtCaptures& block;
    i64 first_column;
    i64 query(i32 r, i32) const { return block.q_row(r); }
    i64 key(i32, i32 c) const { return first_column + Base::column(c); }
    const SavedRow<Real>& saved(i32 r, i32) const { return block.rows[r]; }
  };

  void load_rows() {
    const i64 count = head.sequence.shape.q_len - first_row;
    Rows::template load<kConfig.rows>(q_rows_of(head, p.q, p.dim_qk), first_row, count, Q);
    Rows::template load<kConfig.rows>(q_rows_of(head, p.dout, p.dim_v), first_row, count, dO);
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      rows[r] = Base::row(r) < count ? saved_rows(head)[q_row(r)] : SavedRow<Real>{};
    }
  }

  void step(i64 first_column) {
    const i64 num_keys = head.sequence.shape.kv_len - first_column;
    const Pass pass{*this, first_column};
    Pairs S, dP;
    ptx::block_sync();  // all are done with K and V
    Rows::template load<kConfig.columns>(kv_rows_of(head, p.k, p.dim_qk), first_column, num_keys,
                                         K);
    Rows::template load<kConfig.columns>(kv_rows_of(head, p.v, p.dim_v), first_column, num_keys, V);
    ptx::wait_for_copies();
    ptx::block_sync();  // K and V are there
    Base::dots(dO, V, static_cast<i32>(p.dim_v), dP);
    Base::dots(Q, K, static_cast<i32>(p.dim_qk), S);
    Base::to_gradients(head, pass, dP);
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      const Limits limits = row_limits(head, q_row(r), first_column);
#pragma unroll
      for (i32 c = 0; c < Base::kColumns; ++c) {
        if (!limits.contains(Base::column(c))) continue;
        add_captures(head, pass.query(r, c), pass.key(r, c), S[r][c], dP[r][c], rows[r].shift,
                     sums);
      }
    }
  }

  void run() {
    const SequenceShape& shape = head.sequence.shape;
    const BlockRange range = visible_column_blocks(
        p.mask_options, shape, {first_row, min(first_row + kConfig.rows, i64{shape.q_len})},
        kConfig.columns);
    if (range.visible.size() <= 0) return;
    load_rows();
    const i64 end = range.visible.end;
    for (i64 block = range.visible.begin; block < end; ++block) {
      block = next_key_tile<kConfig.columns>(head, first_row, block, end);
      if (block < end) step(block * kConfig.columns);
    }
    sums.flush();
  }
};

template <FmaConfig kConfig>
void backward_simt_captures(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  const TileTask task = tile_task(ptx::block_index(), p.batch_extent(), p.heads_q,
                                  num_q_slots(p, kConfig.rows), true);
  const TilePlace origin = find_tile(p, p.cu_q, task, kConfig.rows);
  const BackwardHead<kConfig> head(p, origin.index, task.head);
  if (origin.first_row >= head.sequence.shape.q_len) return;
  BackwardSimtCaptures<kConfig>(head, origin.first_row).run();
}

}  // namespace fulmen
