// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exact attention on the tensor cores of every GPU since Ampere, every option of the library. Each
// warp owns 16 or 32 query rows and the whole width of their O, or, where that is too wide, shares
// them with others of its team; K and V come through shared memory for all warps of the block, a
// few blocks of keys ahead of their use.
// Source: Dao, FlashAttention-2 (2023), section 3. A step, for every block of keys that a row sees:
//   1. K_j, V_j have arrived; the copies of block j + stages - 1 are started
//   2. S = Q K^T                                         mma.sync
//   3. scores: scale, softcap, bias, ALiBi, masks         only where the problem or the block has
//   any
//   4. P = exp(S - m); l, O follow a grown m              rare, by vote of the warp
//   5. O += P V                                          P never leaves the team
// Launched with forward_sm80_blocks() blocks, see head_order.cuh.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/forward_sm80/epilogue.cuh"
#include "kernels/forward_sm80/mainloop.cuh"
#include "kernels/forward_sm80/scheduler.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct ForwardSm80 {
  static constexpr i32 kStageBlocks = kConfig.stage_blocks;
  static constexpr i32 kStageColumns = kConfig.stage_columns();
  static constexpr i32 kAhead = kConfig.stages - 1;
  static_assert(kConfig.valid());

  const AttentionParams& p;
  const Head<kConfig.dtype>& head;
  i32 first_row;  // of the block, in its sequence
  i32 first_dim;  // of V and O
  u32 shared = ptx::dynamic_shared();
  ForwardStepsSm80<kConfig> steps;

  ForwardSm80(const Head<kConfig.dtype>& head_, i64 first_row_, i64 first_dim_)
      : p(head_.p),
        head(head_),
        first_row(static_cast<i32>(first_row_)),
        first_dim(static_cast<i32>(first_dim_)),
        steps(head_, first_row, first_dim, shared) {}

  i32 num_rows() const { return head.sequence.shape.q_len; }
  IntervalMask interval_mask() const {
    if constexpr (kConfig.dense) return {.causal = p.mask_options.causal};
    return p.mask_options;
  }
  ForwardFinish<kConfig> finish() const {
    return {head, steps.warp_row, first_dim, shared, steps.team};
  }

  // Where a walk with shifts that were kept left the range of its numbers, a second one keeps none.
  void run() {
    u32 spoiled = 0;
    if (first_row < num_rows()) {
      steps.loader.fetch_q();
      const Interval visit = visited_blocks();
      const i32 begin = static_cast<i32>(visit.begin);
      const i32 end = static_cast<i32>(visit.end);
      const u32 again = shared + kConfig.again_at();
      if (ptx::thread_index() == 0) ptx::store_shared(again, 0);
#pragma unroll 1
      for (bool may_keep = kConfig.lazy_max;; may_keep = false) {
        walk(begin, end, may_keep);
        spoiled = finish().spoiled_rows(steps.softmax, steps.products.O);
        if (!kConfig.walks_twice() || !may_keep || begin >= end) break;
        if (ptx::any(spoiled != 0) && lane_index() == 0) ptx::store_shared(again, 1);
        ptx::block_sync();
        if (ptx::load_shared(again) == 0) break;
      }
    }
    finish().store(steps.softmax, steps.products.O, spoiled);
  }

  // Blocks of keys that some row of the block sees.
  Interval visited_blocks() const {
    const Interval rows{first_row, min(first_row + kConfig.rows(), num_rows())};
    const Interval visit =
        visible_column_blocks(interval_mask(), head.sequence.shape, rows, kStageColumns).visit;
    if constexpr (!kConfig.documents) return visit;
    const Interval keys = steps.loader.documents.hull(
        {visit.begin * kStageColumns,
         min(visit.end * kStageColumns, i64{head.sequence.shape.kv_len})});
    return {keys.begin / kStageColumns, ceil_div(keys.end, i64{kStageColumns})};
  }

  // The first copies, and what the rows see.
  void start(i32 begin, i32 last) {
    steps.loader.start(begin, last);
    clear(steps.products.O);
    steps.loader.documents.find();
    steps.limits.find(interval_mask(), head.sequence.shape, steps.warp_row,
                      shared + kConfig.limits_at());
    steps.softmax.start(num_rows() - steps.warp_row - static_cast<i32>(lane_index() / 4));
  }

  // From the last block to the first: under a causal mask the partial ones come first, and every
  // row has its shift from them.
  void walk(i32 begin, i32 end, bool may_keep) {
    const i32 last = end - 1;
    start(begin, last);
    if constexpr (kConfig.takes_turns) {
      take_turns(begin, last, may_keep);
    } else {
      take_stages(begin, last, may_keep);
    }
    ptx::cp_async_wait<0>();
    if (begin >= end) ptx::block_sync();  // Q is there, over which O goes
  }

  void take_turns(i32 begin, i32 last, bool may_keep) {
#pragma unroll 1
    for (i32 block = last; block >= begin; --block) {
      steps.loader.turn_to_k(block, block == last);
      steps.visit(block * kStageColumns, 0, block == last, may_keep);
    }
  }

  void take_stages(i32 begin, i32 last, bool may_keep) {
    i32 stage = 0;
    steps.loader.await_first_k();
    if constexpr (kConfig.keeps_q) {
      ptx::block_sync();  // Q is there
      steps.products.keep_q();
    }
#pragma unroll 1
    for (i32 block = last; block >= begin; --block) {
      ptx::block_sync();  // block j (of the first: K) is there; all are done with block j + 1
      if (kAhead > 0)
        steps.loader.fetch(block - kAhead, stage == 0 ? kConfig.stages - 1 : stage - 1);
#pragma unroll 1
      for (i32 part = kStageBlocks - 1; part >= 0; --part) {
        steps.visit(block * kStageColumns + part * kConfig.columns, stage * kStageBlocks + part,
                    block == last && part == kStageBlocks - 1, may_keep);
      }
      if (kAhead == 0) {
        ptx::block_sync();  // all are done with block j
        steps.loader.fetch(block - 1, 0);
      }
      steps.loader.await_next();
      stage = stage + 1 == kConfig.stages ? 0 : stage + 1;
    }
  }
};

template <Sm80Config kConfig>
void forward_sm80(const Sm80Params& params) {
  const AttentionParams& p = params.attention;
  if constexpr (kConfig.dense) {
    const HeadBlock block = params.order.at(ptx::block_index());
    const Head<kConfig.dtype> head(p, block.task.batch, block.task.head, block.kv_head,
                                   dense_sequence(p, block.task.batch));
    ForwardSm80<kConfig>(head, block.task.slot * kConfig.rows(), block.part * kConfig.d_v).run();
    return;
  }
  if (p.rng != nullptr || p.packed || p.q_lengths.present() || p.kv_lengths.present()) {
    record_faults(p, kConfig.threads());
  }
  const HeadBlock block = params.order.at(ptx::block_index());
  const TilePlace place = find_tile(p, p.cu_q, block.task, kConfig.rows());
  const Head<kConfig.dtype> head(p, place.index, block.task.head, block.kv_head);
  if (place.first_row >= head.sequence.q_slot) return;
  ForwardSm80<kConfig>(head, place.first_row, block.part * kConfig.d_v).run();
}

}  // namespace fulmen
