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
    const i64 stride = sizes_.padded_columns;
    for_each_head([&](i64 head, i64 row) {
      const PairTerms<Real> pairs(problem_, index_, sequence_, head);
      has_addend_ = !is_full_ || pairs.adds_everywhere();
      const Interval rows{0, q_len_};
      if (has_addend_) pairs.fill_addend(rows, keys_, scratch_.addend + row * stride, stride);
      if (scratch_.keep) pairs.fill_keep(rows, keys_, scratch_.keep + row * stride, stride);
    });
  }

  FewRowsBlock<Real> weights() const {
    return {.scores = scratch_.scores,
            .stride = sizes_.padded_columns,
            .rows = rows_,
            .keys = keys_.size(),
            .terms = {problem_.score_map.as<Real>(), has_addend_ ? scratch_.addend : nullptr,
                      scratch_.keep},
            .row_max = row_max_,
            .row_sum = row_sum_};
  }

  // S = Q K^T;  P = exp(S - m);  O = P V
  void add_keys() {
    for_each_head([&](i64 head, i64 row) {
      kernels_.load_rows(queries_in(head), q_len_, problem_.dim_qk,
                         scratch_.Q + row * sizes_.padded_dim_qk, sizes_.padded_dim_qk);
    });
    for_each_chunk(Array::kK, [&](i64 key, const Source& K, i64 count, i64 dims) {
      kernels_.few_rows.dot(scratch_.Q, sizes_.padded_dim_qk, rows_, K, count, dims,
                            scratch_.scores + key, sizes_.padded_columns);
    });
    kernels_.few_rows.weigh(weights());
    std::fill_n(O_, rows_ * sizes_.padded_dim_v, Real(0));
    for_each_chunk(Array::kV, [&](i64 key, const Source& V, i64 count, i64 dims) {
      if (has_addend_) return add_visible_values(key, V, count);
      kernels_.few_rows.add(scratch_.scores + key, sizes_.padded_columns, rows_, V, count, dims, O_,
                            sizes_.padded_dim_v);
    });
  }

  bool lies_well(Array array) const {
    const Tensor& tensor = problem_.arrays[array];
    return tensor.strides[3] == 1 && tensor.shape[3] % kernels_.lanes == 0;
  }

  // call(first key within keys_, their number, where they lie)
  template <class Call>
  void for_each_run(Array array, const Call& call) const {
    cpu::for_each_run(
        problem_, sequence_, array, kv_head_, keys_,
        [&](i64 key, i64 count, const Source& source) { call(key - keys_.begin, count, source); });
  }

  // The rows where they lie when a kernel can read them there, else loaded chunk by chunk.
  // call(first key, rows, number of keys, dims)
  template <class Call>
  void for_each_chunk(Array array, const Call& call) const {
    const i64 dims = problem_.arrays[array].shape[3];
    const bool reads_directly = lies_well(array) && !(array == Array::kV && has_addend_);
    for_each_run(array, [&](i64 key, i64 count, const Source& source) {
      if (reads_directly) return call(key, source, count, dims);
      const i64 stride = array == Array::kK ? sizes_.padded_dim_qk : sizes_.padded_dim_v;
      const i64 padded = ceil_div(dims, kernels_.lanes) * kernels_.lanes;
      for (i64 done = 0; done < count; done += kLoadedKeys) {
        const Source some = rows_from(source, done);
        const i64 now = min(kLoadedKeys, count - done);
        kernels_.load_rows(some, now, dims, scratch_.loaded, stride);
        call(key + done, Source{scratch_.loaded, kDTypeOf<Real>, stride, 1}, now, padded);
      }
    });
  }

  void add_visible_values(i64 key, const Source& V, i64 count) const {
    multiply_visible<Real>(kernels_,
                           {.rows = rows_,
                            .columns = problem_.dim_v,
                            .depth = count,
                            .A = scratch_.scores + key,
                            .A_row_stride = sizes_.padded_columns,
                            .A_depth_stride = 1,
                            .B = static_cast<const Real*>(V.data),
                            .B_depth_stride = V.row_stride,
                            .B_panel_stride = kernels_.lanes,
                            .C = O_,
                            .C_row_stride = sizes_.padded_dim_v,
                            .accumulates = true},
                           {scratch_.addend + key, sizes_.padded_columns, 1}, scratch_.finite_rows,
                           sizes_.padded_dim_v);
  }

  bool fits_pairs() const {
    constexpr double kMostScale = 0x1p20;  // of what a dot product loses
    return pairs_ && !has_addend_ && std::fabs(problem_.score_map.scale) <= kMostScale &&
           lies_well(Array::kK) && lies_well(Array::kV);
  }

  // call(first key, their number, where they lie) of the values, twos of keys together: where some
  // lie in different pages, a copy chunk by chunk.
  template <class Call>
  void for_each_even_run(const Call& call) const {
    bool even = true;
    for_each_run(Array::kV, [&](i64 key, i64, const Source&) { even = even && key % 2 == 0; });
    if (even) return for_each_run(Array::kV, call);
    for (i64 key = 0; key < keys_.size(); key += kLoadedKeys) {
      const i64 first = keys_.begin + key;
      const Interval some = clamped(first, first + kLoadedKeys, keys_.end);
      call(key, some.size(),
           keys_in_one(problem_, sequence_, Array::kV, kv_head_, some, scratch_.loaded));
    }
  }

  // The same in bf16. False where numbers below the normal ones, which these instructions take for
  // 0, or inf and NaN could have made a difference: nothing is lost then, all is computed again.
  bool add_keys_in_pairs() const {
    const i64 stride = sizes_.padded_dim_qk / 2;
    bool ordinary = true;
    for_each_head([&](i64 head, i64 row) {
      const bool all = pairs_->pack_columns(queries_in(head), q_len_, problem_.dim_qk,
                                            scratch_.Q_pairs + row * stride, stride);
      ordinary = ordinary && all;
    });
    if (!ordinary) return false;
    for_each_run(Array::kK, [&](i64 key, i64 count, const Source& K) {
      pairs_->few_rows.dot(scratch_.Q_pairs, stride, rows_, K, count, problem_.dim_qk,
                           scratch_.scores + key, sizes_.padded_columns);
    });
    pairs_->few_rows.weigh(weights());
    std::fill_n(O_, rows_ * sizes_.padded_dim_v, Real(0));
    const Pair* const P = reinterpret_cast<const Pair*>(scratch_.scores);
    for_each_even_run([&](i64 key, i64 count, const Source& V) {
      pairs_->few_rows.add(P + key / 2, sizes_.padded_columns, rows_, V, count, problem_.dim_v, O_,
                           sizes_.padded_dim_v);
    });
    return has_ordinary_rows();
  }

  // Every row of O is finite, and so large somewhere that what was lost below 2^-126 is beyond its
  // last digit.
  bool has_ordinary_rows() const {
    for (i64 row = 0; row < rows_; ++row) {
      const Real* const O = O_ + row * sizes_.padded_dim_v;
      Real largest = 0;
      for (i64 d = 0; d < problem_.dim_v; ++d) largest = max(largest, std::fabs(O[d]));
      if (problem_.dim_v > 0 && largest < Real(0x1p-80)) return false;
    }
    return kernels_.all_finite({O_, sizes_.padded_dim_v}, rows_, problem_.dim_v);
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
    const HeadBlock at = head_by_head(problem, shared.splits, problem.heads_kv, task);
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
