// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What the roles of backward_sm90 share: the layout of shared memory with its barriers, and the
// mailboxes in which the loader says which item comes next.
#pragma once

#include "kernels/backward_sm90/scheduler.cuh"
#include "kernels/common/pipeline_sm90.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// What the loader tells everybody of an item.
struct BackwardMail {
  i32 num_steps;  // 0: nobody sees the keys; kNoItem: only dQ is left to round; kEnd: nothing
  BackwardItem item;
  BackwardRounding rounding;  // of dQ, which comes first

  static constexpr i32 kNoItem = -1, kEnd = -2, kBytes = 64;
  constexpr bool has_item() const { return num_steps >= 0; }
};

// What the loader tells the consumers of a step, so that they carry nothing of the walk along.
struct BackwardStepMail {
  u32 tile;   // of the sums of dQ: q_rows rows, counted from params.dq_sums; without dQ: the head
  u32 flags;  // the block of queries; kLast; kPartial << warpgroup: its mask has to be looked at;
              // kHuge, which the consumers find out: a row's scores are beyond kHugeScore

  static constexpr u32 kHuge = 1u << 28;
  static constexpr u32 kPartial = 1u << 29;
  static constexpr u32 kLast = 1u << 31;
  constexpr i32 q_block() const { return i32(flags & (kHuge - 1)); }
  constexpr bool is_last() const { return flags & kLast; }
  constexpr bool is_partial(u32 warpgroup) const { return flags & kPartial << warpgroup; }
  constexpr bool is_plain(u32 warpgroup) const {
    return !(flags & (kHuge | kPartial << warpgroup));
  }
};

// Shared memory: K, V, Q, dO, dS, dV and dK on their way out, rows, delta, mail, barriers.
template <BackwardConfig kConfig>
struct BackwardShared {
  u32 base;

  static constexpr i32 kStages = kConfig.stages();
  static constexpr i32 kDsStages = BackwardConfig::kDsStages;
  static constexpr i32 kDOutStages = kConfig.dout_stages();
  using StageCursor = Cursor<kStages>;
  using DOutCursor = Cursor<kDOutStages>;
  using DsCursor = Cursor<kDsStages>;
  using KvCursor = Cursor<1>;
  using MailCursor = Cursor<BackwardConfig::kMailboxes>;

  static constexpr u32 kV = kConfig.k_bytes();
  static constexpr u32 kQ = kV + kConfig.v_bytes();
  static constexpr u32 kDO = kQ + kStages * kConfig.q_bytes();
  static constexpr u32 kDS = kDO + kDOutStages * kConfig.q_bytes();
  static constexpr u32 kOut = kDS + kDsStages * kConfig.ds_bytes();
  static constexpr u32 kRows = kOut + kConfig.out_bytes();
  static constexpr u32 kDelta = kRows + kStages * kConfig.row_bytes();
  static constexpr u32 kMail = kDelta + kDOutStages * kConfig.delta_bytes();
  static constexpr u32 kSteps = kMail + BackwardMail::kBytes * BackwardConfig::kMailboxes;
  static constexpr u32 kBarriers = kSteps + 8 * kStages;
  static constexpr u32 kVBarriers = kBarriers + Ring<1>::kBarrierBytes;
  static constexpr u32 kQBarriers = kVBarriers + Ring<1>::kBarrierBytes;
  static constexpr u32 kDOBarriers = kQBarriers + Ring<kStages>::kBarrierBytes;
  static constexpr u32 kDSBarriers = kDOBarriers + Ring<kDOutStages>::kBarrierBytes;
  static constexpr u32 kMailBarriers = kDSBarriers + Ring<kDsStages>::kBarrierBytes;
  static constexpr u32 kAddedBarriers =
      kMailBarriers + Ring<BackwardConfig::kMailboxes>::kBarrierBytes;
  static constexpr u32 kLandedBarriers = kAddedBarriers + 8 * BackwardConfig::kMailboxes;
  static constexpr u32 kTurnBarriers = kLandedBarriers + 16 + 16 * kStages;
  static constexpr u32 kAnnouncedBarriers = kTurnBarriers + Ring<kDsStages>::kBarrierBytes;
  static_assert(kAnnouncedBarriers + 8 * kDsStages <= u32(kConfig.shared_bytes()));

