// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dQ, and dK with dV, on the ordinary arithmetic units, tile by tile. Two passes that each own what
// they write, so that nothing is added by atomics and results are bitwise equal from run to run:
//   backward_simt_dq     a block owns query rows (Q, dO stay in shared memory) and meets K, V
//   backward_simt_dkdv   a block owns keys (K, V stay) and meets Q, dO of every head of the group
// Both recompute S and P from the saved softmax. dbias and dsinks come from backward_naive.
// Source: Dao, FlashAttention-2 (2023), section 3.1.2; the split into two passes is ours.
#pragma once

#include "kernels/saved_row.cuh"
#include "kernels/simt_block.cuh"

namespace fulmen {

// What a row of queries brings to every pair.
template <class Real>
struct SavedRow {
  Real shift;       // subtracted from scores
  Real normalizer;  // 1 / l_total; 0 for a row that saw nothing
  Real lse_factor;  // dL / l_keys
  bool saw;         // something: other rows add nothing
  Real D;           // dot(dO, O)
};

template <DType kDType>
SavedRow<typename Head<kDType>::Real> saved_row(const Head<kDType>& head, i64 i) {
  using Real = typename Head<kDType>::Real;
  const auto state = saved_state(head, i);
  const bool saw = state.row_sum != Real(0);
  const Real lse_factor = saw ? lse_gradient(head, i) / state.row_sum : Real(0);
  return {state.shift(), state.normalizer(head.sink), lse_factor, saw, 0};
}

template <FmaConfig kConfig>
struct BackwardSimt : Simt<kConfig> {
  using Base = Simt<kConfig>;
  using typename Base::Real;
  using typename Base::Tile;
  using typename Base::Vector;
  using HeadType = Head<kConfig.dtype>;
  using Row = SavedRow<Real>;
  using Pairs = Real[Base::kRows][Base::kColumns];
  static constexpr i32 kQkVectors = kConfig.max_dim_qk / (kConfig.side * Base::kLanes);
  static constexpr i32 kVVectors = kConfig.max_dim_v / (kConfig.side * Base::kLanes);

  Tile own_qk, own_v;  // of the rows that the block owns: Q and dO, or K and V
  Tile other;          // of the others: one of K and V, or of Q and dO
  Tile factors;        // dX or P, by which rows of `other` are multiplied
  Real* row_dots;      // (columns) dot(dO, O)
  u32* unusual;        // `other` holds an infinity or a NaN

  BackwardSimt() {
    typename Base::Layout layout;
    own_qk = layout.tile(kConfig.rows, kConfig.max_dim_qk);
    own_v = layout.tile(kConfig.rows, kConfig.max_dim_v);
    other = layout.tile(kConfig.columns, kConfig.max_dim());
    factors = layout.tile(kConfig.rows, kConfig.columns);
    row_dots = layout.reals(kConfig.columns);
    unusual = layout.word();
  }

  // Replaces `other`, once all threads are done with it; then it is there for all of them.
  void load_other(const ArrayView& array, i64 offset, i64 count, i64 dim, i32 row_elems) {
    ptx::block_sync();  // all are done with the old tile and with `factors`
    if (Base::thread() == 0) *unusual = 0;
    ptx::block_sync();  // before the new tile may set it
    Base::load(array, offset, array.strides[2], count, dim, other, kConfig.columns, row_elems,
               unusual);
    ptx::block_sync();  // the new tile is there, and what was written to `factors` before
  }

  // P of a visible pair before dropout, from its score; the exponent never exceeds 0.
  static Real probability(Real score, const Row& row) {
    return HeadType::Math::exp(min(score - row.shift, Real(0)));
  }

  // dS = P (dP keep - D) + dL e / l_keys, dX = dS d s / d dot. Never -0, which means hidden.
  static Real dot_gradient(const HeadType& head, const Row& row, Real weight, Real dP, Real dot) {
    const Real dS = weight * row.normalizer * (dP - row.D) + weight * row.lse_factor;
    const bool capped = head.map.softcap != Real(0);
    return dS * (capped ? pair_slope(head, dot) : head.map.scale) + Real(0);
  }

