// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of backward_sm90: loads of K, V, Q, dO, dS and of dK and dV on their way out, their
// mbarriers, and the pipeline in which the producer publishes work loads to all other roles.
#pragma once

#include "kernels/backward_sm90/scheduler.cuh"
#include "kernels/common/pipeline_sm90.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/thread.cuh"

namespace fulmen {

// Pieces of dQ (kConversionRows rows of one head) of a kv head that a work tile converts.
struct DqConversion {
  i32 batch_kv_head;  // -1: none
  i32 begin;
  i32 end;
  i32 blocks;  // pieces of a head
  i32 q_begin;
  i32 q_len;
};

// The share of a work tile's kv head that the work tile `lag` further on converts.
constexpr DqConversion conversion_of(const BackwardParams& params, const BackwardTile& work_tile) {
  const i32 blocks = i32(ceil_div(work_tile.shape.q_len, BackwardSm90Config::kConversionRows));
  const i64 pieces = i64{blocks} * params.group_size;
  return {work_tile.batch_kv_head,
          i32(pieces * work_tile.kv_block / work_tile.num_kv_blocks),
          i32(pieces * (work_tile.kv_block + 1) / work_tile.num_kv_blocks),
          blocks,
          work_tile.q_begin,
          work_tile.shape.q_len};
}

// What the producer publishes to all other roles.
struct BackwardWork {
  i32 num_steps;  // 0: no query sees the keys; kNoTile: only dQ is left to convert; kEnd: the end
  BackwardTile work_tile;
  DqConversion conversion;  // comes before the work tile

  static constexpr i32 kNoTile = -1, kEnd = -2, kBytes = 64;
};

// What the producer tells the consumers of a step, so that they hold no range in registers.
struct BackwardStepInfo {
  u32 tile;   // of dq_accum, q_rows rows each; without dQ: the query head
  u32 flags;  // the block of queries; kLast; kPartial << warpgroup: its mask has to be looked at;
              // kHidden << warpgroup: lists of blocks hide it; kLargeScores, set by the consumers:
              // a row is beyond kLargeScore

  static constexpr u32 kHidden = 1u << 26;
  static constexpr u32 kLargeScores = 1u << 28;
  static constexpr u32 kPartial = 1u << 29;
  static constexpr u32 kLast = 1u << 31;
  constexpr i32 q_block() const { return i32(flags & (kHidden - 1)); }
  constexpr bool is_last() const { return flags & kLast; }
  constexpr bool is_partial(u32 warpgroup) const { return flags & kPartial << warpgroup; }
  constexpr bool is_hidden(u32 warpgroup) const { return flags & kHidden << warpgroup; }
  constexpr bool is_plain(u32 warpgroup) const {
    return !(flags & (kLargeScores | kPartial << warpgroup));
  }
};

// A buffer is full, or empty again; of a pair, by what either block has done.
template <BackwardSm90Config kConfig, i32 kBuffers>
inline void wait_full(Pipeline<kBuffers> pipeline, PipelineState<kBuffers> at) {
  if constexpr (kConfig.paired) {
    ptx::mbarrier_wait_copies(pipeline.full(at), at.phase);
  } else {
    pipeline.consumer_wait(at);
  }
}
// The same of a buffer of Q or dO, which both blocks of a cluster load.
template <BackwardSm90Config kConfig, i32 kBuffers>
inline void wait_queries(Pipeline<kBuffers> pipeline, PipelineState<kBuffers> at) {
  if constexpr (kConfig.in_clusters()) {
    ptx::mbarrier_wait_copies(pipeline.full(at), at.phase);
  } else {
    pipeline.consumer_wait(at);
  }
}
template <BackwardSm90Config kConfig, i32 kBuffers>
inline void wait_empty(Pipeline<kBuffers> pipeline, PipelineState<kBuffers> at) {
  if constexpr (kConfig.in_clusters()) {
    ptx::mbarrier_wait_copies(pipeline.empty(at), at.phase ^ 1);
  } else if constexpr (kConfig.holds_keys()) {
    pipeline.producer_wait_loaded(at);  // K and V come through it
  } else {
    pipeline.producer_wait(at);
  }
}

// In this order: K, V, Q, dO, dS, P, bias and mask, dQ of a head, dV and dK on their way out, lse,
// delta, work tiles, barriers.
template <BackwardSm90Config kConfig>
struct BackwardStorage {
  u32 base;

