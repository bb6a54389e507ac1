// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exact attention on the ordinary arithmetic units: a block keeps a tile of Q in shared memory and
// its part of O in registers, and meets K and V a tile at a time. True float32 (16-bit inputs are
// widened) or float64, every option, any strides and alignment. Source: Dao, FlashAttention-2
// (2023), section 3.1. Launched with one block for each (slot of rows, batch, head), see
// tile_tasks.cuh.
//
// A hidden pair has weight -0: it adds nothing to finite values, and where a tile of V holds
// infinities or NaN, sums<guarded> skips it altogether.
#pragma once

#include "kernels/simt_block.cuh"

namespace fulmen {

template <FmaConfig kConfig>
struct ForwardSimt : Simt<kConfig> {
  using Base = Simt<kConfig>;
  using typename Base::Real;
  using typename Base::Tile;
  using typename Base::Vector;
  using HeadType = Head<kConfig.dtype>;
  using State = typename HeadType::State;
  static constexpr i32 kVectors = kConfig.max_dim_v / (kConfig.side * Base::kLanes);

  const AttentionParams& p;
  const HeadType& head;
  i64 first_row;  // of the block, in its sequence
  bool pair_terms;
  Tile Q, KV, P;
  u32* unusual;  // V holds an infinity or a NaN
  State state[Base::kRows];
  Vector O[Base::kRows][kVectors] = {};

  ForwardSimt(const HeadType& head_, i64 first_row_)
      : p(head_.p), head(head_), first_row(first_row_), pair_terms(has_pair_terms(head_.p)) {
    typename Base::Layout layout;
    Q = layout.tile(kConfig.rows, kConfig.max_dim_qk);
    KV = layout.tile(kConfig.columns, kConfig.max_dim());
    P = layout.tile(kConfig.rows, kConfig.columns);
    unusual = layout.word();
  }

  i64 q_row(i32 r) const { return first_row + Base::row(r); }

  void load_rows(const ArrayView& array, i64 j, i64 dim, i32 row_elems) {
    Base::load(array, head.kv_row(array, j), array.strides[2], head.sequence.shape.kv_len - j, dim,
               KV, kConfig.columns, row_elems, unusual);
  }

  // S = softcap(scale Q K^T) + bias + ALiBi of row r, -inf where hidden.
  void score_row(Real (&S)[Base::kColumns], i32 r, i64 first_column, bool is_full) const {
    const i64 i = q_row(r);
    const bool counts = i < head.sequence.shape.q_len;
    const Interval columns = counts ? head.columns(i) : Interval{0, 0};
#pragma unroll
    for (i32 c = 0; c < Base::kColumns; ++c) {
      const i64 j = first_column + Base::column(c);
      const bool inside = counts && (is_full || columns.contains(j));
      S[c] = tile_score(head, S[c], i, j, inside, pair_terms);
    }
  }

  // P = exp(S - m) after dropout;  l and O follow a new m.
  void softmax_row(Real (&S)[Base::kColumns], i32 r, i64 first_column) {
    Real block_max = -HeadType::Math::kInfinity;
#pragma unroll
    for (i32 c = 0; c < Base::kColumns; ++c) block_max = max(block_max, S[c]);
    block_max = Base::across_row(block_max, [](Real a, Real b) { return max(a, b); });
    const Real rescale = state[r].update(block_max);
    Real sum = 0;
#pragma unroll
    for (i32 c = 0; c < Base::kColumns; ++c) {
      const bool hidden = S[c] == -HeadType::Math::kInfinity;
      Real weight = hidden ? Base::kHidden : state[r].weight(S[c]);
      sum += weight;
      if (head.dropout.enabled() && !hidden) {
        weight *= pair_keep(head, q_row(r), first_column + Base::column(c));
      }
      P.at(Base::row(r), Base::column(c)) = weight;
    }
    state[r].row_sum += Base::row_sum(sum);
#pragma unroll
    for (i32 v = 0; v < kVectors; ++v) {
#pragma unroll
      for (i32 m = 0; m < Base::kLanes; ++m) O[r][v].lane[m] *= rescale;
    }
  }

  void step(i64 first_column, bool is_full) {
    Real S[Base::kRows][Base::kColumns];
    ptx::block_sync();  // the last step is done with KV and P
    load_rows(p.k, first_column, p.dim_qk, kConfig.max_dim_qk);
    ptx::block_sync();  // K is there
    Base::dots(Q, KV, p.dim_qk, S);
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      score_row(S[r], r, first_column, is_full);
      softmax_row(S[r], r, first_column);
    }
    ptx::block_sync();  // all are done with K
    if (Base::thread() == 0) *unusual = 0;
    ptx::block_sync();  // before V may set it
    load_rows(p.v, first_column, p.dim_v, kConfig.max_dim_v);
    ptx::block_sync();  // V and P are there
    const i64 depth = min<i64>(kConfig.columns, head.sequence.shape.kv_len - first_column);
    Base::sums(P, KV, depth, *unusual != 0, O);
  }

  void run() {
    const i64 q_len = head.sequence.shape.q_len;
    if (first_row < q_len) {
      Base::load(p.q, head.q_row(p.q, first_row), p.q.strides[2], q_len - first_row, p.dim_qk, Q,
                 kConfig.rows, kConfig.max_dim_qk, unusual);
      const BlockRange range =
          visible_column_blocks(p.mask_options, head.sequence.shape,
                                {first_row, min(first_row + kConfig.rows, q_len)}, kConfig.columns);
      for (i64 block = range.visit.begin; block < range.visit.end; ++block) {
        step(block * kConfig.columns, range.is_full(block));
      }
    }
    store_rows();
  }

  // O / l; lse and stats.
  void store_rows() {
    const i64 q_len = head.sequence.shape.q_len;
    const i64 slot = head.sequence.q_slot - first_row;
    Real normalizer[Base::kRows];
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) normalizer[r] = state[r].normalizer(head.sink);
    Base::store(p.o, head.q_row(p.o, first_row), p.o.strides[2], q_len - first_row, slot, p.dim_v,
                O, [&](i32 r) { return normalizer[r]; });
    if (Base::x() != 0) return;
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      const i64 i = q_row(r);
      if (Base::row(r) >= slot) continue;
      if (p.lse.present()) store_real_called(p.lse, head.q_row(p.lse, i), state[r].lse());
      if (!p.stats.present()) continue;
      store_real_called(p.stats, head.q_row(p.stats, i), state[r].row_max);
      store_real_called(p.stats, head.q_row(p.stats, i) + p.stats.strides[3], state[r].row_sum);
    }
  }
};

template <FmaConfig kConfig>
void forward_simt(const AttentionParams& p) {
  const TileTask task = tile_task(ptx::block_index(), p.batch_extent(), p.heads_q,
                                  num_tile_slots(p, p.q_rows, kConfig.rows), true);
  const TilePlace place = find_tile(p, p.cu_q, task, kConfig.rows);
  const Head<kConfig.dtype> head(p, place.index, task.head);
  if (place.first_row >= head.sequence.q_slot) return;
  ForwardSimt<kConfig>(head, place.first_row).run();
}

}  // namespace fulmen
