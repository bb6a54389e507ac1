// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Forward attention in tiles: a task is a block of query rows of one head; it walks over the blocks
// of keys that those rows see, and keeps (row_max, row_sum, O) of the keys so far. Scores are held
// as S^T, a query row per lane, so that rows' maxima and sums need no shuffles, K and V are read as
// they lie in memory, and only Q is rearranged, once per task. Source: Dao, FlashAttention-2
// (2023), algorithm 1. Steps are kernels of cpu/kernels.h.

#include <algorithm>

#include "cpu/backend.h"
#include "cpu/forward_pairs.h"
#include "cpu/key_rows.h"
#include "cpu/pair_terms.h"
#include "cpu/row_results.h"
#include "cpu/rows.h"
#include "cpu/thread_pool.h"
#include "plan/tiled_workspace.h"

namespace fulmen::cpu {
namespace {

constexpr i64 kStripRows = kTransposedStripRows;  // whole panels for every instruction set

template <class Real>
class ForwardBlock {
 public:
  ForwardBlock(const Problem& problem, const TileSizes& sizes, const ForwardScratch<Real>& scratch,
               const HeadBlock& at, const PairKernels* pairs)
      : problem_(problem),
        kernels_(kernels<Real>()),
        pairs_(problem, sizes, scratch, pairs),
        sizes_(sizes),
        scratch_(scratch),
        head_(at.head),
        kv_head_(problem.kv_head(at.head)),
        sequence_(problem.sequence(at.sequence_index)),
        terms_(problem, at.sequence_index, sequence_, at.head, scratch.steps),
        results_(problem, sequence_, at.head),
        rows_(rows_of_block(at.block, sizes.rows, sequence_.shape.q_len)),
        owned_(rows_of_block(at.block, sizes.rows, sequence_.q_slot)) {}

  void run() {
    const PairTask task(pairs_.kernels());
    if (rows_.size() > 0) {
      start();
      const SeenKeys seen = seen_keys(problem_, sequence_, rows_);
      const i64 columns = sizes_.columns;
      for (i64 first = seen.some.begin / columns * columns; first < seen.some.end;
           first += columns) {
        const Interval keys = clamped(first, first + columns, sequence_.shape.kv_len);
        const Interval next{keys.end, keys.end + keys.size()};
        ahead_ = next.end <= seen.some.end ? KeysAhead(problem_, sequence_, kv_head_, next.begin)
                                           : KeysAhead();
        if (terms_.kind(rows_, keys) != BlockKind::kEmpty) add_keys(keys, seen);
      }
      transpose_outputs(false);
      clear_others();
      results_.store(rows_, seen.some.size() > 0, {scratch_.O, sizes_.padded_dim_v},
                     scratch_.row_max, scratch_.row_sum, scratch_.rescale);
    }
    results_.clear({max(owned_.begin, sequence_.shape.q_len + i64{0}), owned_.end});
  }

 private:
  static constexpr bool kHasPairs = kDTypeOf<Real> == DType::kFloat32;

  Source queries() const {
    return query_source(problem_, sequence_.batch, head_, sequence_.q_begin + rows_.begin);
  }

  // Q^T in panels;  m = -inf, l = 0;  O is 0 until it is added to
  void start() {
    pairs_fit_ = pairs_.kernels() && pairs_.load_queries(queries(), rows_.size());
    if (!pairs_fit_) load_query_lanes();
    const RowState empty;
    std::fill_n(scratch_.row_max, sizes_.padded_rows, static_cast<Real>(empty.row_max));
    std::fill_n(scratch_.row_sum, sizes_.padded_rows, static_cast<Real>(empty.row_sum));
  }

  void load_query_lanes() {
    const View<Real> Q = rows_of(kernels_, queries(), rows_.size(), problem_.dim_qk,
                                 Reads::kElements, scratch_.Q, sizes_.padded_dim_qk);
    kernels_.transpose(Q, rows_.size(), problem_.dim_qk, scratch_.Q_lanes,
                       problem_.dim_qk * kernels_.lanes, kernels_.lanes);
    has_query_lanes_ = true;
  }