  // dot(dO, O) of the query row whose dO is row `at` of `tile`, over the threads of a row.
  static Real row_dot(const HeadType& head, const Tile& tile, i32 at, i64 i) {
    const ArrayView& o = head.p.o;
    Real sum = 0;
    if (i < head.sequence.shape.q_len) {
      const i64 offset = head.q_row(o, i);
      for (i64 d = Base::x(); d < head.p.dim_v; d += kConfig.side) {
        sum += tile.at(at, static_cast<i32>(d)) * load_real<Real>(o, offset + d * o.strides[3]);
      }
    }
    return Base::row_sum(sum);
  }
};

template <FmaConfig kConfig>
struct BackwardSimtDq : BackwardSimt<kConfig> {
  using Base = BackwardSimt<kConfig>;
  using typename Base::Real;
  using typename Base::Vector;

  const AttentionParams& p;
  const Head<kConfig.dtype>& head;
  i64 first_row;
  bool pair_terms;
  typename Base::Row rows[Base::kRows];
  Vector dQ[Base::kRows][Base::kQkVectors] = {};

  BackwardSimtDq(const Head<kConfig.dtype>& head_, i64 first_row_)
      : p(head_.p), head(head_), first_row(first_row_), pair_terms(has_pair_terms(head_.p)) {}

  i64 q_row(i32 r) const { return first_row + Base::row(r); }

  void load_own() {
    const i64 count = head.sequence.shape.q_len - first_row;
    Base::load(p.q, head.q_row(p.q, first_row), p.q.strides[2], count, p.dim_qk, this->own_qk,
               kConfig.rows, kConfig.max_dim_qk, this->unusual);
    Base::load(p.dout, head.q_row(p.dout, first_row), p.dout.strides[2], count, p.dim_v,
               this->own_v, kConfig.rows, kConfig.max_dim_v, this->unusual);
    ptx::block_sync();
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      rows[r] = Base::row(r) < count ? saved_row(head, q_row(r)) : typename Base::Row{};
      rows[r].D = Base::row_dot(head, this->own_v, Base::row(r), q_row(r));
    }
  }

  void load_keys(const ArrayView& array, i64 j, i64 dim, i32 row_elems) {
    Base::load_other(array, head.kv_row(array, j), head.sequence.shape.kv_len - j, dim, row_elems);
  }

  // dX of the block's pairs into `factors`.
  void write_factors(const typename Base::Pairs& S, const typename Base::Pairs& dP,
                     i64 first_column, bool is_full) {
#pragma unroll
    for (i32 r = 0; r < Base::kRows; ++r) {
      const i64 i = q_row(r);
      const bool counts = i < head.sequence.shape.q_len && rows[r].saw;
      const Interval columns = counts ? head.columns(i) : Interval{0, 0};
#pragma unroll
      for (i32 c = 0; c < Base::kColumns; ++c) {
        const i64 j = first_column + Base::column(c);
        const bool inside = counts && (is_full || columns.contains(j));
        const Real score = tile_score(head, S[r][c], i, j, inside, pair_terms);
        Real dX = Base::kHidden;
        if (score != -Head<kConfig.dtype>::Math::kInfinity) {
          const Real kept = head.dropout.enabled() ? dP[r][c] * pair_keep(head, i, j) : dP[r][c];
          const Real weight = Base::probability(score, rows[r]);
          dX = Base::dot_gradient(head, rows[r], weight, kept, S[r][c]);
        }
        this->factors.at(Base::row(r), Base::column(c)) = dX;
      }
    }
  }

  void step(i64 first_column, bool is_full) {
    typename Base::Pairs S, dP;
    load_keys(p.v, first_column, p.dim_v, kConfig.max_dim_v);
    Base::dots(this->own_v, this->other, p.dim_v, dP);  // dP = dO V^T
    load_keys(p.k, first_column, p.dim_qk, kConfig.max_dim_qk);
    Base::dots(this->own_qk, this->other, p.dim_qk, S);  // S = Q K^T
    write_factors(S, dP, first_column, is_full);
    ptx::block_sync();  // dX is there
    const i64 depth = min<i64>(kConfig.columns, head.sequence.shape.kv_len - first_column);
    Base::sums(this->factors, this->other, depth, *this->unusual != 0, dQ);  // dQ += dX K
  }

