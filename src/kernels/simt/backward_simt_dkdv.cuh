// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dK and dV on CUDA cores: a block owns keys, keeps K and V in shared memory and
// its part of dK and dV in registers, and meets Q and dO of every head of the group a tile at a
// time. Rows of a tile of pairs are keys here, columns are queries. With adds_dq it adds what its
// keys bring to dQ to the sums in global memory, by atomics, which spares backward_simt_dq and the
// two products that it would make again; otherwise nothing is added by atomics.
// Launched with one block for each (slot of keys, batch, kv_head).
#pragma once

#include "kernels/common/block_lists.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/simt/gradient.cuh"

namespace fulmen {

template <FmaConfig kConfig>
struct BackwardSimtDkDv : SimtGradient<kConfig> {
  using Base = SimtGradient<kConfig>;
  using Rows = SimtRows<kConfig>;
  using typename Base::HeadType;
  using typename Base::Math;
  using typename Base::Pairs;
  using typename Base::Real;

  const AttentionParams& p;
  i64 first_row;  // of the keys that the block owns
  bool pair_terms;
  typename Base::QkRows K, Q;
  typename Base::VRows V, dO;
  SavedRow<Real>* saved;  // (columns) of the query rows of a tile; shared
  u32* word;              // shared
  bool finite_K = true;   // looked at with adds_dq only
  typename Base::template Sums<kConfig.max_dim_qk> dK = {};
  typename Base::template Sums<kConfig.max_dim_v> dV = {};

  BackwardSimtDkDv(const AttentionParams& params, i64 first_row_)
      : p(params), first_row(first_row_), pair_terms(has_pair_terms<kConfig>(params)) {
    typename Base::Layout layout;
    K = layout.template tile<typename Base::QkRows>(kConfig.rows);
    V = layout.template tile<typename Base::VRows>(kConfig.rows);
    Q = layout.template tile<typename Base::QkRows>(kConfig.columns);
    dO = layout.template tile<typename Base::VRows>(kConfig.columns);
    this->factors = layout.template tile<typename Base::Weights>(kConfig.rows);
    saved = reinterpret_cast<SavedRow<Real>*>(layout.reals(4 * kConfig.columns));
    word = layout.word();
  }

  i64 kv_row(i32 r) const { return first_row + Base::row(r); }

  struct Pass {
    const BackwardSimtDkDv& block;
    const HeadType& head;
    i64 first_column;
    i64 query(i32, i32 c) const { return first_column + Base::column(c); }
    i64 key(i32 r, i32) const { return block.kv_row(r); }
    const SavedRow<Real>& saved(i32, i32 c) const { return block.saved[Base::column(c)]; }
    Limits limits(i32 r) const { return query_limits(head, block.kv_row(r), first_column); }
  };

  void load_own(const HeadType& head) const {
    const i64 count = head.sequence.shape.kv_len - first_row;
    Rows::template load<kConfig.rows>(kv_rows_of(head, p.k, p.dim_qk), first_row, count, K);
    Rows::template load<kConfig.rows>(kv_rows_of(head, p.v, p.dim_v), first_row, count, V);
  }

  // Infinities and NaN of hidden keys must not reach dQ.
  void look_at_keys() {
    ptx::wait_for_copies();
    ptx::block_sync();  // K is there
    finite_K = Rows::template all_finite<kConfig.rows>(K, word);
  }

  void load_dout(const HeadType& head, i64 i) const {
    Rows::template load<kConfig.columns>(q_rows_of(head, p.dout, p.dim_v), i,
                                         head.sequence.shape.q_len - i, dO);
  }

  // What is saved of the query rows of the tile, on its way.
  void load_saved(const HeadType& head, i64 i) const {
    constexpr i32 kParts = static_cast<i32>(sizeof(SavedRow<Real>)) / 16;
    const u8* const from = reinterpret_cast<const u8*>(saved_rows(head) + i);
    const i64 count = head.sequence.shape.q_len - i;
    for (i32 at = Base::thread(); at < kConfig.columns * kParts; at += kConfig.num_threads) {
      ptx::copy_vector(reinterpret_cast<u8*>(saved) + at * 16, from + at * 16, at / kParts < count);
    }
  }

