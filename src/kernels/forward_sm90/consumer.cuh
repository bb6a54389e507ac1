// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a consumer warpgroup of forward_sm90 holds apart from the algorithm: its pipeline states,
// named barriers (ping-pong, warpgroup, all consumers), and which keys its 64 query rows see.
#pragma once

#include "kernels/common/scores_sm90.cuh"
#include "kernels/forward_sm90/producer.cuh"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/math.cuh"

namespace fulmen {

template <ForwardSm90Config kConfig>
struct ForwardWarpgroup {
  using Shared = ForwardStorage<kConfig>;
  using Scores = float[kConfig.kv_rows / 2];

  const ForwardTensorMaps& maps;
  const ForwardParams& params;
  Shared shared;
  u32 warpgroup;
  u32 thread;  // 0 .. 127
  typename Shared::QState q_at;
  typename Shared::KvState k_at, v_at;
  InlineProducer<kConfig> inline_producer{{maps, params, shared}};

  // Ping-pong: warpgroup w issues its products after warpgroup w - 1. Only warpgroup 0 waits for K
  // and V to land; the ping-pong barriers carry that to the others (measured: 3 to 4 % at d 128).
  static constexpr bool kPingPong = kConfig.ping_pong && kConfig.warpgroups > 1;
  static constexpr u32 kPingPongBarrier = 1;   // and on, one each
  static constexpr u32 kWarpgroupBarrier = 4;  // and on, one each
  static constexpr u32 kConsumersBarrier = 7;  // of the consumers
  bool waits_for_data() const { return !kPingPong || warpgroup == 0; }
  void ping_pong_wait() const {
    if constexpr (kPingPong) ptx::bar_sync(kPingPongBarrier + warpgroup, 256);
  }
  void ping_pong_arrive() const {
    const u32 next = warpgroup + 1 == kConfig.warpgroups ? 0 : warpgroup + 1;
    if constexpr (kPingPong) ptx::bar_arrive(kPingPongBarrier + next, 256);
  }

  // The 64 rows of a warpgroup: of each of its heads those from `row` on in the sequence.
  struct Work {
    QueryBlock block;
    i32 row;
    u32 count;  // number of the work tile
  };
  // Read from shared memory wherever it is needed: that costs less than registers.
  SeqlenInfo seqlen_info(const Work& work) const {
    return read_seqlen_info(shared, params, work.block, work.count);
  }

  void release_q() {
    if constexpr (Shared::kRotatesQ) {
      release_every_q();
    } else {
      if (thread == 0) shared.q().consumer_release(q_at);
    }
    q_at.advance(kConfig.q_tiles());
  }
  // All tiles of Q of the work tile, after they have landed.
  void release_every_q() const {
    typename Shared::QState first = q_at;
    first.advance(kConfig.num_q_slots() - warpgroup);
    first.phase ^= 1;  // a round forward and back
    auto at = first;
    for (i32 w = 0; w < kConfig.q_tiles(); ++w, at.advance()) shared.q().consumer_wait(at);
    sync_warpgroup();
    at = first;
    for (i32 w = 0; thread == 0 && w < kConfig.q_tiles(); ++w, at.advance()) {
      shared.q().consumer_release(at);
    }
  }
  void release_k() {
    if (thread == 0) shared.k().consumer_release(k_at);
    k_at.advance();
    ++inline_producer.free_k;
  }
  void release_v() {
    if (thread == 0) shared.v().consumer_release(v_at);
    v_at.advance();
    ++inline_producer.free_v;
  }

  // Without a producer warp: the first loads of a work tile, and before each use of a tile loads
  // into the buffers that were released.
  void begin_producing(const Work& work, const KeyBlocks& blocks) {
    if constexpr (kConfig.specialised) return;
    inline_producer.begin(work.block, seqlen_info(work), blocks.all_begin, blocks.all_end - 1);
    if (warpgroup == 0 && thread == 0)
      inline_producer.producer.load_q(work.block, inline_producer.seqlen);
    ptx::warp_sync();
  }
  void produce() {
    if constexpr (kConfig.specialised) return;
    if (warpgroup == 0 && thread == 0) inline_producer.produce();
    ptx::warp_sync();
  }

  // The first of the columns of V and O that this warpgroup computes.
  i32 first_dim() const { return kConfig.split_dims ? i32(warpgroup) * kConfig.o_dims() : 0; }
  u32 v_tile() const { return shared.v().address(v_at) + first_dim() * kConfig.kv_rows * 2; }

  // All warps of the warpgroup have come here; a wgmma synchronises them as well.
  void sync_warpgroup() const { ptx::bar_sync(kWarpgroupBarrier + warpgroup, 128); }

  // A block of keys that only other warpgroups of this thread block see.
  void skip_block() {
    produce();
    shared.k().consumer_wait(k_at);
    ping_pong_wait();
    ping_pong_arrive();  // before V: with one stage it comes only when the others have read K
    sync_warpgroup();
    release_k();
    shared.v().consumer_wait(v_at);
    sync_warpgroup();
    release_v();
  }

  // The first row of this thread in its tile; the second is 8 further.
  i32 first_row() const { return thread / 32 * 16 + thread % 32 / 4; }

  // Row r, 0 or 1, of this thread: its number in the sequence, and its head.
  i32 q_row(const Work& work, i32 r) const {
    return work.row + (first_row() + 8 * r) % kConfig.tile_rows();
  }
  i32 head(const Work& work, i32 r) const {
    return work.block.head + (first_row() + 8 * r) / kConfig.tile_rows();
  }

  // The intervals of keys that the interval mask leaves to this thread's two rows.
  void find_visible_keys(Interval (&visible)[2], const Work& work) const {
    const SeqlenInfo seqlen = seqlen_info(work);
    for (i32 r = 0; r < 2; ++r) {
      visible[r] =
          visible_columns(effective_mask<kConfig>(params.mask), seqlen.shape, q_row(work, r));
    }
  }

  FragmentScores<kConfig> scores_of(const Work& work) const {
    return {params, seqlen_info(work), work.block, work.row + first_row()};
  }
  float softmax_factor() const { return kConfig.maps_scores() ? 1.f : params.scale_log2; }

  // S = -inf at the keys of block j outside a row's interval. kMask: which bounds can lie in it.
  template <MaskKind kMask>
  void apply_mask(Scores& S, const Interval (&visible)[2], i32 j) const {
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
          bool hidden = kMask == MaskKind::kRight && offset >= end;
          if constexpr (kConfig.score.mask_kind == MaskKind::kBoth)
            hidden = hidden || offset < begin;
          if (hidden) S[i + c] = -kInfinity<float>;
        }
      }
    }
  }
};

}  // namespace fulmen
