// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The consumers of backward_sm90 at 256 dims where two thread blocks of a cluster, a pair, walk
// over the same queries with 64 keys each. As in consumer_split.cuh the first warpgroup makes P^T
// and sums dV, the second makes dS^T and sums dK. dS of a step then lies in the shared memory of
// both blocks, 64 queries by 128 keys, and each makes half of the columns of dQ = dS K over all of
// them, 64 a warpgroup, a step late: half of the additions to dQ that two blocks would make each by
// itself. A block holds of K and V half of the columns in registers, as left operands, and the
// others in shared memory; those are, of K, its columns of dQ, with the keys of both blocks.
#pragma once

#include "kernels/backward_sm90/consumer_split.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

// Of a pair: sends this block's half of dS to the other block, and says to the consumers of both
// when theirs has come. A half is overwritten only when both blocks have read it. In deterministic
// mode also what DqSemaphoreAcquire is elsewhere: dQ of a step is added a step after its dS.
template <BackwardSm90Config kConfig>
struct BackwardDsSender {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DsState at = {};

  void send() {
    const u32 rank = ptx::cluster_rank(), other = rank ^ 1;
    constexpr u32 kBytes = kConfig.ds_bytes() / 2;
    const auto ds = shared.ds();
    const u32 half = ds.address(at) + rank * kBytes;
    const u32 their_full = ptx::map_shared(ds.full(at), other);
    ptx::mbarrier_wait(shared.ds_written(at), at.phase);
    ptx::mbarrier_arrive(ds.full(at));
    ptx::mbarrier_arrive_expect_copy(their_full, kBytes);
    ptx::bulk_store_cluster(ptx::map_shared(half, other), half, kBytes, their_full);
    at.advance();
  }

  void run() {
    [[maybe_unused]] DqSemaphoreAcquire<kConfig> semaphore{params, shared};
    shared.for_each_tile(true, [&](typename Shared::WorkState work_at, i32 num_steps) {
      if constexpr (!kConfig.deterministic) {
#pragma unroll 1
        for (i32 i = 0; i < num_steps; ++i) send();
      } else if (num_steps > 0) {
        const BackwardTile work_tile = shared.read_tile(work_at);
        const QueryBlockRange range = query_block_range<kConfig>(params, work_tile);
        BackwardStep step(range);
#pragma unroll 1
        for (i32 i = 0; i < num_steps; ++i, step.advance(range)) {
          send();
          semaphore.acquire(work_tile, step);
        }
      }
    });
  }
};

template <BackwardSm90Config kConfig>
struct BackwardPairedConsumer {
  using Warpgroup = BackwardWarpgroup<kConfig>;
  using Pairs = typename Warpgroup::Pairs;
  using Scores = typename Warpgroup::Scores;
  using Sums = typename Warpgroup::Sums;
  using Weights = typename Warpgroup::Weights;
  using Shared = typename Warpgroup::Shared;
  using Words = KRegisters<kConfig>;
  static constexpr i32 kColumns = kConfig.dims / 2;

  Warpgroup wg;
  u32 rank = ptx::cluster_rank();

  void advance() {
    wg.at.advance();
    wg.dout_at.advance();
  }

  // S^T = K Q^T or dP^T = V dO^T. rows: of the half in shared memory, this block's 64 of kRows.
  template <i32 kRows>
  void issue_by_queries(Scores& S, const Words& words, u32 rows, u32 queries) const {
    const u32 a = ptx::wgmma_descriptor(rows, 16);
    const u32 half = kColumns * kConfig.q_rows * 2;
    const u32 b = ptx::wgmma_descriptor(queries + rank * half, 16);
    const u32 b_of_words = ptx::wgmma_descriptor(queries + (rank ^ 1) * half, 16);
    ptx::wgmma_fence();
#pragma unroll
    for (i32 d = 0; d < kColumns; d += 16) {
      const u32* r = words + d / 4;
      const u32 a_offset = d / 64 * kRows * 128 + d % 64 * 2;
      const u32 b_offset = d / 64 * kConfig.q_rows * 128 + d % 64 * 2;
      ptx::wgmma_rs<kConfig.dtype, false>(S, r[0], r[1], r[2], r[3], b_of_words + (b_offset >> 4),
                                          d > 0);
      ptx::wgmma_ss<kConfig.dtype, false>(S, a + (a_offset >> 4), b + (b_offset >> 4), true);
    }
    ptx::wgmma_commit();
  }

