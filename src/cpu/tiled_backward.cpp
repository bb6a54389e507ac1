// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Backward attention in tiles, one pass over the pairs: a task is a block of keys of one key/value
// head; it walks over the blocks of query rows, of every head of its group, that see those keys. dK
// and dV stay with the task. dQ is summed over tasks, in the order of the key blocks: a task that
// is ahead waits, so the result has the same bits on any number of threads.
// Source: Dao, FlashAttention-2 (2023), algorithm 2.

#include <algorithm>
#include <numeric>

#include "core/block_map.h"
#include "cpu/backend.h"
#include "cpu/backward_tile.h"
#include "cpu/row_results.h"
#include "cpu/rows.h"
#include "cpu/thread_pool.h"
#include "kernels/attention/block_range.cuh"

namespace fulmen::cpu {
namespace {

template <class Real>
double dot(const Real* a, const Real* b, i64 size) {
  constexpr i64 kSums = 8;  // none of which waits for another
  double sums[kSums] = {};
  const auto add = [&](i64 i, i64 d) {
    sums[i] += static_cast<double>(a[d]) * static_cast<double>(b[d]);
  };
  const i64 whole = size - size % kSums;
  for (i64 d = 0; d < whole; d += kSums) {
    for (i64 i = 0; i < kSums; ++i) add(i, d + i);
  }
  for (i64 d = whole; d < size; ++d) add(d - whole, d);
  return std::accumulate(sums, sums + kSums, 0.0);
}

// First pass: what every row brings along. From stats (or lse), o, dout and dlse to row_max, 1 / l,
// delta = rowsum(dO O), and the row's share of dsinks; and zero gradients for rows that see
// nothing. A task is a block of query rows of one head.
template <class Real>
void prepare_rows(const Problem& problem, const TileSizes& sizes,
                  const BackwardShared<Real>& shared, const BackwardScratch<Real>& scratch,
                  const HeadBlock& at) {
  const Sequence sequence = problem.sequence(at.sequence_index);
  const Interval rows = rows_of_block(at.block, sizes.rows, sequence.shape.q_len);
  const Interval owned = rows_of_block(at.block, sizes.rows, sequence.q_slot);
  const Tensor& sinks = problem.arrays[Array::kSinks];
  const double sink = sinks.present() ? sinks.real(0, at.head, 0, 0) : -LibmMath<double>::kInfinity;
  const i64 stride = sizes.padded_dim_v;
  const auto load = [&](Array array, Real* to) {
    return rows_of(
        kernels<Real>(),
        source_of(problem.arrays[array], sequence.batch, at.head, sequence.q_begin + rows.begin),
        rows.size(), problem.dim_v, Reads::kElements, to, stride);
  };
  const View<Real> dO = load(Array::kDOut, scratch.dO);
  const View<Real> O = load(Array::kO, scratch.O);
  for (i64 i = owned.begin; i < owned.end; ++i) {
    const i64 to = shared_row(problem, sequence, at.head, i);
    const i64 row = sequence.q_begin + i;
    RowState state;
    if (i < rows.end) state = saved_state(problem, sequence.batch, at.head, row);
    const bool saw_keys = state.row_sum != 0;
    const i64 local = i - rows.begin;
    const double delta =
        saw_keys ? dot(dO.data + local * dO.stride, O.data + local * O.stride, problem.dim_v) : 0.0;
    shared.row_max[to] = static_cast<Real>(state.shift());
    shared.normalizer[to] = static_cast<Real>(state.normalizer(sink));
    shared.delta[to] = static_cast<Real>(delta);
    if (shared.lse_term) {
      const double dlse = problem.arrays[Array::kDLse].real(sequence.batch, at.head, row, 0);
      shared.lse_term[to] = saw_keys ? static_cast<Real>(dlse / state.row_sum) : Real(0);
    }
    if (shared.sink_term) shared.sink_term[to] = saw_keys ? -state.sink_share(sink) * delta : 0.0;
  }
  if (!shared.dQ) return;
  shared.sums_of_dQ[(shared.q_blocks[at.sequence_index] + at.block) * problem.heads_q + at.head] =
      0;
  // dq = 0 for rows past the length, and for blocks that no key block sees.
  const bool is_seen =
      rows.size() > 0 &&
      visible_column_blocks(problem.mask, sequence.shape, rows, sizes.columns).visible.size() > 0;
  const Interval cleared{is_seen ? rows.end : owned.begin, owned.end};
  if (cleared.size() <= 0) return;
  give_nothing(kernels<Real>(), problem, cleared.size(), problem.dim_qk,
               destination_of(problem.arrays[Array::kDQ], sequence.batch, at.head,
                              sequence.q_begin + cleared.begin));
}

// dsinks[head] = -sum over rows of p_sink delta, in the order of the rows.
template <class Real>
void store_dsinks(const Problem& problem, const BackwardShared<Real>& shared) {
  for (i64 head = 0; head < problem.heads_q; ++head) {
    double sum = 0;
    for (i64 index = 0; index < problem.num_sequences; ++index) {
      const Sequence sequence = problem.sequence(index);
      const double* const terms = shared.sink_term + shared_row(problem, sequence, head, 0);
      for (i64 i = 0; i < sequence.shape.q_len; ++i) sum += terms[i];
    }
    problem.arrays[Array::kDSinks].set_real(0, head, 0, 0, sum);
  }
}

template <class Real>
class KeyBlock {
 public:
  KeyBlock(const Problem& problem, const TileSizes& sizes, const BackwardShared<Real>& shared,
           const BackwardScratch<Real>& scratch, const HeadBlock& at)
      : problem_(problem),
        sizes_(sizes),
        shared_(shared),
        scratch_(scratch),
        at_(at),
        tile_(problem, sizes, shared, scratch, at.sequence_index, pair_kernels(problem.dtype)),
        keys_(rows_of_block(at.block, sizes.columns, tile_.sequence().shape.kv_len)),
        owned_(rows_of_block(at.block, sizes.columns, tile_.sequence().kv_slot)),
        wants_dK_(problem.has(Array::kDK)),
        wants_dV_(problem.has(Array::kDV)),
        wants_dQ_(problem.has(Array::kDQ)) {}

