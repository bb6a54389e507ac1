// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exact attention, forward, on Hopper: O = softmax(scale Q K^T + mask) V and the log-sum-exp of
// every row, 16-bit in and out, float32 inside. A thread block stays on its multiprocessor and
// takes blocks of queries, longest first, from a counter. One warp plans (ForwardPlanner), one
// loads (ForwardLoader), up to three warpgroups compute 64 query rows each, or two of them half of
// O's columns each (ForwardConsumer): S = Q K^T of one block of keys is issued before O += P V of
// the previous one, so that the softmax hides under both, and the warpgroups may take turns at the
// tensor cores. Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2; the softmax without a
// running maximum is ours (tile/row_softmax.cuh). Queries too short for 64 rows may share a tile
// with other heads of their key head. A block of queries whose result left the range of
// float32, or met an infinity or NaN, is computed again by the textbook. Must hold: sm_90a,
// kConfig.valid(), launched with threads() threads, shared_bytes() bytes and at most one block a
// multiprocessor.
#pragma once

#include "kernels/common/products_sm90.cuh"
#include "kernels/forward_sm90/consumer.cuh"
#include "kernels/forward_sm90/epilogue.cuh"
#include "kernels/forward_sm90/fallback.cuh"
#include "kernels/forward_sm90/producer.cuh"
#include "kernels/forward_sm90/scheduler.cuh"
#include "kernels/forward_sm90/softmax.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

// A warpgroup of 128 threads, 64 query rows at a time.
template <AttentionConfig kConfig>
struct ForwardConsumer : ForwardWarpgroup<kConfig> {
  using Own = ForwardWarpgroup<kConfig>;
  using Own::begin_loads, Own::feed, Own::kTurns, Own::meet, Own::pass_turn, Own::place_of_task,
      Own::release_k, Own::release_q, Own::release_v, Own::scores_of, Own::see, Own::skip_block,
      Own::softmax_factor, Own::take_turn, Own::v_tile, Own::waits_for_data;
  using Own::shared, Own::thread, Own::warpgroup, Own::q_at, Own::k_at, Own::v_at;
  using typename Own::Scores, typename Own::Task;

  // What a warpgroup has of its 64 query rows in registers.
  using Output = float[kConfig.o_dims() / 2];
  using Weights = u32[kConfig.kv_rows / 4];
  struct Rows {
    FragmentScores<kConfig> scores;
    RowSoftmax<kConfig> softmax;
    u32 sQ;
    QRegisters<kConfig> rQ;
    Interval visible[2];
    float rescale[2] = {1, 1};
    bool accumulate = false;
  };

  void wait_for_queries(Rows& rows) const {
    shared.q().wait(q_at);
    rows.sQ = shared.q().address(q_at);
    load_q_registers<kConfig>(rows.rQ, rows.sQ);
    if constexpr (!kTurns && kConfig.q_register_dims > 0) {
      meet();  // all warps have read Q: one gives it back
    }
  }

  // S = Q K_j^T and P = exp2(c S - m), for the last block of keys.
  void begin(Rows& rows, Weights& P, const Task& task, const KeyBlocks& blocks, i32 j) {
    Scores S;
    feed();
    shared.k().wait(k_at);
    take_turn();
    issue_scores<kConfig>(S, rows.rQ, rows.sQ, shared.k().address(k_at));
    pass_turn();
    see(rows.visible, task);
    ptx::wgmma_wait<0>();
    release_k();
    rows.scores.apply(S, j * kConfig.kv_rows);
    if (j >= blocks.full_end || j < blocks.full_begin) {
      Own::template hide<Sight::kEnds>(S, rows.visible, j);
    }
    rows.softmax.update(S, rows.rescale);
    rows.scores.pairs.drop(S, j * kConfig.kv_rows);
    round_probabilities<kConfig>(P, S);
  }

  // One block of keys, and the product that the block before it left.
  template <Sight kSight>
  void step(Rows& rows, Output& O, Weights& P, i32 j) {
    constexpr bool kUpdate = kSight == Sight::kEnds ||
                             kConfig.shift_rule == ShiftRule::kEveryBlock ||
                             kConfig.shift_rule == ShiftRule::kWhenGrown;
    Scores S;
    feed();
    if (waits_for_data()) shared.k().wait(k_at);
    take_turn();
    // S = Q K_j^T
    issue_scores<kConfig>(S, rows.rQ, rows.sQ, shared.k().address(k_at));
    // O += P_{j+1} V_{j+1}
    if (waits_for_data()) shared.v().wait(v_at);
    issue_output<kConfig>(O, P, v_tile(), rows.accumulate);
    rows.accumulate = true;
    pass_turn();
    ptx::wgmma_wait<kConfig.overlap ? 1 : 0>();
    release_k();
    // S = exp2(c S - m), under the product above
    rows.scores.template apply<kConfig.skips_documents && kSight == Sight::kAll>(
        S, j * kConfig.kv_rows);
    if constexpr (kSight != Sight::kAll) Own::template hide<kSight>(S, rows.visible, j);
    bool grown = false;
    if constexpr (kUpdate) {
      grown = rows.softmax.update(S, rows.rescale);
    } else {
      rows.softmax.keep(S);
    }
    rows.scores.pairs.drop(S, j * kConfig.kv_rows);
    ptx::wgmma_wait<0>();
    release_v();
    // O *= exp2(m_old - m), P_j = S
    if (grown) scale_rows(O, rows.rescale);
    round_probabilities<kConfig>(P, S);
    if constexpr (!kUpdate) {
      if (!rows.softmax.outgrew(S, rows.rescale)) return;
      scale_rows(O, rows.rescale);
      round_probabilities<kConfig>(P, S);
    }
  }

