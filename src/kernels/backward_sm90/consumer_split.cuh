// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The consumers of backward_sm90 above 128 dims, where the sums of dK and dV of 64 keys take 128
// registers a thread each. Both warpgroups have the same keys. The first makes P^T and sums dV; the
// second makes dS^T from dP^T and the first's P^T, which it reads from shared memory in the layout
// of the first's registers, and sums dK. A step is two products of each; those of one run under the
// exponentials, or the differences, of the other. Half of K (of V) is a left operand in registers:
// with all of it in shared memory a step would read more there than it multiplies (2,300 of 2,048
// cycles at 256 dims).
#pragma once

#include "kernels/backward_sm90/consumer.cuh"
#include "kernels/backward_sm90/epilogue.cuh"

namespace fulmen {

// dK (kDk) or dV of a work tile; marks the head if it is not finite. Also of pairs
// (consumer_paired.cuh).
template <bool kDk, BackwardSm90Config kConfig>
inline void write_divided_sums(const BackwardWarpgroup<kConfig>& wg, BackwardSums<kConfig>& sums,
                               const BackwardTile& work_tile) {
  if constexpr (kConfig.hides_pairs()) {
    mark_nonfinite(wg.params.nonfinite, work_tile.batch_kv_head, probe(sums));
  }
  const BackwardEpilogue<kConfig> epilogue{wg};
  if constexpr (kDk) {
    epilogue.write_dk(sums, work_tile);
  } else {
    epilogue.write_dv(sums, work_tile);
  }
}

template <BackwardSm90Config kConfig>
struct BackwardDividedConsumer {
  using Warpgroup = BackwardWarpgroup<kConfig>;
  using Pairs = typename Warpgroup::Pairs;
  using Scores = typename Warpgroup::Scores;
  using Sums = typename Warpgroup::Sums;
  using Weights = typename Warpgroup::Weights;

  Warpgroup wg;

  void advance() {
    wg.at.advance();
    wg.dout_at.advance();
  }

  // First warpgroup: dV of the keys of the work tile from `key` on.
  void sum_dv(Sums& dV, i32 key) {
    wg.shared.k().consumer_wait(wg.kv_at);
    const u32 keys = wg.shared.k().address(wg.kv_at);
    KRegisters<kConfig> rK;
    load_keys<kConfig>(rK, keys);
    Scores S;
    wg.shared.q().consumer_wait(wg.at);
    BackwardStepInfo step = wg.shared.read_step(wg.at);
    issue_keys_by_queries<kConfig>(S, rK, keys, wg.shared.q().address(wg.at));
    ptx::wgmma_wait<0>();
    bool accumulate = false;
    // P^T = exp(scale S^T - lse), also for the other warpgroup; dV += P^T dO
    const auto issue_dv = [&] {
      typename Warpgroup::Pairs pairs{};
      Weights P;
      wg.apply_options(S, pairs, key, step);
      if (step.is_partial(0)) wg.apply_mask(S, key, step);
      wg.shift_large_scores(S);
      wg.exponentiate(S);
      wg.share_p(S, pairs);
      wg.release(wg.shared.q(), wg.at);  // all lanes have read their rows
      wg.round(P, S, pairs);
      wg.shared.dout().consumer_wait(wg.dout_state());
      wg.ping_pong_wait();
      issue_keys_by_dims<kConfig>(dV, P, wg.shared.dout().address(wg.dout_state()), accumulate);
      accumulate = true;
    };
#pragma unroll 1
    while (!step.is_last()) {
      issue_dv();
      const auto here = wg.dout_state();
      advance();
      // the next S^T = K Q^T
      wg.shared.q().consumer_wait(wg.at);
      step = wg.shared.read_step(wg.at);
      issue_keys_by_queries<kConfig>(S, rK, keys, wg.shared.q().address(wg.at));
      wg.ping_pong_arrive();
      ptx::wgmma_wait<1>();
      wg.release(wg.shared.dout(), here);
      ptx::wgmma_wait<0>();
    }
    ptx::warp_sync();  // all lanes have read their columns of K
    wg.release(wg.shared.k(), wg.kv_at);
    issue_dv();
    wg.ping_pong_arrive();
    ptx::wgmma_wait<0>();
    wg.release(wg.shared.dout(), wg.dout_state());
    advance();
  }

