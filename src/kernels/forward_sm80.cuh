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
#include "kernels/faults.cuh"
#include "kernels/tile/copy.cuh"
#include "kernels/tile/documents.cuh"
#include "kernels/tile/forward_finish_sm80.cuh"
#include "kernels/tile/forward_products_sm80.cuh"
#include "kernels/tile/head_order.cuh"
#include "kernels/tile/pair_tiles.cuh"
#include "kernels/tile/row_limits.cuh"
#include "kernels/tile/warp_dropout.cuh"

namespace fulmen {

template <Sm80Config kConfig>
struct ForwardSm80 {
  using HeadType = Head<kConfig.dtype>;
  using Products = ForwardProducts<kConfig>;
  using Scores = typename Products::Scores;
  using Team = WarpTeam<kConfig>;
  template <i32 kRows, i32 kDims, bool kInterleaved = kConfig.interleaved>
  using Copy = TileCopy<kConfig.units, kRows, kConfig.threads(), kConfig.words(kDims),
                        kConfig.swizzle, kConfig.element_bytes(), kInterleaved>;
  static constexpr i32 kTiles = kConfig.row_tiles;
  static constexpr i32 kColumns = kConfig.columns;
  static constexpr i32 kStageBlocks = kConfig.stage_blocks;
  static constexpr i32 kStageColumns = kConfig.stage_columns();
  static constexpr i32 kAhead = kConfig.stages - 1;
  static_assert(kConfig.valid());

  const AttentionParams& p;
  const HeadType& head;
  i32 first_row;  // of the block, in its sequence
  i32 first_dim;  // of V and O
  Copy<kStageColumns, kConfig.d_qk> k_copy;
  Copy<kStageColumns, kConfig.d_v> v_copy;
  u32 shared = ptx::dynamic_shared();
  Team team{shared + kConfig.team_at()};
  Products products{{shared}, team};
  WarpSoftmax<kConfig> softmax;
  RowLimits<kConfig> limits;
  PairTiles<kConfig.pairs()> pairs;
  Documents<kConfig> documents;
  i32 next_block = 0, first_block = 0;  // of keys, where K and V take turns

  ForwardSm80(const HeadType& head_, i64 first_row_, i64 first_dim_)
      : p(head_.p),
        head(head_),
        first_row(static_cast<i32>(first_row_)),
        first_dim(static_cast<i32>(first_dim_)),
        k_copy(p.k, head.kv_row(p.k, 0), head.sequence.shape.kv_len, p.dim_qk),
        v_copy(p.v, head.kv_row(p.v, 0) + first_dim * p.v.strides[3], head.sequence.shape.kv_len,
               p.dim_v - first_dim),
        softmax(static_cast<float>(p.score_map.scale)),
        pairs(p, head.sequence.shape, head.index, head.head, first_row),
        documents(head_, first_row, pair_tile(0) + kConfig.pairs().bytes(), kConfig.pair_bytes(),
                  shared + kConfig.own_ids_at()) {}

  i32 warp_row() const { return first_row + static_cast<i32>(Team::first_row()); }
  i32 num_rows() const { return head.sequence.shape.q_len; }
  // Of the warp, in a block of keys from `block_column` on.
  static i32 first_column(i32 block_column) {
    return block_column + static_cast<i32>(Team::member()) * kConfig.warp_columns();
  }

  // Of the block of keys in slot `slot`, or of those from there to the end of its stage.
  typename Products::QTile k_tile(i32 slot) const {
    return {shared + kConfig.q_bytes() + slot * (kConfig.k_bytes() / kStageBlocks)};
  }
  typename Products::VTile v_tile(i32 slot) const {
    return {shared + kConfig.q_bytes() + kConfig.stages * kConfig.k_bytes() +
            slot * (kConfig.v_bytes() / kStageBlocks)};
  }
  u32 pair_tile(i32 stage) const {
    return shared + kConfig.pairs_at() + stage * kConfig.pair_bytes();
  }
  IntervalMask interval_mask() const {
    if constexpr (kConfig.dense) return {.causal = p.mask_options.causal};
    return p.mask_options;
  }
  WarpScores<kConfig> scores() const { return {head, warp_row()}; }
  ForwardFinish<kConfig> finish() const { return {head, warp_row(), first_dim, shared, team}; }

