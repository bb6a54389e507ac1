// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The second attempt of forward_sm90 at a block of queries: the textbook, one block of keys after
// the other, the maximum of each, nothing in between. Finds infinities and NaN among the values
// (unusual_values.cuh), so all warpgroups visit all blocks of keys that one of them visits.
#pragma once

#include "kernels/common/products.cuh"
#include "kernels/forward_sm90/output.cuh"
#include "kernels/forward_sm90/row_softmax.cuh"
#include "kernels/forward_sm90/unusual_values.cuh"
#include "kernels/forward_sm90/warpgroup.cuh"

namespace fulmen {

// Adds infinities and NaN of a tile of V to the rows that see them, and clears them for the
// product. hidden and dropped are asked only where options can hide or drop single pairs.
template <AttentionConfig kConfig>
inline void set_unusual_apart(const ForwardWarpgroup<kConfig>& own,
                              float (&O)[kConfig.o_dims() / 2], const Interval (&visible)[2], i32 j,
                              const MarkedKeys<kConfig>& hidden,
                              const MarkedKeys<kConfig>& dropped) {
  const ValueTile<kConfig> V{own.shared.v().address(own.v_at), own.first_dim()};
  if (!V.has_unusual()) return;
#pragma unroll 1
  for (i32 key = 0; key < kConfig.kv_rows; ++key) {
    const i64 column = i64{j} * kConfig.kv_rows + key;
    bool sees[2];
    float kept[2] = {1, 1};
    for (i32 r = 0; r < 2; ++r) {
      sees[r] = visible[r].contains(column);
      if constexpr (kConfig.has_pair_terms()) sees[r] = !hidden.has(r, key);
      if constexpr (kConfig.dropout) kept[r] = dropped.has(r, key) ? 0.f : 1.f;
    }
    V.add_unusual(O, key, sees, kept);
  }
  ptx::bar_sync(own.kAllBarrier, 128 * kConfig.warpgroups);  // all have seen them
  V.clear_unusual();
  ptx::bar_sync(own.kAllBarrier, 128 * kConfig.warpgroups);  // all are gone
}

template <AttentionConfig kConfig>
inline void compute_carefully(ForwardWarpgroup<kConfig>& own,
                              const typename ForwardWarpgroup<kConfig>::Task& task,
                              const KeyBlocks& blocks) {
  float O[kConfig.o_dims() / 2] = {};
  u32 P[kConfig.kv_rows / 4];
  float S[kConfig.kv_rows / 2];
  RowSoftmax<kConfig> softmax{own.softmax_factor()};
  float rescale[2];
  Interval visible[2];
  own.see(visible, task);
  const FragmentScores<kConfig> scores = own.scores_of(task);
  own.shared.q().wait(own.q_at);
  const u32 sQ = own.shared.q().address(own.q_at);
  QRegisters<kConfig> rQ;
  load_q_registers<kConfig>(rQ, sQ);
#pragma unroll 1
  for (i32 j = blocks.all_end - 1; j >= blocks.all_begin; --j) {
    // S = Q K^T
    own.feed();
    own.shared.k().wait(own.k_at);
    issue_scores<kConfig>(S, rQ, sQ, own.shared.k().address(own.k_at));
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(S);
    own.release_k();
    // S = exp2(c S - m), O *= exp2(m_old - m), P = S
    scores.apply(S, j * kConfig.kv_rows);
    own.template hide<Sight::kEnds>(S, visible, j);
    MarkedKeys<kConfig> hidden;
    if constexpr (kConfig.has_pair_terms()) hidden = {S, kNegativeInfinity};
    if (softmax.template update<true, true>(S, rescale)) scale_rows(O, rescale);
    scores.pairs.drop(S, j * kConfig.kv_rows);
    MarkedKeys<kConfig> dropped;
    if constexpr (kConfig.dropout) dropped = {S, PairTerms<kConfig>::kDropped};
    round_probabilities<kConfig>(P, S);
    // O += P V
    own.shared.v().wait(own.v_at);
    set_unusual_apart(own, O, visible, j, hidden, dropped);
    issue_output<kConfig>(O, P, own.v_tile(), true);
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(O);
    own.meet();  // all warps have looked at V
    own.release_v();
  }
  own.release_q();
  softmax.finish();
  ForwardOutput<kConfig>{own}.template write<true>(O, softmax, task);
}

}  // namespace fulmen
