// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exact attention on the tensor cores of every GPU since Ampere, every option of the library. Each
// warp owns 16 or 32 query rows and the whole width of their O, or, where that is too wide, shares
// them with others of its group; K and V come through shared memory for all warps of the block, a
// few blocks of keys ahead of their use.
// Source: Dao, FlashAttention-2 (2023), section 3. A step, for every block of keys that a row sees:
//   1. K_j, V_j have arrived; the copies of block j + stages - 1 are started
//   2. S = Q K^T                                         mma.sync
//   3. scores: scale, softcap, bias, ALiBi, masks         only where the problem or the block has
//   any
//   4. P = exp(S - m); l, O follow a grown m              rare, by vote of the warp
//   5. O += P V                                          P never leaves the group
// Launched with num_forward_sm80_blocks() blocks, see scheduler.cuh.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/forward_sm80/epilogue.cuh"
#include "kernels/forward_sm80/mainloop.cuh"
#include "kernels/forward_sm80/scheduler.cuh"

namespace fulmen {

template <ForwardSm80Config kConfig>
struct ForwardSm80 {
  static constexpr i32 kStageBlocks = kConfig.stage_blocks;
  static constexpr i32 kStageColumns = kConfig.stage_columns();
  static constexpr i32 kAhead = kConfig.stages - 1;
  static_assert(kConfig.why_invalid()[0] == 0);

  const AttentionParams& p;
  const Head<kConfig.dtype>& head;
  i32 first_row;  // of the block, in its sequence
  i32 first_dim;  // of V and O
  u32 shared = ptx::dynamic_shared();
  ForwardMainloopSm80<kConfig> loop;

  ForwardSm80(const Head<kConfig.dtype>& head_, i64 first_row_, i64 first_dim_)
      : p(head_.p),
        head(head_),
        first_row(static_cast<i32>(first_row_)),
        first_dim(static_cast<i32>(first_dim_)),
        loop(head_, first_row, first_dim, shared) {}

  i32 num_rows() const { return head.sequence.shape.q_len; }
  IntervalMask interval_mask() const {
    if constexpr (kConfig.fixed_length) return {.causal = p.mask_options.causal};
    return p.mask_options;
  }
  ForwardEpilogueSm80<kConfig> epilogue() const {
    return {head, loop.warp_row, first_dim, shared, loop.group};
  }

  // Where P outgrew a kept maximum, the main loop runs again and updates the maximum in every
  // block.
  void run() {
    u32 bad_rows = 0;
    if (first_row < num_rows()) {
      loop.producer.fetch_q();
      const Interval blocks = n_block_range();
      const i32 begin = static_cast<i32>(blocks.begin);
      const i32 end = static_cast<i32>(blocks.end);
      const u32 repeat = shared + kConfig.repeat_at();
      if (ptx::thread_index() == 0) ptx::store_shared(repeat, 0);
#pragma unroll 1
      for (bool may_keep_max = kConfig.lazy_max;; may_keep_max = false) {
        mainloop(begin, end, may_keep_max);
        bad_rows = epilogue().find_bad_rows(loop.softmax, loop.products.O);
        if (!kConfig.may_repeat() || !may_keep_max || begin >= end) break;
        if (ptx::any(bad_rows != 0) && lane_index() == 0) ptx::store_shared(repeat, 1);
        ptx::block_sync();
        if (ptx::load_shared(repeat) == 0) break;
      }
    }
    epilogue().store(loop.softmax, loop.products.O, bad_rows);
  }

  // Blocks of keys that some row of the block sees.
  Interval n_block_range() const {
    const Interval rows{first_row, min(first_row + kConfig.q_rows(), num_rows())};
    const Interval blocks =
        visible_column_blocks(interval_mask(), head.sequence.shape, rows, kStageColumns).visible;
    if constexpr (!kConfig.score.documents) return blocks;
    const Interval keys = loop.producer.documents.key_bounds(
        {blocks.begin * kStageColumns,
         min(blocks.end * kStageColumns, i64{head.sequence.shape.kv_len})});
    return {keys.begin / kStageColumns, ceil_div(keys.end, i64{kStageColumns})};
  }