  // Where dO stands: with as many stages as Q has, where Q does.
  static constexpr DOutCursor dout_cursor(StageCursor at, DOutCursor dout_at) {
    if constexpr (kDOutStages == kStages) {
      return at;
    } else {
      return dout_at;
    }
  }

  // loader -> consumers -> loader
  constexpr Ring<1> k() const { return {base, u32(kConfig.k_bytes()), base + kBarriers}; }
  constexpr Ring<1> v() const { return {base + kV, u32(kConfig.k_bytes()), base + kVBarriers}; }
  // Q comes with `rows`, dO with `delta`.
  constexpr Ring<kStages> q() const {
    return {base + kQ, u32(kConfig.q_bytes()), base + kQBarriers};
  }
  constexpr Ring<kDOutStages> dout() const {
    return {base + kDO, u32(kConfig.q_bytes()), base + kDOBarriers};
  }
  constexpr u32 rows(StageCursor at) const {
    return base + kRows + at.buffer * kConfig.row_bytes();
  }
  constexpr u32 delta(DOutCursor at) const {
    return base + kDelta + at.buffer * kConfig.delta_bytes();
  }
  // Two words that come with Q: what step this is (BackwardStepMail).
  constexpr u32 step(StageCursor at) const { return base + kSteps + 8 * at.buffer; }
  // both warpgroups, 64 keys each -> both: dS waits for its part in dQ; where products are divided,
  // the first -> the second: P
  constexpr Ring<kDsStages> ds() const {
    return {base + kDS, u32(kConfig.ds_bytes()), base + kDSBarriers};
  }
  // a warpgroup -> the copy engine: dV, then dK, of its 64 keys
  constexpr u32 out(u32 warpgroup) const { return base + kOut + warpgroup * kConfig.k_bytes() / 2; }
  // loader -> everybody: an item (BackwardMail)
  constexpr Ring<BackwardConfig::kMailboxes> mail() const {
    return {base + kMail, BackwardMail::kBytes, base + kMailBarriers};
  }
  // copy engine -> cleaner, where sequences differ: the tile is there, but not only the sequence's
  constexpr u32 k_landed() const { return base + kLandedBarriers; }
  constexpr u32 v_landed() const { return base + kLandedBarriers + 8; }
  constexpr u32 q_landed(StageCursor at) const {
    return base + kLandedBarriers + 16 + 16 * at.buffer;
  }
  constexpr u32 dout_landed(DOutCursor at) const { return q_landed({at.buffer, 0}) + 8; }
  // usher -> consumers -> reporter: they may add dQ of a step to its sums; they have. Holds no
  // data.
  constexpr Ring<kDsStages> turns() const { return {base, 0, base + kTurnBarriers}; }
  // reporter -> usher: the grid knows, and has seen this use of the barriers above
  constexpr u32 announced(DsCursor at) const { return base + kAnnouncedBarriers + 8 * at.buffer; }
  // consumers -> reporter: `added`, this item's part of dQ is on its way
  constexpr u32 added(MailCursor at) const { return base + kAddedBarriers + 8 * at.buffer; }

  void write_step(StageCursor at, BackwardStepMail mail) const {
    ptx::store_shared(step(at), mail.tile);
    ptx::store_shared(step(at) + 4, mail.flags);
  }
  BackwardStepMail read_step(StageCursor at) const {
    return {ptx::load_shared(step(at)), ptx::load_shared(step(at) + 4)};
  }