  template <i32 kDim, class Tile>
  void add(const Tile& tile, i32 depth, bool plain,
           typename Base::template Sums<kDim>& sums) const {
    if (!plain && !Rows::template all_finite<kConfig.columns>(tile, word)) {
      Base::template guarded_sums<kDim>(this->factors, tile, depth, sums);
    } else {
      Base::template sums<kDim>(this->factors, tile, depth, sums);
    }
  }

  // dO of this block is on its way; leaves with dO of the next one, if it is not the last, on its
  // way.
  void step(const HeadType& head, i64 first_column, bool is_full, i64 next_column, bool is_last) {
    const bool plain = is_full && !pair_terms;
    const i64 num_queries = head.sequence.shape.q_len - first_column;
    const i32 depth = static_cast<i32>(min<i64>(kConfig.columns, num_queries));
    const Pass pass{*this, head, first_column};
    Pairs S, dP;
    ptx::wait_for_copies();
    ptx::block_sync();  // dO is there, and all are done with Q and `saved`
    Rows::template load<kConfig.columns>(q_rows_of(head, p.q, p.dim_qk), first_column, num_queries,
                                         Q);
    load_saved(head, first_column);
    Base::dots(V, dO, static_cast<i32>(p.dim_v), dP);  // dP^T = V dO^T
    ptx::wait_for_copies();
    ptx::block_sync();                                // Q and `saved` are there
    Base::dots(K, Q, static_cast<i32>(p.dim_qk), S);  // S^T = K Q^T
    Base::template prepare<true>(head, pass, is_full, pair_terms, S, dP);
    Base::each_pair([&](i32 r, i32 c) {  // P = e / l
      const SavedRow<Real>& row = saved[Base::column(c)];
      const bool hidden = !plain && S[r][c] == -Math::kInfinity;
      S[r][c] = Base::weight(S[r][c], row.shift);
      dP[r][c] = hidden ? Base::kHidden : S[r][c] * dP[r][c] + Real(0);  // dX = e G, never -0
      S[r][c] = hidden ? Base::kHidden : S[r][c] * row.normalizer;
    });
    Base::write_own(this->factors, S);
    if (head.dropout.enabled()) {
      Base::change_own(this->factors, [&](Real P, i32 r, i32 c) {
        return Base::is_hidden(P) ? P : P * pair_keep(head, pass.query(r, c), pass.key(r, c));
      });
    }
    ptx::warp_sync();  // P of the warp's rows is there
    if (p.dv.present()) add<kConfig.max_dim_v>(dO, depth, plain, dV);  // dV += P^T dO
    ptx::block_sync();                                                 // all are done with dO and P
    if (!is_last) load_dout(head, next_column);
    if (!p.dk.present() && !kConfig.adds_dq) return;
    Base::write_own(this->factors, dP);
    ptx::warp_sync();  // dX of the warp's rows is there
    if (p.dk.present()) add<kConfig.max_dim_qk>(Q, depth, plain, dK);  // dK += dX^T Q
    if constexpr (kConfig.adds_dq) {
      ptx::block_sync();  // dX of all rows is there
      add_dq(head, first_column, !plain && !finite_K);
    }
  }