  // What a buffer of the pipeline of Q or dO holds before the first step: columns for registers.
  template <i32 kRows>
  void load_words(Words& words, u32 rows) const {
    load_left_columns<kColumns>(words, OperandTile<kRows, true>{rows});
    ptx::fence_proxy_async();  // ldmatrix -> what comes next
    ptx::warp_sync();
  }
  void release_words() {
    wg.release_to_pair(wg.shared.q(), wg.at);
    wg.release_to_pair(wg.shared.dout(), wg.dout_state());
    advance();
  }

  // take(is first, is last) for each step; products in flight at its end would be serialised.
  template <class Take>
  static void for_each_step(const BackwardStepInfo& step, const Take& take) {
    if (step.is_last()) return take(Flag<true>{}, Flag<true>{});
    take(Flag<true>{}, Flag<false>{});
#pragma unroll 1
    while (!step.is_last()) take(Flag<false>{}, Flag<false>{});
    take(Flag<false>{}, Flag<true>{});
  }

  // An accumulator that were one variable through the loop would keep its registers all the time.
  static void move(Scores& to, const Scores& from) {
#pragma unroll
    for (i32 i = 0; i < Warpgroup::kFloats; ++i) to[i] = from[i];
  }

  // P and dS of a step, one ahead of the dS that dQ is made of.
  template <bool kFirst>
  typename Shared::DsState ds_of_step() const {
    typename Shared::DsState now = wg.ds_at;
    if constexpr (!kFirst) now.advance();
    return now;
  }

  template <bool kFirst>
  typename Shared::PState p_of_step() const {
    const typename Shared::DsState ds = ds_of_step<kFirst>();
    if constexpr (kConfig.p_stages() == 1) return {0, ds.index};  // a phase a step
    return {ds.index, ds.phase};
  }

  // dQ of the step before is added while the product issued behind it runs.
  void add_dq(const float (&dQ)[kConfig.dq_floats()], u32 tile) {
    wg.finish_dq(dQ, wg.ds_at, tile);
    wg.ds_at.advance();
  }

  // First warpgroup: all steps of a work tile but dQ of the last, whose tile of dQ is returned.
  u32 sum_dv(Sums& dV, i32 key) {
    Words words;
    wait_full<kConfig>(wg.shared.q(), wg.at);
    load_words<kConfig.kv_rows()>(words, wg.shared.q().address(wg.at) + rank * 64 * 128);
    wait_full<kConfig>(wg.shared.dout(), wg.dout_state());
    release_words();
    wg.shared.k().consumer_wait(wg.kv_at);
    const u32 keys = wg.shared.k().address(wg.kv_at) + rank * 64 * 128;
    const auto issue_scores = [&](Scores& S) {
      issue_by_queries<kConfig.kv_rows()>(S, words, keys, wg.shared.q().address(wg.at));
    };
    wait_full<kConfig>(wg.shared.q(), wg.at);
    BackwardStepInfo step = wg.shared.read_step(wg.at);
    Scores S;
    issue_scores(S);
    ptx::wgmma_wait<0>();
    u32 tile = 0;
    // P^T = exp(scale S^T - lse), also for the other warpgroup; dQ of the step before;
    // dV += P^T dO; the next S^T = K Q^T
    for_each_step(step, [&](auto first_step, auto last_step) {
      constexpr bool kFirst = decltype(first_step)::kValue;
      constexpr bool kLast = decltype(last_step)::kValue;
      Pairs pairs{};
      Weights P;
      if (step.is_partial(0)) wg.apply_mask(S, key, step);
      wg.shift_large_scores(S);
      wg.exponentiate(S);
      wg.p_at = p_of_step<kFirst>();
      wg.share_p(S, pairs);
      wg.release_to_pair(wg.shared.q(), wg.at);  // all lanes have read their rows
      wg.round(P, S, pairs);
      const auto here = wg.dout_state();
      [[maybe_unused]] float dQ[kConfig.dq_floats()];
      if constexpr (!kFirst) wg.issue_dq(dQ, wg.ds_at);
      wait_full<kConfig>(wg.shared.dout(), here);
      issue_keys_by_dims<kConfig>(dV, P, wg.shared.dout().address(here), !kFirst);
      advance();
      if constexpr (!kFirst) {
        ptx::wgmma_wait<1>();
        add_dq(dQ, tile);
      }
      tile = step.tile;
      if constexpr (!kLast) {
        wait_full<kConfig>(wg.shared.q(), wg.at);
        step = wg.shared.read_step(wg.at);
        Scores S_next;
        issue_scores(S_next);
        ptx::wgmma_wait<1>();
        wg.release_to_pair(wg.shared.dout(), here);
        ptx::wgmma_wait<0>();
        move(S, S_next);
      } else {
        ptx::wgmma_wait<0>();
        wg.release_to_pair(wg.shared.dout(), here);
      }
    });
    return tile;
  }

