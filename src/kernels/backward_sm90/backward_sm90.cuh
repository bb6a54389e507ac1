// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients of exact attention on Hopper: dQ, dK and dV in one kernel, 16-bit in and out, float32
// inside. A persistent grid takes blocks of 128 keys from a counter. Two threads load
// (BackwardProducer, BackwardDOutProducer); two warpgroups (BackwardConsumer) keep 64 keys each
// with their sums of dK and dV in registers, and loop over the queries that see them;
// DqSemaphoreRelease counts the blocks of keys that have added to dQ. The warpgroups meet only over
// dS, which the product for dQ uses a step late, so one does its exponentials under the products of
// the other. Dao, "FlashAttention-2" (2023), section 3.1.2, and Shah et al., "FlashAttention-3"
// (2024); dQ that stays in the L2 is ours (dq_accum.cuh). Must hold: sm_90a, a valid config,
// launched with threads() threads and shared_bytes() bytes, after backward_preprocess_sm90, with a
// backward_schedule of the grid.
#pragma once

#include "kernels/backward_sm90/consumer.cuh"
#include "kernels/backward_sm90/consumer_paired.cuh"
#include "kernels/backward_sm90/consumer_split.cuh"
#include "kernels/backward_sm90/dq_accum.cuh"
#include "kernels/backward_sm90/epilogue.cuh"
#include "kernels/backward_sm90/producer.cuh"
#include "kernels/backward_sm90/tail_zero_fill.cuh"

namespace fulmen {

// ---- Consumers: two warpgroups of 128 threads, 64 keys each ------------------------------------

template <BackwardSm90Config kConfig>
struct BackwardConsumer {
  using Warpgroup = BackwardWarpgroup<kConfig>;
  using Shared = typename Warpgroup::Shared;
  using Pairs = typename Warpgroup::Pairs;
  using Scores = typename Warpgroup::Scores;
  using Sums = typename Warpgroup::Sums;
  using Weights = typename Warpgroup::Weights;
  struct Keys {  // the first columns of K and V, as left operands
    KRegisters<kConfig> k;
    u32 v[kConfig.holds_keys() ? kConfig.dims / 4 : 1];
  };

  Warpgroup wg;

  // Queries of a step whose dV += P^T dO is issued before dS is formed, as the registers allow.
  static constexpr i32 kEarlyRows = !kConfig.needs_dp() ? kConfig.q_rows
                                    : kConfig.early_dv  ? 64
                                                        : 0;

  // Whether steps with large scores apply the mask as well: with S in 64 registers a branch that
  // changes S costs every loop as many moves.
  static constexpr bool kHidesAlways = kConfig.q_rows == 128;

  u32 keys_of(Pipeline<1> pipeline) const {
    return pipeline.address(wg.kv_at) + 64 * 128 * wg.warpgroup;
  }
  void issue_scores(Scores& S, const Keys& words, typename Shared::QState of) const {
    issue_keys_by_queries<kConfig>(S, words.k, keys_of(wg.shared.k()), wg.shared.q().address(of));
  }

  // Of K alone.
  void load_first_columns(Keys& words) const {
    wg.shared.k().consumer_wait(wg.kv_at);
    load_keys<kConfig>(words.k, keys_of(wg.shared.k()));
  }
  // All of K and V.
  void take_keys(Keys& words) {
    take_keys(words.k);
    take_keys(words.v);
  }
  // The warpgroup's 64 keys of K or V, out of a buffer of Q or dO.
  void take_keys(KRegisters<kConfig>& words) {
    const auto q = wg.shared.q();
    const auto dout = wg.shared.dout();
    q.consumer_wait(wg.at);
    dout.consumer_wait(wg.dout_state());
    const u32 rows = wg.warpgroup == 0 ? q.address(wg.at) : dout.address(wg.dout_state());
    load_left_columns<kConfig.dims>(words, OperandTile<64, true>{rows});
    ptx::warp_sync();
    wg.release(q, wg.at);
    wg.release(dout, wg.dout_state());
    wg.at.advance();
    wg.dout_at.advance();
  }

  // dV += P^T dO over queries [kBegin, kEnd) of the step.
  template <i32 kBegin, i32 kEnd>
  void issue_dv(Sums& dV, Weights& P, const Scores& S, const Pairs& pairs, bool accumulate) const {
    if constexpr (kConfig.dv && kBegin < kEnd) {
      wg.template round<kBegin, kEnd>(P, S, pairs);
      issue_keys_by_dims<kConfig, kBegin, kEnd>(dV, P, wg.shared.dout().address(wg.dout_state()),
                                                accumulate);
    }
  }

