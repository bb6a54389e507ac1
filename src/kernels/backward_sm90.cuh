// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients of exact attention on Hopper: dQ, dK and dV in one kernel, 16-bit in and out, float32
// inside. A thread block stays on its multiprocessor and takes blocks of 128 keys from a counter.
// One warp loads (BackwardLoader); two warpgroups (BackwardConsumer) keep 64 keys each with their
// sums of dK and dV in registers, and walk over the queries that see them; a thread of a third warp
// announces what has been added to dQ (BackwardReporter). The warpgroups meet only over dS, which
// the product for dQ takes a step late, so one does its exponentials under the products of the
// other. Dao, "FlashAttention-2" (2023), section 3.1.2, and Shah et al., "FlashAttention-3" (2024);
// dQ that stays in the L2 is ours (tile/backward_dq.cuh). Must hold: sm_90a, kConfig.valid(),
// launched with threads() threads and shared_bytes() bytes, after backward_prepare_sm90, with a
// backward_schedule of the grid.
#pragma once

#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/backward_dq.cuh"
#include "kernels/tile/backward_products.cuh"
#include "kernels/tile/backward_shared.cuh"
#include "kernels/tile/store_output.cuh"

namespace fulmen {

// ---- Loader: one thread claims items and talks to the copy engine ------------------------------

template <BackwardConfig kConfig>
struct BackwardLoader {
  using Shared = BackwardShared<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::StageCursor at;
  typename Shared::DOutCursor dout_at;
  typename Shared::KvCursor kv_at;

