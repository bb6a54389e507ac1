// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dQ: every block of keys adds its share to float32 sums in global memory, in the order of wgmma
// fragments, and when all blocks of keys of a head have done so the sums are scaled, converted to
// 16 bits and cleared. The sums of a head are a slot; few slots are used over and over, so that
// they stay in the L2 cache. With sequences of different lengths every row has sums of its own.
#pragma once

#include "kernels/backward_sm90/scheduler.cuh"
#include "kernels/backward_sm90/storage.cuh"
#include "kernels/common/fragments.cuh"
#include "kernels/common/nonfinite_sm90.cuh"
#include "kernels/common/store_output.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/thread.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// Sums of one query head are tiles of q_rows * dims floats, one for each block of queries:
// first the part of warpgroup 0, then of warpgroup 1, of 64 rows and columns; of a pair first those
// of its first block; in a part float4 j of thread t at 512 j + 4 t. Number of the first tile of a
// kv head's first query head, and of tiles of a query head.
template <BackwardSm90Config kConfig>
constexpr u32 first_dq_tile(const BackwardParams& params, i32 batch_kv_head, i32 q_begin) {
  if constexpr (kConfig.whole_heads) return 0;
  if constexpr (kConfig.score.varlen) {
    return u32(first_padded_row<kConfig>(params, batch_kv_head, q_begin) / kConfig.q_rows);
  }
  const u32 slot_head = u32(batch_kv_head % params.num_accum_slots) * params.group_size;
  return slot_head * (params.padded_q_rows() / kConfig.q_rows);
}
template <BackwardSm90Config kConfig>
constexpr u32 dq_tiles_of_head(const BackwardParams& params) {
  return u32((kConfig.score.varlen ? params.padded_rows_per_head : params.padded_q_rows()) /
             kConfig.q_rows);
}
// The query head of a step: of those that share the work tile's keys their tiles follow each other.
template <BackwardSm90Config kConfig>
constexpr i32 head_of_step(const BackwardParams& params, const BackwardTile& work_tile,
                           const BackwardStepInfo& step) {
  if constexpr (!kConfig.dq) return i32(step.tile);
  const u32 first = first_dq_tile<kConfig>(params, work_tile.batch_kv_head, work_tile.q_begin);
  const u32 of_group =
      (step.tile - first - u32(step.q_block())) / dq_tiles_of_head<kConfig>(params);
  return work_tile.batch_kv_head % params.heads_kv * params.group_size + i32(of_group);
}
template <BackwardSm90Config kConfig>
constexpr float* dq_tile(const BackwardParams& params, u32 tile) {
  return params.dq_accum + u64(tile) * (kConfig.q_rows * kConfig.dims);
}

// Number of the block's first part in a tile.
template <BackwardSm90Config kConfig>
inline u32 first_dq_part() {
  if constexpr (kConfig.paired) return 2 * ptx::cluster_rank();
  return 0;
}

// Whether a later kv head uses the same slot.
template <BackwardSm90Config kConfig>
constexpr bool is_reused(const BackwardParams& params, i32 batch_kv_head) {
  return !kConfig.score.varlen &&
         batch_kv_head + params.num_accum_slots < params.num_batch_kv_heads();
}

template <BackwardSm90Config kConfig>
inline void add_dq(const float (&dQ)[kConfig.dq_floats()], float* part, u32 thread) {
#pragma unroll
  for (i32 j = 0; j < kConfig.dq_floats() / 4; ++j) {
    ptx::reduce_add_x4(part + j * 512 + thread * 4, dQ[4 * j], dQ[4 * j + 1], dQ[4 * j + 2],
                       dQ[4 * j + 3]);
  }
}