  void run() {
    const SequenceShape& shape = head.sequence.shape;
    if (first_row < shape.q_len) {
      load_own();
      const BlockRange range = visible_column_blocks(
          p.mask_options, shape, {first_row, min(first_row + kConfig.rows, i64{shape.q_len})},
          kConfig.columns);
      for (i64 block = range.visit.begin; block < range.visit.end; ++block) {
        step(block * kConfig.columns, range.is_full(block));
      }
    }
    Base::store(p.dq, head.q_row(p.dq, first_row), p.dq.strides[2], shape.q_len - first_row,
                head.sequence.q_slot - first_row, p.dim_qk, dQ, [](i32) { return Real(1); });
  }
};

template <FmaConfig kConfig>
struct BackwardSimtDkDv : BackwardSimt<kConfig> {
  using Base = BackwardSimt<kConfig>;
  using typename Base::Real;
  using typename Base::Vector;
  using HeadType = Head<kConfig.dtype>;

  const AttentionParams& p;
  i64 first_row;  // of the keys that the block owns
  bool pair_terms;
  typename Base::Row rows[Base::kColumns];  // of the query rows that this thread meets
  Vector dK[Base::kRows][Base::kQkVectors] = {};
  Vector dV[Base::kRows][Base::kVVectors] = {};

  BackwardSimtDkDv(const AttentionParams& params, i64 first_row_)
      : p(params), first_row(first_row_), pair_terms(has_pair_terms(params)) {}

  i64 kv_row(i32 r) const { return first_row + Base::row(r); }

  void load_own(const HeadType& head) {
    const i64 count = head.sequence.shape.kv_len - first_row;
    Base::load(p.k, head.kv_row(p.k, first_row), p.k.strides[2], count, p.dim_qk, this->own_qk,
               kConfig.rows, kConfig.max_dim_qk, this->unusual);
    Base::load(p.v, head.kv_row(p.v, first_row), p.v.strides[2], count, p.dim_v, this->own_v,
               kConfig.rows, kConfig.max_dim_v, this->unusual);
  }

  void load_queries(const HeadType& head, const ArrayView& array, i64 i, i64 dim, i32 row_elems) {
    Base::load_other(array, head.q_row(array, i), head.sequence.shape.q_len - i, dim, row_elems);
  }

  // Weights e = exp(s - m) of the block's pairs, -0 where hidden; P after dropout into `factors`.
  void write_probabilities(const HeadType& head, const typename Base::Pairs& S,
                           typename Base::Pairs& weight, i64 first_column, bool is_full) {
#pragma unroll
    for (i32 c = 0; c < Base::kColumns; ++c) {
      const i64 i = first_column + Base::column(c);
      rows[c] = i < head.sequence.shape.q_len ? saved_row(head, i) : typename Base::Row{};
      const Interval columns = rows[c].saw ? head.columns(i) : Interval{0, 0};
#pragma unroll
      for (i32 r = 0; r < Base::kRows; ++r) {
        const i64 j = kv_row(r);
        const bool inside =
            rows[c].saw && (is_full ? j < head.sequence.shape.kv_len : columns.contains(j));
        const Real score = tile_score(head, S[r][c], i, j, inside, pair_terms);
        const bool hidden = score == -HeadType::Math::kInfinity;
        weight[r][c] = hidden ? Base::kHidden : Base::probability(score, rows[c]);
        Real P = hidden ? Base::kHidden : weight[r][c] * rows[c].normalizer;
        if (head.dropout.enabled() && !hidden) P *= pair_keep(head, i, j);
        this->factors.at(Base::row(r), Base::column(c)) = P;
      }
    }
  }

  // dX of the block's pairs into `factors`.
  void write_gradients(const HeadType& head, const typename Base::Pairs& S,
                       const typename Base::Pairs& weight, const typename Base::Pairs& dP,
                       i64 first_column) {
#pragma unroll
    for (i32 c = 0; c < Base::kColumns; ++c) {
      const i64 i = first_column + Base::column(c);
#pragma unroll
      for (i32 r = 0; r < Base::kRows; ++r) {
        Real dX = Base::kHidden;
        if (!Base::is_hidden(weight[r][c])) {
          const Real kept =
              head.dropout.enabled() ? dP[r][c] * pair_keep(head, i, kv_row(r)) : dP[r][c];
          dX = Base::dot_gradient(head, rows[c], weight[r][c], kept, S[r][c]);
        }
        this->factors.at(Base::row(r), Base::column(c)) = dX;
      }
    }
  }

