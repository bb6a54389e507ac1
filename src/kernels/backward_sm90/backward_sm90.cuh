// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients of exact attention on Hopper: dQ, dK and dV in one kernel, 16-bit in and out, float32
// inside. A thread block stays on its multiprocessor and takes blocks of 128 keys from a counter.
// Two threads load (BackwardLoader, BackwardDOutLoader); two warpgroups (BackwardConsumer) keep 64
// keys each with their sums of dK and dV in registers, and walk over the queries that see them; a
// third thread announces what has been added to dQ (BackwardReporter). The warpgroups meet only
// over dS, which the product for dQ takes a step late, so one does its exponentials under the
// products of the other. Dao, "FlashAttention-2" (2023), section 3.1.2, and Shah et al.,
// "FlashAttention-3" (2024); dQ that stays in the L2 is ours (tile/backward_dq.cuh). Must hold:
// sm_90a, kConfig.valid(), launched with threads() threads and shared_bytes() bytes, after
// backward_prepare_sm90, with a backward_schedule of the grid.
#pragma once

#include "kernels/backward_sm90/consumer.cuh"
#include "kernels/backward_sm90/consumer_split.cuh"
#include "kernels/backward_sm90/dq_semaphore.cuh"
#include "kernels/backward_sm90/epilogue.cuh"
#include "kernels/backward_sm90/producer.cuh"

namespace fulmen {

// ---- Consumers: two warpgroups of 128 threads, 64 keys each ------------------------------------

template <BackwardConfig kConfig>
struct BackwardConsumer : BackwardWarpgroup<kConfig> {
  using Base = BackwardWarpgroup<kConfig>;
  using Base::apply_options, Base::hide, Base::exponentiate, Base::round, Base::form_ds;
  using Base::at, Base::ds_at, Base::dout_at, Base::kv_at, Base::mail_at;
  using Base::kFloats, Base::kOutBarrier;
  using Base::params, Base::shared, Base::thread, Base::warpgroup;
  using Base::release, Base::take_turn, Base::pass_turn;
  using Base::share_ds, Base::issue_dq, Base::finish_dq, Base::dout_cursor;
  using Keys = BackwardKeys<kConfig>;
  using typename Base::Pairs;
  using typename Base::Scores;
  using typename Base::Shared;
  using typename Base::Sums;
  using typename Base::Weights;

  // Queries of a step whose dV += P^T dO is issued before dS is formed, as the registers allow.
  static constexpr i32 kEarlyRows = !kConfig.needs_dp() ? kConfig.q_rows
                                    : kConfig.early_dv  ? 64
                                                        : 0;

  // Whether rows that are huge go through the mask as well: where S takes 64 registers a branch
  // that changes it costs every loop as many moves.
  static constexpr bool kHidesAlways = kConfig.q_rows == 128;

  u32 keys_of(Ring<1> ring) const { return ring.address(kv_at) + 64 * 128 * warpgroup; }
  void issue_scores(Scores& S, const Keys& rK, typename Shared::StageCursor of) const {
    issue_keys_by_queries<kConfig>(S, rK, keys_of(shared.k()), shared.q().address(of));
  }

  // dV += P^T dO over queries [kBegin, kEnd) of the step.
  template <i32 kBegin, i32 kEnd>
  void issue_dv(Sums& dV, Weights& P, const Scores& S, const Pairs& pairs, bool accumulate) const {
    if constexpr (kConfig.dv && kBegin < kEnd) {
      this->template round<kBegin, kEnd>(P, S, pairs);
      issue_keys_by_dims<kConfig, kBegin, kEnd>(dV, P, shared.dout().address(dout_cursor()),
                                                accumulate);
    }
  }

  // S^T becomes P^T, under dP^T = V dO^T; dV += P^T dO, under dS^T = P^T (dP^T - delta).
  template <bool kFirst>
  void weigh(Scores& S, Weights& P, Weights& dS, Sums& dV, const Pairs& pairs) const {
    [[maybe_unused]] Scores dP;
    if constexpr (kConfig.needs_dp()) {
      const u32 none[1] = {};  // all of V is in shared memory
      issue_keys_by_queries<kConfig>(dP, none, keys_of(shared.v()),
                                     shared.dout().address(dout_cursor()));
    }
    exponentiate(S);
    issue_dv<0, kEarlyRows>(dV, P, S, pairs, !kFirst);
    if constexpr (kConfig.needs_dp()) {
      ptx::wgmma_wait<kConfig.dv && kEarlyRows != 0 ? 1 : 0>();
      form_ds(dS, S, dP, pairs);
    }
    issue_dv<kEarlyRows, kConfig.q_rows>(dV, P, S, pairs, !kFirst || kEarlyRows != 0);
    if constexpr (kConfig.dq) {
      share_ds(dS);
    } else {
      ptx::warp_sync();  // all lanes have read rows and delta
    }
  }