// dQ = scale * sums, rounded, of kConversionRows rows of one head, by all consumer warps; of a pair
// each block has the parts to which it adds.
template <BackwardSm90Config kConfig>
struct DqConverter {
  static constexpr i32 kPartFloats = 64 * 64;
  static constexpr i32 kPairs = kPartFloats / 1024;  // of 8 columns, in a part
  static constexpr i32 kFragments =                  // 16 by 16
      BackwardSm90Config::kConversionRows * kConfig.dims / 256 / kConfig.blocks_of_tile();
  static constexpr i32 kSteps = kFragments / BackwardSm90Config::kConsumerWarps;

  const BackwardParams& params;
  i32 warp;  // of the consumers
  i32 lane;

  // Fragment `step` of this warp: its offset in the sums, and its first row and column of dQ.
  i32 fragment(i32 step) const { return step * BackwardSm90Config::kConsumerWarps + warp; }
  static constexpr i32 part(i32 u) { return u / 4 / kPairs; }  // among those of the block
  i32 offset(i32 u) const {
    const i32 tile = part(u) / 2;
    return tile * kConfig.q_rows * kConfig.dims +
           (i32(first_dq_part<kConfig>()) + part(u) % 2) * kPartFloats + u / 4 % kPairs * 1024 +
           u % 4 * 128 + lane * 4;
  }
  i32 row(i32 u) const {
    return part(u) / 2 * kConfig.q_rows + (kConfig.dq_by_rows() ? part(u) % 2 * 64 : 0) +
           u % 4 * 16;
  }
  i32 column(i32 u) const {
    const i32 of_tile = i32(first_dq_part<kConfig>()) + part(u) % 2;
    return (kConfig.dq_by_rows() ? 0 : of_tile * 64) + u / 4 % kPairs * 16;
  }

  u32 rounded(float x, float y) const {
    const float scale = params.scale * kConfig.sum_scale();
    return ptx::pack<kConfig.dtype>(x * scale, y * scale);
  }
  // A 16 by 16 fragment from its left and right 8 columns; a lane writes 8 of a row.
  void store(u16* out, i32 rows, i32 u, const float (&left)[4], const float (&right)[4]) const {
    ptx::U32x4 x{{rounded(left[0], left[1]), rounded(left[2], left[3]), rounded(right[0], right[1]),
                  rounded(right[2], right[3])}};
    transpose_quad(x);
    const i32 r = row(u) + lane / 4 + lane % 2 * 8;
    const i32 c = column(u) + lane % 4 / 2 * 8;
    if (r >= rows || c >= params.dim_qk) return;
    ptx::store_global_x4(out + r * params.attention.dq.strides[2] + c, x);
  }

  void convert_piece(const DqConversion& conversion, i32 head, i32 block) const {
    const bool clear = is_reused<kConfig>(params, conversion.batch_kv_head);
    const u32 tile = first_dq_tile<kConfig>(params, conversion.batch_kv_head, conversion.q_begin) +
                     u32(head) * dq_tiles_of_head<kConfig>(params);
    float* sums = dq_tile<kConfig>(params, tile) +
                  i64{block} * BackwardSm90Config::kConversionRows * kConfig.dims;
    const i32 q_head = conversion.batch_kv_head % params.heads_kv * params.group_size + head;
    const ArrayView& dq = params.attention.dq;
    const i64 first_row = i64{conversion.q_begin} + block * BackwardSm90Config::kConversionRows;
    u16* out = reinterpret_cast<u16*>(dq.data) +
               dq.offset(batch_of<kConfig>(params, conversion.batch_kv_head), q_head, first_row, 0);
    const i32 rows = conversion.q_len - block * BackwardSm90Config::kConversionRows;
    ptx::F32x4 left[kSteps], right[kSteps];
#pragma unroll
    for (i32 k = 0; k < kSteps; ++k) {
      left[k] = ptx::load_l2_x4(sums + offset(fragment(k)));
      right[k] = ptx::load_l2_x4(sums + offset(fragment(k)) + 512);
    }
    float found = 0;
#pragma unroll
    for (i32 k = 0; k < kSteps; ++k) {
      if constexpr (kConfig.hides_pairs()) found += probe(left[k].word) + probe(right[k].word);
      store(out, rows, fragment(k), left[k].word, right[k].word);
      if (clear) {
        ptx::store_l2_x4(sums + offset(fragment(k)), {});
        ptx::store_l2_x4(sums + offset(fragment(k)) + 512, {});
      }
    }
    if constexpr (kConfig.hides_pairs())
      mark_nonfinite(params.nonfinite, conversion.batch_kv_head, found);
  }