  static constexpr i32 kStages = kConfig.stages();
  static constexpr i32 kDsStages = BackwardSm90Config::kDsStages;
  static constexpr i32 kPStages = kConfig.p_stages();
  static constexpr i32 kDOutStages = kConfig.dout_stages();
  using QState = PipelineState<kStages>;
  using DOutState = PipelineState<kDOutStages>;
  using DsState = PipelineState<kDsStages>;
  using PState = PipelineState<kPStages>;
  using KvState = PipelineState<1>;
  using WorkState = PipelineState<BackwardSm90Config::kWorkStages>;

  static constexpr u32 kV = kConfig.k_bytes();
  static constexpr u32 kQ = kV + kConfig.v_bytes();
  static constexpr u32 kDO = kQ + kStages * kConfig.q_bytes();
  static constexpr u32 kDS = kDO + kDOutStages * kConfig.q_bytes();
  static constexpr u32 kP = kDS + kDsStages * kConfig.ds_bytes();
  static constexpr u32 kPairs = kP + kPStages * kConfig.p_bytes();
  static constexpr u32 kHead = kPairs + kStages * kConfig.pair_bytes();
  static constexpr u32 kOut = kHead + kConfig.head_bytes();
  static constexpr u32 kLse = kOut + kConfig.out_bytes();
  static constexpr u32 kDelta = kLse + kStages * kConfig.lse_bytes();
  static constexpr u32 kWork = kDelta + kDOutStages * kConfig.delta_bytes();
  static constexpr u32 kSteps = kWork + BackwardWork::kBytes * BackwardSm90Config::kWorkStages;
  static constexpr u32 kBarriers = kSteps + 8 * kStages;
  static constexpr u32 kVBarriers = kBarriers + Pipeline<1>::kBarrierBytes;
  static constexpr u32 kQBarriers = kVBarriers + Pipeline<1>::kBarrierBytes;
  static constexpr u32 kDOBarriers = kQBarriers + Pipeline<kStages>::kBarrierBytes;
  static constexpr u32 kDSBarriers = kDOBarriers + Pipeline<kDOutStages>::kBarrierBytes;
  static constexpr u32 kWorkBarriers = kDSBarriers + Pipeline<kDsStages>::kBarrierBytes;
  static constexpr u32 kDqAddedBarriers =
      kWorkBarriers + Pipeline<BackwardSm90Config::kWorkStages>::kBarrierBytes;
  static constexpr u32 kLandedBarriers = kDqAddedBarriers + 8 * BackwardSm90Config::kWorkStages;
  static constexpr u32 kDqSemaphoreBarriers = kLandedBarriers + 16 + 16 * kStages;
  static constexpr u32 kDqReleasedBarriers =
      kDqSemaphoreBarriers + Pipeline<kDsStages>::kBarrierBytes;
  static constexpr u32 kPBarriers = kDqReleasedBarriers + 8 * kDsStages;
  static constexpr u32 kDsWrittenBarriers = kPBarriers + Pipeline<kPStages>::kBarrierBytes;
  static constexpr u32 kClaim = kDsWrittenBarriers + 8 * kDsStages;
  static_assert(kClaim + 16 + Pipeline<1>::kBarrierBytes <= u32(kConfig.shared_bytes()));

  // With as many stages of dO as of Q both have the same state.
  static constexpr DOutState dout_state(QState at, DOutState dout_at) {
    if constexpr (kDOutStages == kStages) {
      return at;
    } else {
      return dout_at;
    }
  }