  // Which steps a warpgroup is at.
  struct Steps {
    BackwardStepMail now, next;  // `next` is read early, under the products of this one
    u32 tile;                    // of dQ, of the step before
  };

  // In turn: dQ = dS K of the step before, the next S^T = K Q^T (after the last step this one's
  // once more, and not used), dK += dS^T Q.
  template <bool kFirst>
  void multiply(Scores& S, Sums& dK, const Weights& dS, const Keys& rK, Steps& steps) {
    constexpr bool kDq = kConfig.dq && !kFirst;
    const typename Shared::StageCursor here = at;
    const typename Shared::DOutCursor dout_here = dout_cursor();
    const typename Shared::DsCursor ds_here = ds_at;
    at.advance();
    dout_at.advance();
    ds_at.advance();
    const typename Shared::DsCursor before{ds_at.buffer, ds_at.parity ^ 1};
    [[maybe_unused]] float dQ[kConfig.dq_floats()];
    if constexpr (!kDq) ptx::wgmma_wait<0>();
    take_turn();
    if constexpr (kDq) issue_dq(dQ, before);
    if constexpr (kConfig.late_ds()) this->announce_ds(ds_here);
    if constexpr (kDq) ptx::wgmma_wait<1>();  // for dV
    const bool is_last = steps.now.is_last();
    if (!is_last) {
      shared.q().wait(at);
      steps.next = shared.read_step(at);
      if (this->has_huge(at)) steps.next.flags |= BackwardStepMail::kHuge;
    }
    issue_scores(S, rK, is_last ? here : at);
    if constexpr (kConfig.dk) {
      issue_keys_by_dims<kConfig>(dK, dS, shared.q().address(here), !kFirst);
    }
    pass_turn();
    release(shared.dout(), dout_here);
    if (kConfig.needs_dp() && is_last) release(shared.v(), kv_at);
    if constexpr (kDq) {
      ptx::wgmma_wait<kConfig.dk ? 2 : 1>();
      finish_dq(dQ, before, steps.tile);
    }
    ptx::wgmma_wait<0>();
    release(shared.q(), here);
    steps.tile = steps.now.tile;
  }

  // All steps of an item, whose keys of this warpgroup begin at `key`; leaves its dK (unscaled) and
  // dV, and dQ of the last step, whose tile it returns.
  u32 compute(Sums& dK, Sums& dV, i32 key) {
    Steps steps;
    Scores S;  // becomes P; S of the next step is issued before this one ends
    shared.q().wait(at);
    steps.now = shared.read_step(at);
    shared.k().wait(kv_at);
    Keys rK;
    load_keys<kConfig>(rK, keys_of(shared.k()));
    issue_scores(S, rK, at);
    ptx::wgmma_wait<0>();
    if constexpr (kConfig.needs_dp()) shared.v().wait(kv_at);

    const auto take = [&](auto first_step, auto masked) {
      constexpr bool kFirst = decltype(first_step)::kValue;
      [[maybe_unused]] Weights P, dS;
      Pairs pairs{};
      this->shared.dout().wait(dout_cursor());
      this->apply_options(S, pairs, key, steps.now);
      if constexpr (decltype(masked)::kValue) {
        const bool hides = kHidesAlways && !kFirst;
        if (hides || steps.now.is_partial(this->warpgroup)) {
          this->hide(S, key, steps.now.q_block());
        }
        this->lower_huge(S);
      }
      this->template weigh<kFirst>(S, P, dS, dV, pairs);
      Scores S_next;
      this->template multiply<kFirst>(S_next, dK, dS, rK, steps);
#pragma unroll
      for (i32 k = 0; k < kFloats; ++k) S[k] = S_next[k];
    };
    using Yes = Flag<true>;
    using No = Flag<false>;
    take(Yes{}, Yes{});
    // Steps that every key sees whole, in rows that are not huge, have a loop of their own: a
    // branch that changes S would cost it 32 to 64 moves of registers.
    while (!steps.now.is_last()) {
#pragma unroll 1
      while (!steps.now.is_last() && !steps.next.is_plain(warpgroup)) {
        steps.now = steps.next;
        take(No{}, Yes{});
      }
#pragma unroll 1
      while (!steps.now.is_last() && steps.next.is_plain(warpgroup)) {
        steps.now = steps.next;
        take(No{}, No{});
      }
    }

    return steps.tile;
  }

