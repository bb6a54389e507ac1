// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Exact attention, forward, on Hopper: O = softmax(scale Q K^T + mask) V and the log-sum-exp of
// every row, 16-bit in and out, float32 inside. A thread block stays on its multiprocessor and
// takes blocks of queries, longest first, from a counter. One warp plans (ForwardPlanner), one
// loads (ForwardLoader), two or three warpgroups compute 64 query rows each (ForwardConsumer): S =
// Q K^T of one block of keys is issued before O += P V of the previous one, so that the softmax
// hides under both, and the warpgroups take turns at the tensor cores. Shah et al.,
// "FlashAttention-3" (2024), sections 3.1 and 3.2; the softmax without a running maximum is ours
// (tile/row_softmax.cuh). Must hold: sm_90a, kConfig.valid(), launched with threads() threads and
// shared_bytes() bytes.
#pragma once

#include "kernels/ptx/tma.cuh"
#include "kernels/tile/forward_planner.cuh"
#include "kernels/tile/forward_shared.cuh"
#include "kernels/tile/products.cuh"
#include "kernels/tile/row_softmax.cuh"
#include "kernels/tile/store_output.cuh"

namespace fulmen {

// ---- Loader: one thread talks to the copy engine ---------------------------------------------

template <AttentionConfig kConfig>
struct ForwardLoader {
  using Shared = ForwardShared<kConfig>;

  const ForwardTensorMaps& maps;
  const ForwardParams& params;
  Shared shared;
  typename Shared::QCursor q_at;
  typename Shared::KvCursor k_at, v_at;

  void load(const TensorMap& map, u32 tile, u32 full, i32 dims, i32 rows, i32 row, i32 head,
            i32 batch, u64 policy) const {
#pragma unroll
    for (i32 d = 0; d < dims; d += 64) {
      if constexpr (kConfig.cache_hints) {
        ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch, policy);
      } else {
        ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch);
      }
    }
  }

  void load_k(i32 block, i32 head, i32 batch) {
    shared.k().acquire(k_at);
    load(maps.k, shared.k().address(k_at), shared.k().full(k_at), kConfig.d_qk, kConfig.kv_rows,
         block * kConfig.kv_rows, head, batch, ptx::kEvictLast);
    k_at.advance();
  }

  void load_v(i32 block, i32 head, i32 batch) {
    shared.v().acquire(v_at);
    load(maps.v, shared.v().address(v_at), shared.v().full(v_at), kConfig.d_v, kConfig.kv_rows,
         block * kConfig.kv_rows, head, batch, ptx::kEvictLast);
    v_at.advance();
  }

  void load_block(const QueryBlock& block, i32 first, i32 last) {
    const i32 row = block.q_block * kConfig.q_rows();
    const i32 kv_head = block.head / (params.heads_q / params.heads_kv);
    if (last <= first + 1) ptx::mbarrier_arrive(shared.nearly_loaded());
    load_k(last, kv_head, block.batch);
    shared.q().acquire(q_at);
    load(maps.q, shared.q().address(q_at), shared.q().full(q_at), kConfig.d_qk, kConfig.q_rows(),
         row, block.head, block.batch, ptx::kEvictFirst);
    q_at.advance();
#pragma unroll 1
    for (i32 j = last - 1; j >= first; --j) {
      if (j == first + 1) ptx::mbarrier_arrive(shared.nearly_loaded());
      load_k(j, kv_head, block.batch);
      load_v(j + 1, kv_head, block.batch);
    }
    load_v(first, kv_head, block.batch);
  }

  void run() {
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.assigned(count), Shared::parity(count));
      const ptx::U32x4 mail = ptx::load_shared_x4(shared.mail(count));
      const QueryBlock block{i32(mail.word[0]), i32(mail.word[1]), i32(mail.word[2])};
      if (block.q_block < 0) return;
      load_block(block, ptx::load_shared(shared.key_blocks(count, 0) + 16),
                 ptx::load_shared(shared.key_blocks(count, 0) + 20) - 1);
    }
  }
};

// ---- Consumers: warpgroups of 128 threads, 64 query rows each -----------------------------------

template <AttentionConfig kConfig>
struct ForwardConsumer {
  using Shared = ForwardShared<kConfig>;
  using Scores = float[kConfig.kv_rows / 2];

  const ForwardTensorMaps& maps;
  const ForwardParams& params;
  Shared shared;
  u32 warpgroup;
  u32 thread;  // 0 .. 127
  typename Shared::QCursor q_at;
  typename Shared::KvCursor k_at, v_at;

  // Turns at the tensor cores: warpgroup w issues its products after w - 1. Only the first waits
  // for K and V to land; the turn carries that to the others (measured: 3 to 4 % at d 128).
  static constexpr bool kTurns = kConfig.ping_pong && kConfig.warpgroups > 1;
  static constexpr u32 kTurnBarrier = 1;    // and on, one each
  static constexpr u32 kOutputBarrier = 4;  // and on, one each
  bool waits_for_data() const { return !kTurns || warpgroup == 0; }
  void take_turn() const {
    if constexpr (kTurns) ptx::bar_sync(kTurnBarrier + warpgroup, 256);
  }
  void pass_turn() const {
    const u32 next = warpgroup + 1 == kConfig.warpgroups ? 0 : warpgroup + 1;
    if constexpr (kTurns) ptx::bar_arrive(kTurnBarrier + next, 256);
  }

