// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Two more roles of backward_sm90: a warp that clears what is nobody's in tiles at the end of a
// sequence, and a thread that tells the grid what has been added to dQ.
#pragma once

#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/backward_dq.cuh"
#include "kernels/tile/backward_shared.cuh"

namespace fulmen {

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
    const i32 keys = mail.shape.kv_len - mail.item.kv_block * kConfig.kv_rows();
#pragma unroll 1
    for (i32 i = 0; i < mail.num_steps; ++i) {
      ptx::mbarrier_wait(shared.q_landed(at), at.parity);
      const i32 queries = mail.shape.q_len - shared.read_step(at).q_block() * kConfig.q_rows;
      clean(q.address(at), q.full(at), kConfig.q_rows, queries);
      if (i == 0) {
        ptx::mbarrier_wait(shared.k_landed(), kv_at.parity);
        clean(shared.k().address(kv_at), shared.k().full(kv_at), kConfig.kv_rows(), keys);
      }
      const auto do_at = Shared::dout_cursor(at, dout_at);
      ptx::mbarrier_wait(shared.dout_landed(do_at), do_at.parity);
      clean(dout.address(do_at), dout.full(do_at), kConfig.q_rows, queries);
      if (kConfig.needs_dp() && i == 0) {
        ptx::mbarrier_wait(shared.v_landed(), kv_at.parity);
        clean(shared.v().address(kv_at), shared.v().full(kv_at), kConfig.kv_rows(), keys);
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
        if (kConfig.dq && mail.index >= params.lag) {
          const i32 rounded = backward_item(params, mail.index - params.lag).line;
          if (is_reused(params, rounded)) ptx::announce(params.freed + rounded);
        }
      }
      shared.mail().release(mail_at);
      mail_at.advance();
    }
  }
};

}  // namespace fulmen