  // Pieces whose sums are complete.
  void run(const DqConversion& conversion) const {
#pragma unroll 1
    for (i32 piece = conversion.begin; piece < conversion.end; ++piece) {
      const i32 head = piece / conversion.blocks;
      convert_piece(conversion, head, piece - head * conversion.blocks);
    }
  }
};

// dQ of whole heads: their sums never leave the thread block, and each is of one thread, which adds
// to it, rounds it and clears it. A tile is the part of warpgroup 0, then of warpgroup 1; in a part
// vector j of thread t at 2,048 j + 16 t.
template <BackwardSm90Config kConfig>
struct HeadDq {
  static constexpr i32 kFloats = kConfig.dq_floats();
  using Sums = float[kFloats];

  const BackwardParams& params;
  BackwardStorage<kConfig> shared;
  u32 warpgroup;
  u32 thread;

  u32 address(u32 tile) const {
    return shared.head_dq(tile) + warpgroup * (kFloats * 512) + thread * 16;
  }
  void load(Sums& sums, u32 tile) const {
#pragma unroll
    for (i32 j = 0; j < kFloats / 4; ++j) {
      const ptx::U32x4 x = ptx::load_shared_x4(address(tile) + j * 2048);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) sums[4 * j + e] = __builtin_bit_cast(float, x.word[e]);
    }
  }
  void clear(u32 tile) const {
#pragma unroll
    for (i32 j = 0; j < kFloats / 4; ++j) ptx::store_shared_x4(address(tile) + j * 2048, {});
  }
  void clear_all() const {
    for (u32 tile = 0; tile < BackwardSm90Config::kHeadRows / kConfig.q_rows; ++tile) clear(tile);
  }
  void add(const Sums& dQ, u32 tile) const {
    Sums sums;
    load(sums, tile);
#pragma unroll
    for (i32 j = 0; j < kFloats / 4; ++j) {
      ptx::U32x4 x;
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        x.word[e] = __builtin_bit_cast(u32, sums[4 * j + e] + dQ[4 * j + e]);
      }
      ptx::store_shared_x4(address(tile) + j * 2048, x);
    }
  }

  // dQ = scale * sums, rounded, of a tile.
  void write_tile(const DqConversion& head, i32 q_head, i32 first, u32 tile) const {
    Sums sums;
    load(sums, tile);
    clear(tile);
    if constexpr (kConfig.hides_pairs()) {
      mark_nonfinite(params.nonfinite, head.batch_kv_head, probe(sums));
    }
#pragma unroll
    for (i32 i = 0; i < kFloats; ++i) sums[i] *= params.scale * kConfig.sum_scale();
    const ArrayView& dq = params.attention.dq;
    const i32 column = i32(warpgroup) * kConfig.dq_columns();
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      const i32 row = first + i32(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
      u16* const out = reinterpret_cast<u16*>(dq.data) +
                       dq.offset(head.batch_kv_head / params.heads_kv, q_head, row, column);
      store_output_row<kConfig.dtype>(sums, half, out, row < head.q_len, params.dim_qk - column);
    }
  }
  // Of a kv head, when its blocks of keys are done.
  void write(const DqConversion& head) const {
    if (head.batch_kv_head < 0) return;
    const i32 first_head = head.batch_kv_head % params.heads_kv * params.group_size;
    u32 tile = 0;
#pragma unroll 1
    for (i32 of_group = 0; of_group < params.group_size; ++of_group) {
#pragma unroll 1
      for (u32 i = 0; i < dq_tiles_of_head<kConfig>(params); ++i, ++tile) {
        write_tile(head, first_head + of_group, i32(i) * kConfig.q_rows, tile);
      }
    }
  }
};