  void load_keys(Interval keys) {
    keys_ = keys;
    in_pairs_ = pairs_fit_ && load_key_pairs();
    transpose_outputs(in_pairs_ && pairs_.transposes_outputs());
    if (in_pairs_) return;
    if (!has_query_lanes_) load_query_lanes();
    K_ = key_rows(Array::kK, Reads::kElements, scratch_.K, sizes_.padded_dim_qk);
    V_ = key_rows(Array::kV, Reads::kPanels, scratch_.V, sizes_.padded_dim_v);
  }

  void add_keys(Interval keys, const SeenKeys& seen) {
    load_keys(keys);
    if (seen.all.begin <= keys.begin && keys.end <= seen.all.end) {
      const i64 at_once = pairs_.strip_rows();
      for (i64 row = rows_.begin; row < rows_.end; row += at_once) {
        add_pairs({row, min(row + at_once, rows_.end)}, keys, true);
      }
    } else {
      add_visible_pairs();
    }
  }

  // Where they lie, or loaded run by run.
  View<Real> key_rows(Array array, Reads reads, Real* scratch, i64 stride) const {
    const i64 dims = problem_.dims(array);
    View<Real> rows{scratch, stride};
    if (problem_.has_records()) {
      load_records<Real>(problem_, sequence_, array, kv_head_, keys_, {scratch, stride});
      return rows;
    }
    for_each_run(problem_, sequence_, array, kv_head_, keys_,
                 [&](i64 key, i64 count, const Source& source) {
                   Real* const to = scratch + (key - keys_.begin) * stride;
                   if (count < keys_.size()) {
                     return kernels_.load_rows(source, count, dims, to, stride);
                   }
                   rows = rows_of(kernels_, source, count, dims, reads, to, stride);
                 });
    return rows;
  }

  bool load_key_pairs() const {
    return pairs_.load_keys(keys_in(Array::kK, scratch_.K_copies),
                            keys_in(Array::kV, scratch_.V_copies), keys_.size());
  }

  Source keys_in(Array array, void* copies) const {
    return keys_in_one(problem_, sequence_, array, kv_head_, keys_, copies);
  }

  void transpose_outputs(bool to_transposed) {
    if (to_transposed != are_transposed_) {
      for_each_strip(rows_, [&](Interval strip, bool has_outputs) {
        if (has_outputs) pairs_.transpose_outputs(strip.begin, strip.size(), to_transposed);
      });
    }
    are_transposed_ = to_transposed;
  }

  // call(strip's rows within the task, whether their outputs were added to)
  template <class Call>
  void for_each_strip(Interval rows, const Call& call) const {
    for (i64 row = rows.begin - rows_.begin; row < rows.end - rows_.begin; row += kStripRows) {
      call(Interval{row, min(row + kStripRows, rows_.size())},
           (strips_with_outputs_ >> row / kStripRows & 1) != 0);
    }
  }

  // Whether the rows' outputs are to be added to, and not to be written first. If some of them are,
  // the others become 0. They have outputs from now on.
  bool add_to_outputs(Interval rows) {
    bool some = false, all = true;
    for_each_strip(rows, [&](Interval, bool has_outputs) {
      some = some || has_outputs;
      all = all && has_outputs;
    });
    for_each_strip(rows, [&](Interval strip, bool has_outputs) {
      if (some && !all && !has_outputs) clear_outputs(strip);
      strips_with_outputs_ |= u64{1} << strip.begin / kStripRows;
    });
    return some;
  }

  void clear_outputs(Interval strip) const {
    if (are_transposed_) return pairs_.clear_outputs(strip.begin);
    std::fill_n(scratch_.O + strip.begin * sizes_.padded_dim_v, strip.size() * sizes_.padded_dim_v,
                Real(0));
  }

  void clear_others() const {
    for_each_strip(rows_, [&](Interval strip, bool has_outputs) {
      if (!has_outputs) clear_outputs(strip);
    });
  }

