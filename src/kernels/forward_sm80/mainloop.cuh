// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One iteration of a warp of forward_sm80, on a block of keys that has arrived: S = Q K^T, softmax,
// O += P V, in one of two ways. A block that all its rows see whole keeps the maximum that there
// is, so that exponents overlap products; any other applies masks and updates the maxima. With a
// single buffer a warp waits for V and starts the copy of the next K between its products.
#pragma once

#include "kernels/common/warp_mma_float32_sm80.cuh"
#include "kernels/common/warp_scores_sm80.cuh"
#include "kernels/forward_sm80/producer.cuh"
#include "kernels/forward_sm80/softmax.cuh"

namespace fulmen {

template <ForwardSm80Config kConfig>
struct ForwardProductsSm80 {
  static constexpr bool kIsFloat32 = kConfig.dtype == DType::kFloat32;
  static constexpr i32 kTiles = kConfig.row_tiles;
  using Group = RowGroupSm80<kConfig>;
  using QTile = SwizzledTile<kConfig.words(kConfig.d_qk), kConfig.swizzle>;
  using VTile = SwizzledTile<kConfig.words(kConfig.d_v), kConfig.swizzle>;
  using Scores = float[kTiles][kConfig.warp_columns() / 2];
  using Output = float[kTiles][kConfig.warp_dims() / 2];

  QTile q;
  Group group;
  Output O;
  ptx::U32x4 q_registers[kConfig.q_in_registers ? kConfig.d_qk / 16 : 1][kTiles];

  ForwardProductsSm80(QTile q_tile, Group group_) : q(q_tile), group(group_) {}

  void rescale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 i = 0; i < kConfig.warp_dims() / 2; ++i) O[t][i] *= factor[t][i / 2 % 2];
    }
  }

  // Q has arrived.
  void load_q_registers() {
    const auto rows = left_rows(q, Group::first_row());
#pragma unroll
    for (i32 step = 0; step < kConfig.d_qk / 16; ++step) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t)
        q_registers[step][t] = ptx::ldmatrix_x4(rows.at(step, 16 * t));
    }
  }

  // S = Q K^T
  void multiply_q_k(Scores& S, const QTile& k) const {
    const auto rows = left_rows(q, Group::first_row());
    const auto keys = right_rows(k, Group::warp_n() * kConfig.warp_columns());
    const auto left = [&](i32 step, i32 t) {
      if constexpr (kConfig.q_in_registers) return q_registers[step][t];
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
    const auto values = right_columns(v, Group::warp_n());
    const auto multiply = [&](const auto& left) {
      multiply_columns<kConfig, kConfig.kv_rows, Group::kWarpsN>(O, left, values);
    };
    if constexpr (Group::kIsOneWarp) {
      multiply([&](i32 k, i32 t) {
        return ptx::U32x4{{P[t][4 * k], P[t][4 * k + 1], P[t][4 * k + 2], P[t][4 * k + 3]}};
      });
    } else {
      group.store_p(P);
      const auto rows = left_rows(group.p_tile(), Group::first_row());
      multiply([&](i32 k, i32 t) { return ptx::ldmatrix_x4(rows.at(k, 16 * t)); });
    }
  }
};

template <ForwardSm80Config kConfig>
struct ForwardMainloopSm80 {
  using Products = ForwardProductsSm80<kConfig>;
  using Scores = typename Products::Scores;
  using Group = RowGroupSm80<kConfig>;
  static constexpr i32 kTiles = kConfig.row_tiles;

  const Head<kConfig.dtype>& head;
  i32 warp_row;  // the warp's first, in its sequence
  ForwardProducerSm80<kConfig> producer;
  Group group;
  Products products;
  ForwardSoftmaxSm80<kConfig> softmax;
  RowRangesSm80<kConfig> row_ranges;
  bool is_smooth = true;  // softcap has been a polynomial so far

  // For the block's queries from `first_row` on, dims of V from `first_dim` on.
  ForwardMainloopSm80(const Head<kConfig.dtype>& head_, i32 first_row, i32 first_dim, u32 shared)
      : head(head_),
        warp_row(first_row + static_cast<i32>(Group::first_row())),
        producer(head_, first_row, first_dim, shared),
        group{shared + kConfig.exchange_at()},
        products({shared}, group),
        softmax(static_cast<float>(head.p.score_map.scale)) {}