  // Start the copies of the next block of keys and of what belongs to its pairs, or of its values,
  // if there is one.
  void fetch_k(i32 block, i32 begin, i32 stage) {
    if (block < begin) return;
    k_copy.start_next(k_tile(stage * kStageBlocks));
    pairs.start(pair_tile(stage), block * kStageColumns);
    documents.start(stage, block * kStageColumns);
  }
  void fetch_v(i32 block, i32 begin, i32 stage) {
    if (block >= begin) v_copy.start_next(v_tile(stage * kStageBlocks));
  }

  template <bool kKeepsHidden>
  void apply_pairs(Scores& S, i32 stage) const {
    pairs.template apply<kKeepsHidden>(S, pair_tile(stage), Team::first_row(), first_column(0));
  }

  // A block that every row of the warp sees whole, with the shift that there is: no maximum, no
  // rescale, nothing that keeps exponents from running under the products. False, and nothing done,
  // where weights outgrow the 16-bit type that way.
  bool step_with_shift(i32 block_column, i32 slot) {
    Scores S;
    products.multiply_q_k(S, k_tile(slot));
    float block_sum[kTiles][2];
    weigh(S, block_sum, block_column, slot);
    if (!kConfig.checks_at_end() && team.any(softmax.is_outgrown(block_sum))) return false;
    softmax.accumulate(block_sum);
    softmax.has_kept = true;
    if constexpr (kConfig.dropout)
      WarpDropout<kConfig>{head, warp_row()}.drop(S, first_column(block_column));
    if constexpr (kConfig.takes_turns) turn_to_v();
    products.multiply_p_v(S, v_tile(slot));
    float factor[kTiles][2];
    if (kConfig.settles() && softmax.settle(team, factor)) products.rescale(factor);
    return true;
  }

  void weigh(Scores& S, float (&block_sum)[kTiles][2], i32 block_column, i32 slot) const {
    if constexpr (kConfig.maps_in_exponent()) {
      if (scores().weigh_mapped(S, softmax, block_sum, first_column(block_column))) return;
    }
    scores().map(S, first_column(block_column));
    apply_pairs<false>(S, slot);
    softmax.exponentiate(S, block_sum, true);
  }

  // Any block.
  void step(i32 block_column, i32 slot, bool is_first) {
    Scores S;
    products.multiply_q_k(S, k_tile(slot));
    // Copies that start beside weights spill 440 bytes of three-product kernels (d 128), here 64.
    constexpr bool kTurnsEarly = !kConfig.lazy_max;
    if constexpr (kConfig.takes_turns && kTurnsEarly) turn_to_v();
    if (is_first && !kConfig.takes_turns) await_first_v();
    scores().map(S, first_column(block_column));
    apply_pairs<true>(S, slot);
    documents.hide(S, slot);
    if (!(kConfig.full_blocks && limits.is_full(block_column))) {
      limits.hide(S, first_column(block_column));
    }
    float factor[kTiles][2];
    if (softmax.update(S, team, factor)) products.rescale(factor);
    float block_sum[kTiles][2];
    softmax.exponentiate(S, block_sum, false);
    softmax.accumulate(block_sum);
    if constexpr (kConfig.dropout)
      WarpDropout<kConfig>{head, warp_row()}.drop(S, first_column(block_column));
    if constexpr (kConfig.takes_turns && !kTurnsEarly) turn_to_v();
    products.multiply_p_v(S, v_tile(slot));
  }

  void await_first_v() const {
    ptx::cp_async_wait<kAhead>();
    ptx::block_sync();  // V of the first block is there
  }

  // Where a walk with shifts that were kept left the range of its numbers, a second one keeps none.
  void run() {
    u32 spoiled = 0;
    if (first_row < num_rows()) {
      Copy<kConfig.rows(), kConfig.d_qk, false>(p.q, head.q_row(p.q, 0), num_rows(), p.dim_qk)
          .start(products.q, first_row);
      const Interval visit = visited_blocks();
      const i32 begin = static_cast<i32>(visit.begin);
      const i32 end = static_cast<i32>(visit.end);
      const u32 again = shared + kConfig.again_at();
      if (ptx::thread_index() == 0) ptx::store_shared(again, 0);
#pragma unroll 1
      for (bool may_keep = kConfig.lazy_max;; may_keep = false) {
        walk(begin, end, may_keep);
        spoiled = finish().spoiled_rows(softmax, products.O);
        if (!kConfig.walks_twice() || !may_keep || begin >= end) break;
        if (ptx::any(spoiled != 0) && lane_index() == 0) ptx::store_shared(again, 1);
        ptx::block_sync();
        if (ptx::load_shared(again) == 0) break;
      }
    }
    finish().store(softmax, products.O, spoiled);
  }