  // dK and dV of an item, and dQ of its last step, whose product runs under the way out of dV.
  void finish_item(Sums& dK, Sums& dV, const BackwardItem& item, u32 last_tile) {
    const typename Shared::DsCursor last{ds_at.buffer ^ 1, ds_at.parity ^ ds_at.buffer ^ 1};
    const bool is_whole = BackwardParts<kConfig>{*this}.gather(dK, dV, item);
    [[maybe_unused]] float dQ[kConfig.dq_floats()];
    if constexpr (kConfig.dq) issue_dq(dQ, last);
    if (is_whole) write_dv(dK, dV, item);
    if constexpr (kConfig.dq) {
      ptx::wgmma_wait<0>();
      finish_dq(dQ, last, last_tile);
    }
    release(shared.k(), kv_at);
    if (is_whole) write_dk(dK, item);
    kv_at.advance();
  }

  // dV, and a report of both if they are not finite.
  void write_dv(const Sums& dK, Sums& dV, const BackwardItem& item) const {
    if constexpr (kConfig.hides_pairs()) {
      const float found = (kConfig.dk ? probe(dK) : 0) + (kConfig.dv ? probe(dV) : 0);
      report_spoiled(params.spoiled, item.line, found);
    }
    if constexpr (kConfig.dv) BackwardOutput<kConfig>{*this}.write_dv(dV, item);
  }
  void write_dk(Sums& dK, const BackwardItem& item) const {
    if constexpr (kConfig.dk) BackwardOutput<kConfig>{*this}.write_dk(dK, item);
  }

  void run() {
    const DqFinish<kConfig> finish{params, i32(ptx::thread_index() / 32) - 4, i32(thread % 32)};
    if (warpgroup == 1) pass_turn();  // the first may begin
#pragma unroll 1
    for (;;) {
      shared.mail().wait(mail_at);
      const i32 num_steps = shared.read_num_steps(mail_at);
      if (num_steps == BackwardMail::kEnd) break;
      if constexpr (kConfig.dq) finish.run(shared.read_rounding(mail_at));
      if (num_steps >= 0) {
        Sums dK, dV;
        if (num_steps > 0) {
          const i32 key =
              shared.read_item(mail_at).kv_block * kConfig.kv_rows() + 64 * i32(warpgroup);
          const u32 last_tile = compute(dK, dV, key);
          // The mail is read again: nothing but the sums has lived through the steps.
          finish_item(dK, dV, shared.read_item(mail_at), last_tile);
        } else {
#pragma unroll
          for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] = dV[i] = 0;
          write_dv(dK, dV, shared.read_item(mail_at));
          write_dk(dK, shared.read_item(mail_at));
        }
        ptx::warp_sync();
        if (thread % 32 == 0) ptx::mbarrier_arrive(shared.added(mail_at));
      }
      ptx::bar_sync(kOutBarrier + warpgroup, 128);
      if (thread == 0) shared.mail().release(mail_at);
      mail_at.advance();
    }
    if (warpgroup == 0) take_turn();  // takes the turn that nobody needs
    if (thread == 0) ptx::tma_store_wait();
  }
};

// Inlined always: a call would serialise the products (C7510).
template <BackwardConfig kConfig>
__attribute__((always_inline)) inline void backward_sm90(const BackwardParams& params) {
  static_assert(kConfig.valid());
  const BackwardShared<kConfig> shared{ptx::dynamic_shared()};
  const i32 warpgroup = ptx::broadcast(ptx::thread_index() / 128);
  const i32 warp = ptx::broadcast(ptx::thread_index() / 32);
  if (ptx::thread_index() == 0) shared.init();
  ptx::block_sync();
  if (params.comes_first) ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    if (ptx::thread_index() == 0) {
      BackwardLoader<kConfig>{params, shared}.run();
      ptx::grid_dependency_wait();  // so that the end of this grid is the end of those before
    } else if (ptx::thread_index() == 32) {
      BackwardReporter<kConfig>{params, shared}.run();
    } else if (ptx::thread_index() == 64) {
      BackwardDOutLoader<kConfig>{params, shared}.run();
    } else if (kConfig.ordered && ptx::thread_index() == 96) {
      BackwardUsher<kConfig>{params, shared}.run();
    } else if (kConfig.sequences && warp == 3) {
      BackwardCleaner<kConfig>{params, shared, ptx::thread_index() % 32}.run();
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    const BackwardWarpgroup<kConfig> own{params, shared, u32(warpgroup) - 1,
                                         ptx::thread_index() % 128};
    if constexpr (!kConfig.divides_products()) {
      BackwardConsumer<kConfig>{own}.run();
    } else if (warpgroup == 1) {
      BackwardDividedConsumer<kConfig>{own}.template run<false>();
    } else {
      BackwardDividedConsumer<kConfig>{own}.template run<true>();
    }
  }
}

}  // namespace fulmen