  // The block's visible pairs where interval masks hide some, strip by strip of rows: the keys that
  // every row of the strip sees, and on both sides of them those that some do. Hidden keys cost
  // nothing beyond a strip's corners.
  void add_visible_pairs() {
    for (i64 begin = rows_.begin; begin < rows_.end; begin += kStripRows) {
      const Interval strip{begin, min(begin + kStripRows, rows_.end)};
      const SeenKeys by_strip = seen_keys(problem_, sequence_, strip);
      const Interval seen =
          clamped(max(by_strip.some.begin, keys_.begin), by_strip.some.end, keys_.end);
      const Interval some{even(seen.begin), seen.end};
      const i64 all_begin = clamp<i64>(by_strip.all.begin, some.begin, some.end);
      const i64 all_end = clamp<i64>(by_strip.all.end, all_begin, some.end);
      const Interval all{even(all_begin + 1), all_end == keys_.end ? all_end : even(all_end)};
      if (all.size() <= 0) {
        add_pairs(strip, some, false);
        continue;
      }
      add_pairs(strip, {some.begin, all.begin}, false);
      add_pairs(strip, all, true);
      add_pairs(strip, {all.end, some.end}, false);
    }
  }

  // Keys stay together in twos, counted from the first of the block.
  i64 even(i64 key) const { return key - (key - keys_.begin) % 2; }

  // rows: from a multiple of kStripRows within the block on. keys: of the block that is loaded.
  // is_full: no interval mask hides a pair of them.
  void add_pairs(Interval rows, Interval keys, bool is_full) {
    if (keys.size() <= 0) return;
    const BlockKind kind = terms_.kind(rows, keys);
    if (kind == BlockKind::kEmpty) return;
    const i64 row = rows.begin - rows_.begin;
    // S^T = K Q^T
    multiply_scores(rows, keys);
    // S <- softcap(scale S) + addend;  m, l <- update;  P = exp(S - m)
    const ScoreTerms<Real> terms = score_terms(rows, keys, kind, is_full);
    const bool rescales = softmax({.scores = scratch_.scores,
                                   .stride = pairs_.score_stride(),
                                   .keys = keys.size(),
                                   .rows = rows.size(),
                                   .terms = terms,
                                   .row_max = scratch_.row_max + row,
                                   .row_sum = scratch_.row_sum + row,
                                   .rescale = scratch_.rescale + row,
                                   .ahead = in_pairs_ ? ahead_.next() : LinesAhead()});
    // O = rescale O + P V
    add_values(rows, keys, terms, rescales ? scratch_.rescale + row : nullptr);
  }

  void multiply_scores(Interval rows, Interval keys) {
    const i64 row = rows.begin - rows_.begin;
    const i64 key = keys.begin - keys_.begin;
    if constexpr (kHasPairs) {
      if (in_pairs_) {
        return pairs_.multiply_scores(row, rows.size(), key, keys.size());
      }
    }
    kernels_.multiply({.rows = keys.size(),
                       .columns = rows.size(),
                       .depth = problem_.dim_qk,
                       .A = K_.data + key * K_.stride,
                       .A_row_stride = K_.stride,
                       .A_depth_stride = 1,
                       .B = scratch_.Q_lanes + row * problem_.dim_qk,
                       .B_depth_stride = kernels_.lanes,
                       .B_panel_stride = problem_.dim_qk * kernels_.lanes,
                       .C = scratch_.scores,
                       .C_row_stride = pairs_.score_stride()});
  }

  bool softmax(const SoftmaxBlock<Real>& block) {
    if constexpr (kHasPairs) {
      if (in_pairs_) return pairs_.kernels()->softmax(block);
    }
    return kernels_.softmax(block);
  }

  void add_values(Interval rows, Interval keys, const ScoreTerms<Real>& terms,
                  const Real* rescale) {
    const i64 row = rows.begin - rows_.begin;
    const i64 key = keys.begin - keys_.begin;
    const bool accumulates = add_to_outputs(rows);
    if (!accumulates) rescale = nullptr;
    if constexpr (kHasPairs) {
      if (in_pairs_) {
        return pairs_.add_values(row, rows.size(), key, keys.size(), accumulates, rescale);
      }
    }
    multiply_visible<Real>(kernels_,
                           {.rows = rows.size(),
                            .columns = problem_.dim_v,
                            .depth = keys.size(),
                            .A = scratch_.scores,
                            .A_row_stride = 1,
                            .A_depth_stride = pairs_.score_stride(),
                            .B = V_.data + key * V_.stride,
                            .B_depth_stride = V_.stride,
                            .B_panel_stride = kernels_.lanes,
                            .C = scratch_.O + row * sizes_.padded_dim_v,
                            .C_row_stride = sizes_.padded_dim_v,
                            .accumulates = accumulates,
                            .row_scale = rescale},
                           {terms.addend, 1, pairs_.score_stride(), terms.seen},
                           scratch_.finite_rows, sizes_.padded_dim_v);
  }