  // P^T = exp(S^T - lse), under the product dP^T = V dO^T; dS^T = P^T (dP^T - delta), under the
  // product dV += P^T dO.
  template <bool kFirst>
  void form_p_and_ds(Scores& S, Weights& P, Weights& dS, Sums& dV, const Keys& words,
                     const Pairs& pairs) const {
    [[maybe_unused]] Scores dP;
    if constexpr (kConfig.needs_dp()) {
      issue_keys_by_queries<kConfig>(dP, words.v, keys_of(wg.shared.v()),
                                     wg.shared.dout().address(wg.dout_state()));
    }
    wg.exponentiate(S);
    issue_dv<0, kEarlyRows>(dV, P, S, pairs, !kFirst);
    if constexpr (kConfig.needs_dp()) {
      ptx::wgmma_wait<kConfig.dv && kEarlyRows != 0 ? 1 : 0>();
      wg.form_ds(dS, S, dP, pairs);
    }
    issue_dv<kEarlyRows, kConfig.q_rows>(dV, P, S, pairs, !kFirst || kEarlyRows != 0);
    if constexpr (kConfig.dq) {
      wg.share_ds(dS);
    } else {
      ptx::warp_sync();  // all lanes have read lse and delta
    }
  }

  // A buffer of Q or dO.
  template <i32 kBuffers>
  void release_queries(Pipeline<kBuffers> pipeline, PipelineState<kBuffers> of) const {
    if constexpr (kConfig.in_clusters()) {
      wg.release_to_pair(pipeline, of);
    } else {
      wg.release(pipeline, of);
    }
  }

  // The step of a warpgroup.
  struct Steps {
    BackwardStepInfo now, next;  // `next` is read early, under the products of this one
    u32 dq_tile;                 // of the step before
  };

  // In this order: dQ = dS K of the step before, the next S^T = K Q^T (after the last step the same
  // S^T again, unused), dK += dS^T Q.
  template <bool kFirst>
  void multiply(Scores& S, Sums& dK, const Weights& dS, const Keys& words, Steps& steps) {
    constexpr bool kDq = kConfig.dq && !kFirst;
    const typename Shared::QState here = wg.at;
    const typename Shared::DOutState dout_here = wg.dout_state();
    const typename Shared::DsState ds_here = wg.ds_at;
    wg.at.advance();
    wg.dout_at.advance();
    wg.ds_at.advance();
    const typename Shared::DsState before{wg.ds_at.index, wg.ds_at.phase ^ 1};
    [[maybe_unused]] float dQ[kConfig.dq_floats()];
    if constexpr (!kDq) ptx::wgmma_wait<0>();
    wg.ping_pong_wait();
    if constexpr (kDq) wg.issue_dq(dQ, before);
    if constexpr (kConfig.late_ds()) wg.announce_ds(ds_here);
    if constexpr (kDq) ptx::wgmma_wait<1>();  // for dV
    const bool is_last = steps.now.is_last();
    if (!is_last) {
      wait_queries<kConfig>(wg.shared.q(), wg.at);
      steps.next = wg.read_step();
    }
    issue_scores(S, words, is_last ? here : wg.at);
    if constexpr (kConfig.dk) {
      issue_keys_by_dims<kConfig>(dK, dS, wg.shared.q().address(here), !kFirst);
    }
    wg.ping_pong_arrive();
    release_queries(wg.shared.dout(), dout_here);
    if (kConfig.v_bytes() > 0 && is_last) wg.release(wg.shared.v(), wg.kv_at);
    if constexpr (kDq) {
      ptx::wgmma_wait<kConfig.dk ? 2 : 1>();
      wg.finish_dq(dQ, before, steps.dq_tile);
    }
    ptx::wgmma_wait<0>();
    release_queries(wg.shared.q(), here);
    steps.dq_tile = steps.now.tile;
  }

