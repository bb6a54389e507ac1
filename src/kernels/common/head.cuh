// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// One query head of one sequence, as the naive kernels see it: which pairs are visible, their
// scores, what dropout leaves of them, and what a row's softmax was when the forward pass kept it.
// Formulas and names are those of semantics and of the CPU's oracle (attention_scalar.cpp).
#pragma once

#include "kernels/attention/kv_scale.cuh"
#include "kernels/attention/mla_record.cuh"
#include "kernels/attention/softmax_state.cuh"
#include "kernels/common/accurate_math.cuh"
#include "kernels/common/block_lists.cuh"
#include "kernels/common/caches.cuh"
#include "kernels/common/expression.cuh"

namespace fulmen {

// How a request is loaded, by whether a kernel is compiled for caches.
template <bool kCaches>
struct Sequences {
  using Type = Sequence;
  static Type load(const AttentionParams& p, i64 index) { return load_sequence(p, index); }
};
template <>
struct Sequences<true> {
  using Type = CacheSequence;
  static Type load(const AttentionParams& p, i64 index) { return load_cache_sequence(p, index); }
};

// kKvDType: that of k and v, kQDType: that of q; quantised where they are not kDType. With kUser,
// the parameters are those of WithExpression.
template <DType kDType, bool kCaches = false, DType kKvDType = kDType, DType kQDType = kDType,
          UserTerms kUser = UserTerms{}>
struct Head {
  static constexpr bool kHasCaches = kCaches;
  static constexpr UserTerms kUserTerms = kUser;
  static constexpr bool kIsQuantised = is_quantised(kKvDType);
  static constexpr bool kHasRecords = is_record(kKvDType);
  static constexpr bool kHasQuantisedQ = is_quantised(kQDType);
  using Element = typename ElementOf<kDType>::Type;
  using KvElement = typename ElementOf<kKvDType>::Type;
  using QElement = typename ElementOf<kQDType>::Type;
  using SequenceType = typename Sequences<kCaches>::Type;
  using Real = typename ElementOf<kDType>::Real;
  using Math = AccurateMath<Real>;
  using State = SoftmaxState<Math>;
  using User = UserExpression<Math>;

  const AttentionParams& p;
  i64 index;  // of the sequence
  i64 head;
  i64 kv_head;
  SequenceType sequence;
  ScoreMap<Real> map;
  Dropout dropout;
  Real alibi = 0;
  Real sink = -Math::kInfinity;

  Head(const AttentionParams& params, i64 index_, i64 head_)
      : Head(params, index_, head_,
             static_cast<u32>(head_) / static_cast<u32>(params.group_size())) {}

  Head(const AttentionParams& params, i64 index_, i64 head_, i64 kv_head_)
      : Head(params, index_, head_, kv_head_, Sequences<kCaches>::load(params, index_)) {}

  Head(const AttentionParams& params, i64 index_, i64 head_, i64 kv_head_,
       const SequenceType& sequence_)
      : p(params),
        index(index_),
        head(head_),
        kv_head(kv_head_),
        sequence(sequence_),
        map(params.score_map.template as<Real>()),
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

  Interval columns(i64 i) const {
    if constexpr (kCaches) return columns_of_row(p, sequence, i);
    return visible_columns(p.mask_options, sequence.shape, i);
  }

  // The blocks of keys that the rows of a block must read.
  BlockRange key_blocks(Interval rows, i64 block_cols) const {
    if constexpr (kCaches) return fulmen::key_blocks(p, sequence, rows, block_cols);
    return visible_column_blocks(p.mask_options, sequence.shape, rows, block_cols);
  }

  // The column of key j in mask and bias.
  i64 column(i64 j) const {
    if constexpr (kCaches) return sequence.first_key + j;
    return j;
  }

