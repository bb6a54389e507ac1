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
//   3. scores: scale, softcap, bias, ALiBi, a user's, masks   only where the problem or the block
//   has any
//   4. P = exp(S - m); l, O follow a grown m              rare, by vote of the warp
//   5. O += P V                                          P never leaves the group
// Launched with num_forward_sm80_blocks() blocks, see scheduler.cuh.
#pragma once

#include "kernels/attention/block_range.cuh"
#include "kernels/common/faults.cuh"
#include "kernels/common/operand_scale.cuh"
#include "kernels/common/warp_scores_sm80.cuh"
#include "kernels/forward_sm80/epilogue.cuh"
#include "kernels/forward_sm80/mask.cuh"
#include "kernels/forward_sm80/producer.cuh"
#include "kernels/forward_sm80/products.cuh"
#include "kernels/forward_sm80/scheduler.cuh"
#include "kernels/forward_sm80/softmax.cuh"

namespace fulmen {

// One iteration of a warp, on a block of keys that has arrived: S = Q K^T, softmax, O += P V, in
// one of two ways. A block that all its rows see whole keeps the maximum that there is, so that
// exponents overlap products; any other applies masks and updates the maxima. With a single buffer
// a warp waits for V and starts the copy of the next K between its products.
template <ForwardSm80Config kConfig>
struct ForwardMainloopSm80 {
  using Products = ForwardProductsSm80<kConfig>;
  using Scores = typename Products::Scores;
  using Group = RowGroupSm80<kConfig>;
  static constexpr i32 kTiles = kConfig.row_tiles;

  const HeadOf<kConfig>& head;
  i32 warp_row;  // the warp's first, in its sequence
  ForwardProducerSm80<kConfig> producer;
  Group group;
  Products products;
  ForwardSoftmaxSm80<kConfig> softmax;
  RowRangesSm80<kConfig> row_ranges;
  ListedBlocksSm80<kConfig> listed;
  float sign;             // of the scale of q and k; 1 but of 8 bits
  bool is_smooth = true;  // softcap has been a polynomial so far

  // For the block's queries from `first_row` on, dims of V from `first_dim` on.
  ForwardMainloopSm80(const HeadOf<kConfig>& head_, const TileLists& lists, i32 first_row,
                      i32 first_dim, u32 shared)
      : head(head_),
        warp_row(first_row + static_cast<i32>(Group::first_row())),
        producer(head_, first_row, first_dim, shared),
        group{shared + kConfig.exchange_at()},
        products({shared}, group),
        softmax(static_cast<float>(head.p.score_map.scale) * scale_of_operands().size),
        listed(lists, head.index, head.head, head.p.heads_q, first_row),
        sign(scale_of_operands().sign) {}

  // The step that a block of keys needs, if any.
  void process_block(i32 block_column, i32 slot, bool is_first, bool may_keep_max) {
    producer.documents.classify(slot);
    const bool keeps = may_keep_max && kConfig.full_blocks && softmax.can_keep_max() && is_smooth &&
                       row_ranges.is_full(block_column) && producer.documents.is_full() &&
                       listed.is_full(block_column / kConfig.kv_rows) &&
                       scores().is_one_sided(block_column);
    if (keeps && step_keeping_max(block_column, slot)) return;
    if (row_ranges.some_visible(block_column) && producer.documents.some_visible() &&
        listed.some_visible(block_column / kConfig.kv_rows)) {
      step(block_column, slot, is_first);
    } else if (kConfig.single_buffer) {
      producer.wait_v_fetch_k();
    } else if (is_first) {
      producer.await_first_v();
    }
  }