  void load(const TensorMap& map, u32 tile, u32 full, i32 rows, i32 row, i32 head,
            i32 batch) const {
#pragma unroll
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch);
    }
  }

  // Blocks of queries that see all of a warpgroup's 64 keys.
  Interval full_blocks(const SequenceShape& shape, i32 key) const {
    if (key + 64 > shape.kv_len) return {0, 0};
    return seeing_blocks<kConfig>(params.mask, shape, key, 64).full;
  }

  void load_item(const BackwardItem& item, const Sequence& sequence, const BackwardWalk& walk) {
    const i32 index = item.line / params.heads_kv;
    const i32 kv_head = item.line - index * params.heads_kv;
    const i32 batch = i32(sequence.batch);
    const i32 key = item.kv_block * kConfig.kKvRows;
    const i32 kv_row = i32(sequence.kv_begin) + key;
    const i32 num_steps = walk.num_steps();
    if (num_steps > 0) {  // K and V are still in use by the item before: to the L2 meanwhile
#pragma unroll
      for (i32 d = 0; d < kConfig.dims; d += 64) {
        ptx::tma_prefetch(params.maps.k, d, kv_row, kv_head, batch);
        if constexpr (kConfig.needs_dp()) {
          ptx::tma_prefetch(params.maps.v, d, kv_row, kv_head, batch);
        }
      }
    }
    if (kConfig.dq && item.line >= params.num_slots) {  // its sums are clear again
      ptx::await(params.freed + item.line - params.num_slots,
                 params.num_kv_blocks * BackwardConfig::kConsumerWarps);
    }
    const auto q = shared.q();
    const auto dout = shared.dout();
    const auto k = shared.k(), v = shared.v();
    const Interval full[2] = {full_blocks(sequence.shape, key),
                              full_blocks(sequence.shape, key + 64)};
    const i64 first_line = i64(batch) * params.heads_q + kv_head * params.group_size();
    const i64 first_row =
        padded_row(kConfig.sequences && params.attention.packed, index, sequence.q_begin);
    BackwardStep step;
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(walk)) {
      const i32 head = kv_head * params.group_size() + step.head;
      const i32 q_block = step.q_block(walk);
      const i32 row = i32(sequence.q_begin) + q_block * kConfig.q_rows;
      const i64 kept =
          (first_line + step.head) * params.rows_of_head + first_row + q_block * kConfig.q_rows;
      const u32 q_full = kConfig.sequences ? shared.q_landed(at) : q.full(at);
      const u32 dout_full = kConfig.sequences ? shared.dout_landed(dout_at) : dout.full(dout_at);
      ptx::mbarrier_wait(q.empty(at), at.parity ^ 1);
      u32 flags = q_block;
      if (i + 1 == num_steps) flags |= BackwardStepMail::kLast;
      for (u32 w = 0; w < 2; ++w) {
        if (!full[w].contains(q_block)) flags |= BackwardStepMail::kPartial << w;
      }
      shared.write_step(at,
                        {first_dq_tile<kConfig>(params, item.line, step.head) + q_block, flags});
      ptx::mbarrier_arrive_expect(q_full, kConfig.q_bytes() + kConfig.row_bytes());
      load(params.maps.q, q.address(at), q_full, kConfig.q_rows, row, head, batch);
      ptx::bulk_load(shared.rows(at), params.rows + kept * (kConfig.has_stats ? 2 : 1),
                     kConfig.row_bytes(), q_full);
      if (i == 0) {
        const u32 full_barrier = kConfig.sequences ? shared.k_landed() : k.full(kv_at);
        ptx::mbarrier_wait(k.empty(kv_at), kv_at.parity ^ 1);
        ptx::mbarrier_arrive_expect(full_barrier, kConfig.k_bytes());
        load(params.maps.k, k.address(kv_at), full_barrier, kConfig.kKvRows, kv_row, kv_head,
             batch);
      }
      ptx::mbarrier_wait(dout.empty(dout_at), dout_at.parity ^ 1);
      ptx::mbarrier_arrive_expect(dout_full, kConfig.q_bytes() + kConfig.delta_bytes());
      load(params.maps.dout, dout.address(dout_at), dout_full, kConfig.q_rows, row, head, batch);
      ptx::bulk_load(shared.delta(dout_at), params.delta + kept, kConfig.delta_bytes(), dout_full);
      if (kConfig.needs_dp() && i == 0) {
        const u32 full_barrier = kConfig.sequences ? shared.v_landed() : v.full(kv_at);
        ptx::mbarrier_wait(v.empty(kv_at), kv_at.parity ^ 1);
        ptx::mbarrier_arrive_expect(full_barrier, kConfig.k_bytes());
        load(params.maps.v, v.address(kv_at), full_barrier, kConfig.kKvRows, kv_row, kv_head,
             batch);
      }
      if (i == 0) kv_at.advance();
      at.advance();
      dout_at.advance();
    }
  }

  void run() {
    typename Shared::MailCursor mail_at;
#pragma unroll 1
    for (;;) {
      // Claims late, so that longest-first balances.
      const i32 index = ptx::atomic_add(params.next_item, 1);
      const bool has_keys = index < params.num_items();
      const BackwardItem item = has_keys ? backward_item(params, index) : BackwardItem{0, 0};
      const Sequence sequence = backward_sequence<kConfig>(params, item.line / params.heads_kv);
      const BackwardWalk walk = backward_walk<kConfig>(params, sequence.shape, item.kv_block);
      ptx::mbarrier_wait(shared.mail().empty(mail_at), mail_at.parity ^ 1);
      shared.write_mail(mail_at, {index, walk.num_steps(), item, sequence.shape});
      ptx::mbarrier_arrive(shared.mail().full(mail_at));
      mail_at.advance();
      if (index >= params.num_items() + params.lag) return;
      if (has_keys) load_item(item, sequence, walk);
    }
  }
};

// ---- Cleaner: one warp, where sequences differ -------------------------------------------------

// A tile at the end of a sequence also brings rows of the next one, or of nobody, with anything in
// them: 0 times NaN would be seen. They become 0 before the consumers look.
template <BackwardConfig kConfig>
struct BackwardCleaner {
  using Shared = BackwardShared<kConfig>;

