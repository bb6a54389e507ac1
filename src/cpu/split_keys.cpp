// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Forward attention of few query rows and many keys, as in decoding, where reading K and V is the
// cost: a task is one split of the keys of one key/value head, for all rows of all heads of its
// group, so that every key is read once; then the parts of each row are merged, in the order of the
// splits, so that neither threads nor other requests change a bit. A split's scores are held whole:
// one maximum, no rescaling. Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding" (2023).

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/backend.h"
#include "cpu/key_rows.h"
#include "cpu/pair_terms.h"
#include "cpu/row_results.h"
#include "cpu/rows.h"
#include "cpu/thread_pool.h"
#include "plan/tiled_workspace.h"

namespace fulmen::cpu {
namespace {

// Of a split, counted over all sequences, and a key/value head: its first row among the parts.
i64 first_part(const Problem& problem, const TileSizes& sizes, i64 split, i64 kv_head) {
  return (split * problem.heads_kv + kv_head) * sizes.rows;
}

template <class Real>
class Split {
 public:
  // at.head: a key/value head; at.block: the split within its sequence. part: its first row among
  // the parts.
  Split(const Problem& problem, const TileSizes& sizes, const SplitShared<Real>& shared,
        const SplitScratch<Real>& scratch, const HeadBlock& at, i64 part)
      : problem_(problem),
        kernels_(kernels<Real>()),
        pairs_(problem.kv_dtype() == DType::kBFloat16 ? pair_kernels() : nullptr),
        sizes_(sizes),
        scratch_(scratch),
        index_(at.sequence_index),
        kv_head_(at.head),
        sequence_(problem.sequence(at.sequence_index)),
        q_len_(sequence_.shape.q_len),
        rows_(q_len_ * problem.group_size()),
        row_max_(shared.row_max + part),
        row_sum_(shared.row_sum + part),
        O_(shared.O + part * sizes.padded_dim_v) {
    if (q_len_ == 0) return;
    const Interval all = rows_of_block(at.block, sizes.columns, sequence_.shape.kv_len);
    const SeenKeys seen = seen_keys(problem, sequence_, {0, q_len_});
    keys_ = clamped(max(seen.some.begin, all.begin), seen.some.end, all.end);
    is_full_ = seen.all.begin <= keys_.begin && keys_.end <= seen.all.end;
  }

  void run() {
    if (keys_.size() <= 0) {
      const RowState empty;
      std::fill_n(row_max_, rows_, static_cast<Real>(empty.row_max));
      std::fill_n(row_sum_, rows_, static_cast<Real>(empty.row_sum));
      return;
    }
    load_terms();
    if constexpr (kHasPairs) {
      if (fits_pairs() && add_keys_in_pairs()) return;
    }
    add_keys();
  }

 private:
  static constexpr bool kHasPairs = kDTypeOf<Real> == DType::kFloat32;
  static constexpr i64 kLoadedKeys = SplitScratch<Real>::kLoadedKeys;

  // A row of the group for each head and row of q.
  template <class Call>
  void for_each_head(const Call& call) const {
    for (i64 member = 0; member < problem_.group_size(); ++member) {
      call(kv_head_ * problem_.group_size() + member, member * q_len_);
    }
  }

  Source queries_in(i64 head) const {
    return source_of(problem_.arrays[Array::kQ], sequence_.batch, head, sequence_.q_begin);
  }

  void load_terms() {
    const i64 stride = scratch_.stride;
    for_each_head([&](i64 head, i64 row) {
      const PairTerms<Real> pairs(problem_, index_, sequence_, head, scratch_.steps);
      has_addend_ = !is_full_ || pairs.adds_everywhere();
      const Interval rows{0, q_len_};
      if (has_addend_) pairs.fill_addend(rows, keys_, scratch_.addend + row * stride, stride);
      if (scratch_.keep) pairs.fill_keep(rows, keys_, scratch_.keep + row * stride, stride);
    });
  }