  // dQ += dX K, of the keys of this block.
  void add_dq(const HeadType& head, i64 first_column, bool guarded) const {
    constexpr i32 kVectors = kConfig.max_dim_qk / (Base::kTurnedAcross * Base::kLanes);
    typename Base::TurnedSums part = {};
    if (guarded) {
      Base::template turned_sums<true>(this->factors, K, part);
    } else {
      Base::template turned_sums<false>(this->factors, K, part);
    }
    const HeadRows dQ = q_rows_of(head, p.dq, p.dim_qk);
    const bool in_vectors = dQ.in_vectors(Base::kLanes);
    const i32 count =
        static_cast<i32>(min<i64>(kConfig.columns, head.sequence.shape.q_len - first_column));
#pragma unroll
    for (i32 i = 0; i < Base::kTurnedColumns; ++i) {
      const i32 column = Base::turned_column(i);
      if (column >= count) continue;
      Real* const row = reinterpret_cast<Real*>(dQ.address(first_column + column));
#pragma unroll
      for (i32 u = 0; u < kVectors; ++u) {
        const i32 d = (Base::turned_x() + Base::kTurnedAcross * u) * Base::kLanes;
        if (d >= dQ.dim) continue;
        if (in_vectors) {
          ptx::add_vector_to(row + d, part[i][u].lane);
        } else {
          add_elements(row, p.dq.strides[3], d, dQ.dim, part[i][u]);
        }
      }
    }
  }

  // Element by element, any stride.
  __attribute__((noinline)) static void add_elements(Real* row, i64 stride, i32 d, i32 dim,
                                                     SimtVector<Real> part) {
#pragma unroll 1
    for (i32 m = 0; m < min(Base::kLanes, dim - d); ++m) {
      ptx::add_to(row + (d + m) * stride, part.lane[m]);
    }
  }

  void run_head(const HeadType& head) {
    const SequenceShape& shape = head.sequence.shape;
    const Interval keys{first_row, min(first_row + kConfig.rows, i64{shape.kv_len})};
    const BlockRange range = visible_row_blocks(p.mask_options, shape, keys, kConfig.columns);
    const i64 end = range.visible.end;
    const auto next = [&](i64 block) {
      return next_row_tile<kConfig.columns>(head, first_row, block, end);
    };
    i64 block = next(range.visible.begin);
    if (block >= end) return;
    ptx::block_sync();  // all are done with dO of the head before
    load_dout(head, block * kConfig.columns);
    for (i64 then = block; block < end; block = then) {
      then = next(block + 1);
      step(head, block * kConfig.columns, range.is_full(block), then * kConfig.columns,
           then >= end);
    }
  }

  void store(const HeadType& head) const {
    const i64 count = head.sequence.shape.kv_len - first_row;
    const i64 slot = head.sequence.kv_slot - first_row;
    const auto one = [](i32) { return typename Rows::Shares{1, 0}; };
    if (p.dk.present()) {
      Rows::template store<kConfig.max_dim_qk>(kv_rows_of(head, p.dk, p.dim_qk), first_row, count,
                                               slot, dK, one);
    }
    if (p.dv.present()) {
      Rows::template store<kConfig.max_dim_v>(kv_rows_of(head, p.dv, p.dim_v), first_row, count,
                                              slot, dV, one);
    }
  }
};

template <FmaConfig kConfig>
void backward_simt_dkdv(const AttentionParams& p) {
  record_faults(p, kConfig.num_threads);
  if constexpr (kConfig.user.mask) {
    record_segment_faults<typename BackwardHead<kConfig>::User>(p, expression_of(p),
                                                                kConfig.num_threads);
  }
  const TileTask task = tile_task(ptx::block_index(), p.batch_extent(), p.heads_kv,
                                  num_kv_slots(p, kConfig.rows), false);
  const TilePlace origin = find_tile(p, p.cu_kv, task, kConfig.rows);
  const BackwardHead<kConfig> first(p, origin.index, task.head * p.group_size());
  if (origin.first_row >= first.sequence.kv_slot) return;
  BackwardSimtDkDv<kConfig> block(p, origin.first_row);
  if (origin.first_row < first.sequence.shape.kv_len) {
    block.load_own(first);
    if constexpr (kConfig.adds_dq) block.look_at_keys();
    for (i64 member = 0; member < p.group_size(); ++member) {
      block.run_head(BackwardHead<kConfig>(p, origin.index, task.head * p.group_size() + member));
    }
  }
  block.store(first);
}

}  // namespace fulmen