// ---- Counters in global memory around the sums
// ---------------------------------------------------
//
// In deterministic mode blocks of keys add to a tile of dQ in one order: DqSemaphoreAcquire waits
// until the block before has dq_added, DqSemaphoreRelease counts it after this one has. In every
// mode DqSemaphoreRelease counts the work tiles whose dQ has arrived, which says when dQ can be
// converted. Two threads, since each waits for memory in every step.

// In deterministic mode: the counter of blocks of keys that have added to dQ of a step.
template <BackwardSm90Config kConfig>
inline u32* dq_semaphore_of(const BackwardParams& params, const BackwardTile& work_tile,
                            const BackwardStep& step) {
  const i64 first_row =
      first_padded_row<kConfig>(params, work_tile.batch_kv_head, work_tile.q_begin);
  const i64 tile =
      (first_row + step.head * params.padded_rows_per_head) / kConfig.q_rows + step.q_block;
  if constexpr (kConfig.paired) return params.dq_semaphore + 2 * tile + ptx::cluster_rank();
  return params.dq_semaphore + tile;
}

// Lets the consumers add dQ of a step when the block of keys before has added to the same rows.
// Every block is claimed after the one before it and takes the same steps behind it.
template <BackwardSm90Config kConfig>
struct DqSemaphoreAcquire {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DsState at = {};

  void acquire(const BackwardTile& work_tile, const BackwardStep& step) {
    ptx::await(dq_semaphore_of<kConfig>(params, work_tile, step),
               arrivals_before<kConfig>(params, step.q_block, work_tile.kv_block));
    ptx::mbarrier_wait(shared.dq_released(at), at.phase ^ 1);
    ptx::mbarrier_arrive(shared.dq_semaphore().full(at));
    at.advance();
  }

  void acquire_steps(const BackwardTile& work_tile, i32 num_steps) {
    const QueryBlockRange range = query_block_range<kConfig>(params, work_tile);
    BackwardStep step(range);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(range)) acquire(work_tile, step);
  }

  void run() {
    shared.for_each_tile(true, [&](typename Shared::WorkState work_at, i32 num_steps) {
      if (num_steps > 0) acquire_steps(shared.read_tile(work_at), num_steps);
    });
  }
};

// Counts in global memory what has been added to dQ: work tiles, and in deterministic mode steps.
template <BackwardSm90Config kConfig>
struct DqSemaphoreRelease {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DsState at = {};

  void release_steps(const BackwardTile& work_tile, i32 num_steps) {
    const QueryBlockRange range = query_block_range<kConfig>(params, work_tile);
    BackwardStep step(range);
#pragma unroll 1
    for (i32 i = 0; i < num_steps; ++i, step.advance(range)) {
      u32* const dq_semaphore = dq_semaphore_of<kConfig>(params, work_tile, step);
      ptx::mbarrier_wait(shared.dq_semaphore().empty(at), at.phase);
      ptx::announce(dq_semaphore);
      ptx::mbarrier_arrive(shared.dq_released(at));
      at.advance();
    }
  }

  void release_tile(typename Shared::WorkState work_at) const {
    ptx::mbarrier_wait(shared.dq_added(work_at), work_at.phase);
    ptx::announce(params.done + shared.read_tile(work_at).batch_kv_head);
    if constexpr (!kConfig.dq) return;
    const i32 converted = shared.read_conversion(work_at).batch_kv_head;
    if (converted >= 0 && is_reused<kConfig>(params, converted)) {
      ptx::announce(params.freed + converted);
    }
  }

  void run() {
    shared.for_each_tile(true, [&](typename Shared::WorkState work_at, i32 num_steps) {
      if (kConfig.deterministic && num_steps > 0)
        release_steps(shared.read_tile(work_at), num_steps);
      if (num_steps >= 0) release_tile(work_at);
    });
  }
};

}  // namespace fulmen