  // The user's score of all rows, where there is one; what is left to be done with scores.
  ScoreMap<Real> map_scores() const {
    if (!problem_.has_score_expression()) return problem_.score_map.as<Real>();
    for_each_head([&](i64 head, i64 row) {
      const i64 at = row * scratch_.stride;
      const PairTerms<Real> pairs(problem_, index_, sequence_, head, scratch_.steps);
      pairs.map_scores({.scores = scratch_.scores + at,
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

  // A row after the other; meanwhile the first values come from memory.
  template <class Kernels>
  void weigh(const Kernels& few_rows, const KeyList* values) const {
    const ScoreMap<Real> map = map_scores();
    for (i64 row = 0; row < rows_; ++row) {
      if (values) fetch_values(*values, row);
      const i64 at = row * scratch_.stride;
      few_rows.weigh({.scores = scratch_.scores + at,
                      .stride = scratch_.stride,
                      .rows = 1,
                      .keys = keys_.size(),
                      .terms = {map, has_addend_ ? scratch_.addend + at : nullptr,
                                scratch_.keep ? scratch_.keep + at : nullptr},
                      .row_max = row_max_ + row,
                      .row_sum = row_sum_ + row});
    }
  }

  // Of the values, part `part` of those that memory can give while weights are computed.
  void fetch_values(const KeyList& values, i64 part) const {
    constexpr i64 kBytes = 8192, kLine = 64;
    const i64 row_bytes = problem_.dim_v * size_bytes(values.dtype);
    const i64 some = ceil_div(kBytes, row_bytes);
    for (i64 key = part * some; key < min((part + 1) * some, values.count); ++key) {
      const char* const row = static_cast<const char*>(values.rows[key]);
      for (i64 at = 0; at < row_bytes; at += kLine) __builtin_prefetch(row + at);
    }
  }

  // S = Q K^T;  P = exp(S - m);  O = P V
  void add_keys() {
    const FewRowsKernels<Real, Real>& few_rows = kernels_.few_rows;
    const i64 dim_qk = padded(problem_.dim_qk);
    for_each_head([&](i64 head, i64 row) {
      kernels_.load_rows(queries_in(head), q_len_, problem_.dim_qk,
                         scratch_.Q + row * sizes_.padded_dim_qk, sizes_.padded_dim_qk);
    });
    few_rows.arrange(scratch_.Q, sizes_.padded_dim_qk, rows_, dim_qk, scratch_.Q_lanes);
    for_each_list(Array::kK, [&](i64 key, const KeyList& keys) {
      few_rows.dot(scratch_.Q_lanes, rows_, keys, dim_qk, scratch_.scores + key, scratch_.stride);
    });
    if (lies_well(Array::kK)) scale_by(Array::kK);
    if (has_addend_ || !lies_well(Array::kV)) {
      weigh(few_rows, nullptr);
    } else {
      const KeyList values = list(Array::kV);
      weigh(few_rows, &values);
    }
    std::fill_n(O_, rows_ * sizes_.padded_dim_v, Real(0));
    if (has_addend_) return add_visible_values();
    if (lies_well(Array::kV)) scale_by(Array::kV);
    for_each_list(Array::kV, [&](i64 key, const KeyList& values) {
      few_rows.add(scratch_.scores + key, scratch_.stride, rows_, values, padded(problem_.dim_v),
                   O_, sizes_.padded_dim_v);
    });
  }

  i64 padded(i64 dims) const { return ceil_div(dims, kernels_.lanes) * kernels_.lanes; }

  bool lies_well(Array array) const {
    const Tensor& tensor = problem_.arrays[array];
    return tensor.strides[3] == 1 && tensor.shape[3] == padded(tensor.shape[3]);
  }

  // Keys of the split where they lie.
  KeyList list(Array array) const {
    i64 listed = 0;
    for_each_run(problem_, sequence_, array, kv_head_, keys_,
                 [&](i64, i64 count, const Source& source) {
                   list_rows(source, count, scratch_.key_rows + listed);
                   listed += count;
                 });
    return {scratch_.key_rows, problem_.arrays[array].dtype, listed};
  }

  // Scores or weights, times what the elements of quantised keys or values are multiplied by.
  void scale_by(Array array) const {
    if (!problem_.has(array == Array::kK ? Array::kKScale : Array::kVScale)) return;
    for_each_run(problem_, sequence_, array, kv_head_, keys_,
                 [&](i64 first, i64 count, const Source& source) {
                   for (i64 i = 0; i < count; ++i) {
                     float scale;
                     std::memcpy(&scale, rows_from(source, i).scales, sizeof(scale));
                     Real* const key = scratch_.scores + first - keys_.begin + i;
                     for (i64 row = 0; row < rows_; ++row) key[row * scratch_.stride] *= scale;
                   }
                 });
  }

  static void list_rows(const Source& source, i64 count, const void** rows) {
    const i64 bytes = source.row_stride * size_bytes(source.dtype);
    for (i64 key = 0; key < count; ++key) {
      rows[key] = static_cast<const char*>(source.data) + key * bytes;
    }
  }

  // call(first key within keys_, the keys): all where they lie when a kernel can read them there,
  // else loaded chunk by chunk.
  template <class Call>
  void for_each_list(Array array, const Call& call) const {
    if (lies_well(array)) return call(0, list(array));
    for_each_chunk(array, [&](i64 key, i64 count, View<Real> rows) {
      list_rows({rows.data, kDTypeOf<Real>, rows.stride, 1}, count, scratch_.key_rows);
      call(key, KeyList{scratch_.key_rows, kDTypeOf<Real>, count});
    });
  }

  // call(first key within keys_, their number, loaded rows)
  template <class Call>
  void for_each_chunk(Array array, const Call& call) const {
    const i64 stride = array == Array::kK ? sizes_.padded_dim_qk : sizes_.padded_dim_v;
    for_each_run(
        problem_, sequence_, array, kv_head_, keys_, [&](i64 key, i64 count, const Source& source) {
          for (i64 done = 0; done < count; done += kLoadedKeys) {
            const Source some = rows_from(source, done);
            const i64 now = min(kLoadedKeys, count - done);
            kernels_.load_rows(some, now, problem_.arrays[array].shape[3], scratch_.loaded, stride);
            call(key - keys_.begin + done, now, View<Real>{scratch_.loaded, stride});
          }
        });
  }

  void add_visible_values() const {
    for_each_chunk(Array::kV, [&](i64 key, i64 count, View<Real> V) {
      multiply_visible<Real>(kernels_,
                             {.rows = rows_,
                              .columns = problem_.dim_v,
                              .depth = count,
                              .A = scratch_.scores + key,
                              .A_row_stride = scratch_.stride,
                              .A_depth_stride = 1,
                              .B = V.data,
                              .B_depth_stride = V.stride,
                              .B_panel_stride = kernels_.lanes,
                              .C = O_,
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

  // The same in bf16. False where numbers below the normal ones, which these instructions take for
  // 0, or inf and NaN could have made a difference: nothing is lost then, all is computed again.
  bool add_keys_in_pairs() const {
    const FewRowsKernels<float, Pair>& few_rows = pairs_->few_rows;
    const i64 stride = sizes_.padded_dim_qk / 2;
    bool ordinary = true;
    for_each_head([&](i64 head, i64 row) {
      const bool all = pairs_->pack_columns(queries_in(head), q_len_, problem_.dim_qk,
                                            scratch_.Q_pairs + row * stride, stride);
      ordinary = ordinary && all;
    });
    if (!ordinary) return false;
    few_rows.arrange(scratch_.Q_pairs, stride, rows_, problem_.dim_qk / 2, scratch_.Q_pair_lanes);
    few_rows.dot(scratch_.Q_pair_lanes, rows_, list(Array::kK), problem_.dim_qk, scratch_.scores,
                 scratch_.stride);
    const KeyList values = list(Array::kV);
    weigh(few_rows, &values);
    std::fill_n(O_, rows_ * sizes_.padded_dim_v, Real(0));
    few_rows.add(reinterpret_cast<const Pair*>(scratch_.scores), scratch_.stride, rows_, values,
                 problem_.dim_v, O_, sizes_.padded_dim_v);
    return pairs_->are_ordinary({O_, sizes_.padded_dim_v}, rows_, problem_.dim_v);
  }

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  const PairKernels* pairs_;
  const TileSizes& sizes_;
  const SplitScratch<Real>& scratch_;
  i64 index_;
  i64 kv_head_;
  CacheSequence sequence_;
  i64 q_len_;
  i64 rows_;
  Real* row_max_;
  Real* row_sum_;
  Real* O_;
  Interval keys_{0, 0};
  bool is_full_ = true;
  bool has_addend_ = false;
};

// The rows of one head of one sequence from their parts, in the order of the splits.
template <class Real>
class MergedRows {
 public:
  MergedRows(const Problem& problem, const TileSizes& sizes, const SplitShared<Real>& shared,
             const SplitScratch<Real>& scratch, i64 index, i64 head)
      : problem_(problem),
        sizes_(sizes),
        shared_(shared),
        O_(scratch.loaded),
        index_(index),
        head_(head),
        sequence_(problem.sequence(index)),
        results_(problem, sequence_, head) {}

  void run() {
    const i64 q_len = sequence_.shape.q_len;
    bool saw_keys = false;
    for (i64 i = 0; i < q_len; ++i) saw_keys = merge_row(i) || saw_keys;
    Real factor[kMostSplitRows];
    results_.store({0, q_len}, saw_keys, {O_, sizes_.padded_dim_v}, row_max_, row_sum_, factor);
    results_.clear({q_len, sequence_.q_slot});
  }

 private:
  // Whether some split saw keys of row i.
  bool merge_row(i64 i) {
    Real* const O = O_ + i * sizes_.padded_dim_v;
    std::fill_n(O, sizes_.padded_dim_v, Real(0));
    RowState state;
    for (i64 split = shared_.splits[index_]; split < shared_.splits[index_ + 1]; ++split) {
      const i64 part = first_part(problem_, sizes_, split, problem_.kv_head(head_)) +
                       head_ % problem_.group_size() * sequence_.shape.q_len + i;
      const RowState other{static_cast<double>(shared_.row_max[part]),
                           static_cast<double>(shared_.row_sum[part])};
      if (other.row_sum == 0) continue;  // saw nothing, and wrote no O
      const RowState::MergeFactors factors = state.merge(other);
      const Real mine = static_cast<Real>(factors.mine);
      const Real theirs = static_cast<Real>(factors.other);
      const Real* const from = shared_.O + part * sizes_.padded_dim_v;
      for (i64 d = 0; d < problem_.dim_v; ++d) O[d] = O[d] * mine + from[d] * theirs;
    }
    row_max_[i] = static_cast<Real>(state.row_max);
    row_sum_[i] = static_cast<Real>(state.row_sum);
    return state.row_sum != 0;
  }

  const Problem& problem_;
  const TileSizes& sizes_;
  const SplitShared<Real>& shared_;
  Real* O_;
  i64 index_;
  i64 head_;
  CacheSequence sequence_;
  RowResults<Real> results_;
  Real row_max_[kMostSplitRows];
  Real row_sum_[kMostSplitRows];
};

template <class Real>
void split_keys(const Plan& plan, const Problem& problem, void* workspace) {
  const SplitWorkspace<Real> memory(workspace, problem, plan.tile, plan.device.num_threads);
  const TileSizes& sizes = memory.sizes();
  const SplitShared<Real>& shared = memory.shared();
  shared.splits[0] = 0;
  for (i64 index = 0; index < problem.num_sequences; ++index) {
    const i64 keys = problem.sequence(index).shape.kv_len;
    shared.splits[index + 1] = shared.splits[index] + ceil_div(keys, sizes.columns);
  }

  const i64 parts = shared.splits[problem.num_sequences] * problem.heads_kv;
  for_each_task(slots_for(plan, problem, parts), parts, [&](int slot, i64 task) {
    const SplitScratch<Real> scratch = memory.scratch(slot);
    const HeadBlock at = block_by_block(problem, shared.splits, problem.heads_kv, task);
    const i64 part =
        first_part(problem, sizes, shared.splits[at.sequence_index] + at.block, at.head);
    Split<Real>(problem, sizes, shared, scratch, at, part).run();
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

void split_keys_forward(const Plan& plan, const Problem& problem, void* workspace) {
  problem.dtype == DType::kFloat64 ? split_keys<double>(plan, problem, workspace)
                                   : split_keys<float>(plan, problem, workspace);
}

}  // namespace fulmen::cpu