  // Whether the arrays leave a pair visible that the intervals do.
  bool sees(i64 i, i64 j) const {
    if constexpr (kCaches) {
      if (p.tree.present() && !sees_key(p, sequence, i, j)) return false;
      if (p.cache_layout.slot_rows > 0 && has_no_slot(p.cache_layout, key_row(p, sequence, j))) {
        return false;
      }
    }
    if (p.mask.present() && p.mask.data[p.mask.offset(index, head, i, column(j))] == 0)
      return false;
    if (p.q_ids.present()) {
      const i64 q_id =
          load_index(p.q_ids, p.q_ids.offset(sequence.batch, 0, 0, sequence.q_begin + i));
      const i64 kv_id =
          load_index(p.kv_ids, p.kv_ids.offset(kv_batch(), 0, 0, sequence.kv_begin + j));
      if (q_id != kv_id) return false;
    }
    if (p.lists_by_pair && !lists_pair(p, index, head, i, j)) return false;
    if (p.bias.present() && bias(i, j) == -Math::kInfinity) return false;
    if constexpr (kUser.mask) {
      UserPair<User> at(expression_of(p), pair(i, j));
      const bool shown = User::shows(at.e, at.row, at.column, at.outside);
      report_outside(at.e, at.outside);
      return shown;
    }
    return true;
  }

  Real bias(i64 i, i64 j) const {
    return p.bias.present() ? load_real<Real>(p.bias, p.bias.offset(index, head, i, column(j)))
                            : Real(0);
  }

  // Offsets of element 0 of a row.
  i64 q_row(const ArrayView& array, i64 i) const {
    return array.offset(sequence.batch, head, sequence.q_begin + i, 0);
  }
  i64 kv_row(const ArrayView& array, i64 j) const {
    if constexpr (kCaches) return kv_row(array, readable_row(p, sequence, j));
    return array.offset(sequence.batch, kv_head, sequence.kv_begin + j, 0);
  }
  // Of a key with a page.
  i64 kv_row(const ArrayView& array, const KeyRow& key) const {
    return array.offset(key.batch, kv_head, key.row, 0);
  }

  // Whether row i sees a key that has no page: then it is empty.
  bool sees_no_page(i64 i) const {
    if constexpr (kCaches) {
      const Interval seen = columns(i);
      for (i64 j = seen.begin; j < seen.end; ++j) {
        if (!has_page(p, key_row(p, sequence, j)) && sees(i, j)) return true;
      }
    }
    return false;
  }

  // The numbers of key or value j, scales and all.
  struct Elements {
    const ArrayView& array;
    i64 first;
    const Head& head;
    const ArrayView& scales;
    i64 row;
    Real scale;
    Real operator[](i64 d) const {
      const Real by = scales.strides[3] == 0 ? scale : head.kv_scale(scales, row, d);
      return element_of<KvElement>(array, first + d * array.strides[3]) * by;
    }
  };
  struct Record {
    RecordRow<const u8> place;
    Real operator[](i64 d) const { return record_number<Real>(place, d); }
  };
  auto numbers(const ArrayView& array, const ArrayView& scales, i64 j) const {
    if constexpr (is_record(kKvDType)) {
      return Record{record(array, j)};
    } else {
      return Elements{array, kv_row(array, j), *this, scales, j, kv_scale(scales, j)};
    }
  }

  Real dot_qk(i64 i, i64 j) const {
    const i64 q = q_row(p.q, i);
    const auto k = numbers(p.k, p.k_scale, j);
    const Real q_scale = this->q_scale(i);
    Real sum = 0;
    for (i64 d = 0; d < p.dim_qk; ++d) {
      sum += element_of<QElement>(p.q, q + d * p.q.strides[3]) * q_scale * k[d];
    }
    return sum;
  }

