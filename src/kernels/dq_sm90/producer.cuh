// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Who brings tiles to backward_dq_sm90: one thread that talks to the copy engine, and where
// sequences differ a warp that clears what is nobody's.
#pragma once

#include "kernels/dq_sm90/config.h"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// ---- Loader: one thread talks to the copy engine ---------------------------------------------

// Slots of Q: all warpgroups' Q, then all warpgroups' dO.
template <AttentionConfig kConfig>
struct BackwardDqLoader {
  using Shared = ForwardShared<kConfig>;

  const BackwardDqParams& params;
  Shared shared;
  typename Shared::QCursor q_at;
  typename Shared::KvCursor kv_at;

  void load(const TensorMap& map, u32 tile, u32 full, i32 rows, i32 row, i32 head,
            i32 batch) const {
#pragma unroll
    for (i32 d = 0; d < kConfig.d_qk; d += 64) {
      ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch);
    }
  }

  void load_queries(const TensorMap& map, const QueryBlock& block, const Place& place) {
    const i32 row = place.q_begin + block.q_block * kConfig.q_rows();
    for (i32 w = 0; w < kConfig.warpgroups; ++w) {
      shared.q().acquire(q_at);
      load(map, shared.q().address(q_at), shared.q().full(q_at), 64, row + 64 * w, block.head,
           place.batch);
      q_at.advance();
    }
  }

  // Where a sequence ends inside the block, both tiles go to the sweeper first.
  void load_keys(i32 block, i32 head, const Place& place) {
    const i32 row = place.kv_begin + block * kConfig.kv_rows;
    const bool ends_inside =
        kConfig.sequences && rows_inside<kConfig>(place, block) < kConfig.kv_rows;
    const u32 k_full = ends_inside ? shared.landed(kv_at) : shared.k().full(kv_at);
    const u32 v_full = ends_inside ? shared.landed(kv_at) : shared.v().full(kv_at);
    ptx::mbarrier_wait(shared.k().empty(kv_at), kv_at.parity ^ 1);
    ptx::mbarrier_wait(shared.v().empty(kv_at), kv_at.parity ^ 1);
    if (ends_inside) {
      ptx::mbarrier_arrive_expect(k_full, kConfig.k_bytes() + kConfig.v_bytes());
    } else {
      ptx::mbarrier_arrive_expect(k_full, kConfig.k_bytes());
      ptx::mbarrier_arrive_expect(v_full, kConfig.v_bytes());
    }
    load(params.maps.k, shared.k().address(kv_at), k_full, kConfig.kv_rows, row, head, place.batch);
    load(params.maps.v, shared.v().address(kv_at), v_full, kConfig.kv_rows, row, head, place.batch);
    kv_at.advance();
  }

  void run() {
    const ForwardParams& forward = params.forward;
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.assigned(count), Shared::parity(count));
      const ptx::U32x4 mail = ptx::load_shared_x4(shared.mail(count));
      const QueryBlock block{i32(mail.word[0]), i32(mail.word[1]), i32(mail.word[2])};
      if (block.q_block < 0) return;
      const Place place = read_place(shared, forward, block, count);
      const i32 first = ptx::load_shared(shared.key_blocks(count, 0) + 16);
      const i32 last = i32(ptx::load_shared(shared.key_blocks(count, 0) + 20)) - 1;
      const i32 kv_head = block.head / (forward.heads_q / forward.heads_kv);
      load_queries(params.maps.q, block, place);
      load_queries(params.maps.dout, block, place);
#pragma unroll 1
      for (i32 j = last; j >= first; --j) {
        if (j == min(first + 1, last)) ptx::mbarrier_arrive(shared.nearly_loaded());
        load_keys(j, kv_head, place);
      }
    }
  }
};

// ---- Sweeper: one warp, where sequences differ -------------------------------------------------

// Keys and values past a sequence's end are nobody's, with anything in them; they become 0.
template <AttentionConfig kConfig>
struct BackwardDqSweeper {
  using Shared = ForwardShared<kConfig>;

  const BackwardDqParams& params;
  Shared shared;
  typename Shared::KvCursor kv_at;
  u32 parities = 0;  // of the `landed` barriers, one bit each

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

  void sweep(i32 rows) {
    ptx::mbarrier_wait(shared.landed(kv_at), parities >> kv_at.buffer & 1);
    parities ^= 1u << kv_at.buffer;
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
      ptx::mbarrier_wait(shared.assigned(count), Shared::parity(count));
      const Assignment assignment = read_assignment(shared, count);
      if (assignment.block.q_block < 0) return;
      const Place place = read_place(shared, params.forward, assignment.block, count);
      const KeyBlocks blocks = read_key_blocks(shared, count, 0);
      ptx::warp_sync();
      if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(shared.done(count));
#pragma unroll 1
      for (i32 j = blocks.all_end - 1; j >= blocks.all_begin; --j) {
        const i32 rows = rows_inside<kConfig>(place, j);
        if (rows < kConfig.kv_rows) sweep(rows);
        kv_at.advance();
      }
    }
  }
};

}  // namespace fulmen
