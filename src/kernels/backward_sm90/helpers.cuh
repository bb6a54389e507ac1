// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// More roles of backward_sm90: a warp that clears what is nobody's in tiles at the end of a
// sequence, a thread that keeps sums of dQ in order, and one that tells the grid what has been
// added to them. The last two are apart since each waits for trips to memory in every step.
#pragma once

#include "kernels/backward_sm90/dq.cuh"
#include "kernels/backward_sm90/shared.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// A tile at the end of a sequence also brings rows of the next one, or of nobody, with anything in
// them: 0 times NaN would be seen. They become 0 before the consumers look. Other tiles go from the
// copy engine to the consumers.
template <BackwardConfig kConfig>
struct BackwardCleaner {
  using Shared = BackwardShared<kConfig>;

  const BackwardParams& params;
  Shared shared;
  u32 lane;
  typename Shared::StageCursor at;
  typename Shared::DOutCursor dout_at;
  typename Shared::KvCursor kv_at;
  u32 phases = 0;  // bit i: which phase of landed barrier i comes next

  // Waits for the tile, clears its rows from `begin` on, and hands it over.
  void clean(u32 landed, u32 tile, u32 full, i32 rows, i32 begin) {
    const u32 bit = (landed - shared.k_landed()) / 8;
    ptx::mbarrier_wait(landed, phases >> bit & 1);
    phases ^= 1u << bit;
#pragma unroll 1
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      for (i32 unit = max(begin, 0) * 8 + i32(lane); unit < rows * 8; unit += 32) {
        ptx::store_shared_x4(tile + d * rows * 2 + unit * 16, {});
      }
    }
    ptx::fence_proxy_async();
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(full);
  }

  void clean_item(const BackwardItem& item, i32 num_steps) {
    const auto q = shared.q();
    const auto dout = shared.dout();
    const auto k = shared.k(), v = shared.v();
    const i32 keys = item.shape.kv_len - item.kv_block * kConfig.kv_rows();
    const bool cuts_keys = keys < kConfig.kv_rows();
    const BackwardWalk walk = backward_walk<kConfig>(params, item);
    BackwardStep step(walk);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(walk)) {
      const i32 queries = item.shape.q_len - step.q_block * kConfig.q_rows;
      const bool cuts_queries = queries < kConfig.q_rows;
      const bool cuts_keys_here = cuts_keys && i == 0;
      const auto do_at = Shared::dout_cursor(at, dout_at);
      if (cuts_queries)
        clean(shared.q_landed(at), q.address(at), q.full(at), kConfig.q_rows, queries);
      if (cuts_keys_here) {
        clean(shared.k_landed(), k.address(kv_at), k.full(kv_at), kConfig.kv_rows(), keys);
      }
      if (cuts_queries) {
        clean(shared.dout_landed(do_at), dout.address(do_at), dout.full(do_at), kConfig.q_rows,
              queries);
      }
      if (kConfig.needs_dp() && cuts_keys_here) {
        clean(shared.v_landed(), v.address(kv_at), v.full(kv_at), kConfig.kv_rows(), keys);
      }
      at.advance();
      dout_at.advance();
    }
    if (num_steps > 0) kv_at.advance();
  }

  void run() {
    shared.take_mail(lane == 0, [&](typename Shared::MailCursor mail_at, i32 num_steps) {
      if (num_steps > 0) clean_item(shared.read_item(mail_at), num_steps);
      ptx::warp_sync();
    });
  }
};

// Where sums of dQ are to have one order: how many blocks of keys have added to those of a step.
template <BackwardConfig kConfig>
inline u32* turns_of(const BackwardParams& params, const BackwardItem& item,
                     const BackwardStep& step) {
  const i64 first_row = first_kept_row<kConfig>(params, item.line, item.q_begin);
  return params.turns + (first_row + step.head * params.rows_of_head) / kConfig.q_rows +
         step.q_block;
}

// There a thread lets the consumers add dQ of a step when the block of keys before has added to the
// same rows. Every block is claimed after the one before it, and walks the same way behind it.
template <BackwardConfig kConfig>
struct BackwardUsher {
  using Shared = BackwardShared<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DsCursor at = {};

  void usher_item(const BackwardItem& item, i32 num_steps) {
    const BackwardWalk walk = backward_walk<kConfig>(params, item);
    BackwardStep step(walk);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(walk)) {
      ptx::await(turns_of<kConfig>(params, item, step),
                 turn_of<kConfig>(params, step.q_block, item.kv_block));
      ptx::mbarrier_wait(shared.announced(at), at.parity ^ 1);
      ptx::mbarrier_arrive(shared.turns().full(at));
      at.advance();
    }
  }

  void run() {
    shared.take_mail(true, [&](typename Shared::MailCursor mail_at, i32 num_steps) {
      if (num_steps > 0) usher_item(shared.read_item(mail_at), num_steps);
    });
  }
};

// Tells the grid what has been added to dQ: of an item, and where sums have an order of every step.
template <BackwardConfig kConfig>
struct BackwardReporter {
  using Shared = BackwardShared<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DsCursor at = {};

  void report_steps(const BackwardItem& item, i32 num_steps) {
    const BackwardWalk walk = backward_walk<kConfig>(params, item);
    BackwardStep step(walk);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(walk)) {
      u32* const turns = turns_of<kConfig>(params, item, step);
      ptx::mbarrier_wait(shared.turns().empty(at), at.parity);
      ptx::announce(turns);
      ptx::mbarrier_arrive(shared.announced(at));
      at.advance();
    }
  }

  void report(typename Shared::MailCursor mail_at) const {
    ptx::mbarrier_wait(shared.added(mail_at), mail_at.parity);
    ptx::announce(params.done + shared.read_item(mail_at).line);
    if constexpr (!kConfig.dq) return;
    const i32 rounded = shared.read_rounding(mail_at).line;
    if (rounded >= 0 && is_reused<kConfig>(params, rounded)) {
      ptx::announce(params.freed + rounded);
    }
  }

  void run() {
    shared.take_mail(true, [&](typename Shared::MailCursor mail_at, i32 num_steps) {
      if (kConfig.ordered && num_steps > 0) report_steps(shared.read_item(mail_at), num_steps);
      if (num_steps >= 0) report(mail_at);
    });
  }
};

}  // namespace fulmen