  const BackwardParams& params;
  Shared shared;
  u32 lane;
  typename Shared::StageCursor at;
  typename Shared::DOutCursor dout_at;
  typename Shared::KvCursor kv_at;

  // Clears rows from `begin` on, and hands the tile over.
  void clean(u32 tile, u32 full, i32 rows, i32 begin) const {
    if (begin < rows) {
#pragma unroll 1
      for (i32 d = 0; d < kConfig.dims; d += 64) {
        for (i32 unit = max(begin, 0) * 8 + i32(lane); unit < rows * 8; unit += 32) {
          ptx::store_shared_x4(tile + d * rows * 2 + unit * 16, {});
        }
      }
      ptx::fence_proxy_async();
    }
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(full);
  }

  void clean_item(const BackwardMail& mail) {
    const auto q = shared.q();
    const auto dout = shared.dout();
    const i32 keys = mail.shape.kv_len - mail.item.kv_block * kConfig.kKvRows;
#pragma unroll 1
    for (i32 i = 0; i < mail.num_steps; ++i) {
      ptx::mbarrier_wait(shared.q_landed(at), at.parity);
      const i32 queries = mail.shape.q_len - shared.read_step(at).q_block() * kConfig.q_rows;
      clean(q.address(at), q.full(at), kConfig.q_rows, queries);
      if (i == 0) {
        ptx::mbarrier_wait(shared.k_landed(), kv_at.parity);
        clean(shared.k().address(kv_at), shared.k().full(kv_at), kConfig.kKvRows, keys);
      }
      ptx::mbarrier_wait(shared.dout_landed(dout_at), dout_at.parity);
      clean(dout.address(dout_at), dout.full(dout_at), kConfig.q_rows, queries);
      if (kConfig.needs_dp() && i == 0) {
        ptx::mbarrier_wait(shared.v_landed(), kv_at.parity);
        clean(shared.v().address(kv_at), shared.v().full(kv_at), kConfig.kKvRows, keys);
      }
      if (i == 0) kv_at.advance();
      at.advance();
      dout_at.advance();
    }
  }

  void run() {
    typename Shared::MailCursor mail_at;
#pragma unroll 1
    for (;;) {
      shared.mail().wait(mail_at);
      const BackwardMail mail = shared.read_mail(mail_at);
      if (mail.index >= params.num_items() + params.lag) return;
      if (mail.index < params.num_items()) clean_item(mail);
      ptx::warp_sync();
      if (lane == 0) shared.mail().release(mail_at);
      mail_at.advance();
    }
  }
};

// ---- Reporter: one thread tells the grid what has been added to dQ -----------------------------

template <BackwardConfig kConfig>
struct BackwardReporter {
  const BackwardParams& params;
  BackwardShared<kConfig> shared;

  void run() const {
    typename BackwardShared<kConfig>::MailCursor mail_at;
#pragma unroll 1
    for (;;) {
      shared.mail().wait(mail_at);
      const BackwardMail mail = shared.read_mail(mail_at);
      if (mail.index >= params.num_items() + params.lag) return;
      if (mail.index < params.num_items()) {
        ptx::mbarrier_wait(shared.added(mail_at), mail_at.parity);
        ptx::announce(params.done + mail.item.line);
      }
      shared.mail().release(mail_at);
      mail_at.advance();
    }
  }
};

// ---- Consumers: two warpgroups of 128 threads, 64 keys each ------------------------------------

template <BackwardConfig kConfig>
struct BackwardConsumer {
  using Shared = BackwardShared<kConfig>;
  using Scores = BackwardScores<kConfig>;
  using Weights = BackwardWeights<kConfig>;
  using Sums = BackwardSums<kConfig>;
  static constexpr i32 kFloats = kConfig.q_rows / 2;
  static constexpr float kLog2E = 1.44269504088896340736f;
  static constexpr float kNegativeInfinity = __builtin_bit_cast(float, 0xff800000u);
  static constexpr u32 kOutBarrier = 1;   // and 2, one each
  static constexpr u32 kTurnBarrier = 3;  // and 4, one each