  // The step that a block of keys needs, if any.
  void process_block(i32 block_column, i32 slot, bool is_first, bool may_keep_max) {
    producer.documents.classify(slot);
    const bool keeps = may_keep_max && kConfig.full_blocks && softmax.can_keep_max() && is_smooth &&
                       row_ranges.is_full(block_column) && producer.documents.is_full() &&
                       scores().is_one_sided(block_column);
    if (keeps && step_keeping_max(block_column, slot)) return;
    if (row_ranges.some_visible(block_column) && producer.documents.some_visible()) {
      step(block_column, slot, is_first);
    } else if (kConfig.single_buffer) {
      producer.wait_v_fetch_k();
    } else if (is_first) {
      producer.await_first_v();
    }
  }

 private:
  WarpScores<kConfig> scores() const { return {head, warp_row}; }
  // Of the warp, in a block of keys from `block_column` on.
  static i32 first_column(i32 block_column) {
    return block_column + static_cast<i32>(Group::warp_n()) * kConfig.warp_columns();
  }

  template <bool kKeepsHidden>
  void apply_pairs(Scores& S, i32 stage) const {
    producer.pairs.template apply<kKeepsHidden>(S, producer.pair_tile(stage), Group::first_row(),
                                                first_column(0));
  }

  // A block that every row of the warp sees whole, with the shift that there is: no maximum, no
  // rescale, nothing that keeps exponents from running under the products. False, and nothing done,
  // where weights outgrow the 16-bit type that way.
  bool step_keeping_max(i32 block_column, i32 slot) {
    Scores S;
    products.multiply_q_k(S, producer.k_tile(slot));
    if constexpr (Group::kIsOneWarp) {
      is_smooth = scores().is_smooth(S);
      if (!is_smooth) return false;
    }
    float block_sum[kTiles][2];
    exponentiate(S, block_sum, block_column, slot);
    if (!kConfig.checks_sums_at_end() && group.any(softmax.is_too_large(block_sum))) return false;
    softmax.accumulate(block_sum);
    softmax.has_kept_max = true;
    if constexpr (kConfig.score.dropout)
      WarpDropout<kConfig>{head, warp_row}.drop(S, first_column(block_column));
    if constexpr (kConfig.single_buffer) producer.wait_v_fetch_k();
    products.multiply_p_v(S, producer.v_tile(slot));
    float factor[kTiles][2];
    if (kConfig.rescales_by_sum() && softmax.rescale_by_sum(group, factor))
      products.rescale(factor);
    return true;
  }

  void exponentiate(Scores& S, float (&block_sum)[kTiles][2], i32 block_column, i32 slot) const {
    if constexpr (kConfig.maps_in_exponent()) {
      if (Group::kIsOneWarp || scores().is_smooth(S)) {
        return scores().exponentiate_mapped(S, softmax, block_sum, first_column(block_column));
      }
    }
    scores().map(S, first_column(block_column));
    apply_pairs<false>(S, slot);
    softmax.exponentiate(S, block_sum, true);
  }

  // Any block.
  void step(i32 block_column, i32 slot, bool is_first) {
    Scores S;
    products.multiply_q_k(S, producer.k_tile(slot));
    // Copies that start next to exponents spill 440 bytes of three-product kernels (d 128),
    // here 64.
    constexpr bool kFetchesKEarly = !kConfig.lazy_max;
    if constexpr (kConfig.single_buffer && kFetchesKEarly) producer.wait_v_fetch_k();
    if (is_first && !kConfig.single_buffer) producer.await_first_v();
    scores().map(S, first_column(block_column));
    apply_pairs<true>(S, slot);
    producer.documents.hide(S, slot);
    if (!(kConfig.full_blocks && row_ranges.is_full(block_column))) {
      row_ranges.hide(S, first_column(block_column));
    }
    float factor[kTiles][2];
    if (softmax.update(S, group, factor)) products.rescale(factor);
    float block_sum[kTiles][2];
    softmax.exponentiate(S, block_sum, false);
    softmax.accumulate(block_sum);
    if constexpr (kConfig.score.dropout)
      WarpDropout<kConfig>{head, warp_row}.drop(S, first_column(block_column));
    if constexpr (kConfig.single_buffer && !kFetchesKEarly) producer.wait_v_fetch_k();
    products.multiply_p_v(S, producer.v_tile(slot));
  }
};

}  // namespace fulmen
