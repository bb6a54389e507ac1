// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The consumers of backward_sm90 above 128 dims, where the sums of dK and dV of 64 keys take 128
// registers a thread each. Both warpgroups have the same keys. The first makes P^T and sums dV, the
// second makes dS^T from dP^T and the first's P^T, which it finds in shared memory as the first's
// registers had it, and sums dK. A step is two products of each; those of one run under the
// exponentials, or the differences, of the other. Half of K (of V) is a left operand in registers:
// with all of it in shared memory a step would read more there than it multiplies (2,300 of 2,048
// cycles at 256 dims).
#pragma once

#include "kernels/backward_sm90/consumer.cuh"
#include "kernels/backward_sm90/epilogue.cuh"

namespace fulmen {

template <BackwardConfig kConfig>
struct BackwardDividedConsumer : BackwardWarpgroup<kConfig> {
  using Base = BackwardWarpgroup<kConfig>;
  using Base::apply_options, Base::hide, Base::lower_huge, Base::exponentiate, Base::round;
  using Base::at, Base::dout_at, Base::kv_at, Base::mail_at;
  using Base::kFloats, Base::kOutBarrier;
  using Base::params, Base::shared, Base::thread, Base::warpgroup;
  using Base::release, Base::take_turn, Base::pass_turn;
  using Base::share_p, Base::form_shared_ds, Base::dout_cursor;
  using typename Base::Scores;
  using typename Base::Sums;
  using typename Base::Weights;

  void advance() {
    at.advance();
    dout_at.advance();
  }

  // First warpgroup: dV of the item's keys, which begin at `key`.
  void sum_dv(Sums& dV, i32 key) {
    shared.k().wait(kv_at);
    const u32 keys = shared.k().address(kv_at);
    BackwardKeys<kConfig> rK;
    load_keys<kConfig>(rK, keys);
    Scores S;
    shared.q().wait(at);
    BackwardStepMail step = shared.read_step(at);
    issue_keys_by_queries<kConfig>(S, rK, keys, shared.q().address(at));
    ptx::wgmma_wait<0>();
    bool accumulate = false;
    // P^T = exp(scale S^T - lse), also for the other warpgroup; dV += P^T dO
    const auto issue_dv = [&] {
      typename Base::Pairs pairs{};
      Weights P;
      this->apply_options(S, pairs, key, step);
      if (step.is_partial(0)) this->hide(S, key, step.q_block());
      this->lower_huge(S);
      this->exponentiate(S);
      this->share_p(S, pairs);
      release(this->shared.q(), at);  // all lanes have read their rows
      this->round(P, S, pairs);
      this->shared.dout().wait(dout_cursor());
      take_turn();
      issue_keys_by_dims<kConfig>(dV, P, this->shared.dout().address(dout_cursor()), accumulate);
      accumulate = true;
    };
#pragma unroll 1
    while (!step.is_last()) {
      issue_dv();
      const auto here = dout_cursor();
      advance();
      // the next S^T = K Q^T
      shared.q().wait(at);
      step = shared.read_step(at);
      issue_keys_by_queries<kConfig>(S, rK, keys, shared.q().address(at));
      pass_turn();
      ptx::wgmma_wait<1>();
      release(shared.dout(), here);
      ptx::wgmma_wait<0>();
    }
    ptx::warp_sync();  // all lanes have read their columns of K
    release(shared.k(), kv_at);
    issue_dv();
    pass_turn();
    ptx::wgmma_wait<0>();
    release(shared.dout(), dout_cursor());
    advance();
  }

  // Second warpgroup: dK of the item's keys, before the scale.
  void sum_dk(Sums& dK) {
    shared.q().wait(at);
    BackwardStepMail step = shared.read_step(at);
    Scores dP;
    shared.dout().wait(dout_cursor());
    shared.v().wait(kv_at);
    const u32 values = shared.v().address(kv_at);
    BackwardKeys<kConfig> rV;
    load_keys<kConfig>(rV, values);
    issue_keys_by_queries<kConfig>(dP, rV, values, shared.dout().address(dout_cursor()));
    ptx::wgmma_wait<0>();
    bool accumulate = false;
    // dS^T = P^T (dP^T - delta), dK += dS^T Q
    const auto issue_dk = [&] {
      Weights dS;
      this->form_shared_ds(dS, dP);
      release(this->shared.dout(), dout_cursor());  // all lanes have read delta
      take_turn();
      issue_keys_by_dims<kConfig>(dK, dS, this->shared.q().address(at), accumulate);
      accumulate = true;
    };
#pragma unroll 1
    while (!step.is_last()) {
      issue_dk();
      const auto here = at;
      advance();
      // the next dP^T = V dO^T
      shared.dout().wait(dout_cursor());
      issue_keys_by_queries<kConfig>(dP, rV, values, shared.dout().address(dout_cursor()));
      pass_turn();
      ptx::wgmma_wait<1>();
      release(shared.q(), here);
      ptx::wgmma_wait<0>();
      shared.q().wait(at);
      step = shared.read_step(at);
    }
    ptx::warp_sync();  // all lanes have read their columns of V
    release(shared.v(), kv_at);
    issue_dk();
    pass_turn();
    ptx::wgmma_wait<0>();
    release(shared.q(), at);
    advance();
  }

  // kDk: the second warpgroup, else the first.
  template <bool kDk>
  void run() {
    if constexpr (kDk) pass_turn();  // the first may begin
#pragma unroll 1
    for (;;) {
      shared.mail().wait(mail_at);
      const i32 num_steps = shared.read_num_steps(mail_at);
      if (num_steps == BackwardMail::kEnd) break;
      Sums sums;
      if (num_steps > 0) {
        if constexpr (kDk) {
          sum_dk(sums);
        } else {
          sum_dv(sums, shared.read_item(mail_at).kv_block * kConfig.kv_rows());
        }
        kv_at.advance();
      } else {
#pragma unroll
        for (i32 i = 0; i < kConfig.dims / 2; ++i) sums[i] = 0;
      }
      ptx::warp_sync();
      if (thread % 32 == 0) ptx::mbarrier_arrive(shared.added(mail_at));
      // The mail is read again: nothing but the sums has lived through the steps.
      const BackwardItem done = shared.read_item(mail_at);
      if constexpr (kConfig.hides_pairs()) {
        report_spoiled(params.spoiled, done.line, probe(sums));
      }
      const BackwardOutput<kConfig> output{*this};
      if constexpr (kDk) {
        output.write_dk(sums, done);
      } else {
        output.write_dv(sums, done);
      }
      ptx::bar_sync(kOutBarrier + warpgroup, 128);
      if (thread == 0) shared.mail().release(mail_at);
      mail_at.advance();
    }
    if constexpr (!kDk) take_turn();  // takes the turn that nobody needs
  }
};

}  // namespace fulmen