  void run() {
    const PairTask task(tile_.pairs());
    if (keys_.size() > 0) {
      tile_.load_keys(at_.head, keys_, wants_dS());
      for (i64 member = 0; member < problem_.group_size(); ++member) {
        add_head(at_.head * problem_.group_size() + member);
      }
    }
    store(Array::kDK, scratch_.dK, sizes_.padded_dim_qk,
          static_cast<Real>(problem_.score_map.scale));
    store(Array::kDV, scratch_.dV, sizes_.padded_dim_v, 1);
  }

 private:
  bool wants_dS() const { return wants_dQ_ || wants_dK_; }

  void add_head(i64 head) {
    const CacheSequence& sequence = tile_.sequence();
    const i64 num_blocks = ceil_div(sequence.shape.q_len, sizes_.rows);
    for (i64 block = 0; block < num_blocks; ++block) {
      const Interval rows = rows_of_block(block, sizes_.rows, sequence.shape.q_len);
      const BlockRange blocks =
          visible_column_blocks(problem_.mask, sequence.shape, rows, sizes_.columns);
      if (!blocks.visible.contains(at_.block)) continue;
      const SeenKeys of_rows = seen_keys(problem_, sequence, rows);
      const Interval seen = whole_lanes(of_rows.some);
      const bool is_empty = tile_.is_empty(head, rows, seen);
      if (!is_empty) add_queries(head, rows, seen, of_rows.all);
      if (wants_dQ_) add_to_dQ(head, block, rows, blocks.visible, is_empty);
    }
  }

  // The block's keys that a mask leaves of them, with those beside them up to whole lanes.
  Interval whole_lanes(Interval some) const {
    const i64 begin = max(some.begin - keys_.begin, i64{0}) / kMostLanes * kMostLanes;
    const i64 end = ceil_div(some.end - keys_.begin, kMostLanes) * kMostLanes;
    return clamped(keys_.begin + begin, keys_.begin + end, keys_.end);
  }

  // all: keys that every row sees.
  void add_queries(i64 head, Interval rows, Interval seen, Interval all) {
    start_sums(seen);
    tile_.load_queries(head, rows, seen);
    // P = exp(S - m) / l;  dS = P (dP - delta)
    tile_.weigh(all.begin <= seen.begin && seen.end <= all.end, BackwardTile<Real>::Of::kDot);
    // dV += P^T dO
    if (wants_dV_) tile_.add_to_dV(scratch_.dV, has_sums_);
    // dK += dS^T Q
    if (wants_dK_) tile_.add_to_dK(scratch_.dK, has_sums_);
    has_sums_ = true;
  }

  // dK = dV = 0, unless what is added first is of all keys.
  void start_sums(Interval seen) {
    if (has_sums_ || seen.size() == keys_.size()) return;
    if (wants_dK_) std::fill_n(scratch_.dK, keys_.size() * sizes_.padded_dim_qk, Real(0));
    if (wants_dV_) std::fill_n(scratch_.dV, keys_.size() * sizes_.padded_dim_v, Real(0));
    has_sums_ = true;
  }