  // Second warpgroup: dK of the keys of the work tile, before the scale.
  void sum_dk(Sums& dK) {
    wg.shared.q().consumer_wait(wg.at);
    BackwardStepInfo step = wg.shared.read_step(wg.at);
    Scores dP;
    wg.shared.dout().consumer_wait(wg.dout_state());
    wg.shared.v().consumer_wait(wg.kv_at);
    const u32 values = wg.shared.v().address(wg.kv_at);
    KRegisters<kConfig> rV;
    load_keys<kConfig>(rV, values);
    issue_keys_by_queries<kConfig>(dP, rV, values, wg.shared.dout().address(wg.dout_state()));
    ptx::wgmma_wait<0>();
    bool accumulate = false;
    // dS^T = P^T (dP^T - delta), dK += dS^T Q
    const auto issue_dk = [&] {
      Weights dS;
      wg.form_shared_ds(dS, dP);
      wg.release(wg.shared.dout(), wg.dout_state());  // all lanes have read delta
      wg.ping_pong_wait();
      issue_keys_by_dims<kConfig>(dK, dS, wg.shared.q().address(wg.at), accumulate);
      accumulate = true;
    };
#pragma unroll 1
    while (!step.is_last()) {
      issue_dk();
      const auto here = wg.at;
      advance();
      // the next dP^T = V dO^T
      wg.shared.dout().consumer_wait(wg.dout_state());
      issue_keys_by_queries<kConfig>(dP, rV, values, wg.shared.dout().address(wg.dout_state()));
      wg.ping_pong_arrive();
      ptx::wgmma_wait<1>();
      wg.release(wg.shared.q(), here);
      ptx::wgmma_wait<0>();
      wg.shared.q().consumer_wait(wg.at);
      step = wg.shared.read_step(wg.at);
    }
    ptx::warp_sync();  // all lanes have read their columns of V
    wg.release(wg.shared.v(), wg.kv_at);
    issue_dk();
    wg.ping_pong_arrive();
    ptx::wgmma_wait<0>();
    wg.release(wg.shared.q(), wg.at);
    advance();
  }

  // kDk: the second warpgroup, else the first.
  template <bool kDk>
  void run() {
    if constexpr (kDk) wg.ping_pong_arrive();  // the first warpgroup may begin
#pragma unroll 1
    for (;;) {
      wg.shared.work().consumer_wait(wg.work_at);
      const i32 num_steps = wg.shared.read_num_steps(wg.work_at);
      if (num_steps == BackwardWork::kEnd) break;
      Sums sums;
      if (num_steps > 0) {
        if constexpr (kDk) {
          sum_dk(sums);
        } else {
          sum_dv(sums, wg.shared.read_tile(wg.work_at).kv_block * kConfig.kv_rows());
        }
        wg.kv_at.advance();
      } else {
#pragma unroll
        for (i32 i = 0; i < kConfig.dims / 2; ++i) sums[i] = 0;
      }
      ptx::warp_sync();
      if (wg.thread % 32 == 0) ptx::mbarrier_arrive(wg.shared.dq_added(wg.work_at));
      // The work tile is read again: only the sums stay in registers during the steps.
      write_divided_sums<kDk>(wg, sums, wg.shared.read_tile(wg.work_at));
      wg.sync_warpgroup();
      if (wg.thread == 0) wg.shared.work().consumer_release(wg.work_at);
      wg.work_at.advance();
    }
    if constexpr (!kDk) wg.ping_pong_wait();  // for the last arrival
  }
};

}  // namespace fulmen
