// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exact attention on CUDA cores: a block keeps a tile of Q in shared memory and
// its part of O in registers, and meets K and V a tile at a time. True float32 (16-bit inputs are
// widened) or float64, every option, any strides and alignment. Source: Dao, FlashAttention-2
// (2023), section 3.1. Launched with one block for each (slot of rows, batch, head), see
// tile_tasks.cuh. K and V each have a tile: one is copied while the other is multiplied.
//
// A hidden pair has weight -0: it adds nothing to finite values, and where a tile of V holds
// infinities or NaN, guarded_sums skips it altogether.
#pragma once

#include "kernels/common/block_lists.cuh"
#include "kernels/common/caches.cuh"
#include "kernels/simt/block.cuh"
#include "kernels/simt/tile.cuh"

namespace fulmen {

// What O of row i is multiplied by, and what is added of the part that o holds; state, of the keys
// of this call, becomes that of both.
template <class HeadType>
__attribute__((noinline)) auto shares_of_row(const HeadType& head, i64 i,
                                             typename HeadType::State& state) {
  using Real = typename HeadType::Real;
  using Shares = typename HeadType::State::MergeFactors;
  if (!head.p.accumulates) return Shares{state.normalizer(head.sink), Real(0)};
  if (i < head.sequence.shape.q_len) {
    const bool changes = state.row_sum != Real(0) || head.p.sinks.present();
    const Shares shares = state.join(saved_state(head, i), head.sink);
    if (changes) return shares;
  }
  return Shares{Real(0), Real(1)};  // what is there stays
}

template <class HeadType>
__attribute__((noinline)) bool sees_no_page(const HeadType& head, i64 i) {
  return i < head.sequence.shape.q_len && head.sees_no_page(i);
}

// lse and stats of a row.
template <class HeadType>
__attribute__((noinline)) void store_state(const HeadType& head, i64 i,
                                           typename HeadType::State state) {
  const AttentionParams& p = head.p;
  if (p.lse.present()) store_real(p.lse, head.q_row(p.lse, i), state.lse());
  if (!p.stats.present()) return;
  store_real(p.stats, head.q_row(p.stats, i), state.row_max);
  store_real(p.stats, head.q_row(p.stats, i) + p.stats.strides[3], state.row_sum);
}

template <FmaConfig kConfig>
struct ForwardSimt : Simt<kConfig> {
  using Base = Simt<kConfig>;
  using Rows = SimtRows<kConfig>;
  using typename Base::Pairs;
  using typename Base::Real;
  using HeadType =
      Head<kConfig.dtype, kConfig.caches, kConfig.kv_dtype(), kConfig.q_dtype(), kConfig.user>;
  using KeyRows = KeyRowsOf<HeadType>;
  using Math = typename HeadType::Math;
  using State = typename HeadType::State;

  const AttentionParams& p;
  const HeadType& head;
  i64 first_row;  // of the block, in its sequence
  bool pair_terms;
  typename KeyRows::Type k_rows, v_rows;
  typename Base::QkRows Q, K;
  typename Base::VRows V;
  typename Base::Weights P;
  u32* word;                 // shared
  State state[Base::kRows];  // row_sum: of this thread's columns
  typename Base::template Sums<kConfig.max_dim_v> O = {};

  ForwardSimt(const HeadType& head_, i64 first_row_)
      : p(head_.p),
        head(head_),
        first_row(first_row_),
        pair_terms(
            has_pair_terms<kConfig>(head_.p) ||
            (kConfig.caches && (head_.p.tree.present() || head_.p.cache_layout.slot_rows > 0))),
        k_rows(KeyRows::make(head_, p.k, p.k_scale, p.dim_qk, 0)),
        v_rows(KeyRows::make(head_, p.v, p.v_scale, p.dim_v, kValueOfNoPage)) {
    typename Base::Layout layout;
    Q = layout.template tile<typename Base::QkRows>(kConfig.rows);
    K = layout.template tile<typename Base::QkRows>(kConfig.columns);
    V = layout.template tile<typename Base::VRows>(kConfig.columns);
    P = layout.template tile<typename Base::Weights>(kConfig.rows);
    word = layout.word();
  }

  i64 q_row(i32 r) const { return first_row + Base::row(r); }
  i64 num_keys(i64 first_column) const { return head.sequence.shape.kv_len - first_column; }

  // S = softcap(scale Q K^T) + bias + ALiBi, -inf where hidden: by way of shared memory.
  void score_pairs(Pairs& S, i64 first_column) const {
    i32 row = -1;
    Limits limits{};  // of that row
    Base::change_pairs(P, S, [&](Real dot, i32 r, i32 c) {
      const i64 i = q_row(r);
      const i32 column = Base::column(c);
      if (r != row) limits = row_limits(head, i, first_column);
      row = r;
      return limits.contains(column) ? pair_score(head, dot, i, first_column + column)
                                     : -Math::kInfinity;
    });
  }

  // P = exp(S - m);  l and O follow a new m.
  void softmax(const Pairs& S) {
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      Real block_max = S[r][0];
#pragma unroll
      for (i32 c = 1; c < Base::kColumns; ++c) block_max = Math::max(block_max, S[r][c]);
      block_max = Base::across_row(block_max, [](Real a, Real b) { return Math::max(a, b); });
      const Real rescale = state[r].update(block_max);
      const Real shift = state[r].shift();
      Real sum = 0;
#pragma unroll
      for (i32 c = 0; c < Base::kColumns; ++c) {
        const Real weight = Math::exp(S[r][c] - shift);
        sum += weight;
        Base::own(P, r, c) = weight;
      }
      state[r].row_sum += sum;
#pragma unroll
      for (auto& vector : O[r]) {
#pragma unroll
        for (Real& o : vector.lane) o *= rescale;
      }
    }
  }

