// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exact attention, forward, on Hopper: O = softmax(scale Q K^T + mask) V and the log-sum-exp of
// every row, 16-bit in and out, float32 inside. A persistent grid: one warp schedules work tiles
// (ForwardScheduler), one thread loads (ForwardProducer), up to three warpgroups compute 64 query
// rows each, or two of them half of O's columns each (ForwardConsumer). S = Q K^T of one block of
// keys is issued before O += P V of the block before it, so that the softmax runs under both
// products, and with ping-pong one warpgroup's softmax runs under another's products. Shah et al.,
// "FlashAttention-3" (2024), sections 3.1 and 3.2; the softmax without a running maximum is ours
// (softmax.cuh). Queries too short for 64 rows may share a tile with other heads of their key head.
// Of e4m3 O += P V is added in float32 (output.cuh); V comes transposed from values.cuh, which runs
// before. Of wide heads two blocks of a cluster share their rows (partner.cuh).
// Must hold: sm_90a, a valid config, launched with threads() threads, shared_bytes() bytes and at
// most one thread block a multiprocessor.
#pragma once

#include "kernels/common/products_sm90.cuh"
#include "kernels/forward_sm90/consumer.cuh"
#include "kernels/forward_sm90/epilogue.cuh"
#include "kernels/forward_sm90/fallback.cuh"
#include "kernels/forward_sm90/output.cuh"
#include "kernels/forward_sm90/paged_producer.cuh"
#include "kernels/forward_sm90/partner.cuh"
#include "kernels/forward_sm90/producer.cuh"
#include "kernels/forward_sm90/scheduler.cuh"
#include "kernels/forward_sm90/softmax.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

// A warpgroup of 128 threads, 64 query rows at a time.
template <ForwardSm90Config kConfig>
struct ForwardConsumer {
  using Warpgroup = ForwardWarpgroup<kConfig>;
  using Scores = typename Warpgroup::Scores;
  using Work = typename Warpgroup::Work;

  Warpgroup wg;

  // 64 query rows in registers, beside O.
  using Weights = u32[kConfig.weight_words()];
  struct Rows {
    FragmentScores<kConfig> scores;
    RowSoftmax<kConfig> softmax;
    u32 sQ;
    QRegisters<kConfig> rQ;
    Interval visible[2];
    float rescale[2] = {1, 1};
    bool begun = false;      // whether O has the product of a block of keys
    float sign = 1;          // e4m3: of the product of the scales of q and k
    KeyStep step;            // with lists of tiles
    bool saw_whole = false;  // likewise: a block that all rows see
  };

  // With lists of tiles: what this block of keys is and what comes next; returns its number.
  i32 take_key_step(Rows& rows) const {
    return fulmen::take_key_step<kConfig>(wg.shared, wg.k_at, wg.warpgroup, rows.step);
  }

  void wait_for_queries(Rows& rows) const {
    wg.shared.q().consumer_wait(wg.q_at);
    rows.sQ = wg.shared.q().address(wg.q_at);
    load_q_registers<kConfig>(rows.rQ, rows.sQ);
    if constexpr (!Warpgroup::kPingPong && kConfig.q_register_dims > 0) {
      wg.sync_warpgroup();  // all warps have read Q: thread 0 may release it
    }
  }

  // The last block of keys: S = Q K_j^T, m = row maximum of S, P = exp2(S - m), l = row sum of P.
  void begin(Rows& rows, Weights& P, const Work& work, const KeyBlocks& blocks, i32 j) {
    Scores S;
    wg.produce();
    wg.shared.k().consumer_wait(wg.k_at);
    wg.ping_pong_wait();
    if constexpr (kConfig.score.has_tile_lists()) j = take_key_step(rows);
    issue_scores<kConfig>(S, rows.rQ, rows.sQ, wg.shared.k().address(wg.k_at));
    wg.ping_pong_arrive();
    wg.find_visible_keys(rows.visible, work);
    ptx::wgmma_wait<0>();
    wg.release_k();
    rows.scores.apply(S, rows.scores.keys(j * kConfig.kv_rows), wg.pair_tiles.tile(wg.warpgroup));
    wg.pair_tiles.release();
    wg.sign_scores(S, rows.sign);
    if (j >= blocks.full_end || j < blocks.full_begin) {
      wg.template apply_mask<MaskKind::kRight>(S, rows.visible, j);
    }
    rows.softmax.max_exp_sum(S, rows.rescale, wg.partner.maximum());
    rows.scores.pairs.drop(S, j * kConfig.kv_rows);
    round_weights<kConfig>(P, S);
    wg.partner.send(P);
  }

