// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a warp of forward_sm80 does with a block of keys that has arrived: S = Q K^T, scores to
// weights, O += P V, in one of two ways. A block that all its rows see whole is weighed with the
// shift that there is, so that exponents run under the products; any other looks at masks and
// maxima. Where K and V take turns, a warp asks for the next K between its products.
#pragma once

#include "kernels/common/warp_mma_float32_sm80.cuh"
#include "kernels/common/warp_scores_sm80.cuh"
#include "kernels/forward_sm80/producer.cuh"
#include "kernels/forward_sm80/softmax.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct ForwardProducts {
  static constexpr bool kIsFloat32 = kConfig.dtype == DType::kFloat32;
  static constexpr i32 kTiles = kConfig.row_tiles;
  using Team = WarpTeam<kConfig>;
  using QTile = SwizzledTile<kConfig.words(kConfig.d_qk), kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.words(kConfig.d_v), kConfig.swizzle>;
  using Scores = float[kTiles][kConfig.warp_columns() / 2];
  using Output = float[kTiles][kConfig.warp_dims() / 2];

  QTile q;
  Team team;
  Output O;
  ptx::U32x4 kept_q[kConfig.keeps_q ? kConfig.d_qk / 16 : 1][kTiles];

  ForwardProducts(QTile q_tile, Team team_) : q(q_tile), team(team_) {}

  void rescale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.warp_dims() / 2; ++i) O[t][i] *= factor[t][i / 2 % 2];
    }
  }

  // Q has arrived.
  void keep_q() {
    const auto rows = left_rows(q, Team::first_row());
#pragma unroll
    for (i32 step = 0; step < kConfig.d_qk / 16; ++step) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) kept_q[step][t] = ptx::ldmatrix_x4(rows.at(step, 16 * t));
    }
  }

  // S = Q K^T
  void multiply_q_k(Scores& S, const QTile& k) const {
    const auto rows = left_rows(q, Team::first_row());
    const auto keys = right_rows(k, Team::member() * kConfig.warp_columns());
    const auto left = [&](i32 step, i32 t) {
      if constexpr (kConfig.keeps_q) return kept_q[step][t];
      return ptx::ldmatrix_x4(rows.at(step, 16 * t));
    };
    if constexpr (kIsFloat32) {
      multiply_rows_float32<kConfig, kConfig.d_qk>(S, left, keys);
    } else {
      multiply_rows<kConfig, kConfig.d_qk>(S, left, keys);
    }
  }

  // O += P V
  void multiply_p_v(const Scores& S, const VTile& v) {
    if constexpr (kIsFloat32) {
      multiply_columns_float32<kConfig>(O, S, v);
    } else {
      multiply_rounded_p_v(S, v);
    }
  }

 private:
  void multiply_rounded_p_v(const Scores& S, const VTile& v) {
    u32 P[kTiles][kConfig.warp_columns() / 4];
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.warp_columns() / 4; ++i) {
        P[t][i] = ptx::pack<kConfig.dtype>(S[t][2 * i], S[t][2 * i + 1]);
      }
    }
    const auto values = right_columns(v, Team::member());
    const auto multiply = [&](const auto& left) {
      multiply_columns<kConfig, kConfig.columns, Team::kMembers>(O, left, values);
    };
    if constexpr (Team::kIsOne) {
      multiply([&](i32 k, i32 t) {
        return ptx::U32x4{{P[t][4 * k], P[t][4 * k + 1], P[t][4 * k + 2], P[t][4 * k + 3]}};
      });
    } else {
      team.put(P);
      const auto rows = left_rows(team.p_tile(), Team::first_row());
      multiply([&](i32 k, i32 t) { return ptx::ldmatrix_x4(rows.at(k, 16 * t)); });
    }
  }
};

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