  // Second warpgroup: the same for dK, before the scale.
  u32 sum_dk(Sums& dK) {
    Words words;
    wait_full<kConfig>(wg.shared.dout(), wg.dout_state());
    load_words<kConfig.kv_rows_of_block()>(words, wg.shared.dout().address(wg.dout_state()));
    wait_full<kConfig>(wg.shared.q(), wg.at);
    release_words();
    wg.shared.v().consumer_wait(wg.kv_at);
    const u32 values = wg.shared.v().address(wg.kv_at);
    const auto issue_dp = [&](Scores& dP) {
      wait_full<kConfig>(wg.shared.dout(), wg.dout_state());
      issue_by_queries<kConfig.kv_rows_of_block()>(dP, words, values,
                                                   wg.shared.dout().address(wg.dout_state()));
    };
    Scores dP;
    issue_dp(dP);
    wait_full<kConfig>(wg.shared.q(), wg.at);
    BackwardStepInfo step = wg.shared.read_step(wg.at);
    wg.shared.k().consumer_wait(wg.kv_at);  // for dQ
    ptx::wgmma_wait<0>();
    u32 tile = 0;
    // dS^T = P^T (dP^T - delta), to both blocks; dQ of the step before; dK += dS^T Q; the next
    // dP^T = V dO^T
    for_each_step(step, [&](auto first_step, auto last_step) {
      constexpr bool kFirst = decltype(first_step)::kValue;
      constexpr bool kLast = decltype(last_step)::kValue;
      Weights dS;
      wg.p_at = p_of_step<kFirst>();
      wg.form_shared_ds(dS, dP);
      wg.release_to_pair(wg.shared.dout(), wg.dout_state());  // all lanes have read delta
      write_ds(dS, ds_of_step<kFirst>());
      const auto here = wg.at;
      [[maybe_unused]] float dQ[kConfig.dq_floats()];
      if constexpr (!kFirst) wg.issue_dq(dQ, wg.ds_at);
      issue_keys_by_dims<kConfig>(dK, dS, wg.shared.q().address(here), !kFirst);
      advance();
      if constexpr (!kFirst) {
        ptx::wgmma_wait<1>();
        add_dq(dQ, tile);
      }
      tile = step.tile;
      if constexpr (!kLast) {
        Scores dP_next;
        issue_dp(dP_next);
        ptx::wgmma_wait<1>();
        wg.release_to_pair(wg.shared.q(), here);
        wait_full<kConfig>(wg.shared.q(), wg.at);
        step = wg.shared.read_step(wg.at);
        ptx::wgmma_wait<0>();
        move(dP, dP_next);
      } else {
        ptx::wgmma_wait<0>();
        wg.release_to_pair(wg.shared.q(), here);
      }
    });
    wg.release(wg.shared.v(), wg.kv_at);
    return tile;
  }