  // All steps of a work tile; `key`: the first key of this warpgroup. Makes dK (unscaled) and dV;
  // dQ of the last step is left to the caller, with the tile that this returns.
  u32 compute(Sums& dK, Sums& dV, i32 key) {
    Steps steps;
    Scores S;  // becomes P; S of the next step is issued before this one ends
    Keys words;
    if constexpr (kConfig.holds_keys()) take_keys(words);
    wait_queries<kConfig>(wg.shared.q(), wg.at);
    steps.now = wg.shared.read_step(wg.at);
    if constexpr (!kConfig.holds_keys()) load_first_columns(words);
    issue_scores(S, words, wg.at);
    ptx::wgmma_wait<0>();
    if constexpr (kConfig.v_bytes() > 0) wg.shared.v().consumer_wait(wg.kv_at);

    const auto take = [&](auto first_step, auto masked) {
      constexpr bool kFirst = decltype(first_step)::kValue;
      [[maybe_unused]] Weights P, dS;
      Pairs pairs{};
      wait_queries<kConfig>(wg.shared.dout(), wg.dout_state());
      constexpr bool kMasked = decltype(masked)::kValue;
      constexpr bool kHides = kHidesAlways && !kFirst;
      if constexpr (kMasked || kConfig.maps_every_score() || kConfig.score.dropout) {
        wg.template apply_options<kHides>(S, pairs, key, steps.now);
      }
      if constexpr (kMasked) {
        if (kHides || steps.now.is_partial(wg.warpgroup)) {
          wg.apply_mask(S, key, steps.now);
        }
        wg.shift_large_scores(S);
      }
      this->template form_p_and_ds<kFirst>(S, P, dS, dV, words, pairs);
      Scores S_next;
      this->template multiply<kFirst>(S_next, dK, dS, words, steps);
#pragma unroll
      for (i32 k = 0; k < Warpgroup::kFloats; ++k) S[k] = S_next[k];
    };
    using Yes = Flag<true>;
    using No = Flag<false>;
    take(Yes{}, Yes{});
    if constexpr (kConfig.holds_keys()) wg.shared.k().consumer_wait(wg.kv_at);  // for dQ
    // Steps without mask and without large scores have a loop of their own: a branch that changes S
    // would cost it 32 to 64 moves of registers.
    while (!steps.now.is_last()) {
#pragma unroll 1
      while (!steps.now.is_last() && !steps.next.is_plain(wg.warpgroup)) {
        steps.now = steps.next;
        take(No{}, Yes{});
      }
#pragma unroll 1
      while (!steps.now.is_last() && steps.next.is_plain(wg.warpgroup)) {
        steps.now = steps.next;
        take(No{}, No{});
      }
    }

    return steps.dq_tile;
  }

  // dK and dV of a work tile, and dQ of its last step, whose product runs under the stores of dV.
  void finish_tile(Sums& dK, Sums& dV, const BackwardTile& work_tile, u32 last_tile) {
    const typename Shared::DsState last{wg.ds_at.index ^ 1, wg.ds_at.phase ^ wg.ds_at.index ^ 1};
    const bool is_whole = BackwardParts<kConfig>{wg}.gather(dK, dV, work_tile);
    [[maybe_unused]] float dQ[kConfig.dq_floats()];
    if constexpr (kConfig.dq) wg.issue_dq(dQ, last);
    if constexpr (kConfig.whole_heads) {  // the next K has no other buffer to come to
      ptx::wgmma_wait<0>();
      wg.release(wg.shared.k(), wg.kv_at);
      wg.kv_at.advance();
      wg.finish_dq(dQ, last, last_tile);
      write_dv(dK, dV, work_tile);
      return write_dk(dK, work_tile);
    }
    if (is_whole) write_dv(dK, dV, work_tile);
    if constexpr (kConfig.dq) {
      ptx::wgmma_wait<0>();
      wg.finish_dq(dQ, last, last_tile);
    }
    wg.release(wg.shared.k(), wg.kv_at);
    if (is_whole) write_dk(dK, work_tile);
    wg.kv_at.advance();
  }

  // dV; marks the head if dK or dV is not finite.
  void write_dv(const Sums& dK, Sums& dV, const BackwardTile& work_tile) const {
    if constexpr (kConfig.hides_pairs()) {
      const float found = (kConfig.dk ? probe(dK) : 0) + (kConfig.dv ? probe(dV) : 0);
      mark_nonfinite(wg.params.nonfinite, work_tile.batch_kv_head, found);
    }
    if constexpr (kConfig.dv) BackwardEpilogue<kConfig>{wg}.write_dv(dV, work_tile);
  }
  void write_dk(Sums& dK, const BackwardTile& work_tile) const {
    if constexpr (kConfig.dk) BackwardEpilogue<kConfig>{wg}.write_dk(dK, work_tile);
  }