  const BackwardParams& params;
  Shared shared;
  u32 warpgroup;
  u32 thread;  // 0 .. 127
  typename Shared::StageCursor at;
  typename Shared::DOutCursor dout_at;
  typename Shared::KvCursor kv_at;
  typename Shared::MailCursor mail_at;

  void take_turn() const {
    if constexpr (kConfig.take_turns) ptx::bar_sync(kTurnBarrier + warpgroup, 256);
  }
  void pass_turn() const {
    if constexpr (kConfig.take_turns) ptx::bar_arrive(kTurnBarrier + 1 - warpgroup, 256);
  }
  // By every warp, once it has waited for the products that read the tile.
  template <i32 kBuffers>
  void release(Ring<kBuffers> ring, Cursor<kBuffers> cursor) const {
    if (thread % 32 == 0) ring.release(cursor);
  }

  // Where dO stands: with as many stages as Q has, where Q does.
  typename Shared::DOutCursor dout_cursor() const {
    if constexpr (Shared::kDOutStages == Shared::kStages) {
      return at;
    } else {
      return dout_at;
    }
  }

  // S^T = -inf where the mask hides it; `first` is the warpgroup's first key.
  void hide(Scores& S, i32 first, i32 q_block) const {
    const SequenceShape shape = kConfig.sequences ? shared.read_shape(mail_at) : params.shape;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = first + i32(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
      const i32 query = q_block * kConfig.q_rows + i32(thread % 4) * 2;  // of S[0]
      Interval rows{0, 0};
      if (key < shape.kv_len) {
        rows = visible_rows(backward_mask<kConfig>(params.mask), shape, key);
      }
      const i32 begin = i32(rows.begin) - query, end = i32(rows.end) - query;
#pragma unroll
      for (i32 i = 2 * half; i < kFloats; i += 4) {
#pragma unroll
        for (i32 c = 0; c < 2; ++c) {
          const i32 offset = i / 4 * 8 + c;
          if (offset < begin || offset >= end) S[i + c] = kNegativeInfinity;
        }
      }
    }
  }

