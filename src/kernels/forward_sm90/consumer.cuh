// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// What a consumer warpgroup of forward_sm90 has and does apart from the algorithm: its place in the
// rings of tiles, its turn at the tensor cores, and which keys its 64 query rows see.
#pragma once

#include "kernels/common/scores_sm90.cuh"
#include "kernels/forward_sm90/producer.cuh"
#include "kernels/forward_sm90/storage.cuh"
#include "kernels/ptx/math.cuh"

namespace fulmen {

template <AttentionConfig kConfig>
struct ForwardWarpgroup {
  using Shared = ForwardShared<kConfig>;
  using Scores = float[kConfig.kv_rows / 2];

  const ForwardTensorMaps& maps;
  const ForwardParams& params;
  Shared shared;
  u32 warpgroup;
  u32 thread;  // 0 .. 127
  typename Shared::QCursor q_at;
  typename Shared::KvCursor k_at, v_at;
  ForwardFeeder<kConfig> feeder{{maps, params, shared}};

  // Turns at the tensor cores: warpgroup w issues its products after w - 1. Only the first waits
  // for K and V to land; the turn carries that to the others (measured: 3 to 4 % at d 128).
  static constexpr bool kTurns = kConfig.ping_pong && kConfig.warpgroups > 1;
  static constexpr u32 kTurnBarrier = 1;  // and on, one each
  static constexpr u32 kMeetBarrier = 4;  // and on, one each
  static constexpr u32 kAllBarrier = 7;   // of the consumers
  bool waits_for_data() const { return !kTurns || warpgroup == 0; }
  void take_turn() const {
    if constexpr (kTurns) ptx::bar_sync(kTurnBarrier + warpgroup, 256);
  }
  void pass_turn() const {
    const u32 next = warpgroup + 1 == kConfig.warpgroups ? 0 : warpgroup + 1;
    if constexpr (kTurns) ptx::bar_arrive(kTurnBarrier + next, 256);
  }

  // What a warpgroup works on: 64 rows, of each of its heads those from `row` on in the sequence.
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
    if constexpr (Shared::kMovesTiles) {
      release_every_q();
    } else {
      if (thread == 0) shared.q().release(q_at);
    }
    q_at.advance(kConfig.q_tiles());
  }
  // All tiles of the block of queries, after they have landed.
  void release_every_q() const {
    typename Shared::QCursor first = q_at;
    first.advance(kConfig.num_q_slots() - warpgroup);
    first.parity ^= 1;  // a round forward and back
    auto at = first;
    for (i32 w = 0; w < kConfig.q_tiles(); ++w, at.advance()) shared.q().wait(at);
    meet();
    at = first;
    for (i32 w = 0; thread == 0 && w < kConfig.q_tiles(); ++w, at.advance()) {
      shared.q().release(at);
    }
  }
  void release_k() {
    if (thread == 0) shared.k().release(k_at);
    k_at.advance();
    ++feeder.free_k;
  }
  void release_v() {
    if (thread == 0) shared.v().release(v_at);
    v_at.advance();
    ++feeder.free_v;
  }

  // Loads, where no warp of its own does: what comes first of a task, and then wherever a tile is
  // about to be used, into the buffers that were given back.
  void begin_loads(const Task& task, const KeyBlocks& blocks) {
    if constexpr (kConfig.specialised) return;
    feeder.begin(task.block, place_of_task(task), blocks.all_begin, blocks.all_end - 1);
    if (warpgroup == 0 && thread == 0) feeder.loader.load_q(task.block, feeder.place);
    ptx::warp_sync();
  }
  void feed() {
    if constexpr (kConfig.specialised) return;
    if (warpgroup == 0 && thread == 0) feeder.feed();
    ptx::warp_sync();
  }

  // The columns of V and O that are this warpgroup's, from this one on.
  i32 first_dim() const { return kConfig.split_dims ? i32(warpgroup) * kConfig.o_dims() : 0; }
  u32 v_tile() const { return shared.v().address(v_at) + first_dim() * kConfig.kv_rows * 2; }

  // All warps are here: what they waited for may go on. Products are such a place, too.
  void meet() const { ptx::bar_sync(kMeetBarrier + warpgroup, 128); }

  // A block of keys that only other warpgroups of this thread block see.
  void skip_block() {
    feed();
    shared.k().wait(k_at);
    take_turn();
    pass_turn();  // before V: with one stage it comes only when the others have read K
    meet();
    release_k();
    shared.v().wait(v_at);
    meet();
    release_v();
  }

  // The first row of this thread in its tile; the second is 8 further.
  i32 first_row() const { return thread / 32 * 16 + thread % 32 / 4; }

  // What row r, 0 or 1, of this thread is: a row of a head of the sequence.
  i32 q_row(const Task& task, i32 r) const {
    return task.row + (first_row() + 8 * r) % kConfig.tile_rows();
  }
  i32 head(const Task& task, i32 r) const {
    return task.block.head + (first_row() + 8 * r) / kConfig.tile_rows();
  }

  // The keys that this thread's two rows see.
  void see(Interval (&visible)[2], const Task& task) const {
    const Place place = place_of_task(task);
    for (i32 r = 0; r < 2; ++r) {
      visible[r] =
          visible_columns(effective_mask<kConfig>(params.mask), place.shape, q_row(task, r));
    }
  }

  FragmentScores<kConfig> scores_of(const Task& task) const {
    return {params, place_of_task(task), task.block, task.row + first_row()};
  }
  float softmax_factor() const { return kConfig.maps_scores() ? 1.f : params.scale_log2; }

  // Hides the keys of block j that a row does not see.
  template <Sight kSight>
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
          bool hidden = kSight == Sight::kEnds && offset >= end;
          if constexpr (kConfig.mask == MaskKind::kBoth) hidden = hidden || offset < begin;
          if (hidden) S[i + c] = kNegativeInfinity;
        }
      }
    }
  }
};

}  // namespace fulmen