  // An element of q, k or v, whose dtype the kernel knows, where they are not quantised.
  Real element(const ArrayView& array, i64 offset) const {
    return element_of<Element>(array, offset);
  }
  // What an element of quantised k or v is multiplied by: the scale of its row, or of v that of its
  // dim.
  Real kv_scale(const ArrayView& scales, i64 j, i64 d = 0) const {
    if constexpr (kIsQuantised) {
      if (scales.present()) {
        const i64 at = kv_row(scales, j) + d * scales.strides[3];
        return fulmen::kv_scale(element_of<float>(scales, at));
      }
    }
    return Real(1);
  }
  Real q_scale(i64 i) const {
    if constexpr (kHasQuantisedQ) {
      if (p.q_scale.present()) {
        return fulmen::kv_scale(element_of<float>(p.q_scale, q_row(p.q_scale, i)));
      }
    }
    return Real(1);
  }

  template <class Stored>
  static Real element_of(const ArrayView& array, i64 offset) {
    constexpr i64 kBytes = sizeof(Stored);
    return widen(load_element<Stored>(array.data + offset * kBytes));
  }

  // Of a cache of records: rows of the page that has key j.
  RecordRow<const u8> record(const ArrayView& array, i64 j) const {
    KeyRow at{kv_batch(), sequence.kv_begin + j};
    i64 rows = p.kv_rows;
    if constexpr (kCaches) {
      at = readable_row(p, sequence, j);
      if (p.cache_layout.paged) rows = max<i64>(p.cache_layout.slot_rows, p.cache_layout.page_rows);
    }
    const u8* const page = array.data + array.offset(at.batch, kv_head, 0, 0);
    return {p.dim_qk, page, at.row, rows, array.strides[2]};
  }

  Real capped_score(i64 i, i64 j) const { return map.template score<Math>(dot_qk(i, j)); }

  // What bias and ALiBi add.
  Real added(i64 i, i64 j) const {
    if constexpr (kCaches) {
      return bias(i, j) +
             alibi_bias(alibi, row_position(p, sequence, i), key_position(p, sequence, j));
    }
    return bias(i, j) + alibi_bias(alibi, sequence.shape.position(i), j);
  }

  // From the capped score to what the softmax is of.
  Real score(Real capped, i64 i, i64 j) const {
    const Real s = capped + added(i, j);
    if constexpr (kUser.score) {
      UserPair<User> at(expression_of(p), pair(i, j));
      const Real mapped = User::score(at.e, at.row, at.column, at.diagonal(), s, at.outside);
      report_outside(at.e, at.outside);
      return mapped;
    }
    return s;
  }

  // d score / d (capped + added); 1 without a score of the user's.
  Real user_slope(Real capped, i64 i, i64 j) const {
    if constexpr (kUser.score) {
      UserPair<User> at(expression_of(p), pair(i, j));
      const Real s = capped + added(i, j);
      return User::mapped(at.e, at.row, at.column, at.diagonal(), s, at.outside).slope;
    }
    return Real(1);
  }

  // add(n, array, element, d score / d element) for what the user's score reads.
  template <class Add>
  void differentiate(Real capped, i64 i, i64 j, const Add& add) const {
    const UserPair<User> at(expression_of(p), pair(i, j));
    User::differentiate(at.e, at.row, at.column, capped + added(i, j), add);
  }

  // The pair as the user's expression knows it.
  ExpressionPair pair(i64 i, i64 j) const {
    i64 position = 0;
    if constexpr (kCaches) {
      position = row_position(p, sequence, i);
    } else {
      position = sequence.shape.position(i);
    }
    return {index, head, kv_head, sequence.shape.q_len, sequence.shape.kv_len, i, j, position};
  }

  i64 kv_batch() const {
    if constexpr (kCaches) return sequence.kv_batch;
    return sequence.batch;
  }