  // D of the block's query rows, dO of which is in `other`. Rows of threads compute them, columns
  // of threads need them: they change hands in shared memory.
  void share_row_dots(const HeadType& head, i64 first_column) {
#pragma unroll
    for (i32 c = 0; c < Base::kColumns; ++c) {
      const i32 at = Base::y() + kConfig.side * c;
      const Real D = Base::row_dot(head, this->other, at, first_column + at);
      if (Base::x() == 0) this->row_dots[at] = D;
    }
    ptx::block_sync();  // row_dots are there, and all are done with `factors`
#pragma unroll
    for (i32 c = 0; c < Base::kColumns; ++c) rows[c].D = this->row_dots[Base::column(c)];
  }

  void step(const HeadType& head, i64 first_column, bool is_full) {
    typename Base::Pairs S, weight, dP;
    const i64 depth = min<i64>(kConfig.columns, head.sequence.shape.q_len - first_column);
    load_queries(head, p.q, first_column, p.dim_qk, kConfig.max_dim_qk);
    Base::dots(this->own_qk, this->other, p.dim_qk, S);  // S^T = K Q^T
    write_probabilities(head, S, weight, first_column, is_full);
    load_queries(head, p.dout, first_column, p.dim_v, kConfig.max_dim_v);
    if (p.dv.present()) {
      Base::sums(this->factors, this->other, depth, *this->unusual != 0, dV);  // dV += P^T dO
    }
    if (!p.dk.present()) return;
    Base::dots(this->own_v, this->other, p.dim_v, dP);  // dP^T = V dO^T
    share_row_dots(head, first_column);
    write_gradients(head, S, weight, dP, first_column);
    load_queries(head, p.q, first_column, p.dim_qk, kConfig.max_dim_qk);
    Base::sums(this->factors, this->other, depth, *this->unusual != 0, dK);  // dK += dX^T Q
  }

  void run_head(const HeadType& head) {
    const SequenceShape& shape = head.sequence.shape;
    const Interval keys{first_row, min(first_row + kConfig.rows, i64{shape.kv_len})};
    const BlockRange range = visible_row_blocks(p.mask_options, shape, keys, kConfig.columns);
    for (i64 block = range.visit.begin; block < range.visit.end; ++block) {
      step(head, block * kConfig.columns, range.is_full(block));
    }
  }

  void store(const HeadType& head) {
    const i64 count = head.sequence.shape.kv_len - first_row;
    const i64 slot = head.sequence.kv_slot - first_row;
    const auto one = [](i32) { return Real(1); };
    if (p.dk.present()) {
      Base::store(p.dk, head.kv_row(p.dk, first_row), p.dk.strides[2], count, slot, p.dim_qk, dK,
                  one);
    }
    if (p.dv.present()) {
      Base::store(p.dv, head.kv_row(p.dv, first_row), p.dv.strides[2], count, slot, p.dim_v, dV,
                  one);
    }
  }
};

template <FmaConfig kConfig>
void backward_simt_dq(const AttentionParams& p) {
  const TileTask task = tile_task(ptx::block_index(), p.batch_extent(), p.heads_q,
                                  num_tile_slots(p, p.q_rows, kConfig.rows), true);
  const TilePlace place = find_tile(p, p.cu_q, task, kConfig.rows);
  const Head<kConfig.dtype> head(p, place.index, task.head);
  if (place.first_row >= head.sequence.q_slot) return;
  BackwardSimtDq<kConfig>(head, place.first_row).run();
}

template <FmaConfig kConfig>
void backward_simt_dkdv(const AttentionParams& p) {
  const TileTask task = tile_task(ptx::block_index(), p.batch_extent(), p.heads_kv,
                                  num_tile_slots(p, p.kv_rows, kConfig.rows), false);
  const TilePlace place = find_tile(p, p.cu_kv, task, kConfig.rows);
  const Head<kConfig.dtype> first(p, place.index, task.head * p.group_size());
  if (place.first_row >= first.sequence.kv_slot) return;
  BackwardSimtDkDv<kConfig> block(p, place.first_row);
  if (place.first_row < first.sequence.shape.kv_len) {
    block.load_own(first);
    for (i64 member = 0; member < p.group_size(); ++member) {
      block.run_head(Head<kConfig.dtype>(p, place.index, task.head * p.group_size() + member));
    }
  }
  block.store(first);
}

}  // namespace fulmen