  // Blocks of keys that some row of the block sees.
  Interval visited_blocks() const {
    const Interval rows{first_row, min(first_row + kConfig.rows(), num_rows())};
    const Interval visit =
        visible_column_blocks(interval_mask(), head.sequence.shape, rows, kStageColumns).visit;
    if constexpr (!kConfig.documents) return visit;
    const Interval keys =
        documents.hull({visit.begin * kStageColumns,
                        min(visit.end * kStageColumns, i64{head.sequence.shape.kv_len})});
    return {keys.begin / kStageColumns, ceil_div(keys.end, i64{kStageColumns})};
  }

  // The first copies, K of the last block before all others, and what the rows see.
  void start(i32 begin, i32 last) {
    k_copy.seek(last * kStageColumns);
    v_copy.seek(last * kStageColumns);
    fetch_k(last, begin, 0);
    ptx::cp_async_commit();
    if (!kConfig.takes_turns) {
      fetch_v(last, begin, 0);
      ptx::cp_async_commit();
    }
#pragma unroll
    for (i32 stage = 1; stage < kAhead; ++stage) {
      fetch_k(last - stage, begin, stage);
      fetch_v(last - stage, begin, stage);
      ptx::cp_async_commit();
    }
    clear(products.O);
    documents.find();
    limits.find(interval_mask(), head.sequence.shape, warp_row(), shared + kConfig.limits_at());
    softmax.start(num_rows() - warp_row() - static_cast<i32>(lane_index() / 4));
  }

  // From the last block to the first: under a causal mask the partial ones come first, and every
  // row has its shift from them.
  void walk(i32 begin, i32 end, bool may_keep) {
    const i32 last = end - 1;
    start(begin, last);
    i32 stage = 0;
    if constexpr (kConfig.keeps_q) {
      await_first_k();
      ptx::block_sync();  // Q is there
      products.keep_q();
    }
#pragma unroll 1
    for (i32 block = last; block >= begin; --block) {
      const bool is_first = block == last;
      if constexpr (kConfig.takes_turns) {
        turn_to_k(block, begin);
        visit(block * kStageColumns, 0, is_first, may_keep);
        continue;
      }
      if (is_first) {
        await_first_k();
      } else {
        ptx::cp_async_wait<(kAhead > 0 ? kAhead - 1 : 0)>();
      }
      ptx::block_sync();  // block j (of the first: K) is there; all are done with block j + 1
      if (kAhead > 0) fetch(block - kAhead, begin, stage == 0 ? kConfig.stages - 1 : stage - 1);
#pragma unroll 1
      for (i32 part = kStageBlocks - 1; part >= 0; --part) {
        visit(block * kStageColumns + part * kColumns, stage * kStageBlocks + part,
              is_first && part == kStageBlocks - 1, may_keep);
      }
      if (kAhead == 0) {
        ptx::block_sync();  // all are done with block j
        fetch(block - 1, begin, 0);
      }
      stage = stage + 1 == kConfig.stages ? 0 : stage + 1;
    }
    ptx::cp_async_wait<0>();
    if (begin >= end) ptx::block_sync();  // Q is there, over which O goes
  }

  // K_j is there and all are done with V_j+1: V_j comes.
  void turn_to_k(i32 block, i32 begin) {
    ptx::cp_async_wait<0>();
    ptx::block_sync();
    fetch_v(block, begin, 0);
    ptx::cp_async_commit();
    next_block = block - 1;
    first_block = begin;
  }
  // V_j is there and all are done with K_j: K_j-1 comes.
  void turn_to_v() {
    ptx::cp_async_wait<0>();
    ptx::block_sync();
    fetch_k(next_block, first_block, 0);
    ptx::cp_async_commit();
  }

  static void await_first_k() { ptx::cp_async_wait<(kAhead > 0 ? kAhead : 1)>(); }

  void fetch(i32 block, i32 begin, i32 stage) {
    fetch_k(block, begin, stage);
    fetch_v(block, begin, stage);
    ptx::cp_async_commit();
  }

  // The step that a block of keys needs, if any.
  void visit(i32 block_column, i32 slot, bool is_first, bool may_keep) {
    documents.look(slot);
    const bool keeps = may_keep && kConfig.full_blocks && softmax.may_keep() &&
                       limits.is_full(block_column) && documents.is_full();
    if (keeps && step_with_shift(block_column, slot)) return;
    if (limits.sees(block_column) && documents.sees()) {
      step(block_column, slot, is_first);
    } else if (kConfig.takes_turns) {
      turn_to_v();
    } else if (is_first) {
      await_first_v();
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