  // O += P V, for the first block of keys.
  void end(Rows& rows, Output& O, const Weights& P) {
    feed();
    shared.v().wait(v_at);
    issue_output<kConfig>(O, P, v_tile(), rows.accumulate);
    rows.softmax.finish();
    ptx::wgmma_wait<0>();
    release_v();
  }

  // From the last block of keys that a row sees to the first.
  void compute_block(const Task& task, const KeyBlocks& blocks) {
    i32 j = blocks.all_end - 1;
#pragma unroll 1
    for (; j >= blocks.end; --j) skip_block();
    Rows rows{scores_of(task), {softmax_factor()}};
    Output O;
    Weights P;
    wait_for_queries(rows);
    begin(rows, P, task, blocks, j--);
#pragma unroll 1
    for (; j >= blocks.full_end; --j) step<Sight::kEnds>(rows, O, P, j);
#pragma unroll 1
    for (; j >= blocks.full_begin; --j) step<Sight::kAll>(rows, O, P, j);
    if constexpr (kConfig.mask == MaskKind::kBoth || kConfig.skips_documents) {
#pragma unroll 1
      for (; j >= blocks.begin; --j) step<Sight::kBegins>(rows, O, P, j);
    }
    release_q();
    end(rows, O, P);
    if constexpr (kConfig.mask == MaskKind::kBoth) {
#pragma unroll 1
      for (j = blocks.begin - 1; j >= blocks.all_begin; --j) skip_block();
    }
    const ForwardOutput<kConfig> output{*this};
    output.report(O, rows.softmax, rows.visible, task);
    output.template write<false>(O, rows.softmax, task);
  }

  void run() {
    q_at.advance(q_tile<kConfig>(warpgroup));
    if (kTurns && warpgroup == kConfig.warpgroups - 1) pass_turn();  // the first may begin
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.assigned(count), shared.parity(count));
      const Assignment assignment = read_assignment(shared, count);
      if (assignment.block.q_block < 0) break;
      const Task task{assignment.block,
                      assignment.block.q_block * kConfig.q_rows() +
                          kConfig.tile_rows() * q_tile<kConfig>(warpgroup),
                      count};
      const KeyBlocks blocks = read_key_blocks(shared, count, warpgroup);
      begin_loads(task, blocks);
      if (assignment.careful) {
        compute_carefully<kConfig>(*this, task, blocks);
      } else {
        compute_block(task, blocks);
      }
      ptx::warp_sync();
      if (thread % 32 == 0) ptx::mbarrier_arrive(shared.done(count));
    }
    if (kTurns && warpgroup == 0) take_turn();  // takes the turn that nobody needs
    if (kConfig.stage_output && thread == 0) ptx::tma_store_wait();
  }
};

template <AttentionConfig kConfig>
inline void forward_sm90(const ForwardArguments& arguments) {
  static_assert(kConfig.valid());
  const ForwardTensorMaps& maps = arguments.maps;
  const ForwardParams& params = arguments.params;
  const ForwardShared<kConfig> shared{ptx::dynamic_shared()};
  const i32 warpgroup = ptx::broadcast(ptx::thread_index() / 128);
  const i32 warp = ptx::broadcast(ptx::thread_index() / 32 % 4);
  const u32 thread = ptx::thread_index() % 128;
  if (ptx::thread_index() == 0) {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
    shared.init();
  }
  ptx::block_sync();
  ptx::grid_dependency_wait();  // up to here, the kernel before this one may still run
  ptx::grid_dependents_launch();
  if (warpgroup == kConfig.warpgroups) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    if (thread == 0) {
      if constexpr (kConfig.specialised) ForwardLoader<kConfig>{maps, params, shared}.run();
    } else if (warp == 1) {
      ForwardPlanner<kConfig>{params, shared, thread % 32}.run();
    } else if (kConfig.sequences && warp == 2) {
      ForwardSweeper<kConfig>{params, shared}.run();
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    ForwardConsumer<kConfig>{{maps, params, shared, u32(warpgroup), thread}}.run();
  }
}

}  // namespace fulmen