  void init() const {
    constexpr i32 kWarps = BackwardConfig::kConsumerWarps / (kConfig.divides_products() ? 2 : 1);
    k().init(kWarps);
    v().init(kWarps);
    q().init(BackwardConfig::kConsumerWarps);
    dout().init(BackwardConfig::kConsumerWarps);
    // two warpgroups, a loader, the reporter; the cleaner or the usher
    mail().init(kConfig.sequences || kConfig.ordered ? 5 : 4);
    if constexpr (kConfig.sequences) {
      for (u32 i = 0; i < 2 + 2 * kStages; ++i) ptx::mbarrier_init(k_landed() + 8 * i, 1);
    }
    for (i32 i = 0; i < kDsStages; ++i) {
      ptx::mbarrier_init(ds().full(DsCursor{u32(i)}), kWarps);
      ptx::mbarrier_init(ds().empty(DsCursor{u32(i)}), kWarps);
    }
    if constexpr (kConfig.ordered) {
      turns().init(BackwardConfig::kConsumerWarps);
      for (u32 i = 0; i < kDsStages; ++i) ptx::mbarrier_init(announced({i, 0}), 1);
    }
    for (i32 i = 0; i < BackwardConfig::kMailboxes; ++i) {
      ptx::mbarrier_init(added(MailCursor{u32(i)}), BackwardConfig::kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }

  void write_mail(MailCursor at, const BackwardMail& sent) const {
    const u32 address = mail().address(at);
    const BackwardItem& item = sent.item;
    const BackwardRounding& r = sent.rounding;
    const auto store = [&](u32 part, i32 a, i32 b, i32 c, i32 d) {
      ptx::store_shared_x4(address + 16 * part, {{u32(a), u32(b), u32(c), u32(d)}});
    };
    store(0, item.line, item.kv_block, item.num_kv_blocks, item.q_begin);
    store(1, item.shape.q_len, item.shape.kv_len, item.shape.shift, item.kv_begin);
    store(2, r.line, r.begin, r.end, r.blocks);
    store(3, r.q_begin, r.q_len, sent.num_steps, item.part);
  }
  i32 read_num_steps(MailCursor at) const { return i32(ptx::load_shared(mail().address(at) + 56)); }
  BackwardItem read_item(MailCursor at) const {
    const ptx::U32x4 x = ptx::load_shared_x4(mail().address(at));
    const ptx::U32x4 y = ptx::load_shared_x4(mail().address(at) + 16);
    return {i32(x.word[0]),
            i32(x.word[1]),
            i32(x.word[2]),
            i32(x.word[3]),
            i32(y.word[3]),
            {i32(y.word[0]), i32(y.word[1]), i32(y.word[2])},
            i32(ptx::load_shared(mail().address(at) + 60))};
  }
  SequenceShape read_shape(MailCursor at) const {
    const ptx::U32x4 x = ptx::load_shared_x4(mail().address(at) + 16);
    return {i32(x.word[0]), i32(x.word[1]), i32(x.word[2])};
  }
  BackwardRounding read_rounding(MailCursor at) const {
    const ptx::U32x4 x = ptx::load_shared_x4(mail().address(at) + 32);
    const ptx::U32x4 y = ptx::load_shared_x4(mail().address(at) + 48);
    return {i32(x.word[0]), i32(x.word[1]), i32(x.word[2]),
            i32(x.word[3]), i32(y.word[0]), i32(y.word[1])};
  }

  // What a role, a thread or a warp, does for every item: take(box, num_steps), in order up to the
  // end. The box goes back afterwards, by the thread that `releases`.
  template <class Take>
  void take_mail(bool releases, const Take& take) const {
    MailCursor at;
#pragma unroll 1
    for (;;) {
      mail().wait(at);
      const i32 num_steps = read_num_steps(at);
      if (num_steps == BackwardMail::kEnd) return;
      take(at, num_steps);
      if (releases) mail().release(at);
      at.advance();
    }
  }
};

}  // namespace fulmen
