// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Forward attention of few query rows and many keys, as in decoding, where reading K and V is the
// cost: a task is one split of the keys of some neighbouring key/value heads, for all rows of all
// heads of their groups, so that every key is read once, and in the order of memory; then the parts
// of each row are merged, in the order of the splits, so that neither threads nor other requests
// change a bit. A split's scores are held whole: one maximum, no rescaling. Source: Dao, Haziza,
// Massa, Sizov, "Flash-Decoding" (2023).

#include <algorithm>
#include <cmath>

#include "cpu/backend.h"
#include "cpu/key_rows.h"
#include "cpu/pair_terms.h"
#include "cpu/row_results.h"
#include "cpu/rows.h"
#include "cpu/thread_pool.h"
#include "kernels/attention/kv_scale.cuh"
#include "plan/tiled_workspace.h"

namespace fulmen::cpu {
namespace {

template <class Real>
class Split {
 public:
  // at.block: the split within its sequence. kv_heads: as many as lie beside each other, at most.
  // part: the first row of the first of them among the parts. pairs: null where numbers are widened
  // to be multiplied.
  Split(const Problem& problem, const TileSizes& sizes, const SplitShared<Real>& shared,
        const SplitScratch<Real>& scratch, const HeadBlock& at, Interval kv_heads, i64 part,
        const PairKernels* pairs)
      : problem_(problem),
        kernels_(kernels<Real>()),
        pairs_(pairs),
        sizes_(sizes),
        shared_(shared),
        scratch_(scratch),
        index_(at.sequence_index),
        kv_heads_(kv_heads),
        sequence_(problem.sequence(at.sequence_index)),
        q_len_(sequence_.shape.q_len),
        rows_(q_len_ * problem.group_size()),
        part_(part) {
    if (q_len_ == 0) return;
    const Interval all = rows_of_block(at.block, sizes.columns, sequence_.shape.kv_len);
    const SeenKeys seen = seen_keys(problem, sequence_, {0, q_len_});
    keys_ = clamped(max(seen.some.begin, all.begin), seen.some.end, all.end);
    const bool is_full = seen.all.begin <= keys_.begin && keys_.end <= seen.all.end;
    has_addend_ = !is_full || PairTerms<Real>::may_add(problem, sequence_);
    if (!sees_some<Real>(problem, index_, sequence_, kv_heads, keys_, scratch.steps)) keys_ = {};
  }

  void run() {
    if (keys_.size() <= 0) return see_nothing();
    if constexpr (kHasPairs) {
      if (fits_pairs()) return add_keys_in_pairs();
    }
    add_keys(kv_heads_);
  }

 private:
  static constexpr bool kHasPairs = kDTypeOf<Real> == DType::kFloat32;
  static constexpr i64 kLoadedKeys = SplitScratch<Real>::kLoadedKeys;

  Real* row_max(i64 kv_head) const { return shared_.row_max + part_of(kv_head); }
  Real* row_sum(i64 kv_head) const { return shared_.row_sum + part_of(kv_head); }
  Real* O(i64 kv_head) const { return shared_.O + part_of(kv_head) * sizes_.padded_dim_v; }
  i64 part_of(i64 kv_head) const { return part_ + (kv_head - kv_heads_.begin) * sizes_.rows; }

  Real* scores(i64 kv_head) const {
    return scratch_.scores + (kv_head - kv_heads_.begin) * sizes_.rows * scratch_.stride;
  }

  void see_nothing() const {
    const RowState empty;
    for (i64 head = kv_heads_.begin; head < kv_heads_.end; ++head) {
      std::fill_n(row_max(head), rows_, static_cast<Real>(empty.row_max));
      std::fill_n(row_sum(head), rows_, static_cast<Real>(empty.row_sum));
    }
  }

  // A row of the group for each head and row of q.
  template <class Call>
  void for_each_head(i64 kv_head, const Call& call) const {
    for (i64 member = 0; member < problem_.group_size(); ++member) {
      call(kv_head * problem_.group_size() + member, member * q_len_);
    }
  }

  Source queries_in(i64 head) const {
    return query_source(problem_, sequence_.batch, head, sequence_.q_begin);
  }

