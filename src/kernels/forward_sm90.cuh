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
// (tile/row_softmax.cuh). A block of queries whose result left the range of float32, or met an
// infinity or NaN, is computed again by the textbook. Must hold: sm_90a, kConfig.valid(), launched
// with threads() threads, shared_bytes() bytes and at most one block a multiprocessor.
#pragma once

#include "kernels/ptx/tma.cuh"
#include "kernels/tile/forward_planner.cuh"
#include "kernels/tile/forward_shared.cuh"
#include "kernels/tile/products.cuh"
#include "kernels/tile/row_softmax.cuh"
#include "kernels/tile/score_map.cuh"
#include "kernels/tile/store_output.cuh"
#include "kernels/tile/unusual_values.cuh"

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
    constexpr i32 kBoxDims = kConfig.swizzle ? 64 : 8;
#pragma unroll
    for (i32 d = 0; d < kConfig.chunked(dims); d += kBoxDims) {
      if constexpr (kConfig.cache_hints) {
        ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch, policy);
      } else {
        ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch);
      }
    }
  }

  void load_k(i32 block, i32 head, const Place& place) {
    shared.k().acquire(k_at);
    load(maps.k, shared.k().address(k_at), shared.k().full(k_at), kConfig.d_qk, kConfig.kv_rows,
         place.kv_begin + block * kConfig.kv_rows, head, place.batch, ptx::kEvictLast);
    k_at.advance();
  }

  void load_v(i32 block, i32 head, const Place& place) {
    const bool ends_inside =
        kConfig.sequences && rows_inside<kConfig>(place, block) < kConfig.kv_rows;
    const u32 barrier = ends_inside ? shared.landed(v_at) : shared.v().full(v_at);
    shared.v().acquire(v_at, barrier);
    load(maps.v, shared.v().address(v_at), barrier, kConfig.d_v, kConfig.kv_rows,
         place.kv_begin + block * kConfig.kv_rows, head, place.batch, ptx::kEvictLast);
    v_at.advance();
  }

  void load_block(const QueryBlock& block, const Place& place, i32 first, i32 last) {
    const i32 row = place.q_begin + block.q_block * kConfig.q_rows();
    const i32 kv_head = block.head / (params.heads_q / params.heads_kv);
    if (last <= first + 1) ptx::mbarrier_arrive(shared.nearly_loaded());
    load_k(last, kv_head, place);
    for (i32 w = 0; w < kConfig.warpgroups; ++w) {
      shared.q().acquire(q_at);
      load(maps.q, shared.q().address(q_at), shared.q().full(q_at), kConfig.d_qk, 64, row + 64 * w,
           block.head, place.batch, ptx::kEvictFirst);
      q_at.advance();
    }
#pragma unroll 1
    for (i32 j = last - 1; j >= first; --j) {
      if (j == first + 1) ptx::mbarrier_arrive(shared.nearly_loaded());
      load_k(j, kv_head, place);
      load_v(j + 1, kv_head, place);
    }
    load_v(first, kv_head, place);
  }

  void run() {
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.assigned(count), Shared::parity(count));
      const ptx::U32x4 mail = ptx::load_shared_x4(shared.mail(count));
      const QueryBlock block{i32(mail.word[0]), i32(mail.word[1]), i32(mail.word[2])};
      if (block.q_block < 0) return;
      load_block(block, read_place(shared, params, block, count),
                 ptx::load_shared(shared.key_blocks(count, 0) + 16),
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
  static constexpr u32 kAllBarrier = 7;     // of the consumers
  bool waits_for_data() const { return !kTurns || warpgroup == 0; }
  void take_turn() const {
    if constexpr (kTurns) ptx::bar_sync(kTurnBarrier + warpgroup, 256);
  }
  void pass_turn() const {
    const u32 next = warpgroup + 1 == kConfig.warpgroups ? 0 : warpgroup + 1;
    if constexpr (kTurns) ptx::bar_arrive(kTurnBarrier + next, 256);
  }

  // What a warpgroup works on: 64 rows from `row` on, counted in the sequence.
  struct Task {
    QueryBlock block;
    i32 row;
    u32 count;  // of the assignment
  };
  // Read again where it is needed: registers are dearer.
  Place place_of_task(const Task& task) const {
    return read_place(shared, params, task.block, task.count);
  }

  void release_q() {
    if (thread == 0) shared.q().release(q_at);
    q_at.advance(kConfig.warpgroups);
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

  // The keys that this thread's two rows see.
  void see(Interval (&visible)[2], const Task& task) const {
    const Place place = place_of_task(task);
    for (i32 r = 0; r < 2; ++r) {
      visible[r] = visible_columns(effective_mask<kConfig>(params.mask), place.shape,
                                   task.row + first_row() + 8 * r);
    }
  }

  FragmentScores<kConfig> scores_of(const Task& task) const {
    return {params, place_of_task(task), task.block, task.row + first_row()};
  }
  float softmax_factor() const { return kConfig.maps_scores() ? 1.f : params.scale_log2; }

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

  void compute_block(const Task& task, const KeyBlocks& blocks) {
    i32 j = blocks.all_end - 1;
    float O[kConfig.d_v / 2];
    u32 P[kConfig.kv_rows / 4];
    RowSoftmax<kConfig> softmax{softmax_factor()};
    float rescale[2] = {1, 1};
    bool accumulate = false;

#pragma unroll 1
    for (; j >= blocks.end; --j) skip_block();
    shared.q().wait(q_at);
    const u32 sQ = shared.q().address(q_at);
    QRegisters<kConfig> rQ;
    load_q_registers<kConfig>(rQ, sQ);
    if constexpr (!kTurns && kConfig.q_register_dims > 0) {
      ptx::bar_sync(kOutputBarrier + warpgroup, 128);  // all warps have read Q: one gives it back
    }
    const FragmentScores<kConfig> scores = scores_of(task);

    // S = Q K^T and P = exp2(c S - m) for the last block of keys
    Interval visible[2];
    {
      Scores S;
      shared.k().wait(k_at);
      take_turn();
      issue_scores<kConfig>(S, rQ, sQ, shared.k().address(k_at));
      pass_turn();
      see(visible, task);
      ptx::wgmma_wait<0>();
      release_k();
      scores.apply(S, j * kConfig.kv_rows);
      if (j >= blocks.full_end || j < blocks.full_begin) hide(S, visible, j);
      softmax.update(S, rescale);
      scores.pairs.drop(S, j * kConfig.kv_rows);
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
      scores.apply(S, j * kConfig.kv_rows);
      if constexpr (kPartial) hide(S, visible, j);
      const bool grown = kUpdate ? softmax.update(S, rescale) : softmax.keep(S, rescale);
      scores.pairs.drop(S, j * kConfig.kv_rows);
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
    release_q();

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

    report(O, softmax, visible, task);
    write<false>(O, softmax, task);
  }

  // The textbook: one block of keys after the other, the maximum of each, nothing in between.
  // Finds infinities and NaN among the values (unusual_values.cuh), so all warpgroups visit all
  // blocks of keys that one of them visits.
  void compute_carefully(const Task& task, const KeyBlocks& blocks) {
    float O[kConfig.d_v / 2] = {};
    u32 P[kConfig.kv_rows / 4];
    Scores S;
    RowSoftmax<kConfig> softmax{softmax_factor()};
    float rescale[2];
    Interval visible[2];
    see(visible, task);
    const FragmentScores<kConfig> scores = scores_of(task);
    shared.q().wait(q_at);
    const u32 sQ = shared.q().address(q_at);
    QRegisters<kConfig> rQ;
    load_q_registers<kConfig>(rQ, sQ);
#pragma unroll 1
    for (i32 j = blocks.all_end - 1; j >= blocks.all_begin; --j) {
      // S = Q K^T
      shared.k().wait(k_at);
      issue_scores<kConfig>(S, rQ, sQ, shared.k().address(k_at));
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(S);
      release_k();
      // S = exp2(c S - m), O *= exp2(m_old - m), P = S
      scores.apply(S, j * kConfig.kv_rows);
      hide(S, visible, j);
      MarkedKeys<kConfig> hidden;
      if constexpr (kConfig.has_pair_terms()) hidden = {S, kNegativeInfinity};
      if (softmax.template update<true, true>(S, rescale)) scale_rows(O, rescale);
      scores.pairs.drop(S, j * kConfig.kv_rows);
      MarkedKeys<kConfig> dropped;
      if constexpr (kConfig.dropout) dropped = {S, PairTerms<kConfig>::kDropped};
      round_probabilities<kConfig>(P, S);
      // O += P V
      shared.v().wait(v_at);
      set_unusual_apart(O, visible, j, hidden, dropped);
      issue_output<kConfig>(O, P, shared.v().address(v_at), true);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(O);
      ptx::bar_sync(kOutputBarrier + warpgroup, 128);  // all warps have looked at V
      release_v();
    }
    release_q();
    softmax.finish();
    write<true>(O, softmax, task);
  }

  // hidden and dropped are asked only where options can hide or drop single pairs.
  void set_unusual_apart(float (&O)[kConfig.d_v / 2], const Interval (&visible)[2], i32 j,
                         const MarkedKeys<kConfig>& hidden,
                         const MarkedKeys<kConfig>& dropped) const {
    const ValueTile<kConfig> V{shared.v().address(v_at)};
    if (!V.has_unusual()) return;
#pragma unroll 1
    for (i32 key = 0; key < kConfig.kv_rows; ++key) {
      const i64 column = i64{j} * kConfig.kv_rows + key;
      bool sees[2];
      float kept[2] = {1, 1};
      for (i32 r = 0; r < 2; ++r) {
        sees[r] = visible[r].contains(column);
        if constexpr (kConfig.has_pair_terms()) sees[r] = !hidden.has(r, key);
        if constexpr (kConfig.dropout) kept[r] = dropped.has(r, key) ? 0.f : 1.f;
      }
      V.add_unusual(O, key, sees, kept);
    }
    ptx::bar_sync(kAllBarrier, 128 * kConfig.warpgroups);  // all have seen them
    V.clear_unusual();
    ptx::bar_sync(kAllBarrier, 128 * kConfig.warpgroups);  // all are gone
  }

  // Asks for a second attempt where a row left the range of float32 or is not finite.
  void report(const float (&O)[kConfig.d_v / 2], const RowSoftmax<kConfig>& softmax,
              const Interval (&visible)[2], const Task& task) const {
    const i32 q_len = place_of_task(task).shape.q_len;
    float probe[2] = {0, 0};  // 0, or NaN if an element of the row is inf or NaN
#pragma unroll
    for (i32 i = 0; i < kConfig.d_v / 2; ++i) {
      probe[i / 2 % 2] = ptx::fma(O[i], 0.f, probe[i / 2 % 2]);
    }
    bool failed = false;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const bool counts = task.row + first_row() + 8 * r < q_len;
      const bool in_range = visible[r].size() == 0 || softmax.in_range(r);
      failed = failed || (counts && !(in_range && probe[r] == 0));
    }
    if (ptx::any(failed) && thread % 32 == 0) ptx::store_shared(shared.failed(task.count), 1);
  }

  // 1 / (sum of the exponentials, with that of the sink).
  float normalizer(const RowSoftmax<kConfig>& softmax, i32 r, i32 head) const {
    if (softmax.sum[r] == 0) return 0;
    float inverse = ptx::reciprocal(softmax.sum[r]);
    if constexpr (kConfig.dropout) inverse *= params.kept_scale;
    if constexpr (kConfig.sinks) {
      const ArrayView& sinks = params.attention.sinks;
      const float sink = load_real<float>(sinks, sinks.offset(0, head, 0, 0)) * kLog2E;
      inverse *= ptx::reciprocal(1 + ptx::exp2(sink - softmax.lse_log2(r)));
    }
    return inverse;
  }

  // lse and stats of a row: by one thread of its quad. kExactly: after the careful attempt.
  template <bool kExactly>
  void write_row(const RowSoftmax<kConfig>& softmax, i32 r, const Task& task, const Place& place,
                 i32 q_row, bool blank) const {
    const auto store = [&](const ArrayView& array, i32 index, float x) {
      const i64 at = array.offset(place.batch, task.block.head, place.q_begin + q_row, index);
      reinterpret_cast<float*>(array.data)[at] = x;
    };
    const AttentionParams& arrays = params.attention;
    if (arrays.lse.present()) store(arrays.lse, 0, blank ? kNegativeInfinity : softmax.lse(r));
    if constexpr (kConfig.stats) {
      const auto saved = kExactly ? softmax.saved_exactly(r, params.scale) : softmax.saved(r);
      store(arrays.stats, 0, blank ? kNegativeInfinity : saved.row_max);
      store(arrays.stats, 1, blank ? 0.f : saved.row_sum);
    }
  }

  // O / sum, lse and stats, to global memory.
  template <bool kExactly>
  void write(float (&O)[kConfig.d_v / 2], const RowSoftmax<kConfig>& softmax,
             const Task& task) const {
    const Place place = place_of_task(task);
    float inverse[2];
    bool blank[2] = {};  // rows past the sequence's length
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = task.row + first_row() + 8 * r;
      if constexpr (kConfig.sequences) blank[r] = q_row >= place.shape.q_len;
      inverse[r] = normalizer(softmax, r, task.block.head);
      if (thread % 4 == 0 && q_row < place.q_slot) {
        write_row<kExactly>(softmax, r, task, place, q_row, blank[r]);
      }
    }
    scale_rows(O, inverse);
    if constexpr (kConfig.stage_output) {
      write_staged<kExactly>(O, task);
    } else {
      write_directly(O, task, place, blank);
    }
  }

  // From registers.
  void write_directly(float (&O)[kConfig.d_v / 2], const Task& task, const Place& place,
                      const bool (&blank)[2]) const {
    const ArrayView& o = params.attention.o;
    const i32 dims = i32(params.attention.dim_v);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const i32 q_row = task.row + first_row() + 8 * r;
      const bool inside = q_row < place.q_slot;
      const i64 at = o.offset(place.batch, task.block.head, place.q_begin + q_row, 0);
      if (kConfig.sequences && blank[r]) clear_row(O, r);
      if constexpr (kConfig.wide_output) {
        store_output_row(O, r, reinterpret_cast<float*>(o.data) + at, inside, dims);
      } else {
        store_output_row<kConfig.dtype>(O, r, reinterpret_cast<u16*>(o.data) + at, inside, dims);
      }
    }
  }

  // Through shared memory. kAgain: right after the first attempt at the same rows.
  template <bool kAgain>
  void write_staged(const float (&O)[kConfig.d_v / 2], const Task& task) const {
    const u32 tile = shared.o() + 64 * 128 * warpgroup;
    constexpr u32 kChunkBytes = kConfig.q_rows() * 128;
    if (thread == 0) {  // the previous tile has left
      if (kAgain) ptx::tma_store_wait();
      ptx::tma_store_wait_read();
    }
    ptx::bar_sync(kOutputBarrier + warpgroup, 128);
    stage_output_tile<kConfig.dtype, kConfig.swizzle>(O, tile, kChunkBytes);
    ptx::fence_proxy_async();
    ptx::bar_sync(kOutputBarrier + warpgroup, 128);
    if (thread == 0) {
      for (i32 d = 0; d < kConfig.d_v; d += 64) {
        ptx::tma_store(maps.o, tile + d / 64 * kChunkBytes, d, task.row, task.block.head,
                       task.block.batch);
      }
      ptx::tma_store_commit();
    }
  }

  void run() {
    q_at.advance(warpgroup);
    if (kTurns && warpgroup == kConfig.warpgroups - 1) pass_turn();  // the first may begin
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.assigned(count), Shared::parity(count));
      const Assignment assignment = read_assignment(shared, count);
      if (assignment.block.q_block < 0) break;
      const Task task{assignment.block,
                      assignment.block.q_block * kConfig.q_rows() + 64 * i32(warpgroup), count};
      const KeyBlocks blocks = read_key_blocks(shared, count, warpgroup);
      if (assignment.careful) {
        compute_carefully(task, blocks);
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
  if (warpgroup == kConfig.warpgroups) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    if (thread == 0) {
      ForwardLoader<kConfig>{maps, params, shared}.run();
    } else if (warp == 1) {
      ForwardPlanner<kConfig>{params, shared, thread % 32}.run();
    } else if (kConfig.sequences && warp == 2) {
      ForwardSweeper<kConfig>{params, shared}.run();
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    ForwardConsumer<kConfig>{maps, params, shared, u32(warpgroup), thread}.run();
  }
}

}  // namespace fulmen
