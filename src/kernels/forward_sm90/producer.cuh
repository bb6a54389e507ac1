// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The producer of forward_sm90: one thread that starts the TMA loads of Q, K and V in the order in
// which the consumers use them, as soon as a buffer is free; and the warp that sets rows of V past
// a sequence's end to zero. InlineProducer does the same from a thread of a consumer (ablation);
// of pools of pages see paged_producer.cuh.
#pragma once

#include "kernels/common/documents_sm90.cuh"
#include "kernels/common/pair_tiles_sm90.cuh"
#include "kernels/common/products_sm90.cuh"
#include "kernels/forward_sm90/listed_keys.cuh"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

template <ForwardSm90Config kConfig>
struct ForwardProducer {
  using Shared = ForwardStorage<kConfig>;

  const ForwardTensorMaps& maps;
  const ForwardParams& params;
  Shared shared;
  typename Shared::QState q_at;
  typename Shared::KvState k_at, v_at;
  typename Shared::PairState pairs_at;

  void load(const TensorMap& map, u32 tile, u32 full, i32 dims, i32 rows, i32 row, i32 head,
            i32 batch, u64 policy, i32 first_dim = 0) const {
    constexpr i32 kBytes = kConfig.element_bytes();
    constexpr i32 kBoxDims = (kConfig.swizzle ? 128 : 16) / kBytes;
#pragma unroll
    for (i32 d = 0; d < kConfig.row_bytes(dims) / kBytes; d += kBoxDims) {
      if constexpr (kConfig.cache_hints) {
        ptx::tma_load(tile + d * rows * kBytes, map, full, first_dim + d, row, head, batch, policy);
      } else {
        ptx::tma_load(tile + d * rows * kBytes, map, full, first_dim + d, row, head, batch);
      }
    }
  }

  void load_k(i32 block, i32 head, const SeqlenInfo& seqlen) {
    shared.k().producer_acquire(k_at);
    const i32 key = block * kConfig.kv_rows + pair_rank<kConfig>() * kConfig.own_keys();
    load(maps.k, shared.k().address(k_at), shared.k().full(k_at), kConfig.d_qk, kConfig.own_keys(),
         seqlen.kv_begin + key, head, seqlen.kv_batch, ptx::kEvictLast);
    k_at.advance();
  }

  // first_range: of the blocks of keys of the sequence, among all.
  void load_v(i32 block, i32 head, const SeqlenInfo& seqlen, i32 first_range) {
    if constexpr (kConfig.has_8_bits()) {
      shared.v().producer_acquire(v_at);
      load(maps.v, shared.v().address(v_at), shared.v().full(v_at), kConfig.kv_rows, kConfig.d_v, 0,
           head, first_range + block, ptx::kEvictLast);
      v_at.advance();
      return;
    }
    const bool ends_inside =
        kConfig.fills_tails() && rows_inside<kConfig>(seqlen, block) < kConfig.kv_rows;
    const u32 barrier = ends_inside ? shared.landed(v_at) : shared.v().full(v_at);
    shared.v().producer_acquire(v_at, barrier);
    load(maps.v, shared.v().address(v_at), barrier, kConfig.v_dims(), kConfig.kv_rows,
         seqlen.kv_begin + block * kConfig.kv_rows, head, seqlen.kv_batch, ptx::kEvictLast,
         pair_rank<kConfig>() * kConfig.o_dims());
    v_at.advance();
  }

  void load_q(const QueryBlock& block, const SeqlenInfo& seqlen) {
    const i32 row = seqlen.q_begin + block.q_block * kConfig.q_rows();
    for (i32 w = 0; w < kConfig.q_tiles(); ++w) {
      if constexpr (kConfig.q_register_dims > 0) {
        shared.q().producer_acquire_loaded(q_at);
      } else {
        shared.q().producer_acquire(q_at);
      }
      for (i32 h = 0; h < kConfig.heads_per_tile; ++h) {
        load(maps.q, shared.q().address(q_at) + h * kConfig.tile_rows() * 128,
             shared.q().full(q_at), kConfig.d_qk, 64, row + kConfig.tile_rows() * w, block.head + h,
             seqlen.batch, ptx::kEvictFirst);
      }
      q_at.advance();
    }
  }

  // Bias and mask of the block's rows and those keys.
  void load_pairs(const QueryBlock& block, i32 key_block) {
    if constexpr (kConfig.pair_tiles()) {
      shared.pairs().producer_acquire(pairs_at);
      load_pair_tiles<kConfig>(maps.bias, maps.mask, params.attention,
                               shared.pairs().address(pairs_at), shared.pairs().full(pairs_at),
                               block, key_block);
      pairs_at.advance();
    }
  }

  void tell_nearly_loaded() const { ptx::mbarrier_arrive(shared.nearly_loaded()); }

  i32 kv_head(const QueryBlock& block) const {
    return block.head / (params.heads_q / params.heads_kv);
  }

  i32 first_range(const QueryBlock& block, const SeqlenInfo& seqlen) const {
    if constexpr (!kConfig.has_8_bits()) return 0;
    return i32(first_key_range(params.attention, kConfig.kv_rows, block.batch, seqlen.kv_begin));
  }