  // producers -> consumers -> producers
  constexpr Pipeline<1> k() const { return {base, u32(kConfig.k_bytes()), base + kBarriers}; }
  constexpr Pipeline<1> v() const { return {base + kV, u32(kConfig.v_bytes()), base + kVBarriers}; }
  // Q comes with `lse` and `pairs`, dO with `delta`.
  constexpr Pipeline<kStages> q() const {
    return {base + kQ, u32(kConfig.q_bytes()), base + kQBarriers};
  }
  constexpr Pipeline<kDOutStages> dout() const {
    return {base + kDO, u32(kConfig.q_bytes()), base + kDOBarriers};
  }
  constexpr u32 lse(QState at) const { return base + kLse + at.index * kConfig.lse_bytes(); }
  constexpr u32 pairs(QState at) const { return base + kPairs + at.index * kConfig.pair_bytes(); }
  constexpr u32 delta(DOutState at) const {
    return base + kDelta + at.index * kConfig.delta_bytes();
  }
  // Two words that come with Q: what step this is (BackwardStepInfo).
  constexpr u32 step(QState at) const { return base + kSteps + 8 * at.index; }
  // both warpgroups, 64 keys each, or both blocks of a pair -> both: dS, for dQ
  constexpr Pipeline<kDsStages> ds() const {
    return {base + kDS, u32(kConfig.ds_bytes()), base + kDSBarriers};
  }
  // where products are divided, the first warpgroup -> the second: P
  constexpr Pipeline<kPStages> p() const {
    return {base + kP, u32(kConfig.p_bytes()), base + kPBarriers};
  }
  // of a pair: second warpgroup -> BackwardDsSender: this block's half of dS is written
  constexpr u32 ds_written(DsState at) const { return base + kDsWrittenBarriers + 8 * at.index; }
  // the producer of a cluster's first block -> that of its second: an index of the grid's counter
  constexpr Pipeline<1> claim() const { return {base + kClaim, 16, base + kClaim + 16}; }
  // Sums of dQ of a whole head, tile `tile` of q_rows rows. Every thread has sums of its own.
  constexpr u32 head_dq(u32 tile) const {
    return base + kHead + tile * (kConfig.q_rows * kConfig.dims * 4);
  }
  // a warpgroup -> TMA: dV, then dK, of its 64 keys
  constexpr u32 out(u32 warpgroup) const { return base + kOut + warpgroup * kConfig.k_bytes() / 2; }
  // producer -> all other roles
  constexpr Pipeline<BackwardSm90Config::kWorkStages> work() const {
    return {base + kWork, BackwardWork::kBytes, base + kWorkBarriers};
  }
  // TMA -> tail zero-fill: a tile has landed that ends past the sequence
  constexpr u32 k_landed() const { return base + kLandedBarriers; }
  constexpr u32 v_landed() const { return base + kLandedBarriers + 8; }
  constexpr u32 q_landed(QState at) const { return base + kLandedBarriers + 16 + 16 * at.index; }
  constexpr u32 dout_landed(DOutState at) const { return q_landed({at.index, 0}) + 8; }
  // DqSemaphoreAcquire -> consumers -> DqSemaphoreRelease: they may add dQ of a step to its sums;
  // they have. Holds no data.
  constexpr Pipeline<kDsStages> dq_semaphore() const {
    return {base, 0, base + kDqSemaphoreBarriers};
  }
  // DqSemaphoreRelease -> DqSemaphoreAcquire: dq_semaphore() may be used again
  constexpr u32 dq_released(DsState at) const { return base + kDqReleasedBarriers + 8 * at.index; }
  // consumers -> DqSemaphoreRelease: the work tile's share of dQ is added
  constexpr u32 dq_added(WorkState at) const { return base + kDqAddedBarriers + 8 * at.index; }

  void write_step(QState at, BackwardStepInfo info) const {
    ptx::store_shared(step(at), info.tile);
    ptx::store_shared(step(at) + 4, info.flags);
  }
  BackwardStepInfo read_step(QState at) const {
    return {ptx::load_shared(step(at)), ptx::load_shared(step(at) + 4)};
  }