  // The first copies, and what the rows see.
  void start(i32 begin, i32 last) {
    loop.producer.start(begin, last);
    clear(loop.products.O);
    loop.producer.documents.find();
    loop.row_ranges.find(interval_mask(), head.sequence.shape, loop.warp_row,
                         shared + kConfig.row_ranges_at());
    loop.softmax.start(num_rows() - loop.warp_row - static_cast<i32>(lane_index() / 4));
  }

  // From the last block to the first: under a causal mask the partial ones come first, and every
  // row has its shift from them.
  void mainloop(i32 begin, i32 end, bool may_keep_max) {
    const i32 last = end - 1;
    start(begin, last);
    if constexpr (kConfig.single_buffer) {
      single_buffer_loop(begin, last, may_keep_max);
    } else {
      pipelined_loop(begin, last, may_keep_max);
    }
    ptx::cp_async_wait<0>();
    if (begin >= end) ptx::block_sync();  // cp.async -> Q, which O overwrites
  }

  void single_buffer_loop(i32 begin, i32 last, bool may_keep_max) {
#pragma unroll 1
    for (i32 block = last; block >= begin; --block) {
      loop.producer.wait_k_fetch_v(block, block == last);
      loop.process_block(block * kStageColumns, 0, block == last, may_keep_max);
    }
  }

  void pipelined_loop(i32 begin, i32 last, bool may_keep_max) {
    i32 stage = 0;
    loop.producer.await_first_k();
    if constexpr (kConfig.q_in_registers) {
      ptx::block_sync();  // cp.async -> Q
      loop.products.load_q_registers();
    }
#pragma unroll 1
    for (i32 block = last; block >= begin; --block) {
      ptx::block_sync();  // cp.async -> block j (of the first: K); all warps have read block j + 1
      if (kAhead > 0)
        loop.producer.fetch(block - kAhead, stage == 0 ? kConfig.stages - 1 : stage - 1);
#pragma unroll 1
      for (i32 part = kStageBlocks - 1; part >= 0; --part) {
        loop.process_block(block * kStageColumns + part * kConfig.kv_rows,
                           stage * kStageBlocks + part, block == last && part == kStageBlocks - 1,
                           may_keep_max);
      }
      if (kAhead == 0) {
        ptx::block_sync();  // all warps have read block j
        loop.producer.fetch(block - 1, 0);
      }
      loop.producer.await_next();
      stage = stage + 1 == kConfig.stages ? 0 : stage + 1;
    }
  }
};

template <ForwardSm80Config kConfig>
void forward_sm80(const ForwardSm80Params& params) {
  const AttentionParams& p = params.attention;
  if constexpr (kConfig.fixed_length) {
    const WorkTileSm80 block = params.scheduler.at(ptx::block_index());
    const Head<kConfig.dtype> head(p, block.task.batch, block.task.head, block.kv_head,
                                   dense_sequence(p, block.task.batch));
    ForwardSm80<kConfig>(head, block.task.slot * kConfig.q_rows(), block.part * kConfig.d_v).run();
    return;
  }
  if (p.rng != nullptr || p.packed || p.q_lengths.present() || p.kv_lengths.present()) {
    record_faults(p, kConfig.threads());
  }
  const WorkTileSm80 block = params.scheduler.at(ptx::block_index());
  const TilePlace place = find_tile(p, p.cu_q, block.task, kConfig.q_rows());
  const Head<kConfig.dtype> head(p, place.index, block.task.head, block.kv_head);
  if (place.first_row >= head.sequence.q_slot) return;
  ForwardSm80<kConfig>(head, place.first_row, block.part * kConfig.d_v).run();
}

}  // namespace fulmen