  // Marks hidden pairs in P.
  void hide(const Pairs& S) const {
    Base::each_pair([&](i32 r, i32 c) {
      if (S[r][c] == -Math::kInfinity) Base::own(P, r, c) = Base::kHidden;
    });
  }

  void drop_out(i64 first_column) const {
    Base::change_own(P, [&](Real weight, i32 r, i32 c) {
      return Base::is_hidden(weight)
                 ? weight
                 : weight * pair_keep(head, q_row(r), first_column + Base::column(c));
    });
  }

  // K of this block is on its way; leaves with K of the next one, if it is not the last, on its
  // way.
  void step(i64 first_column, bool is_full, i64 next_column, bool is_last) {
    const bool plain = is_full && !pair_terms;
    Pairs S;
    ptx::wait_for_copies();
    ptx::block_sync();  // K is there, and all are done with V
    Rows::template load<kConfig.columns>(v_rows, first_column, num_keys(first_column), V);
    Base::dots(Q, K, static_cast<i32>(p.dim_qk), S);
    if (pair_terms) {
      score_pairs(S, first_column);
    } else {
      Base::each_pair([&](i32 r, i32 c) { S[r][c] = Math::product(S[r][c], head.map.scale); });
      if (!is_full) {
        Base::hide_outside(S, [&](i32 r) { return row_limits(head, q_row(r), first_column); });
      }
    }
    softmax(S);
    if (!plain) hide(S);
    if (head.dropout.enabled()) drop_out(first_column);
    ptx::wait_for_copies();
    ptx::block_sync();  // V and P are there, and all are done with K
    const bool guarded = !plain && !Rows::template all_finite<kConfig.columns>(V, word);
    if (!is_last) {
      Rows::template load<kConfig.columns>(k_rows, next_column, num_keys(next_column), K);
    }
    const i32 depth = static_cast<i32>(min<i64>(kConfig.columns, num_keys(first_column)));
    if (guarded) {
      Base::template guarded_sums<kConfig.max_dim_v>(P, V, depth, O);
    } else {
      Base::template sums<kConfig.max_dim_v>(P, V, depth, O);
    }
  }

  void load_first(i64 first_column) const {
    const HeadRows q_rows = q_rows_of(head, p.q, p.dim_qk);
    const i64 num_rows = head.sequence.shape.q_len - first_row;
    if constexpr (HeadType::kHasQuantisedQ) {
      Rows::template load<kConfig.rows>(QuantisedQueries<HeadType, HeadRows>{q_rows, head},
                                        first_row, num_rows, Q);
    } else {
      Rows::template load<kConfig.rows>(q_rows, first_row, num_rows, Q);
    }
    Rows::template load<kConfig.columns>(k_rows, first_column, num_keys(first_column), K);
  }

  void run() {
    const i64 q_len = head.sequence.shape.q_len;
    if (first_row < q_len) {
      const BlockRange range =
          head.key_blocks({first_row, min(first_row + kConfig.rows, q_len)}, kConfig.columns);
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
    store_rows();
  }

  // Rows that saw a key without a page: this thread's part of O is NaN.
  void empty_rows_of_no_page() {
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      if (O[r][0].lane[0] == O[r][0].lane[0] || !sees_no_page(head, q_row(r))) continue;
      state[r] = State{};
      for (auto& vector : O[r]) vector = {};
    }
  }

  // O / l; lse and stats.
  void store_rows() {
    const SequenceShape& shape = head.sequence.shape;
    const i64 slot = (p.accumulates ? shape.q_len : head.sequence.q_slot) - first_row;
    if constexpr (kConfig.caches) empty_rows_of_no_page();
    typename Rows::Shares shares[Base::kRows];
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      state[r].row_sum = Base::row_sum(state[r].row_sum);
      const auto of_row = shares_of_row(head, q_row(r), state[r]);
      shares[r] = {of_row.mine, of_row.other};
    }
    ptx::warp_sync();  // all threads of a row have read stats
    Rows::template store<kConfig.max_dim_v>(q_rows_of(head, p.o, p.dim_v), first_row,
                                            shape.q_len - first_row, slot, O,
                                            [&](i32 r) { return shares[r]; });
    if (Base::x() != 0) return;
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      const bool stays = p.accumulates && shares[r].mine == Real(0) && shares[r].other == Real(1);
      if (Base::row(r) >= slot || stays) continue;
      store_state(head, q_row(r), q_row(r) < head.sequence.shape.q_len ? state[r] : State{});
    }
  }
};

template <FmaConfig kConfig>
void forward_simt(const AttentionParams& p) {
  kConfig.caches ? record_cache_faults(p, kConfig.num_threads)
                 : record_faults(p, kConfig.num_threads);
  if constexpr (kConfig.user.mask) {
    record_segment_faults<typename ForwardSimt<kConfig>::HeadType::User>(p, expression_of(p),
                                                                         kConfig.num_threads);
  }
  const TileTask task = tile_task(ptx::block_index(), p.batch_extent(), p.heads_q,
                                  num_q_slots(p, kConfig.rows), true);
  const TilePlace origin = find_tile(p, p.cu_q, task, kConfig.rows);
  const typename ForwardSimt<kConfig>::HeadType head(p, origin.index, task.head);
  if (origin.first_row >= head.sequence.q_slot) return;
  ForwardSimt<kConfig>(head, origin.first_row).run();
}

}  // namespace fulmen
