// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One query head of one sequence, as the naive kernels see it: which pairs are visible, their
// scores, what dropout leaves of them, and what a row's softmax was when the forward pass kept it.
// Formulas and names are those of semantics and of the CPU's oracle (attention_scalar.cpp).
#pragma once

#include "kernels/attention/softmax_state.cuh"
#include "kernels/common/accurate_math.cuh"
#include "kernels/common/fma_config.h"
#include "kernels/common/sequences.cuh"

namespace fulmen {

template <DType kDType>
struct Head {
  using Element = typename ElementOf<kDType>::Type;
  using Real = typename ElementOf<kDType>::Real;
  using Math = AccurateMath<Real>;
  using State = SoftmaxState<Math>;

  const AttentionParams& p;
  i64 index;  // of the sequence
  i64 head;
  i64 kv_head;
  Sequence sequence;
  ScoreMap<Real> map;
  Dropout dropout;
  Real alibi = 0;
  Real sink = -Math::kInfinity;

  Head(const AttentionParams& params, i64 index_, i64 head_)
      : Head(params, index_, head_,
             static_cast<u32>(head_) / static_cast<u32>(params.group_size())) {}

  Head(const AttentionParams& params, i64 index_, i64 head_, i64 kv_head_)
      : Head(params, index_, head_, kv_head_, load_sequence(params, index_)) {}

  Head(const AttentionParams& params, i64 index_, i64 head_, i64 kv_head_,
       const Sequence& sequence_)
      : p(params),
        index(index_),
        head(head_),
        kv_head(kv_head_),
        sequence(sequence_),
        map{static_cast<Real>(params.score_map.scale), static_cast<Real>(params.score_map.softcap)},
        dropout(params.dropout) {
    if (p.rng != nullptr) {
      dropout.seed = static_cast<u64>(p.rng[0]);
      dropout.offset = static_cast<u32>(p.rng[1]);
    }
    if (p.alibi_slopes.present()) {
      alibi = load_real_called<Real>(p.alibi_slopes, p.alibi_slopes.offset(index, head, 0, 0));
    }
    if (p.sinks.present()) sink = load_real_called<Real>(p.sinks, p.sinks.offset(0, head, 0, 0));
  }

  Interval columns(i64 i) const { return visible_columns(p.mask_options, sequence.shape, i); }

  // Whether the arrays leave a pair visible that the intervals do.
  bool sees(i64 i, i64 j) const {
    if (p.mask.present() && p.mask.data[p.mask.offset(index, head, i, j)] == 0) return false;
    if (p.q_ids.present()) {
      const i64 q_id =
          load_index(p.q_ids, p.q_ids.offset(sequence.batch, 0, 0, sequence.q_begin + i));
      const i64 kv_id =
          load_index(p.kv_ids, p.kv_ids.offset(sequence.batch, 0, 0, sequence.kv_begin + j));
      if (q_id != kv_id) return false;
    }
    return !p.bias.present() || bias(i, j) != -Math::kInfinity;
  }

  Real bias(i64 i, i64 j) const {
    return p.bias.present() ? load_real<Real>(p.bias, p.bias.offset(index, head, i, j)) : Real(0);
  }

  // Offsets of element 0 of a row.
  i64 q_row(const ArrayView& array, i64 i) const {
    return array.offset(sequence.batch, head, sequence.q_begin + i, 0);
  }
  i64 kv_row(const ArrayView& array, i64 j) const {
    return array.offset(sequence.batch, kv_head, sequence.kv_begin + j, 0);
  }

  Real dot_qk(i64 i, i64 j) const {
    const i64 q = q_row(p.q, i);
    const i64 k = kv_row(p.k, j);
    Real sum = 0;
    for (i64 d = 0; d < p.dim_qk; ++d) {
      sum += element(p.q, q + d * p.q.strides[3]) * element(p.k, k + d * p.k.strides[3]);
    }
    return sum;
  }

  // An element of q, k or v, whose dtype the kernel knows.
  Real element(const ArrayView& array, i64 offset) const {
    constexpr i64 kBytes = sizeof(Element);
    return widen(load_element<Element>(array.data + offset * kBytes));
  }

  Real capped_score(i64 i, i64 j) const { return map.template score<Math>(dot_qk(i, j)); }

  // What bias and ALiBi add.
  Real added(i64 i, i64 j) const {
    return bias(i, j) + alibi_bias(alibi, sequence.shape.position(i), j);
  }

  // 0 for a dropped pair, 1 / (1 - p) for a kept one.
  Real keep(i64 i, i64 j) const {
    if (!dropout.enabled()) return Real(1);
    const u32 batch_head = static_cast<u32>(index * p.heads_q + head);
    const Philox4x32 drawn = dropout.draw(static_cast<u32>(j / 8), static_cast<u32>(i), batch_head);
    return dropout.keeps(drawn, static_cast<u32>(j % 8)) ? static_cast<Real>(dropout.kept_scale())
                                                         : Real(0);
  }
};

}  // namespace fulmen