 private:
  OperandScale scale_of_operands() const {
    if constexpr (!kConfig.has_8_bits()) return {};
    return operand_scale(head.p, head.sequence.batch, head.head, head.kv_head);
  }
  // Times their sign: the softmax knows positive scales alone.
  void sign_scores(Scores& S) const {
    if constexpr (!kConfig.has_8_bits()) return;
    if (sign == 1) return;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (float& s : S[t]) s *= sign;
    }
  }

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
    scores().ask_user_of_full_block(S, first_column(block_column));
    softmax.exponentiate(S, block_sum, true);
  }

  // Any block.
  void step(i32 block_column, i32 slot, bool is_first) {
    Scores S;
    products.multiply_q_k(S, producer.k_tile(slot));
    // Copies next to exponents spill 440 bytes of three-product kernels (d 128), here 64.
    constexpr bool kFetchesKEarly = !kConfig.lazy_max;
    if constexpr (kConfig.single_buffer && kFetchesKEarly) producer.wait_v_fetch_k();
    if (is_first && !kConfig.single_buffer) producer.await_first_v();
    sign_scores(S);
    scores().map(S, first_column(block_column));
    apply_pairs<true>(S, slot);
    producer.documents.hide(S, slot);
    if (!(kConfig.full_blocks && row_ranges.is_full(block_column))) {
      row_ranges.hide(S, first_column(block_column));
    }
    scores().ask_user(S, first_column(block_column));
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

template <ForwardSm80Config kConfig>
struct ForwardSm80 {
  static constexpr i32 kStageBlocks = kConfig.stage_blocks;
  static constexpr i32 kStageColumns = kConfig.stage_columns();
  static constexpr i32 kAhead = kConfig.stages - 1;
  static_assert(kConfig.why_invalid()[0] == 0);

  const AttentionParams& p;
  const HeadOf<kConfig>& head;
  i32 first_row;  // of the block, in its sequence
  i32 first_dim;  // of V and O
  u32 shared = ptx::dynamic_shared();
  ForwardMainloopSm80<kConfig> loop;

  ForwardSm80(const HeadOf<kConfig>& head_, const TileLists& lists, i64 first_row_, i64 first_dim_)
      : p(head_.p),
        head(head_),
        first_row(static_cast<i32>(first_row_)),
        first_dim(static_cast<i32>(first_dim_)),
        loop(head_, lists, first_row, first_dim, shared) {}

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
        loop.products.finish();
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
    if constexpr (kConfig.score.documents) {
      const Interval keys = loop.producer.documents.key_bounds(
          {blocks.begin * kStageColumns,
           min(blocks.end * kStageColumns, i64{head.sequence.shape.kv_len})});
      return {keys.begin / kStageColumns, ceil_div(keys.end, i64{kStageColumns})};
    } else {
      return blocks;
    }
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
    const i32 last = loop.listed.before(end, begin);
    start(begin, last);
    if constexpr (kConfig.single_buffer) {
      single_buffer_loop(begin, last, may_keep_max);
    } else {
      pipelined_loop(begin, last, may_keep_max);
    }
    ptx::cp_async_wait<0>();
    if (last < begin) ptx::block_sync();  // cp.async -> Q, which O overwrites
  }

  void single_buffer_loop(i32 begin, i32 last, bool may_keep_max) {
#pragma unroll 1
    for (i32 block = last, next = 0; block >= begin; block = next) {
      next = loop.listed.before(block, begin);
      loop.producer.wait_k_fetch_v(block, next, block == last);
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
    for (i32 block = last, next = 0; block >= begin; block = next) {
      next = loop.listed.before(block, begin);
      ptx::block_sync();  // cp.async -> block j (of the first: K); all warps have read block j + 1
      const i32 other = stage == 0 ? kConfig.stages - 1 : stage - 1;
      if (kAhead > 0) loop.producer.fetch(next - max(kAhead - 1, 0), other);
#pragma unroll 1
      for (i32 part = kStageBlocks - 1; part >= 0; --part) {
        loop.process_block(block * kStageColumns + part * kConfig.kv_rows,
                           stage * kStageBlocks + part, block == last && part == kStageBlocks - 1,
                           may_keep_max);
      }
      if (kAhead == 0) {
        ptx::block_sync();  // all warps have read block j
        loop.producer.fetch(next, 0);
      }
      loop.producer.await_next();
      stage = stage + 1 == kConfig.stages ? 0 : stage + 1;
    }
  }
};

template <ForwardSm80Config kConfig>
void forward_sm80(const ForwardSm80Params& params) {
  const AttentionParams& p = params.attention;
  WarpScores<kConfig>::record_faults(p);
  if constexpr (kConfig.fixed_length) {
    const WorkTileSm80 block = params.scheduler.at(ptx::block_index());
    const HeadOf<kConfig> head(p, block.task.batch, block.task.head, block.kv_head,
                               dense_sequence(p, block.task.batch));
    ForwardSm80<kConfig>(head, params.tile_lists, block.task.slot * kConfig.q_rows(),
                         block.part * kConfig.d_v)
        .run();
    return;
  }
  if constexpr (kConfig.caches) {
    record_cache_faults(p, kConfig.threads());
  } else if (p.rng != nullptr || p.packed.q || p.q_lengths.present() || p.kv_lengths.present()) {
    record_faults(p, kConfig.threads());
  }
  const WorkTileSm80 block = params.scheduler.at(ptx::block_index());
  const TilePlace place = find_tile(p, p.cu_q, block.task, kConfig.q_rows());
  const HeadOf<kConfig> head(p, place.index, block.task.head, block.kv_head);
  if (place.first_row >= head.sequence.q_slot) return;
  ForwardSm80<kConfig>(head, params.tile_lists, place.first_row, block.part * kConfig.d_v).run();
}

}  // namespace fulmen