  // O += P V of the block of keys before, of which nothing is left in registers when S comes, then
  // S = Q K^T.
  void multiply_serially(const Rows& rows, Scores& S, Output<kConfig>& O, const Weights& P) {
    if (wg.waits_for_data()) wg.shared.v().consumer_wait(wg.v_at);
    wg.ping_pong_wait();
    add_in_parts<kConfig>(O, P, wg.v_tile());
    wg.release_v();
    if (wg.waits_for_data()) wg.shared.k().consumer_wait(wg.k_at);
    issue_scores<kConfig>(S, rows.rQ, rows.sQ, wg.shared.k().address(wg.k_at));
    wg.ping_pong_arrive();
    ptx::wgmma_wait<0>();
  }

  // Block of keys j, with the product O += P V of block j + 1.
  template <MaskKind kMask>
  void step(Rows& rows, Output<kConfig>& O, BlockOutput<kConfig>& block, Weights& P, i32 j) {
    constexpr bool kUpdatesMax = kMask == MaskKind::kRight ||
                                 kConfig.shift_rule == ShiftRule::kEveryBlock ||
                                 kConfig.shift_rule == ShiftRule::kWhenGrown;
    Scores S;
    wg.produce();
    if constexpr (kConfig.adds_in_parts()) {
      multiply_serially(rows, S, O, P);
    } else {
      if (wg.waits_for_data()) wg.shared.k().consumer_wait(wg.k_at);
      wg.ping_pong_wait();
      if constexpr (kConfig.score.has_tile_lists()) j = take_key_step(rows);
      // S = Q K_j^T
      issue_scores<kConfig>(S, rows.rQ, rows.sQ, wg.shared.k().address(wg.k_at));
      wg.partner.receive(P);
      // O += P_{j+1} V_{j+1}
      if (wg.waits_for_data()) wg.shared.v().consumer_wait(wg.v_at);
      issue_block<kConfig>(O, block, P, wg.v_tile(), rows.begun);
      rows.begun = true;
      wg.ping_pong_arrive();
    }
    const auto keys = rows.scores.keys(j * kConfig.kv_rows);  // under the products
    if constexpr (!kConfig.adds_in_parts()) ptx::wgmma_wait<kConfig.overlap ? 1 : 0>();
    wg.release_k();
    // S = scores in log2, -inf where hidden; all this under the product above
    constexpr bool kWhole = kMask == MaskKind::kNone;
    rows.scores.template apply<kWhole, kWhole || FragmentScores<kConfig>::kUncut>(
        S, keys, wg.pair_tiles.tile(wg.warpgroup));
    wg.pair_tiles.release();
    wg.sign_scores(S, rows.sign);
    if constexpr (kMask != MaskKind::kNone) wg.template apply_mask<kMask>(S, rows.visible, j);
    // m = max(m, row maximum of S), P_j = exp2(S - m), l += row sum of P_j
    bool grown = false;
    if constexpr (kUpdatesMax) {
      grown = rows.softmax.max_exp_sum(S, rows.rescale, wg.partner.maximum());
    } else {
      rows.softmax.exp_sum(S);  // with the m of the blocks before
    }
    rows.scores.pairs.drop(S, j * kConfig.kv_rows);
    if constexpr (!kConfig.adds_in_parts()) {
      ptx::wgmma_wait<0>();
      wg.release_v();
    }
    add_block<kConfig>(O, block);
    if (grown) scale_rows(O, rows.rescale);  // O *= exp2(m_old - m)
    // Where a sum grew beyond what P holds, all is divided: S after P was made of it in vain, which
    // a vote would hold up, or before, where registers do not hold both.
    const auto outgrew = [&] {
      if (kUpdatesMax || !rows.softmax.outgrew(S, rows.rescale)) return false;
      scale_rows(O, rows.rescale);
      return true;
    };
    if constexpr (kConfig.adds_in_parts()) outgrew();
    round_weights<kConfig>(P, S);
    wg.partner.send(P);
    if constexpr (!kConfig.adds_in_parts()) {
      if (outgrew()) round_weights<kConfig>(P, S);
    }
  }