  void init() const {
    constexpr i32 kWarps =
        BackwardSm90Config::kConsumerWarps / (kConfig.divides_products() ? 2 : 1);
    constexpr i32 kReaders = BackwardSm90Config::kConsumerWarps * kConfig.blocks_of_tile();
    k().init(kConfig.dq ? BackwardSm90Config::kConsumerWarps : kWarps);
    v().init(kWarps);
    q().init(BackwardSm90Config::kConsumerWarps * kConfig.cluster_blocks());
    dout().init(BackwardSm90Config::kConsumerWarps * kConfig.cluster_blocks());
    // two warpgroups, a producer, dQ release or the producer of K; tail zero-fill, dQ acquire or
    // the sender of dS
    work().init(kConfig.score.varlen || kConfig.deterministic || kConfig.paired ? 5 : 4);
    if constexpr (kConfig.score.varlen) {
      for (u32 i = 0; i < 2 + 2 * kStages; ++i) ptx::mbarrier_init(k_landed() + 8 * i, 1);
    }
    for (i32 i = 0; i < kDsStages; ++i) {
      // from a pair: the senders of both blocks
      ptx::mbarrier_init(ds().full(DsState{u32(i)}), kConfig.paired ? 2 : kWarps);
      ptx::mbarrier_init(ds().empty(DsState{u32(i)}), kReaders);
    }
    if constexpr (kConfig.divides_products()) {
      for (i32 i = 0; i < kPStages; ++i) {
        ptx::mbarrier_init(p().full(PState{u32(i)}), kWarps);
        ptx::mbarrier_init(p().empty(PState{u32(i)}), kWarps);
      }
    }
    if constexpr (kConfig.paired) {
      for (i32 i = 0; i < kDsStages; ++i) ptx::mbarrier_init(ds_written(DsState{u32(i)}), kWarps);
    }
    if constexpr (kConfig.in_clusters()) claim().init(1);
    if constexpr (kConfig.deterministic) {
      dq_semaphore().init(BackwardSm90Config::kConsumerWarps);
      for (u32 i = 0; i < kDsStages; ++i) ptx::mbarrier_init(dq_released({i, 0}), 1);
    }
    for (i32 i = 0; i < BackwardSm90Config::kWorkStages; ++i) {
      ptx::mbarrier_init(dq_added(WorkState{u32(i)}), BackwardSm90Config::kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }

  void write_work(WorkState at, const BackwardWork& sent) const {
    const u32 address = work().address(at);
    const BackwardTile& work_tile = sent.work_tile;
    const DqConversion& r = sent.conversion;
    const auto store = [&](u32 part, i32 a, i32 b, i32 c, i32 d) {
      ptx::store_shared_x4(address + 16 * part, {{u32(a), u32(b), u32(c), u32(d)}});
    };
    store(0, work_tile.batch_kv_head, work_tile.kv_block, work_tile.num_kv_blocks,
          work_tile.q_begin);
    store(1, work_tile.shape.q_len, work_tile.shape.kv_len, work_tile.shape.shift,
          work_tile.kv_begin);
    store(2, r.batch_kv_head, r.begin, r.end, r.blocks);
    store(3, r.q_begin, r.q_len, sent.num_steps, work_tile.part);
  }
  i32 read_num_steps(WorkState at) const { return i32(ptx::load_shared(work().address(at) + 56)); }
  BackwardTile read_tile(WorkState at) const {
    const ptx::U32x4 x = ptx::load_shared_x4(work().address(at));
    const ptx::U32x4 y = ptx::load_shared_x4(work().address(at) + 16);
    return {i32(x.word[0]),
            i32(x.word[1]),
            i32(x.word[2]),
            i32(x.word[3]),
            i32(y.word[3]),
            {i32(y.word[0]), i32(y.word[1]), i32(y.word[2])},
            i32(ptx::load_shared(work().address(at) + 60))};
  }
  SequenceShape read_shape(WorkState at) const {
    const ptx::U32x4 x = ptx::load_shared_x4(work().address(at) + 16);
    return {i32(x.word[0]), i32(x.word[1]), i32(x.word[2])};
  }
  DqConversion read_conversion(WorkState at) const {
    const ptx::U32x4 x = ptx::load_shared_x4(work().address(at) + 32);
    const ptx::U32x4 y = ptx::load_shared_x4(work().address(at) + 48);
    return {i32(x.word[0]), i32(x.word[1]), i32(x.word[2]),
            i32(x.word[3]), i32(y.word[0]), i32(y.word[1])};
  }

  // By a thread or a warp: take(at, num_steps) for each work tile in order. The thread that
  // `releases` frees its stage afterwards.
  template <class Take>
  void for_each_tile(bool releases, const Take& take) const {
    WorkState at;
#pragma unroll 1
    for (;;) {
      work().consumer_wait(at);
      const i32 num_steps = read_num_steps(at);
      if (num_steps == BackwardWork::kEnd) return;
      take(at, num_steps);
      if (releases) work().consumer_release(at);
      at.advance();
    }
  }
};

}  // namespace fulmen