  ScoreTerms<Real> score_terms(Interval rows, Interval keys, BlockKind kind, bool is_full) {
    const bool has_intervals = !is_full && terms_.hides_by_intervals(kind);
    const bool has_addend = (!is_full && !has_intervals) || terms_.adds(kind);
    const bool has_keep = problem_.dropout.enabled();
    if (has_addend) {
      terms_.fill_addend(rows, keys, scratch_.pair_rows, sizes_.padded_columns);
      turn_pairs(rows, keys, scratch_.addend);
    }
    if (has_keep) {
      terms_.fill_keep(rows, keys, scratch_.pair_rows, sizes_.padded_columns);
      turn_pairs(rows, keys, scratch_.keep);
    }
    const ScoreTerms<Real> terms{
        problem_.score_map.as<Real>(), has_addend ? scratch_.addend : nullptr,
        has_keep ? scratch_.keep : nullptr,
        has_intervals ? terms_.seen_by(rows, keys, scratch_.seen) : SeenByRows<Real>()};
    if (!terms_.has_score()) return terms;
    return terms_.map_scores({.scores = scratch_.scores,
                              .addend = has_addend ? scratch_.addend : nullptr,
                              .slope = nullptr,
                              .stride = pairs_.score_stride(),
                              .rows = keys.size(),
                              .columns = rows.size(),
                              .terms = terms},
                             rows, keys, Lanes::kRows, false);
  }

  void turn_pairs(Interval rows, Interval keys, Real* lanes) {
    kernels_.transpose({scratch_.pair_rows, sizes_.padded_columns}, rows.size(), keys.size(), lanes,
                       kernels_.lanes, pairs_.score_stride());
  }

  const Problem& problem_;
  const Kernels<Real>& kernels_;
  ForwardPairs<Real> pairs_;
  const TileSizes& sizes_;
  const ForwardScratch<Real>& scratch_;
  i64 head_;
  i64 kv_head_;
  CacheSequence sequence_;
  PairTerms<Real> terms_;
  RowResults<Real> results_;
  Interval rows_;        // of the block, within q_len
  Interval owned_;       // of the block, within the rows that the sequence owns
  Interval keys_{0, 0};  // those that are loaded
  KeysAhead ahead_;      // those after them
  View<Real> K_{}, V_{};
  bool pairs_fit_ = false;  // all of Q is ordinary
  bool in_pairs_ = false;   // and so are the keys that are loaded
  bool has_query_lanes_ = false;
  bool are_transposed_ = false;  // outputs so far
  u64 strips_with_outputs_ = 0;  // a bit for each, of kStripRows
};

template <class Real>
void forward(const Plan& plan, const Problem& problem, void* workspace, const PairKernels* pairs) {
  const ForwardWorkspace<Real> memory(workspace, problem, plan.tile, plan.device.num_threads);
  i64* const first = memory.shared().q_blocks;
  const i64 blocks = number_blocks(problem, Side::kQuery, memory.sizes().rows, first);
  const i64 num_tasks = blocks * problem.heads_q;
  for_each_task(slots_for(plan, problem, num_tasks), num_tasks, [&](int slot, i64 task) {
    const ForwardScratch<Real> scratch = memory.scratch(slot);
    const HeadBlock at = head_by_head(problem, first, problem.heads_q, task);
    ForwardBlock<Real>(problem, memory.sizes(), scratch, at, pairs).run();
  });
}

}  // namespace

void tiled_forward(const Plan& plan, const Problem& problem, void* workspace) {
  tiled_forward(plan, problem, workspace, pair_kernels(problem.kv_dtype()));
}

void tiled_forward(const Plan& plan, const Problem& problem, void* workspace,
                   const PairKernels* pairs) {
  if (splits_keys(problem)) return split_keys_forward(plan, problem, workspace, pairs);
  problem.dtype == DType::kFloat64 ? forward<double>(plan, problem, workspace, nullptr)
                                   : forward<float>(plan, problem, workspace, pairs);
}

}  // namespace fulmen::cpu