  // O += P V of the first block of keys.
  void end(Rows& rows, Output<kConfig>& O, BlockOutput<kConfig>& block, Weights& P) {
    wg.produce();
    wg.partner.receive(P);
    wg.shared.v().consumer_wait(wg.v_at);
    issue_block<kConfig>(O, block, P, wg.v_tile(), rows.begun);
    rows.softmax.finish();
    ptx::wgmma_wait<0>();
    wg.release_v();
    add_block<kConfig>(O, block);
  }

  // The blocks of keys after the first that intervals leave.
  void walk(Rows& rows, Output<kConfig>& O, BlockOutput<kConfig>& block, Weights& P,
            const KeyBlocks& blocks, i32 j) {
#pragma unroll 1
    for (; j >= blocks.full_end; --j) step<MaskKind::kRight>(rows, O, block, P, j);
#pragma unroll 1
    for (; j >= blocks.full_begin; --j) step<MaskKind::kNone>(rows, O, block, P, j);
    if constexpr (kConfig.score.mask_kind == MaskKind::kBoth || kConfig.skips_documents) {
#pragma unroll 1
      for (; j >= blocks.begin; --j) step<MaskKind::kLeft>(rows, O, block, P, j);
    }
  }

  // Those that lists leave, too.
  void walk_listed(Rows& rows, Output<kConfig>& O, BlockOutput<kConfig>& block, Weights& P) {
    const i32 part = q_tile<kConfig>(wg.warpgroup);
    while (!rows.step.is_last()) {
#pragma unroll 1
      while (rows.step.goes_on(part, false)) step<MaskKind::kRight>(rows, O, block, P, 0);
#pragma unroll 1
      while (rows.step.goes_on(part, true)) {
        rows.saw_whole = true;
        step<MaskKind::kNone>(rows, O, block, P, 0);
      }
    }
  }

  // All blocks of keys of a work tile, from the last to the first.
  void compute_block(const Work& work, const KeyBlocks& blocks) {
    i32 j = blocks.all_end - 1;
    if constexpr (!kConfig.score.has_tile_lists()) wg.skip_blocks(j, blocks.end);
    const ForwardEpilogue<kConfig> epilogue{wg};
    if constexpr (kConfig.score.accumulate) epilogue.prefetch(work);
    Rows rows{wg.scores_of(work), {wg.softmax_factor()}};
    Output<kConfig> O;
    BlockOutput<kConfig> block;
    if constexpr (kConfig.has_8_bits()) {
#pragma unroll
      for (i32 i = 0; i < kConfig.o_dims() / 2; ++i) O[i] = 0;
    }
    Weights P;
    rows.sign = wg.take_operand_scale(rows.softmax, work);
    wait_for_queries(rows);
    begin(rows, P, work, blocks, j--);
    if constexpr (kConfig.score.has_tile_lists()) {
      walk_listed(rows, O, block, P);
    } else {
      walk(rows, O, block, P, blocks, j);
    }
    wg.release_q();
    end(rows, O, block, P);
    if constexpr (kConfig.score.mask_kind == MaskKind::kBoth && !kConfig.score.has_tile_lists()) {
      j = blocks.begin - 1;
      wg.skip_blocks(j, blocks.all_begin);
    }
    float probe[2];
    epilogue.probe_rows(probe, O);
    wg.partner.add(rows.softmax.sum, probe);
    const bool failed =
        epilogue.request_fallback(probe, rows.softmax, rows.visible, rows.saw_whole, work);
    epilogue.template finish<false>(O, rows.softmax, work, failed);
  }