  // dQ += dS K, 0 of an empty block, when all earlier key blocks have added theirs; the last one
  // stores dq.
  void add_to_dQ(i64 head, i64 block, Interval rows, Interval key_blocks, bool is_empty) {
    const Sequence& sequence = tile_.sequence();
    const i64 row = shared_row(problem_, sequence, head, rows.begin);
    Real* const dQ = shared_.dQ + row * sizes_.padded_dim_qk;
    const i64 counter = (shared_.q_blocks[at_.sequence_index] + block) * problem_.heads_q + head;
    const i64 position = at_.block - key_blocks.begin;
    await_order(shared_.sums_of_dQ[counter], position);
    if (!is_empty) tile_.add_to_dQ(dQ, position > 0);
    if (is_empty && position == 0) std::fill_n(dQ, rows.size() * sizes_.padded_dim_qk, Real(0));
    if (position + 1 == key_blocks.size()) {
      give_rows(tile_.kernels(), problem_, {dQ, sizes_.padded_dim_qk}, rows.size(), problem_.dim_qk,
                static_cast<Real>(problem_.score_map.scale),
                destination_of(problem_.arrays[Array::kDQ], sequence.batch, head,
                               sequence.q_begin + rows.begin));
    }
    advance_order(shared_.sums_of_dQ[counter], position + 1);
  }

  // Keys that no row saw, and rows past the length, get 0.
  void store(Array array, const Real* sum, i64 stride, Real factor) const {
    const Tensor& gradient = problem_.arrays[array];
    if (!gradient.present()) return;
    const Sequence& sequence = tile_.sequence();
    const i64 batch = sequence.batch;
    const i64 dims = gradient.shape[3];
    const i64 stored = has_sums_ ? keys_.size() : 0;
    const i64 row = sequence.kv_begin + owned_.begin;
    if (stored > 0) {
      give_rows(tile_.kernels(), problem_, {sum, stride}, stored, dims, factor,
                destination_of(gradient, batch, at_.head, row));
    }
    if (stored < owned_.size()) {
      give_nothing(tile_.kernels(), problem_, owned_.size() - stored, dims,
                   destination_of(gradient, batch, at_.head, row + stored));
    }
  }

  const Problem& problem_;
  const TileSizes& sizes_;
  const BackwardShared<Real>& shared_;
  const BackwardScratch<Real>& scratch_;
  HeadBlock at_;
  BackwardTile<Real> tile_;
  Interval keys_;   // of the block, within kv_len
  Interval owned_;  // of the block, within the rows that the sequence owns
  bool wants_dK_;
  bool wants_dV_;
  bool wants_dQ_;
  bool has_sums_ = false;
};

template <class Real>
void backward(const Plan& plan, const Problem& problem, void* workspace) {
  const BackwardWorkspace<Real> memory(workspace, problem, plan.tile, plan.device.num_threads);
  const TileSizes& sizes = memory.sizes();
  const BackwardShared<Real>& shared = memory.shared();
  const i64 heads_q = problem.heads_q;
  const i64 heads_kv = problem.heads_kv;

  const i64 q_tasks = number_blocks(problem, Side::kQuery, sizes.rows, shared.q_blocks) * heads_q;
  for_each_task(slots_for(plan, problem, q_tasks), q_tasks, [&](int slot, i64 task) {
    const BackwardScratch<Real> scratch = memory.scratch(slot);
    const HeadBlock at = head_by_head(problem, shared.q_blocks, heads_q, task);
    prepare_rows(problem, sizes, shared, scratch, at);
  });

  const i64 kv_tasks =
      number_blocks(problem, Side::kKey, sizes.columns, shared.kv_blocks) * heads_kv;
  const bool wants_rows =
      problem.has(Array::kDQ) || problem.has(Array::kDK) || problem.has(Array::kDV);
  if (wants_rows) {
    for_each_task(slots_for(plan, problem, kv_tasks), kv_tasks, [&](int slot, i64 task) {
      const BackwardScratch<Real> scratch = memory.scratch(slot);
      const HeadBlock at = block_by_block(problem, shared.kv_blocks, heads_kv, task);
      KeyBlock<Real>(problem, sizes, shared, scratch, at).run();
    });
  }

  if (problem.has(Array::kDBias)) {
    const DBiasTiles tiles(problem, sizes);
    for_each_task(slots_for(plan, problem, tiles.size()), tiles.size(), [&](int slot, i64 task) {
      const BackwardScratch<Real> scratch = memory.scratch(slot);
      sum_dbias_tile(problem, sizes, shared, scratch, tiles.at(task));
    });
  }
  if (problem.wants_captures()) {
    const i64 tiles = start_captures(problem, sizes, shared);
    for_each_task(slots_for(plan, problem, tiles), tiles, [&](int slot, i64 task) {
      add_captures_tile(problem, sizes, shared, memory.scratch(slot), task);
    });
    store_captures(problem, shared);
  }
  if (problem.has(Array::kDSinks)) store_dsinks(problem, shared);
}

}  // namespace

void tiled_backward(const Plan& plan, const Problem& problem, void* workspace) {
  problem.dtype == DType::kFloat64 ? backward<double>(plan, problem, workspace)
                                   : backward<float>(plan, problem, workspace);
}

}  // namespace fulmen::cpu