  // dS^T of this block becomes its 64 columns of dS, which BackwardDsSender sends.
  void write_ds(const Weights& dS, typename Shared::DsState at) const {
    wait_empty<kConfig>(wg.shared.ds(), at);
    store_ds<kConfig>(dS, wg.shared.ds().address(at), rank);
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (wg.thread % 32 == 0) ptx::mbarrier_arrive(wg.shared.ds_written(at));
  }

  // dQ of the last step.
  void finish_last_dq(u32 tile) {
    float dQ[kConfig.dq_floats()];
    wg.issue_dq(dQ, wg.ds_at);
    ptx::wgmma_wait<0>();
    add_dq(dQ, tile);
    wg.release(wg.shared.k(), wg.kv_at);
    wg.kv_at.advance();
  }

  // kDk: the second warpgroup, else the first.
  template <bool kDk>
  void run() {
    const DqConverter<kConfig> converter{wg.params, i32(ptx::thread_index() / 32) - 4,
                                         i32(wg.thread % 32)};
#pragma unroll 1
    for (;;) {
      wg.shared.work().consumer_wait(wg.work_at);
      const i32 num_steps = wg.shared.read_num_steps(wg.work_at);
      if (num_steps == BackwardWork::kEnd) break;
      converter.run(wg.shared.read_conversion(wg.work_at));
      if (num_steps >= 0) {
        Sums sums;
        u32 last_tile = 0;
        if (num_steps == 0) {
#pragma unroll
          for (i32 i = 0; i < kConfig.dims / 2; ++i) sums[i] = 0;
        } else if constexpr (kDk) {
          last_tile = sum_dk(sums);
        } else {
          const i32 first = wg.shared.read_tile(wg.work_at).kv_block * kConfig.kv_rows();
          last_tile = sum_dv(sums, first + first_key<kConfig>(0));
        }
        if constexpr (kConfig.splits()) {
          write_or_add<kDk>(sums, wg.shared.read_tile(wg.work_at));
        } else {
          write_divided_sums<kDk>(wg, sums, wg.shared.read_tile(wg.work_at));
        }
        if (num_steps > 0) finish_last_dq(last_tile);
        ptx::warp_sync();
        if (wg.thread % 32 == 0) ptx::mbarrier_arrive(wg.shared.dq_added(wg.work_at));
      }
      wg.sync_warpgroup();
      if (wg.thread == 0) wg.shared.work().consumer_release(wg.work_at);
      wg.work_at.advance();
    }
  }

  template <bool kDk>
  void write_or_add(Sums& sums, const BackwardTile& work_tile) const {
    const i32 number = split_number<kConfig>(wg.params, work_tile);
    if (number < 0) {
      write_divided_sums<kDk>(wg, sums, work_tile);
    } else {
      add_part<kDk>(sums, work_tile, number);
    }
  }

  // A part of a split work tile adds its sums to those in global memory, of which the last part
  // makes dK and dV.
  template <bool kDk>
  void add_part(const Sums& sums, const BackwardTile& work_tile, i32 number) const {
    const u32 index = 4 * number + 2 * rank + wg.warpgroup;
    float* const to = wg.params.part_sums + i64{index} * 64 * kConfig.dims + wg.thread * 4;
#pragma unroll
    for (i32 j = 0; j < kConfig.dims / 8; ++j) {
      ptx::reduce_add_x4(to + j * 512, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2],
                         sums[4 * j + 3]);
    }
    u32* const done = wg.params.parts_done + index;
    wg.sync_warpgroup();
    if (wg.thread == 0) ptx::announce(done);
    if (work_tile.part + 1 < wg.params.num_parts) return;
    if (wg.thread == 0) ptx::await(done, wg.params.num_parts);
    wg.sync_warpgroup();
    Sums whole;
#pragma unroll
    for (i32 j = 0; j < kConfig.dims / 8; ++j) {
      const ptx::F32x4 x = ptx::load_l2_x4(to + j * 512);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) whole[4 * j + e] = x.word[e];
    }
    write_divided_sums<kDk>(wg, whole, work_tile);
  }
};

}  // namespace fulmen