  void run() {
    wg.q_at.advance(q_tile<kConfig>(wg.warpgroup));
    if (wg.warpgroup == kConfig.warpgroups - 1) wg.ping_pong_arrive();  // warpgroup 0 may begin
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(wg.shared.published(count), wg.shared.parity(count));
      const WorkTile tile = read_work_tile(wg.shared, count);
      if (tile.block.q_block < 0) break;
      const Work work{tile.block,
                      tile.block.q_block * kConfig.q_rows() +
                          kConfig.tile_rows() * q_tile<kConfig>(wg.warpgroup),
                      count};
      const KeyBlocks blocks = read_key_blocks(wg.shared, count, wg.warpgroup);
      wg.begin_producing(work, blocks);
      if (tile.failed != 0) {
        compute_fallback<kConfig>(wg, work, blocks, tile.failed);
      } else {
        compute_block(work, blocks);
      }
      ptx::warp_sync();
      if (wg.thread % 32 == 0) ptx::mbarrier_arrive(wg.shared.done(count));
    }
    if (wg.warpgroup == 0) wg.ping_pong_wait();  // for the last arrival, which nothing else takes
    if (kConfig.stage_output && wg.thread == 0) ptx::tma_store_wait();
  }
};

template <ForwardSm90Config kConfig>
inline void forward_sm90(const ForwardArguments& arguments) {
  static_assert(kConfig.valid());
  const ForwardTensorMaps& maps = arguments.maps;
  const ForwardParams& params = arguments.params;
  const ForwardStorage<kConfig> shared{ptx::dynamic_shared()};
  const i32 warpgroup = ptx::broadcast(ptx::thread_index() / 128);
  const i32 warp = ptx::broadcast(ptx::thread_index() / 32 % 4);
  const u32 thread = ptx::thread_index() % 128;
  if (ptx::thread_index() == 0) {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
    if constexpr (kConfig.tiled_bias) ptx::prefetch_tensormap(maps.bias);
    if constexpr (kConfig.tiled_mask) ptx::prefetch_tensormap(maps.mask);
    shared.init();
  }
  if constexpr (kConfig.paired) {
    ptx::cluster_sync();
  } else {
    ptx::block_sync();
  }
  // Up to here, the kernel before this one may still run; decode_sm80 beside it to the end.
  if constexpr (!kConfig.mixed) ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  if (warpgroup == kConfig.warpgroups) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    if (kConfig.paged ? warp == 0 : thread == 0) {
      if constexpr (kConfig.gathers) {
        RowProducer<kConfig, false>{{maps, params, shared}}.run();
      } else if constexpr (kConfig.paged) {
        PagedProducer<kConfig, false>{{maps, params, shared}}.run();
      } else if constexpr (kConfig.specialised) {
        ForwardProducer<kConfig>{maps, params, shared}.run();
      }
    } else if (warp == 1) {
      ForwardScheduler<kConfig>{params, shared, thread % 32}.run();
    } else if (warp == 2) {
      if constexpr (kConfig.gathers) {
        RowFinder<kConfig>{params, shared}.run();
      } else if constexpr (kConfig.fills_tails()) {
        ForwardTailZeroFill<kConfig>{params, shared}.run();
      }
    } else if (warp == 3) {
      if constexpr (kConfig.gathers) {
        RowProducer<kConfig, true>{{maps, params, shared}}.run();
      } else if constexpr (kConfig.paged) {
        PagedProducer<kConfig, true>{{maps, params, shared}}.run();
      }
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    ForwardConsumer<kConfig>{{{u32(warpgroup), thread}, maps, params, shared}}.run();
  }
  if constexpr (kConfig.mixed) ptx::grid_dependency_wait();  // what follows waits for both
  if constexpr (kConfig.paired) {  // until then the other block may reach here
    ptx::warp_sync();
    ptx::cluster_sync();
  }
}

}  // namespace fulmen