  // S = Q K^T;  P = exp(S - m);  O = P V
  void add_keys(Interval kv_heads) const {
    const FewRowsKernels<Real, Real>& few_rows = kernels_.few_rows;
    const i64 dim_qk = padded(problem_.dim_qk);
    for (i64 kv_head = kv_heads.begin; kv_head < kv_heads.end; ++kv_head) {
      for_each_head(kv_head, [&](i64 head, i64 row) {
        kernels_.load_rows(queries_in(head), q_len_, problem_.dim_qk,
                           scratch_.Q + row * sizes_.padded_dim_qk, sizes_.padded_dim_qk);
      });
      few_rows.arrange(scratch_.Q, sizes_.padded_dim_qk, rows_, dim_qk, Q_lanes(kv_head));
    }
    for_each_list(Array::kK, kv_heads, [&](i64 kv_head, i64 key, const KeyList& keys) {
      few_rows.dot(Q_lanes(kv_head), rows_, keys, dim_qk, scores(kv_head) + key, scratch_.stride);
    });
    weigh(few_rows, kv_heads);
    if (has_addend_) return;  // and has added the values
    for_each_list(Array::kV, kv_heads, [&](i64 kv_head, i64 key, const KeyList& values) {
      few_rows.add(scores(kv_head) + key, scratch_.stride, rows_, values, padded(problem_.dim_v),
                   O(kv_head), sizes_.padded_dim_v);
    });
  }

  Real* Q_lanes(i64 kv_head) const {
    return scratch_.Q_lanes + (kv_head - kv_heads_.begin) * kMostSplitRows * sizes_.padded_dim_qk;
  }

  Pair* Q_pair_lanes(i64 kv_head) const {
    const i64 lanes = kMostSplitRows * (sizes_.padded_dim_qk / 2);
    return scratch_.Q_pair_lanes + (kv_head - kv_heads_.begin) * lanes;
  }

  // Head after head; meanwhile the first values come from memory.
  template <class Kernels>
  void weigh(const Kernels& few_rows, Interval kv_heads) const {
    const bool lies = lies_well(Array::kV);
    const HeadRows values = lies ? list(Array::kV, kv_heads) : HeadRows{};
    i64 weighed = 0;
    for (i64 kv_head = kv_heads.begin; kv_head < kv_heads.end; ++kv_head) {
      if (lies_well(Array::kK)) scale_by(Array::kK, kv_head);
      load_terms(kv_head);
      const ScoreMap<Real> map = map_scores(kv_head);
      for (i64 row = 0; row < rows_; ++row) {
        if (lies) fetch_step(values, weighed++);
        weigh_row(few_rows, kv_head, row, map);
      }
      std::fill_n(O(kv_head), rows_ * sizes_.padded_dim_v, Real(0));
      if (has_addend_) {
        add_visible_values(kv_head);
      } else if (lies) {
        scale_by(Array::kV, kv_head);
      }
    }
  }

  template <class Kernels>
  void weigh_row(const Kernels& few_rows, i64 kv_head, i64 row, const ScoreMap<Real>& map) const {
    const i64 at = row * scratch_.stride;
    few_rows.weigh({.scores = scores(kv_head) + at,
                    .stride = scratch_.stride,
                    .rows = 1,
                    .keys = keys_.size(),
                    .terms = {map, has_addend_ ? scratch_.addend + at : nullptr,
                              scratch_.keep ? scratch_.keep + at : nullptr},
                    .row_max = row_max(kv_head) + row,
                    .row_sum = row_sum(kv_head) + row});
  }

  void load_terms(i64 kv_head) const {
    if (!has_addend_ && !scratch_.keep) return;
    const i64 stride = scratch_.stride;
    for_each_head(kv_head, [&](i64 head, i64 row) {
      const PairTerms<Real> pairs(problem_, index_, sequence_, head, scratch_.steps);
      const Interval rows{0, q_len_};
      if (has_addend_) pairs.fill_addend(rows, keys_, scratch_.addend + row * stride, stride);
      if (scratch_.keep) pairs.fill_keep(rows, keys_, scratch_.keep + row * stride, stride);
    });
  }

  // The user's score of all rows, where there is one; what is left to be done with scores.
  ScoreMap<Real> map_scores(i64 kv_head) const {
    if (!problem_.has_score_expression()) return problem_.score_map.as<Real>();
    for_each_head(kv_head, [&](i64 head, i64 row) {
      const i64 at = row * scratch_.stride;
      const PairTerms<Real> pairs(problem_, index_, sequence_, head, scratch_.steps);
      pairs.map_scores({.scores = scores(kv_head) + at,
                        .addend = has_addend_ ? scratch_.addend + at : nullptr,
                        .slope = nullptr,
                        .stride = scratch_.stride,
                        .rows = q_len_,
                        .columns = keys_.size(),
                        .terms = {problem_.score_map.as<Real>(), nullptr, nullptr}},
                       {0, q_len_}, keys_, Lanes::kKeys, false);
    });
    return {Real(1), Real(0)};
  }

  i64 padded(i64 dims) const { return ceil_div(dims, kernels_.lanes) * kernels_.lanes; }

  bool lies_well(Array array) const {
    const Tensor& tensor = problem_.arrays[array];
    return !problem_.has_records() && tensor.strides[3] == 1 &&
           tensor.shape[3] == padded(tensor.shape[3]);
  }