  void run() {
    const DqConverter<kConfig> converter{wg.params, i32(ptx::thread_index() / 32) - 4,
                                         i32(wg.thread % 32)};
    if (wg.warpgroup == 1) wg.ping_pong_arrive();  // warpgroup 0 may begin
    if constexpr (kConfig.whole_heads) wg.head_dq().clear_all();
#pragma unroll 1
    for (;;) {
      wg.shared.work().consumer_wait(wg.work_at);
      const i32 num_steps = wg.shared.read_num_steps(wg.work_at);
      if (num_steps == BackwardWork::kEnd) break;
      if constexpr (kConfig.whole_heads) {
        wg.head_dq().write(wg.shared.read_conversion(wg.work_at));
      } else if constexpr (kConfig.dq) {
        converter.run(wg.shared.read_conversion(wg.work_at));
      }
      if (num_steps >= 0) {
        Sums dK, dV;
        if (num_steps > 0) {
          const i32 key =
              wg.shared.read_tile(wg.work_at).kv_block * kConfig.kv_rows() + 64 * i32(wg.warpgroup);
          const u32 last_tile = compute(dK, dV, key);
          // The work tile is read again: only the sums stay in registers during the steps.
          finish_tile(dK, dV, wg.shared.read_tile(wg.work_at), last_tile);
        } else {
#pragma unroll
          for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] = dV[i] = 0;
          write_dv(dK, dV, wg.shared.read_tile(wg.work_at));
          write_dk(dK, wg.shared.read_tile(wg.work_at));
        }
        if constexpr (!kConfig.whole_heads) {
          ptx::warp_sync();
          if (wg.thread % 32 == 0) ptx::mbarrier_arrive(wg.shared.dq_added(wg.work_at));
        }
      }
      wg.sync_warpgroup();
      if (wg.thread == 0) wg.shared.work().consumer_release(wg.work_at);
      wg.work_at.advance();
    }
    if (wg.warpgroup == 0) wg.ping_pong_wait();  // for the last arrival
    if (wg.thread == 0) ptx::tma_store_wait();
  }
};

// Always inlined, these too: a call would serialise the products (C7510).
template <BackwardSm90Config kConfig>
__attribute__((always_inline)) inline void backward_producers(
    const BackwardParams& params, const BackwardStorage<kConfig>& shared) {
  const u32 thread = ptx::thread_index();
  [[maybe_unused]] const i32 warp = ptx::broadcast(i32(thread / 32));
  ptx::setmaxnreg_dec<kConfig.producer_registers()>();
  if (thread == 0) {
    BackwardProducer<kConfig>{params, shared}.run();
    ptx::grid_dependency_wait();  // so that the end of this grid is the end of those before
  } else if (kConfig.whole_heads && thread == 32) {
    BackwardKeyProducer<kConfig>{params, shared}.run();
  } else if (thread == 32) {
    DqSemaphoreRelease<kConfig>{params, shared}.run();
  } else if (thread == 64) {
    BackwardDOutProducer<kConfig>{params, shared}.run();
  } else if (kConfig.paired && thread == 96) {
    BackwardDsSender<kConfig>{params, shared}.run();
  } else if (kConfig.deterministic && thread == 96) {
    DqSemaphoreAcquire<kConfig>{params, shared}.run();
  } else if (kConfig.score.varlen && warp == 3) {
    BackwardTailZeroFill<kConfig>{params, shared, thread % 32}.run();
  }
}

template <BackwardSm90Config kConfig>
__attribute__((always_inline)) inline void backward_consumers(const BackwardWarpgroup<kConfig>& own,
                                                              bool is_first) {
  ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
  if constexpr (!kConfig.divides_products()) {
    BackwardConsumer<kConfig>{own}.run();
  } else if constexpr (kConfig.paired) {
    if (is_first) {
      BackwardPairedConsumer<kConfig>{own}.template run<false>();
    } else {
      BackwardPairedConsumer<kConfig>{own}.template run<true>();
    }
  } else if (is_first) {
    BackwardDividedConsumer<kConfig>{own}.template run<false>();
  } else {
    BackwardDividedConsumer<kConfig>{own}.template run<true>();
  }
}

template <BackwardSm90Config kConfig>
__attribute__((always_inline)) inline void backward_sm90(const BackwardParams& params) {
  static_assert(kConfig.valid());
  const BackwardStorage<kConfig> shared{ptx::dynamic_shared()};
  const i32 warpgroup = ptx::broadcast(ptx::thread_index() / 128);
  if (ptx::thread_index() == 0) shared.init();
  if constexpr (kConfig.in_clusters()) {
    ptx::cluster_sync();
  } else {
    ptx::block_sync();
  }
  if (params.comes_first) ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  if (warpgroup == 0) {
    backward_producers<kConfig>(params, shared);
  } else {
    backward_consumers<kConfig>({{u32(warpgroup) - 1, ptx::thread_index() % 128}, params, shared},
                                warpgroup == 1);
  }
  if constexpr (kConfig.in_clusters()) {  // until then the other block may reach here
    ptx::warp_sync();
    ptx::cluster_sync();
  }
}

}  // namespace fulmen
