// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dQ on Hopper by blocks of queries: a warpgroup keeps 64 rows of Q and dO in shared memory and its
// sums of dQ in registers and loops over the keys that they see, so nothing is added in global
// memory and every run gives the same bits. Scheduler, storage, scores and masks are those of
// forward_sm90; two warpgroups share K and V, and with ping-pong the exponentials of one run under
// the products of the other. Used where backward_sm90 leaves dQ out: head dimensions above 128,
// where its sums of dK and dV fill the registers, options of scores, and some deterministic calls.
// Must hold: sm_90a, a valid config with two slots of Q for each warpgroup, launched with threads()
// threads, shared_bytes() bytes and at most one thread block a multiprocessor, after
// backward_preprocess_sm90.
#pragma once

#include "kernels/backward_sm90/config_beside.h"
#include "kernels/common/fragment_captures.cuh"
#include "kernels/common/nonfinite_sm90.cuh"
#include "kernels/common/products_sm90.cuh"
#include "kernels/common/scores_sm90.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/dq_sm90/producer.cuh"
#include "kernels/dq_sm90/query_terms.cuh"
#include "kernels/forward_sm90/scheduler.cuh"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/grid.cuh"

namespace fulmen {

// ---- Consumers: warpgroups of 128 threads, 64 query rows each -----------------------------------

// Whether the products of the next block are issued behind those of one: options leave no registers
// for a second pair.
template <ForwardSm90Config kConfig>
inline constexpr bool kDqLooksAhead = !kConfig.maps_every_score() && !kConfig.score.dropout;

template <ForwardSm90Config kConfig>
struct BackwardDqConsumer
    : ConsumerThread<kConfig.warpgroups, kConfig.ping_pong && kDqLooksAhead<kConfig>> {
  static constexpr bool kLooksAhead = kDqLooksAhead<kConfig>;
  static constexpr bool kListed = kConfig.score.has_tile_lists();
  using Thread = ConsumerThread<kConfig.warpgroups, kConfig.ping_pong && kLooksAhead>;
  using Thread::first_column, Thread::first_row, Thread::ping_pong_arrive, Thread::ping_pong_wait,
      Thread::thread, Thread::warpgroup;
  using Shared = ForwardStorage<kConfig>;
  using Scores = float[kConfig.kv_rows / 2];
  using Weights = u32[kConfig.kv_rows / 4];
  using Sums = float[kConfig.d_qk / 2];
  using Captures = FragmentCaptures<UserPairsSm90<kConfig>, kConfig.score.user.captures>;
  // No part of dO is in registers.
  static constexpr ForwardSm90Config kDOutConfig = [] {
    ForwardSm90Config config = kConfig;
    config.q_register_dims = 0;
    return config;
  }();

  const BackwardDqParams& params;
  Shared shared;
  typename Shared::QState q_at;
  typename Shared::KvState kv_at;
  PairTileReader<kConfig> pair_tiles{shared};

  struct Work {
    QueryBlock block;
    i32 row;    // the thread's first, in the sequence; the second is 8 further
    u32 count;  // number of the work tile
  };
  SeqlenInfo seqlen_info(const Work& work) const {
    return read_seqlen_info(shared, params.forward, work.block, work.count);
  }

  void release(u32 barrier) const {
    if (thread == 0) ptx::mbarrier_arrive(barrier);
  }

  void release_k(typename Shared::KvState at) const {
    const u32 of = kListed ? thread % 32 : thread;
    if (of == 0) ptx::mbarrier_arrive(shared.k().empty(at));
  }

  // Q and dO of a work tile.
  void release_queries() {
    for (i32 n = 0; n < 2; ++n) {
      release(shared.q().empty(q_at));
      q_at.advance(kConfig.warpgroups);
    }
  }

  // Blocks of keys from j down to `begin` that only other warpgroups of this thread block see.
  void skip_blocks(i32& j, i32 begin) {
#pragma unroll 1
    for (; j >= begin; --j) {
      pair_tiles.skip();
      this->skip_block(shared.k(), kv_at, shared.v(), kv_at);
      kv_at.advance();
    }
  }

  // Of the pairs of a thread's two rows.
  struct Pairs {
    QueryTerms<kConfig> terms;
    FragmentScores<kConfig> scores;
    Interval visible[2];  // keys
  };
  Pairs pairs_of(const Work& work, const SeqlenInfo& seqlen) const {
    const ExpressionParams* expression = nullptr;
    if constexpr (kConfig.score.user.any()) expression = &expression_of(params);
    Pairs pairs{{params, work.block, seqlen, work.row},
                {params.forward, seqlen, work.block, work.row, expression},
                {}};
    for (i32 r = 0; r < 2; ++r) {
      pairs.visible[r] = visible_columns(effective_mask<kConfig>(params.forward.mask), seqlen.shape,
                                         work.row + 8 * r);
    }
    return pairs;
  }

  // S = Q K^T, dP = dO V^T of the block at kv_at
  void issue_products(Scores& S, Scores& dP, const QRegisters<kConfig>& rQ, u32 q, u32 dout) const {
    shared.k().consumer_wait(kv_at);
    issue_scores<kConfig>(S, rQ, q, shared.k().address(kv_at));
    shared.v().consumer_wait(kv_at);
    issue_scores<kDOutConfig>(dP, QRegisters<kDOutConfig>{}, dout, shared.v().address(kv_at));
  }

  // dS = P (dP - delta) of block j, where P = exp(score - lse) is made under the second product
  template <bool kPartial>
  void finish_products(Weights& dS, Scores& S, Scores& dP, const Pairs& pairs, Captures& captures,
                       i32 j) {
    const auto keys = pairs.scores.keys(j * kConfig.kv_rows);  // under the products
    ptx::wgmma_wait<1>();
    auto slopes = pairs.terms.slopes(S);
    const bool exactly =  // of large biases
        !kConfig.tiled_bias || !kConfig.score.stats || kConfig.score.user.captures ||
        pairs.terms.has_large_scores;
    pairs.scores.template apply<!kPartial>(S, keys, pair_tiles.tile(warpgroup), exactly, slopes);
    pair_tiles.release();
    if constexpr (kPartial)
      hide_keys<kConfig>(S, pairs.visible, j * kConfig.kv_rows + first_column());
    if (kConfig.score.stats && pairs.terms.has_large_scores) {
      pairs.terms.shift_large_scores(S);
      pairs.terms.exponentiate(S);
    } else {
      pairs.terms.exponentiate(S);
    }
    ptx::wgmma_wait<0>();
    release(shared.v().empty(kv_at));
    pairs.terms.drop(dP, pairs.scores, j * kConfig.kv_rows);
    pairs.terms.form_ds(S, dP, slopes);
    captures.add(pairs.scores.pairs.user, dP, slopes.before, j * kConfig.kv_rows);
    round_probabilities<kConfig>(dS, S);
  }

  // dQ += dS K of the block at kv_at, with no product behind it.
  void add_block(Sums& dQ, const Weights& dS, bool accumulate) {
    ping_pong_wait();
    issue_output<kConfig>(dQ, dS, shared.k().address(kv_at), accumulate);
    ping_pong_arrive();
    ptx::wgmma_wait<0>();
    release_k(kv_at);
    kv_at.advance();
  }

  // A row that sees no key may hold NaN.
  void zero_masked_rows(Sums& dQ, const Pairs& pairs) const {
    if constexpr (kConfig.score.mask_kind != MaskKind::kNone || kConfig.score.varlen) {
      for (i32 r = 0; r < 2; ++r) {
        if (pairs.visible[r].size() <= 0) clear_row(dQ, r);
      }
    }
  }

  // step(Flag<partial>) for the blocks of keys from j on, or after `listed`.
  template <class Step>
  void walk(const KeyBlocks& blocks, const i32& j, const KeyStep& listed, const Step& step) const {
    if constexpr (kListed) return walk_listed(listed, q_tile<kConfig>(warpgroup), step);
#pragma unroll 1
    while (j >= blocks.full_end) step(Flag<true>{});
#pragma unroll 1
    while (j >= blocks.full_begin) step(Flag<false>{});
    if constexpr (kConfig.score.mask_kind == MaskKind::kBoth || kConfig.skips_documents) {
#pragma unroll 1
      while (j >= blocks.begin) step(Flag<true>{});
    }
  }

  // What the block at kv_at is and what comes next; returns its number.
  i32 take_key_step(KeyStep& listed) const {
    shared.k().consumer_wait(kv_at);
    return fulmen::take_key_step<kConfig>(shared, kv_at, warpgroup, listed);
  }

  // dQ of 64 rows, before the scale.
  void compute(Sums& dQ, const Work& work, const KeyBlocks& blocks) {
    typename Shared::QState dout_at = q_at;
    dout_at.advance(kConfig.warpgroups);
    const SeqlenInfo seqlen = seqlen_info(work);
    const Pairs pairs = pairs_of(work, seqlen);
    i32 j = blocks.all_end - 1;
    if constexpr (!kListed) skip_blocks(j, blocks.end);
    shared.q().consumer_wait(q_at);
    shared.q().consumer_wait(dout_at);
    const u32 q = shared.q().address(q_at), dout = shared.q().address(dout_at);
    QRegisters<kConfig> rQ;
    load_q_registers<kConfig>(rQ, q);
    if (kConfig.q_register_dims > 0) this->sync_warpgroup();  // all warps have read Q
    Captures captures(1.f / static_cast<float>(1 << weight_shift(kConfig.dtype)));
    Scores S, dP;
    Weights dS;
    bool accumulate = false;
    KeyStep listed{};  // with lists of tiles
    const auto issue = [&](Scores& S, Scores& dP) {
      if constexpr (kListed) j = take_key_step(listed);
      issue_products(S, dP, rQ, q, dout);
    };
    // dQ += dS K of a block; kLooksAhead: S and dP of the next block are issued behind it
    const auto step = [&](auto partial) {
      constexpr bool kPartial = decltype(partial)::kValue;
      if constexpr (kLooksAhead) {
        const typename Shared::KvState here = kv_at;
        kv_at.advance();
        ping_pong_wait();
        issue_output<kConfig>(dQ, dS, this->shared.k().address(here), accumulate);
        accumulate = true;
        issue(S, dP);
        ping_pong_arrive();
        ptx::wgmma_wait<2>();
        release_k(here);
        this->template finish_products<kPartial>(dS, S, dP, pairs, captures, j--);
      } else {
        Scores S, dP;
        Weights dS;
        issue(S, dP);
        this->template finish_products<kPartial>(dS, S, dP, pairs, captures, j--);
        add_block(dQ, dS, accumulate);
        accumulate = true;
      }
    };
    if constexpr (kLooksAhead) {
      issue(S, dP);
      finish_products<true>(dS, S, dP, pairs, captures, j--);
    } else if constexpr (kListed) {
      step(Flag<true>{});
    }
    walk(blocks, j, listed, step);
    if constexpr (kLooksAhead) add_block(dQ, dS, accumulate);
    captures.flush();
    release_queries();
    if constexpr (kConfig.score.mask_kind == MaskKind::kBoth && !kListed) {
      skip_blocks(j, blocks.all_begin);
    }
    zero_masked_rows(dQ, pairs);
  }

  // scale dQ, rounded, to global memory; rows past the end are not written.
  void write(Sums& dQ, const Work& work) const {
    const SeqlenInfo seqlen = seqlen_info(work);
    const ArrayView& dq = params.forward.attention.dq;
    constexpr float kSumScale = 1.f / static_cast<float>(1 << weight_shift(kConfig.dtype));
    const float factor = params.forward.scale * kSumScale;
    const float scale[2] = {factor, factor};
    scale_rows(dQ, scale);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 row = work.row + 8 * r;
      const i64 at = dq.offset(seqlen.batch, work.block.head, seqlen.q_begin + row, 0);
      store_output_row<kConfig.dtype>(dQ, r, reinterpret_cast<u16*>(dq.data) + at,
                                      row < seqlen.shape.q_len,
                                      i32(params.forward.attention.dim_qk));
    }
  }

