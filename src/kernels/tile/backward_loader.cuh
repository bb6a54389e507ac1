// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The loader of backward_sm90: one thread that claims items, tells everybody, and talks to the copy
// engine. K and V of an item come once, Q and dO for every step.
#pragma once

#include "kernels/ptx/bulk.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/backward_dq.cuh"
#include "kernels/tile/backward_shared.cuh"

namespace fulmen {

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

  // Where a tile is announced: at the cleaner's barrier if rows of nobody come with it.
  u32 landing(u32 full, u32 landed, i32 rows, i32 rows_left) const {
    return kConfig.sequences && rows_left < rows ? landed : full;
  }

  void load_item(const BackwardItem& item, const BackwardWalk& walk) {
    const i32 kv_head = item.line % params.heads_kv;
    const i32 batch = batch_of<kConfig>(params, item.line);
    const i32 key = item.kv_block * kConfig.kv_rows();
    const i32 keys_left = item.shape.kv_len - key;
    const i32 kv_row = item.kv_begin + key;
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
    if (kConfig.dq && !kConfig.sequences && item.line >= params.num_slots) {
      // its sums are clear again
      ptx::await(params.freed + item.line - params.num_slots, params.num_kv_blocks);
    }
    const auto q = shared.q();
    const auto dout = shared.dout();
    const auto k = shared.k(), v = shared.v();
    const Interval full[2] = {full_blocks(item.shape, key + kConfig.first_key(0)),
                              full_blocks(item.shape, key + kConfig.first_key(1))};
    const i64 first_row = first_kept_row<kConfig>(params, item.line, item.q_begin);
    const u32 first_tile = first_dq_tile<kConfig>(params, item.line, item.q_begin);
    BackwardStep step;
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(walk)) {
      const i32 head = kv_head * params.group_size() + step.head;
      const i32 q_block = step.q_block(walk);
      const i32 first_query = q_block * kConfig.q_rows;
      const i32 row = item.q_begin + first_query;
      const i64 kept = first_row + step.head * params.rows_of_head + first_query;
      const i32 rows_left = item.shape.q_len - first_query;
      const u32 q_full = landing(q.full(at), shared.q_landed(at), kConfig.q_rows, rows_left);
      const auto do_at = Shared::dout_cursor(at, dout_at);
      const u32 dout_full =
          landing(dout.full(do_at), shared.dout_landed(do_at), kConfig.q_rows, rows_left);
      ptx::mbarrier_wait(q.empty(at), at.parity ^ 1);
      u32 flags = q_block;
      if (i + 1 == num_steps) flags |= BackwardStepMail::kLast;
      for (u32 w = 0; w < 2; ++w) {
        if (!full[w].contains(q_block)) flags |= BackwardStepMail::kPartial << w;
      }
      const u32 tile =
          kConfig.dq ? first_tile + u32(step.head) * dq_tiles_of_head<kConfig>(params) + q_block
                     : u32(head);
      shared.write_step(at, {tile, flags});
      ptx::mbarrier_arrive_expect(q_full, kConfig.q_bytes() + kConfig.row_bytes());
      load(params.maps.q, q.address(at), q_full, kConfig.q_rows, row, head, batch);
      ptx::bulk_load(shared.rows(at), params.rows + (kConfig.has_stats ? kept_row(kept) : kept),
                     kConfig.row_bytes(), q_full);
      if (i == 0) {
        const u32 full_barrier =
            landing(k.full(kv_at), shared.k_landed(), kConfig.kv_rows(), keys_left);
        ptx::mbarrier_wait(k.empty(kv_at), kv_at.parity ^ 1);
        ptx::mbarrier_arrive_expect(full_barrier, kConfig.k_bytes());
        load(params.maps.k, k.address(kv_at), full_barrier, kConfig.kv_rows(), kv_row, kv_head,
             batch);
      }
      ptx::mbarrier_wait(dout.empty(do_at), do_at.parity ^ 1);
      ptx::mbarrier_arrive_expect(dout_full, kConfig.q_bytes() + kConfig.delta_bytes());
      load(params.maps.dout, dout.address(do_at), dout_full, kConfig.q_rows, row, head, batch);
      ptx::bulk_load(shared.delta(do_at), params.delta + kept, kConfig.delta_bytes(), dout_full);
      if (kConfig.needs_dp() && i == 0) {
        const u32 full_barrier =
            landing(v.full(kv_at), shared.v_landed(), kConfig.kv_rows(), keys_left);
        ptx::mbarrier_wait(v.empty(kv_at), kv_at.parity ^ 1);
        ptx::mbarrier_arrive_expect(full_barrier, kConfig.k_bytes());
        load(params.maps.v, v.address(kv_at), full_barrier, kConfig.kv_rows(), kv_row, kv_head,
             batch);
      }
      if (i == 0) kv_at.advance();
      at.advance();
      dout_at.advance();
    }
  }

  // What the claim of item `index` of `count` asks for; waits until the dQ to be rounded is
  // complete.
  BackwardMail mail_of(i32 index, i32 count) const {
    BackwardMail mail{BackwardMail::kEnd, {}, {-1, 0, 0, 1, 0, 0}};
    if (index >= count + params.lag) return mail;
    mail.num_steps = BackwardMail::kNoItem;
    if (index < count) mail.item = backward_item<kConfig>(params, index);
    if (kConfig.dq && index >= params.lag) {
      const BackwardItem before = backward_item<kConfig>(params, index - params.lag);
      ptx::await(params.done + before.line, before.num_kv_blocks);
      mail.rounding = rounding_of(params, before);
    }
    return mail;
  }

  void run() {
    typename Shared::MailCursor mail_at;
    const i32 count = num_backward_items<kConfig>(params);
#pragma unroll 1
    for (;;) {
      // Claims late, so that longest-first balances.
      const i32 index = ptx::atomic_add(params.next_item, 1);
      BackwardMail mail = mail_of(index, count);
      BackwardWalk walk{};
      if (index < count) {
        walk = backward_walk<kConfig>(params, mail.item.shape, mail.item.kv_block);
        mail.num_steps = walk.num_steps();
      }
      ptx::mbarrier_wait(shared.mail().empty(mail_at), mail_at.parity ^ 1);
      shared.write_mail(mail_at, mail);
      ptx::mbarrier_arrive(shared.mail().full(mail_at));
      mail_at.advance();
      if (mail.num_steps == BackwardMail::kEnd) return;
      if (mail.has_item()) load_item(mail.item, walk);
    }
  }
};

}  // namespace fulmen