  // 0 for a dropped pair, 1 / (1 - p) for a kept one.
  Real keep(i64 i, i64 j) const {
    if (!dropout.enabled()) return Real(1);
    if constexpr (kUser.mask) {
      const ExpressionParams& e = expression_of(p);
      if (e.q_segments.present()) i = position_by(e.q_segments, index, i);
      if (e.kv_segments.present()) j = position_by(e.kv_segments, index, j);
      if (min(i, j) == kNoPosition) return Real(1);  // hidden
    }
    const u32 batch_head = static_cast<u32>(index * p.heads_q + head);
    const Philox4x32 drawn = dropout.draw(static_cast<u32>(j / 8), static_cast<u32>(i), batch_head);
    return dropout.keeps(drawn, static_cast<u32>(j % 8)) ? static_cast<Real>(dropout.kept_scale())
                                                         : Real(0);
  }
};

// That of a config with a member of its own for caches; of q, k and v of 8 bits in float32.
template <auto kConfig>
using HeadOf = Head<is_quantised(kConfig.dtype) ? DType::kFloat32 : kConfig.dtype, kConfig.caches,
                    kConfig.dtype, kConfig.dtype, kConfig.score.user>;

// Those of the backward pass of sm80.
template <auto kConfig>
using BackwardHeadOf = Head<kConfig.dtype, false, kConfig.dtype, kConfig.dtype, kConfig.score.user>;

// Those of a backward pass on CUDA cores, over whole arrays of q's type.
template <auto kConfig>
using BackwardHead = Head<kConfig.dtype, false, kConfig.dtype, kConfig.dtype, kConfig.user>;

// What the forward pass kept of a row's softmax, as the backward kernels read it: stats, or the lse
// alone (then row_max = lse and row_sum = 1, which is exact for ordinary lse).
//
// Of row i, read by load(array, offset).
template <class HeadType, class Load>
typename HeadType::State saved_state(const HeadType& head, i64 i, const Load& load) {
  using Real = typename HeadType::Real;
  const AttentionParams& p = head.p;
  if (p.stats.present()) {
    const i64 stats = head.q_row(p.stats, i);
    return {load(p.stats, stats), load(p.stats, stats + p.stats.strides[3])};
  }
  const Real lse = load(p.lse, head.q_row(p.lse, i));
  return {lse, lse == -HeadType::Math::kInfinity ? Real(0) : Real(1)};
}

// The gradient that arrives through lse; 0 where there is none.
template <class HeadType, class Load>
typename HeadType::Real lse_gradient(const HeadType& head, i64 i, const Load& load) {
  const ArrayView& dlse = head.p.dlse;
  return dlse.present() ? load(dlse, head.q_row(dlse, i)) : typename HeadType::Real(0);
}

// The same, of any dtype.
template <class HeadType>
auto saved_state(const HeadType& head, i64 i) {
  return saved_state(head, i, [](const ArrayView& array, i64 offset) {
    return load_real_called<typename HeadType::Real>(array, offset);
  });
}
template <class HeadType>
auto lse_gradient(const HeadType& head, i64 i) {
  return lse_gradient(head, i, [](const ArrayView& array, i64 offset) {
    return load_real_called<typename HeadType::Real>(array, offset);
  });
}

// The general path from a dot product to a score, -inf where hidden.
template <class HeadType, class Real>
__attribute__((noinline)) Real pair_score(const HeadType& head, Real dot, i64 i, i64 j) {
  const Real capped = head.map.template score<typename HeadType::Math>(dot);
  return head.sees(i, j) ? head.score(capped, i, j) : -HeadType::Math::kInfinity;
}

// d score / d dot, from the dot product itself.
template <class HeadType, class Real>
__attribute__((noinline)) Real pair_slope(const HeadType& head, Real dot) {
  return head.map.slope(head.map.template score<typename HeadType::Math>(dot)) * head.map.scale;
}

// d s' / d s where s' is the user's, likewise.
template <class HeadType, class Real>
__attribute__((noinline)) Real pair_user_slope(const HeadType& head, Real dot, i64 i, i64 j) {
  return head.user_slope(head.map.template score<typename HeadType::Math>(dot), i, j);
}

template <class HeadType>
__attribute__((noinline)) typename HeadType::Real pair_keep(const HeadType& head, i64 i, i64 j) {
  return head.keep(i, j);
}

}  // namespace fulmen