  void load_block(const QueryBlock& block, const SeqlenInfo& seqlen, i32 first, i32 last) {
    const i32 head = kv_head(block);
    const i32 range = first_range(block, seqlen);
    if (last <= first + 1) tell_nearly_loaded();
    load_k(last, head, seqlen);
    load_q(block, seqlen);
    load_pairs(block, last);
#pragma unroll 1
    for (i32 j = last - 1; j >= first; --j) {
      if (j == first + 1) tell_nearly_loaded();
      load_k(j, head, seqlen);
      load_pairs(block, j);
      load_v(j + 1, head, seqlen, range);
    }
    load_v(first, head, seqlen, range);
  }

  // The blocks of keys that lists leave.
  void load_listed(const QueryBlock& block, const SeqlenInfo& seqlen, u32 count) {
    const i32 head = kv_head(block);
    KeyWalk<kConfig> walk(shared, params, block, count);
    auto now = walk.first(), next = walk.next();
    const auto load_next_k = [&] {
      if (next.block < 0) tell_nearly_loaded();
      ptx::mbarrier_wait(shared.k().empty(k_at), k_at.phase ^ 1);
      write_key_step<kConfig>(shared, k_at, now, next);
      load_k(now.block, head, seqlen);
    };
    load_next_k();
    load_q(block, seqlen);
#pragma unroll 1
    while (next.block >= 0) {
      const i32 before = now.block;
      now = next;
      next = walk.next();
      load_next_k();
      load_v(before, head, seqlen, 0);
    }
    load_v(now.block, head, seqlen, 0);
  }

  void run() {
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.published(count), Shared::parity(count));
      const ptx::U32x4 tile = ptx::load_shared_x4(shared.work_tile(count));
      const QueryBlock block{i32(tile.word[0]), i32(tile.word[1]), i32(tile.word[2])};
      if (block.q_block < 0) return;
      const SeqlenInfo seqlen = read_seqlen_info(shared, params, block, count);
      if constexpr (kConfig.score.has_tile_lists()) {
        load_listed(block, seqlen, count);
      } else {
        load_block(block, seqlen, ptx::load_shared(shared.key_blocks(count, 0) + 16),
                   ptx::load_shared(shared.key_blocks(count, 0) + 20) - 1);
      }
    }
  }
};

// The same by a thread of a consumer warpgroup (ablation): it starts as many loads as there are
// buffers, and whenever its warpgroup calls produce() one for each buffer that the warpgroup has
// released; it then waits until the other warpgroups have released that buffer, too.
template <ForwardSm90Config kConfig>
struct InlineProducer {
  ForwardProducer<kConfig> producer;
  QueryBlock block;
  SeqlenInfo seqlen;
  i32 first, last;  // blocks of keys
  i32 next_k, next_v;
  i32 free_k = kConfig.stages, free_v = kConfig.stages;

  void begin(const QueryBlock& block_, const SeqlenInfo& seqlen_, i32 first_, i32 last_) {
    block = block_;
    seqlen = seqlen_;
    first = first_;
    last = next_k = next_v = last_;
  }

  void produce() {
    const i32 head = producer.kv_head(block);
#pragma unroll 1
    for (; free_k > 0 && next_k >= first; --next_k, --free_k) {
      if (next_k == min(first + 1, last)) ptx::mbarrier_arrive(producer.shared.nearly_loaded());
      producer.load_k(next_k, head, seqlen);
    }
#pragma unroll 1
    for (; free_v > 0 && next_v >= first; --next_v, --free_v)
      producer.load_v(next_v, head, seqlen, 0);
  }
};

// One warp that sets rows past the sequence's end to zero in tiles of V that have landed, before
// the consumers read them: probabilities of 0 times whatever lies there could be NaN.
template <ForwardSm90Config kConfig>
struct ForwardTailZeroFill {
  using Shared = ForwardStorage<kConfig>;

  const ForwardParams& params;
  Shared shared;
  typename Shared::KvState v_at;
  u32 phases = 0;  // of the `landed` barriers, one bit each

  // Rows `first` and on of a tile of V become 0.
  void clear_rows(u32 tile, i32 first) const {
    const OperandTile<kConfig.kv_rows, kConfig.swizzle> V{tile};
#pragma unroll 1
    for (u32 at = first * 8 + ptx::thread_index() % 32; at < kConfig.kv_rows * 8; at += 32) {
#pragma unroll
      for (i32 unit = 0; unit < kConfig.chunked(kConfig.d_v) / 8; unit += 8) {
        ptx::store_shared_x4(V.unit(at / 8, unit + at % 8), {{0, 0, 0, 0}});
      }
    }
    ptx::fence_proxy_async();
  }

  void zero_fill(i32 rows) {
    ptx::mbarrier_wait(shared.landed(v_at), phases >> v_at.index & 1);
    phases ^= 1u << v_at.index;
    clear_rows(shared.v().address(v_at), rows);
    ptx::warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(shared.v().full(v_at));
  }

  void run() {
#pragma unroll 1
    for (u32 count = 0;; ++count) {
      ptx::mbarrier_wait(shared.published(count), Shared::parity(count));
      const WorkTile tile = read_work_tile(shared, count);
      if (tile.block.q_block < 0) return;
      const SeqlenInfo seqlen = read_seqlen_info(shared, params, tile.block, count);
      KeyOrder<kConfig> order(shared, params, tile.block, count);
      ptx::warp_sync();
      if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(shared.done(count));
      order.each([&](i32 j) {
        const i32 rows = rows_inside<kConfig>(seqlen, j);
        if (rows < kConfig.kv_rows) zero_fill(rows);
        v_at.advance();
      });
    }
  }
};

}  // namespace fulmen