  KeysOfStep keys_of_step(Array array) const {
    const bool by_tiles = pairs_ && pairs_->few_rows_by_tiles &&
                          pairs_->few_rows_by_tiles(rows_, problem_.dims(array));
    const bool widens = problem_.arrays[array].dtype != kDTypeOf<Real> && !pairs_;
    return cpu::keys_of_step(by_tiles, rows_ <= (widens ? 1 : 4));
  }

  // Keys of the split where they lie.
  HeadRows list(Array array, Interval kv_heads) const {
    i64 listed = 0;
    for_each_run(problem_, sequence_, array, kv_heads.begin, keys_,
                 [&](i64, i64 count, const Source& source) {
                   list_rows(source, count, scratch_.key_rows + listed);
                   listed += count;
                 });
    return rows_of_heads(problem_.arrays[array], kv_heads.size(), scratch_.key_rows, listed,
                         keys_of_step(array));
  }

  // Scores or weights, times what the elements of quantised keys or values are multiplied by.
  void scale_by(Array array, i64 kv_head) const {
    for_each_run(problem_, sequence_, array, kv_head, keys_,
                 [&](i64 first, i64 count, const Source& source) {
                   if (source.scales == nullptr) return;
                   for (i64 i = 0; i < count; ++i) {
                     const float scale = kv_scale(load_bytes<float>(rows_from(source, i).scales));
                     Real* const key = scores(kv_head) + first - keys_.begin + i;
                     for (i64 row = 0; row < rows_; ++row) key[row * scratch_.stride] *= scale;
                   }
                 });
  }

  // call(kv_head, first key within keys_, the keys): where they lie when a kernel can read them
  // there, else loaded chunk by chunk.
  template <class Call>
  void for_each_list(Array array, Interval kv_heads, const Call& call) const {
    if (lies_well(array)) {
      return walk(list(array, kv_heads), [&](i64 head, i64 key, const KeyList& keys) {
        call(kv_heads.begin + head, key, keys);
      });
    }
    for (i64 kv_head = kv_heads.begin; kv_head < kv_heads.end; ++kv_head) {
      for_each_chunk(array, kv_head, [&](i64 key, i64 count, View<Real> rows) {
        list_rows({rows.data, kDTypeOf<Real>, rows.stride, 1}, count, scratch_.key_rows);
        call(kv_head, key, KeyList{scratch_.key_rows, kDTypeOf<Real>, count});
      });
    }
  }

  // call(first key within keys_, their number, loaded rows)
  template <class Call>
  void for_each_chunk(Array array, i64 kv_head, const Call& call) const {
    const i64 stride = array == Array::kK ? sizes_.padded_dim_qk : sizes_.padded_dim_v;
    for_each_loaded<Real>(problem_, sequence_, kernels_, array, kv_head, keys_, kLoadedKeys,
                          {scratch_.loaded, stride}, [&](i64 key, i64 count) {
                            call(key - keys_.begin, count, View<Real>{scratch_.loaded, stride});
                          });
  }

  void add_visible_values(i64 kv_head) const {
    for_each_chunk(Array::kV, kv_head, [&](i64 key, i64 count, View<Real> V) {
      multiply_visible<Real>(kernels_,
                             {.rows = rows_,
                              .columns = problem_.dim_v,
                              .depth = count,
                              .A = scores(kv_head) + key,
                              .A_row_stride = scratch_.stride,
                              .A_depth_stride = 1,
                              .B = V.data,
                              .B_depth_stride = V.stride,
                              .B_panel_stride = kernels_.lanes,
                              .C = O(kv_head),
                              .C_row_stride = sizes_.padded_dim_v,
                              .accumulates = true},
                             {scratch_.addend + key, scratch_.stride, 1}, scratch_.finite_rows,
                             sizes_.padded_dim_v);
    });
  }

  bool fits_pairs() const {
    constexpr double kMostScale = 0x1p20;  // of what a dot product loses
    return pairs_ && !has_addend_ && std::fabs(problem_.score_map.scale) <= kMostScale &&
           lies_well(Array::kK) && lies_well(Array::kV);
  }