  void run() {
    const ForwardParams& forward = params.forward;
    q_at.advance(warpgroup);
    if (warpgroup == 1) ping_pong_arrive();  // warpgroup 0 may begin
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.published(count), Shared::parity(count));
      const WorkTile tile = read_work_tile(shared, count);
      const QueryBlock& block = tile.block;
      if (block.q_block < 0) break;
      const i32 row = block.q_block * kConfig.q_rows() + 64 * i32(warpgroup) + first_row();
      const Work work{block, row, count};
      Sums dQ;
      compute(dQ, work, read_key_blocks(shared, count, warpgroup));
      if constexpr (kConfig.score.mask_kind != MaskKind::kNone || kConfig.score.has_pair_terms() ||
                    kConfig.score.has_tile_lists()) {
        const i32 group = forward.heads_q / forward.heads_kv;
        mark_nonfinite(params.nonfinite, block.batch * forward.heads_kv + block.head / group,
                       probe(dQ));
      }
      write(dQ, work);
      ptx::warp_sync();
      if (thread % 32 == 0) ptx::mbarrier_arrive(shared.done(count));
    }
    if (warpgroup == 0) ping_pong_wait();  // for the last arrival
  }
};

template <ForwardSm90Config kConfig>
inline void backward_dq_sm90(const BackwardDqParams& params) {
  static_assert(kConfig.valid() && kConfig.d_qk == kConfig.d_v && !kConfig.stage_output);
  static_assert(kConfig.num_q_slots() == 2 * kConfig.warpgroups && kConfig.stages >= 2);
  const ForwardStorage<kConfig> shared{ptx::dynamic_shared()};
  const i32 warpgroup = ptx::broadcast(ptx::thread_index() / 128);
  const i32 warp = ptx::broadcast(ptx::thread_index() / 32 % 4);
  const u32 thread = ptx::thread_index() % 128;
  if (ptx::thread_index() == 0) shared.init();
  ptx::block_sync();
  if (params.comes_first) ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  if (warpgroup == kConfig.warpgroups) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    if (thread == 0) {
      BackwardDqProducer<kConfig>{params, shared}.run();
      ptx::grid_dependency_wait();  // so that the end of this grid is the end of those before
    } else if (warp == 1) {
      ForwardScheduler<kConfig>{params.forward, shared, thread % 32}.run();
    } else if (kConfig.score.varlen && warp == 2) {
      BackwardDqTailZeroFill<kConfig>{params, shared}.run();
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    BackwardDqConsumer<kConfig>{{u32(warpgroup), thread}, params, shared}.run();
  }
}

}  // namespace fulmen