  // P^T = exp(scale S^T - lse)
  void exponentiate(Scores& S) const {
    const u32 rows = shared.rows(at) + thread % 4 * (kConfig.has_stats ? 16 : 8);
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
      if constexpr (kConfig.has_stats) {
        const ptx::U32x4 x = ptx::load_shared_x4(rows + i * 16);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          const float row_max = __builtin_bit_cast(float, x.word[e % 2 * 2]);
          const float sum_log2 = __builtin_bit_cast(float, x.word[e % 2 * 2 + 1]);
          const float below = -ptx::max(row_max - ptx::mul(S[i + e], params.scale), 0.f);
          S[i + e] = ptx::exp2_in_place(ptx::fma(below, kLog2E, -sum_log2));
        }
      } else {
        const ptx::F32x2 lse = ptx::load_shared_f32x2(rows + i * 8);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          S[i + e] = ptx::exp2_in_place(ptx::fma(S[i + e], params.scale_log2, -lse.word[e % 2]));
        }
      }
    }
  }

  void round(Weights& W, const Scores& P) const {
#pragma unroll
    for (i32 i = 0; i < kFloats / 2; ++i) W[i] = ptx::pack<kConfig.dtype>(P[2 * i], P[2 * i + 1]);
  }

  // dS^T = P^T (dP^T - delta), rounded
  void form_ds(Weights& dS, const Scores& P, const Scores& dP) const {
    const u32 deltas = shared.delta(dout_cursor()) + thread % 4 * 8;
#pragma unroll
    for (i32 i = 0; i < kFloats; i += 4) {
      const ptx::F32x2 delta = ptx::load_shared_f32x2(deltas + i * 8);
#pragma unroll
      for (i32 e = 0; e < 4; e += 2) {
        dS[(i + e) / 2] = ptx::pack<kConfig.dtype>(P[i + e] * (dP[i + e] - delta.word[0]),
                                                   P[i + e + 1] * (dP[i + e + 1] - delta.word[1]));
      }
    }
  }

  // dS^T to both warpgroups, for dQ a step later.
  void share_ds(const Weights& dS) const {
    ptx::mbarrier_wait(shared.ds().empty(at), at.parity ^ 1);
    store_ds<kConfig>(dS, shared.ds().address(at), warpgroup);
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared.ds().full(at));
  }

  // dQ = dS K of a step; then, once it is there, to the sums.
  void issue_dq(float (&dQ)[kConfig.dq_floats()], typename Shared::StageCursor of) const {
    shared.ds().wait(of);
    issue_queries_by_dims<kConfig>(dQ, shared.ds().address(of), shared.k().address(kv_at),
                                   warpgroup);
  }
  void finish_dq(const float (&dQ)[kConfig.dq_floats()], typename Shared::StageCursor of,
                 u32 tile) const {
    release(shared.ds(), of);
    float* part = dq_tile<kConfig>(params, tile) + warpgroup * DqFinish<kConfig>::kPartFloats;
    add_dq<kConfig>(dQ, part, thread);
  }

  // All steps of an item, whose keys of this warpgroup begin at `key`; leaves its dK (unscaled) and
  // dV. The rings of Q, dO and dS are walked by one cursor.
  void compute(Sums& dK, Sums& dV, i32 key) {
    const u32 keys = 64 * 128 * warpgroup;
    BackwardStepMail step, next;  // `next` is read early, under the products of this one
    u32 old_tile = 0;

    Scores S;  // becomes P; S of the next step is issued before this one ends
    shared.q().wait(at);
    step = shared.read_step(at);
    shared.k().wait(kv_at);
    issue_keys_by_queries<kConfig>(S, shared.k().address(kv_at) + keys, shared.q().address(at));
    ptx::wgmma_wait<0>();
    if constexpr (kConfig.needs_dp()) shared.v().wait(kv_at);

    const auto take = [&](auto first_step, auto masked) {
      constexpr bool kFirst = decltype(first_step)::kValue;
      const typename Shared::DOutCursor dout_at_step = dout_cursor();
      const u32 dout = shared.dout().address(dout_at_step);
      [[maybe_unused]] Weights dS;
      shared.dout().wait(dout_at_step);
      if constexpr (decltype(masked)::kValue) {
        if (step.is_partial(warpgroup)) hide(S, key, step.q_block());
      }
      {
        [[maybe_unused]] Weights P;
        [[maybe_unused]] Scores dP;
        // dP^T = V dO^T, under P^T = exp(scale S^T - lse)
        if constexpr (kConfig.needs_dp()) {
          issue_keys_by_queries<kConfig>(dP, shared.v().address(kv_at) + keys, dout);
        }
        exponentiate(S);
        // dV += P^T dO, under dS^T = P^T (dP^T - delta) where the registers allow
        constexpr bool kEarly = kConfig.dv && (kConfig.early_dv || !kConfig.needs_dp()) &&
                                kConfig.q_rows == 64;
        if constexpr (kEarly) {
          round(P, S);
          issue_keys_by_dims<kConfig>(dV, P, dout, !kFirst);
        }
        if constexpr (kConfig.needs_dp()) {
          ptx::wgmma_wait<kEarly ? 1 : 0>();
          form_ds(dS, S, dP);
        }
        if constexpr (kConfig.dv && !kEarly) {
          round(P, S);
          issue_keys_by_dims<kConfig>(dV, P, dout, !kFirst);
        }
        if constexpr (kConfig.dq) {
          share_ds(dS);
        } else {
          ptx::warp_sync();  // all lanes have read rows and delta
        }
        ptx::wgmma_wait<0>();
        release(shared.dout(), dout_at_step);
        if (kConfig.needs_dp() && step.is_last()) release(shared.v(), kv_at);
      }
      const auto here = at;
      at.advance();
      dout_at.advance();
      const typename Shared::StageCursor before{at.buffer, at.parity ^ 1};
      Scores S_next;
      float dQ[kConfig.dq_floats()];
      take_turn();
      // dQ = dS K of the step before
      if constexpr (kConfig.dq && !kFirst) issue_dq(dQ, before);
      // the next S^T = K Q^T (after the last step: this one's once more, and not used)
      if (!step.is_last()) {
        shared.q().wait(at);
        next = shared.read_step(at);
      }
      issue_keys_by_queries<kConfig>(S_next, shared.k().address(kv_at) + keys,
                                     shared.q().address(step.is_last() ? here : at));
      // dK += dS^T Q
      if constexpr (kConfig.dk) {
        issue_keys_by_dims<kConfig>(dK, dS, shared.q().address(here), !kFirst);
      }
      pass_turn();
      if constexpr (kConfig.dq && !kFirst) {
        ptx::wgmma_wait<kConfig.dk ? 2 : 1>();
        finish_dq(dQ, before, old_tile);
      }
      ptx::wgmma_wait<0>();
      release(shared.q(), here);
#pragma unroll
      for (i32 k = 0; k < kFloats; ++k) S[k] = S_next[k];
      old_tile = step.tile;
    };
    using Yes = BackwardFlag<true>;
    using No = BackwardFlag<false>;
    take(Yes{}, Yes{});
    // Steps that every key sees whole have a loop of their own, without a trace of the mask.
    while (!step.is_last()) {
#pragma unroll 1
      while (!step.is_last() && next.is_partial(warpgroup)) {
        step = next;
        take(No{}, Yes{});
      }
#pragma unroll 1
      while (!step.is_last() && !next.is_partial(warpgroup)) {
        step = next;
        take(No{}, No{});
      }
    }

    if constexpr (kConfig.dq) {
      float dQ[kConfig.dq_floats()];
      const typename Shared::StageCursor last{at.buffer ^ 1, at.parity ^ at.buffer ^ 1};
      issue_dq(dQ, last);
      ptx::wgmma_wait<0>();
      finish_dq(dQ, last, old_tile);
    }
    release(shared.k(), kv_at);
    kv_at.advance();
  }

  // dV and dK, rounded, to global memory; rows past the end are not written.
  void write(Sums& dK, Sums& dV, const BackwardMail& mail) const {
    if constexpr (kConfig.sequences || kConfig.is_wide()) return write_rows(dK, dV, mail);
    const BackwardItem& item = mail.item;
    if (thread == 0) ptx::tma_store_wait_read();  // the previous ones have left
    ptx::bar_sync(kOutBarrier + warpgroup, 128);
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] *= params.scale;
    if constexpr (kConfig.dv) {
      stage_output_tile<kConfig.dtype>(dV, shared.dv_out(warpgroup), 64 * 128);
    }
    if constexpr (kConfig.dk) {
      stage_output_tile<kConfig.dtype>(dK, shared.dk_out(warpgroup), 64 * 128);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(kOutBarrier + warpgroup, 128);
    if (thread == 0) {
      const i32 batch = item.line / params.heads_kv;
      const i32 head = item.line - batch * params.heads_kv;
      const i32 row = item.kv_block * kConfig.kKvRows + 64 * warpgroup;
      for (i32 d = 0; d < kConfig.dims; d += 64) {
        if constexpr (kConfig.dv) {
          ptx::tma_store(params.maps.dv, shared.dv_out(warpgroup) + d * 128, d, row, head, batch);
        }
        if constexpr (kConfig.dk) {
          ptx::tma_store(params.maps.dk, shared.dk_out(warpgroup) + d * 128, d, row, head, batch);
        }
      }
      ptx::tma_store_commit();
    }
  }

  // The same without the copy engine, which would write over the next sequence. Rows of nobody were
  // cleared before.
  void write_rows(Sums& dK, Sums& dV, const BackwardMail& mail) const {
    const i32 index = mail.item.line / params.heads_kv;
    const i32 head = mail.item.line - index * params.heads_kv;
    const Sequence sequence = backward_sequence<kConfig>(params, index);
#pragma unroll
    for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] *= params.scale;
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 key = mail.item.kv_block * kConfig.kKvRows + 64 * warpgroup +
                      i32(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
      const bool inside = key < mail.shape.kv_len;
      const i64 row = sequence.kv_begin + key;
      if constexpr (kConfig.dv) {
        u16* out = params.dv + sequence.batch * params.dv_stride_batch +
                   head * params.dv_stride_head + row * params.dv_stride_row;
        store_output_row<kConfig.dtype>(dV, half, out, inside, params.dim_v);
      }
      if constexpr (kConfig.dk) {
        u16* out = params.dk + sequence.batch * params.dk_stride_batch +
                   head * params.dk_stride_head + row * params.dk_stride_row;
        store_output_row<kConfig.dtype>(dK, half, out, inside, params.dim_qk);
      }
    }
  }

  void run() {
    const DqFinish<kConfig> finish{params, i32(ptx::thread_index() / 32) - 4, i32(thread % 32)};
    if (warpgroup == 1) pass_turn();  // the first may begin
#pragma unroll 1
    for (;;) {
      shared.mail().wait(mail_at);
      const BackwardMail mail = shared.read_mail(mail_at);
      if (mail.index >= params.num_items() + params.lag) break;
      if (kConfig.dq && mail.index >= params.lag) finish.run(mail.index - params.lag);
      if (mail.index < params.num_items()) {
        Sums dK, dV;
        if (mail.num_steps > 0) {
          compute(dK, dV, mail.item.kv_block * kConfig.kKvRows + 64 * warpgroup);
        } else {
#pragma unroll
          for (i32 i = 0; i < kConfig.dims / 2; ++i) dK[i] = dV[i] = 0;
        }
        ptx::warp_sync();
        if (thread % 32 == 0) ptx::mbarrier_arrive(shared.added(mail_at));
        if constexpr (kConfig.hides_pairs()) {
          const float found = (kConfig.dk ? probe(dK) : 0) + (kConfig.dv ? probe(dV) : 0);
          report_spoiled(params.spoiled, shared.read_mail(mail_at).item.line, found);
        }
        // The mail is read again: nothing but the sums has lived through the steps.
        if constexpr (kConfig.dk || kConfig.dv) write(dK, dV, shared.read_mail(mail_at));
      }
      ptx::bar_sync(kOutBarrier + warpgroup, 128);
      if (thread == 0) shared.mail().release(mail_at);
      mail_at.advance();
    }
    if (warpgroup == 0) take_turn();  // takes the turn that nobody needs
    if (thread == 0) ptx::tma_store_wait();
  }
};

template <BackwardConfig kConfig>
inline void backward_sm90(const BackwardParams& params) {
  static_assert(kConfig.valid());
  const BackwardShared<kConfig> shared{ptx::dynamic_shared()};
  const i32 warpgroup = ptx::broadcast(ptx::thread_index() / 128);
  const i32 warp = ptx::broadcast(ptx::thread_index() / 32);
  if (ptx::thread_index() == 0) shared.init();
  ptx::block_sync();
  ptx::grid_dependency_wait();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    if (ptx::thread_index() == 0) {
      BackwardLoader<kConfig>{params, shared}.run();
    } else if (ptx::thread_index() == 32) {
      BackwardReporter<kConfig>{params, shared}.run();
    } else if (kConfig.sequences && warp == 2) {
      BackwardCleaner<kConfig>{params, shared, ptx::thread_index() % 32}.run();
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    BackwardConsumer<kConfig>{params, shared, u32(warpgroup) - 1, ptx::thread_index() % 128}.run();
  }
}

}  // namespace fulmen
