// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The producer of backward_dq_sm90: one thread that starts the TMA loads of Q, dO, K and V; and the
// warp that sets rows of K and V past a sequence's end to zero.
#pragma once

#include "kernels/backward_sm90/config_beside.h"
#include "kernels/common/pair_tiles_sm90.cuh"
#include "kernels/forward_sm90/listed_keys.cuh"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// ---- Producer: one thread ----------------------------------------------------------------------

// Slots of Q: all warpgroups' Q, then all warpgroups' dO.
template <ForwardSm90Config kConfig>
struct BackwardDqProducer {
  using Shared = ForwardStorage<kConfig>;

  const BackwardDqParams& params;
  Shared shared;
  typename Shared::QState q_at;
  typename Shared::KvState kv_at;
  typename Shared::PairState pairs_at;

  void load(const TensorMap& map, u32 tile, u32 full, i32 rows, i32 row, i32 head,
            i32 batch) const {
#pragma unroll
    for (i32 d = 0; d < kConfig.d_qk; d += 64) {
      ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch);
    }
  }

  void load_queries(const TensorMap& map, const QueryBlock& block, const SeqlenInfo& seqlen) {
    const i32 row = seqlen.q_begin + block.q_block * kConfig.q_rows();
    for (i32 w = 0; w < kConfig.warpgroups; ++w) {
      shared.q().producer_acquire_loaded(q_at);
      load(map, shared.q().address(q_at), shared.q().full(q_at), 64, row + 64 * w, block.head,
           seqlen.batch);
      q_at.advance();
    }
  }

  // Where a sequence ends inside the block, the tail zero-fill gets both tiles first.
  void load_keys(i32 block, i32 head, const SeqlenInfo& seqlen) {
    const i32 row = seqlen.kv_begin + block * kConfig.kv_rows;
    const bool ends_inside =
        kConfig.score.varlen && rows_inside<kConfig>(seqlen, block) < kConfig.kv_rows;
    const u32 k_full = ends_inside ? shared.landed(kv_at) : shared.k().full(kv_at);
    const u32 v_full = ends_inside ? shared.landed(kv_at) : shared.v().full(kv_at);
    ptx::mbarrier_wait(shared.k().empty(kv_at), kv_at.phase ^ 1);
    ptx::mbarrier_wait(shared.v().empty(kv_at), kv_at.phase ^ 1);
    if (ends_inside) {
      ptx::mbarrier_arrive_expect(k_full, kConfig.k_bytes() + kConfig.v_bytes());
    } else {
      ptx::mbarrier_arrive_expect(k_full, kConfig.k_bytes());
      ptx::mbarrier_arrive_expect(v_full, kConfig.v_bytes());
    }
    load(params.maps.k, shared.k().address(kv_at), k_full, kConfig.kv_rows, row, head,
         seqlen.batch);
    load(params.maps.v, shared.v().address(kv_at), v_full, kConfig.kv_rows, row, head,
         seqlen.batch);
    kv_at.advance();
  }

  void load_bias_and_mask(const QueryBlock& block, i32 key_block) {
    if constexpr (kConfig.pair_tiles()) {
      const auto pairs = shared.pairs();
      pairs.producer_acquire(pairs_at);
      load_pair_tiles<kConfig>(params.maps.bias, params.maps.mask, params.forward.attention,
                               pairs.address(pairs_at), pairs.full(pairs_at), block, key_block);
      pairs_at.advance();
    }
  }

  // The blocks of keys that lists leave.
  void load_listed(const QueryBlock& block, i32 head, const SeqlenInfo& seqlen, u32 count) {
    KeyWalk<kConfig> walk(shared, params.forward, block, count);
    auto now = walk.first(), next = walk.next();
#pragma unroll 1
    for (; now.block >= 0; now = next, next = walk.next()) {
      if (next.block < 0) ptx::mbarrier_arrive(shared.nearly_loaded());
      ptx::mbarrier_wait(shared.k().empty(kv_at), kv_at.phase ^ 1);
      write_key_step<kConfig>(shared, kv_at, now, next);
      load_keys(now.block, head, seqlen);
    }
  }

  void run() {
    const ForwardParams& forward = params.forward;
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.published(count), Shared::parity(count));
      const ptx::U32x4 tile = ptx::load_shared_x4(shared.work_tile(count));
      const QueryBlock block{i32(tile.word[0]), i32(tile.word[1]), i32(tile.word[2])};
      if (block.q_block < 0) return;
      const SeqlenInfo seqlen = read_seqlen_info(shared, forward, block, count);
      const i32 first = ptx::load_shared(shared.key_blocks(count, 0) + 16);
      const i32 last = i32(ptx::load_shared(shared.key_blocks(count, 0) + 20)) - 1;
      const i32 kv_head = block.head / (forward.heads_q / forward.heads_kv);
      load_queries(params.maps.q, block, seqlen);
      load_queries(params.maps.dout, block, seqlen);
      if constexpr (kConfig.score.has_tile_lists()) {
        load_listed(block, kv_head, seqlen, count);
        continue;
      }
#pragma unroll 1
      for (i32 j = last; j >= first; --j) {
        if (j == min(first + 1, last)) ptx::mbarrier_arrive(shared.nearly_loaded());
        load_keys(j, kv_head, seqlen);
        load_bias_and_mask(block, j);
      }
    }
  }
};

// ---- Tail zero-fill: one warp, with config.score.varlen
// --------------------------------------------

// Sets keys and values past a sequence's end to zero in tiles that have landed: 0 times a NaN that
// lies there would be NaN.
template <ForwardSm90Config kConfig>
struct BackwardDqTailZeroFill {
  using Shared = ForwardStorage<kConfig>;

  const BackwardDqParams& params;
  Shared shared;
  typename Shared::KvState kv_at;
  u32 phases = 0;  // of the `landed` barriers, one bit each

  void clear(u32 tile, i32 first) const {
#pragma unroll 1
    for (i32 at = first * 128 + i32(ptx::thread_index()) % 32 * 16; at < kConfig.kv_rows * 128;
         at += 512) {
#pragma unroll
      for (i32 d = 0; d < kConfig.d_qk; d += 64) {
        ptx::store_shared_x4(tile + d * kConfig.kv_rows * 2 + at, {{0, 0, 0, 0}});
      }
    }
  }

  void zero_fill(i32 rows) {
    ptx::mbarrier_wait(shared.landed(kv_at), phases >> kv_at.index & 1);
    phases ^= 1u << kv_at.index;
    clear(shared.k().address(kv_at), rows);
    clear(shared.v().address(kv_at), rows);
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (ptx::thread_index() % 32 == 0) {
      ptx::mbarrier_arrive(shared.k().full(kv_at));
      ptx::mbarrier_arrive(shared.v().full(kv_at));
    }
  }

  void run() {
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.published(count), Shared::parity(count));
      const WorkTile tile = read_work_tile(shared, count);
      if (tile.block.q_block < 0) return;
      const SeqlenInfo seqlen = read_seqlen_info(shared, params.forward, tile.block, count);
      KeyOrder<kConfig> order(shared, params.forward, tile.block, count);
      ptx::warp_sync();
      if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(shared.done(count));
      order.each([&](i32 j) {
        const i32 rows = rows_inside<kConfig>(seqlen, j);
        if (rows < kConfig.kv_rows) zero_fill(rows);
        kv_at.advance();
      });
    }
  }
};

}  // namespace fulmen