  void release_k() {
    if (thread == 0) shared.k().release(k_at);
    k_at.advance();
  }
  void release_v() {
    if (thread == 0) shared.v().release(v_at);
    v_at.advance();
  }

  // A block of keys that only other warpgroups of this thread block see.
  void skip_block() {
    shared.k().wait(k_at);
    take_turn();
    pass_turn();  // before V: with one stage it comes only when the others have read K
    release_k();
    shared.v().wait(v_at);
    release_v();
  }

  // The first row of this thread in its warpgroup; the second is 8 further.
  i32 first_row() const { return thread / 32 * 16 + thread % 32 / 4; }

  // Hides the keys of block j that a row does not see.
  void hide(Scores& S, const Interval (&visible)[2], i32 j) const {
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      const i32 column = j * kConfig.kv_rows + i32(thread) % 4 * 2;  // of S[0]
      const i32 end = i32(visible[row].end) - column;
      const i32 begin = i32(visible[row].begin) - column;
#pragma unroll
      for (i32 i = 2 * row; i < kConfig.kv_rows / 2; i += 4) {
#pragma unroll
        for (i32 c = 0; c < 2; ++c) {
          const i32 offset = i / 4 * 8 + c;
          bool hidden = offset >= end;
          if constexpr (kConfig.mask == MaskKind::kBoth) hidden = hidden || offset < begin;
          if (hidden) S[i + c] = kNegativeInfinity;
        }
      }
    }
  }

  void compute_block(const Assignment& assignment, const KeyBlocks& blocks, u32 count) {
    const QueryBlock& block = assignment.block;
    const i32 row = block.q_block * kConfig.q_rows() + 64 * warpgroup;
    i32 j = blocks.all_end - 1;

    float O[kConfig.d_v / 2];
    u32 P[kConfig.kv_rows / 4];
    RowSoftmax<kConfig> softmax{params.scale_log2};
    float rescale[2] = {1, 1};
    bool accumulate = false;

#pragma unroll 1
    for (; j >= blocks.end; --j) skip_block();
    shared.q().wait(q_at);
    const u32 sQ = shared.q().address(q_at) + 64 * 128 * warpgroup;
    QRegisters<kConfig> rQ;
    load_q_registers<kConfig>(rQ, sQ);

    // S = Q K^T and P = exp2(c S - m) for the last block of keys
    Interval visible[2];
    {
      Scores S;
      shared.k().wait(k_at);
      take_turn();
      issue_scores<kConfig>(S, rQ, sQ, shared.k().address(k_at));
      pass_turn();
      for (i32 r = 0; r < 2; ++r) {
        visible[r] = visible_columns(effective_mask<kConfig>(params.mask), params.shape,
                                     row + first_row() + 8 * r);
      }
      ptx::wgmma_wait<0>();
      release_k();
      if (j >= blocks.full_end || j < blocks.full_begin) hide(S, visible, j);
      softmax.update(S, rescale);
      round_probabilities<kConfig>(P, S);
      --j;
    }

    const auto step = [&](auto partial) {
      constexpr bool kPartial = decltype(partial)::kValue;
      constexpr bool kUpdate = kPartial || kConfig.shift_rule == ShiftRule::kEveryBlock ||
                               kConfig.shift_rule == ShiftRule::kWhenGrown;
      Scores S;
      if (waits_for_data()) shared.k().wait(k_at);
      take_turn();
      // S_j = Q K_j^T
      issue_scores<kConfig>(S, rQ, sQ, shared.k().address(k_at));
      // O += P_{j+1} V_{j+1}
      if (waits_for_data()) shared.v().wait(v_at);
      issue_output<kConfig>(O, P, shared.v().address(v_at), accumulate);
      accumulate = true;
      pass_turn();
      ptx::wgmma_wait<kConfig.overlap ? 1 : 0>();
      release_k();
      // S = exp2(c S - m), under the product above
      if constexpr (kPartial) hide(S, visible, j);
      const bool grown = kUpdate ? softmax.update(S, rescale) : softmax.keep(S, rescale);
      ptx::wgmma_wait<0>();
      release_v();
      // O *= exp2(m_old - m), P_j = S
      if (grown) scale_rows(O, rescale);
      round_probabilities<kConfig>(P, S);
    };
#pragma unroll 1
    for (; j >= blocks.full_end; --j) step(Flag<true>{});
#pragma unroll 1
    for (; j >= blocks.full_begin; --j) step(Flag<false>{});
    if constexpr (kConfig.mask == MaskKind::kBoth) {
#pragma unroll 1
      for (; j >= blocks.begin; --j) step(Flag<true>{});
    }
    if (thread == 0) shared.q().release(q_at);
    q_at.advance();

    // O += P V for the first block of keys
    shared.v().wait(v_at);
    issue_output<kConfig>(O, P, shared.v().address(v_at), accumulate);
    softmax.finish();
    ptx::wgmma_wait<0>();
    release_v();
    if constexpr (kConfig.mask == MaskKind::kBoth) {
#pragma unroll 1
      for (j = blocks.begin - 1; j >= blocks.all_begin; --j) skip_block();
    }

    if (!assignment.careful) report(O, softmax, visible, row, count);
    write(O, softmax, block, row, assignment.careful);
  }

  // Asks for a second attempt where a row left the range of float32.
  void report(const float (&O)[kConfig.d_v / 2], const RowSoftmax<kConfig>& softmax,
              const Interval (&visible)[2], i32 row, u32 count) const {
    constexpr bool kCanFail = kConfig.shift_rule == ShiftRule::kFirstBlock ||
                              kConfig.shift_rule == ShiftRule::kWhenSumGrew;
    if constexpr (kCanFail) {
      float probe[2] = {0, 0};  // 0, or NaN if an element of the row is inf or NaN
#pragma unroll
      for (i32 i = 0; i < kConfig.d_v / 2; ++i) {
        probe[i / 2 % 2] = ptx::fma(O[i], 0.f, probe[i / 2 % 2]);
      }
      bool failed = false;
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        const bool sees = row + first_row() + 8 * r < params.shape.q_len && visible[r].size() > 0;
        failed = failed || (sees && !(softmax.in_range(r) && probe[r] == 0));
      }
      if (ptx::any(failed) && thread % 32 == 0) ptx::store_shared(shared.failed(count), 1);
    }
  }

  // O / sum and the log-sum-exp, to global memory.
  void write(float (&O)[kConfig.d_v / 2], const RowSoftmax<kConfig>& softmax,
             const QueryBlock& block, i32 row, bool careful) const {
    float inverse[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      inverse[r] = softmax.sum[r] == 0 ? 0.f : ptx::reciprocal(softmax.sum[r]);
      const i32 q_row = row + first_row() + 8 * r;
      if (thread % 4 == 0 && q_row < params.shape.q_len) {
        const i64 line = i64(block.batch) * params.heads_q + block.head;
        params.lse[line * params.shape.q_len + q_row] = softmax.lse(r);
      }
    }
    scale_rows(O, inverse);
    if constexpr (kConfig.stage_output) {
      const u32 tile = shared.o() + 64 * 128 * warpgroup;
      constexpr u32 kChunkBytes = kConfig.q_rows() * 128;
      if (thread == 0) {  // the previous tile has left; a second attempt comes after the first
        if (careful) ptx::tma_store_wait();
        ptx::tma_store_wait_read();
      }
      ptx::bar_sync(kOutputBarrier + warpgroup, 128);
      stage_output_tile<kConfig.dtype>(O, tile, kChunkBytes);
      ptx::fence_proxy_async();
      ptx::bar_sync(kOutputBarrier + warpgroup, 128);
      if (thread == 0) {
        for (i32 d = 0; d < kConfig.d_v; d += 64) {
          ptx::tma_store(maps.o, tile + d / 64 * kChunkBytes, d, row, block.head, block.batch);
        }
        ptx::tma_store_commit();
      }
    } else {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        const i32 q_row = row + first_row() + 8 * r;
        u16* out = params.o + block.batch * params.o_stride_batch +
                   block.head * params.o_stride_head + q_row * params.o_stride_row;
        store_output_row<kConfig.dtype>(O, r, out, q_row < params.shape.q_len);
      }
    }
  }

  void run() {
    if (kTurns && warpgroup == kConfig.warpgroups - 1) pass_turn();  // the first may begin
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.assigned(count), Shared::parity(count));
      const Assignment assignment = read_assignment(shared, count);
      if (assignment.block.q_block < 0) break;
      compute_block(assignment, read_key_blocks(shared, count, warpgroup), count);
      ptx::warp_sync();
      if (thread % 32 == 0) ptx::mbarrier_arrive(shared.done(count));
    }
    if (kTurns && warpgroup == 0) take_turn();  // takes the turn that nobody needs
    if (kConfig.stage_output && thread == 0) ptx::tma_store_wait();
  }
};

template <AttentionConfig kConfig>
inline void forward_sm90(const ForwardTensorMaps& maps, const ForwardParams& params) {
  static_assert(kConfig.valid());
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
  if (warpgroup == kConfig.warpgroups) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    if (thread == 0) {
      ForwardLoader<kConfig>{maps, params, shared}.run();
    } else if (warp == 1) {
      ForwardPlanner<kConfig>{params, shared, thread % 32}.run();
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    ForwardConsumer<kConfig>{maps, params, shared, u32(warpgroup), thread}.run();
  }
}

}  // namespace fulmen