  // The same in bf16. Heads in which numbers below the normal ones, which these instructions take
  // for 0, or inf and NaN could have made a difference are computed again, each by itself: what
  // other heads hold changes no bit of one.
  void add_keys_in_pairs() const {
    const PairTask task(pairs_);
    const FewRowsKernels<float, Pair>& few_rows = pairs_->few_rows;
    const i64 stride = sizes_.padded_dim_qk / 2;
    u64 odd = 0;  // a bit for each head of which a query is not ordinary
    for (i64 kv_head = kv_heads_.begin; kv_head < kv_heads_.end; ++kv_head) {
      for_each_head(kv_head, [&](i64 head, i64 row) {
        const bool all = pairs_->pack_columns(queries_in(head), q_len_, problem_.dim_qk,
                                              scratch_.Q_pairs + row * stride, stride);
        if (!all) odd |= bit_of(kv_head);
      });
      few_rows.arrange(scratch_.Q_pairs, stride, rows_, problem_.dim_qk / 2, Q_pair_lanes(kv_head));
    }
    for_each_list(Array::kK, kv_heads_, [&](i64 kv_head, i64 key, const KeyList& keys) {
      few_rows.dot(Q_pair_lanes(kv_head), rows_, keys, problem_.dim_qk, scores(kv_head) + key,
                   scratch_.stride);
    });
    weigh(few_rows, kv_heads_);
    for_each_list(Array::kV, kv_heads_, [&](i64 kv_head, i64 key, const KeyList& values) {
      few_rows.add(reinterpret_cast<const Pair*>(scores(kv_head)) + key / 2, scratch_.stride, rows_,
                   values, problem_.dim_v, O(kv_head), sizes_.padded_dim_v);
    });
    for (i64 kv_head = kv_heads_.begin; kv_head < kv_heads_.end; ++kv_head) {
      const View<float> sums{O(kv_head), sizes_.padded_dim_v};
      const bool fits = !(odd & bit_of(kv_head));
      if (fits && pairs_->are_ordinary(sums, rows_, problem_.dim_v)) continue;
      add_keys({kv_head, kv_head + 1});
    }
  }

  u64 bit_of(i64 kv_head) const { return u64{1} << (kv_head - kv_heads_.begin); }

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  const PairKernels* pairs_;
  const TileSizes& sizes_;
  const SplitShared<Real>& shared_;
  const SplitScratch<Real>& scratch_;
  i64 index_;
  Interval kv_heads_;
  CacheSequence sequence_;
  i64 q_len_;
  i64 rows_;
  i64 part_;
  Interval keys_{0, 0};
  bool has_addend_ = false;
};

// Key/value heads of a task: fewer where threads would have nothing to do. No bit depends on it.
i64 heads_together(const Plan& plan, const Problem& problem, i64 splits) {
  constexpr i64 kTasksOfThread = 4;
  i64 heads = most_heads_together(problem);
  while (heads > 1 &&
         splits * ceil_div(problem.heads_kv, heads) < kTasksOfThread * plan.device.num_threads) {
    heads = ceil_div(heads, i64{2});
  }
  return heads;
}

template <class Real>
void split_keys(const Plan& plan, const Problem& problem, void* workspace,
                const PairKernels* pairs) {
  const SplitWorkspace<Real> memory(workspace, problem, plan.tile, plan.device.num_threads);
  const TileSizes& sizes = memory.sizes();
  const SplitShared<Real>& shared = memory.shared();
  shared.splits[0] = 0;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const i64 keys = problem.sequence(index).shape.kv_len;
    shared.splits[index + 1] = shared.splits[index] + ceil_div(keys, sizes.columns);
  }

  const i64 splits = shared.splits[problem.num_sequences];
  const i64 heads = heads_together(plan, problem, splits);
  const i64 groups = ceil_div(problem.heads_kv, heads);
  for_each_task(
      slots_for(plan, problem, splits * groups), splits * groups, [&](int slot, i64 task) {
        const SplitScratch<Real> scratch = memory.scratch(slot);
        const HeadBlock at = block_by_block(problem, shared.splits, groups, task);
        const i64 first = at.head * heads;
        const i64 part =
            first_part(problem, sizes, shared.splits[at.sequence_index] + at.block, first);
        const Interval kv_heads{first, min(first + heads, problem.heads_kv)};
        Split<Real>(problem, sizes, shared, scratch, at, kv_heads, part, pairs).run();
      });

  const i64 merges = problem.num_sequences * problem.heads_q;
  for_each_task(slots_for(plan, problem, merges), merges, [&](int slot, i64 task) {
    const SplitScratch<Real> scratch = memory.scratch(slot);
    MergedRows<Real>(problem, sizes, shared, scratch, task / problem.heads_q,
                     task % problem.heads_q)
        .run();
  });
}

}  // namespace

void split_keys_forward(const Plan& plan, const Problem& problem, void* workspace,
                        const PairKernels* pairs) {
  const bool multiplies_pairs = pairs && pairs->few_rows.dot;
  problem.dtype == DType::kFloat64
      ? split_keys<double>(plan, problem, workspace, nullptr)
      : split_keys<float>(plan, problem, workspace, multiplies_pairs ? pairs : nullptr);
}

}  // namespace fulmen::cpu
