// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a warp of forward_sm80 does with a block of keys that has arrived: S = Q K^T, scores to
// weights, O += P V, in one of two ways. A block that all its rows see whole is weighed with the
// shift that there is, so that exponents run under the products; any other looks at masks and
// maxima. Where K and V take turns, a warp asks for the next K between its products.
#pragma once

#include "kernels/common/warp_dropout.cuh"
#include "kernels/forward_sm80/loader.cuh"
#include "kernels/forward_sm80/row_limits.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct ForwardStepsSm80 {
  using Products = ForwardProducts<kConfig>;
  using Scores = typename Products::Scores;
  using Team = WarpTeam<kConfig>;
  static constexpr i32 kTiles = kConfig.row_tiles;

  const Head<kConfig.dtype>& head;
  i32 warp_row;  // the warp's first, in its sequence
  ForwardLoaderSm80<kConfig> loader;
  Team team;
  Products products;
  WarpSoftmax<kConfig> softmax;
  RowLimits<kConfig> limits;
  bool is_smooth = true;  // softcap has been a polynomial so far

  // For the block's queries from `first_row` on, dims of V from `first_dim` on.
  ForwardStepsSm80(const Head<kConfig.dtype>& head_, i32 first_row, i32 first_dim, u32 shared)
      : head(head_),
        warp_row(first_row + static_cast<i32>(Team::first_row())),
        loader(head_, first_row, first_dim, shared),
        team{shared + kConfig.team_at()},
        products({shared}, team),
        softmax(static_cast<float>(head.p.score_map.scale)) {}

  // The step that a block of keys needs, if any.
  void visit(i32 block_column, i32 slot, bool is_first, bool may_keep) {
    loader.documents.look(slot);
    const bool keeps = may_keep && kConfig.full_blocks && softmax.may_keep() && is_smooth &&
                       limits.is_full(block_column) && loader.documents.is_full() &&
                       scores().is_one_sided(block_column);
    if (keeps && step_with_shift(block_column, slot)) return;
    if (limits.sees(block_column) && loader.documents.sees()) {
      step(block_column, slot, is_first);
    } else if (kConfig.takes_turns) {
      loader.turn_to_v();
    } else if (is_first) {
      loader.await_first_v();
    }
  }

 private:
  WarpScores<kConfig> scores() const { return {head, warp_row}; }
  // Of the warp, in a block of keys from `block_column` on.
  static i32 first_column(i32 block_column) {
    return block_column + static_cast<i32>(Team::member()) * kConfig.warp_columns();
  }

  template <bool kKeepsHidden>
  void apply_pairs(Scores& S, i32 stage) const {
    loader.pairs.template apply<kKeepsHidden>(S, loader.pair_tile(stage), Team::first_row(),
                                              first_column(0));
  }

  // A block that every row of the warp sees whole, with the shift that there is: no maximum, no
  // rescale, nothing that keeps exponents from running under the products. False, and nothing done,
  // where weights outgrow the 16-bit type that way.
  bool step_with_shift(i32 block_column, i32 slot) {
    Scores S;
    products.multiply_q_k(S, loader.k_tile(slot));
    if constexpr (Team::kIsOne) {
      is_smooth = scores().is_smooth(S);
      if (!is_smooth) return false;
    }
    float block_sum[kTiles][2];
    weigh(S, block_sum, block_column, slot);
    if (!kConfig.checks_at_end() && team.any(softmax.is_outgrown(block_sum))) return false;
    softmax.accumulate(block_sum);
    softmax.has_kept = true;
    if constexpr (kConfig.dropout)
      WarpDropout<kConfig>{head, warp_row}.drop(S, first_column(block_column));
    if constexpr (kConfig.takes_turns) loader.turn_to_v();
    products.multiply_p_v(S, loader.v_tile(slot));
    float factor[kTiles][2];
    if (kConfig.settles() && softmax.settle(team, factor)) products.rescale(factor);
    return true;
  }

  void weigh(Scores& S, float (&block_sum)[kTiles][2], i32 block_column, i32 slot) const {
    if constexpr (kConfig.maps_in_exponent()) {
      if (Team::kIsOne || scores().is_smooth(S)) {
        return scores().weigh_mapped(S, softmax, block_sum, first_column(block_column));
      }
    }
    scores().map(S, first_column(block_column));
    apply_pairs<false>(S, slot);
    softmax.exponentiate(S, block_sum, true);
  }

  // Any block.
  void step(i32 block_column, i32 slot, bool is_first) {
    Scores S;
    products.multiply_q_k(S, loader.k_tile(slot));
    // Copies that start beside weights spill 440 bytes of three-product kernels (d 128), here 64.
    constexpr bool kTurnsEarly = !kConfig.lazy_max;
    if constexpr (kConfig.takes_turns && kTurnsEarly) loader.turn_to_v();
    if (is_first && !kConfig.takes_turns) loader.await_first_v();
    scores().map(S, first_column(block_column));
    apply_pairs<true>(S, slot);
    loader.documents.hide(S, slot);
    if (!(kConfig.full_blocks && limits.is_full(block_column))) {
      limits.hide(S, first_column(block_column));
    }
    float factor[kTiles][2];
    if (softmax.update(S, team, factor)) products.rescale(factor);
    float block_sum[kTiles][2];
    softmax.exponentiate(S, block_sum, false);
    softmax.accumulate(block_sum);
    if constexpr (kConfig.dropout)
      WarpDropout<kConfig>{head, warp_row}.drop(S, first_column(block_column));
    if constexpr (kConfig.takes_turns && !kTurnsEarly) loader.turn_to_v();
    products.multiply_p_v(S, loader.v_tile(slot));
  }
};

}  // namespace fulmen
