// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// More roles of backward_sm90: a warp that clears what is nobody's in tiles at the end of a
// sequence, a thread that keeps sums of dQ in order, and one that tells the grid what has been
// added to them. The last two are apart since each waits for trips to memory in every step.
#pragma once

#include "kernels/backward_sm90/dq_accum.cuh"
#include "kernels/backward_sm90/storage.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

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
