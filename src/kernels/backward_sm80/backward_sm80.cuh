// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dQ, dK and dV on the tensor cores of every GPU since Ampere, every option of the library. A block
// owns keys, keeps K and V in shared memory and its dK and dV in registers, and meets Q and dO of
// every head of the group, a tile of queries at a time, loaded one step ahead.
// Source: Dao, FlashAttention-2 (2023), section 3.1.2. A step:
//   1. Q_i, dO_i have arrived; the copies of the next tile are started
//   2. S = Q K^T, P = exp(S - lse)                  a warp has its own tiles of S
//   3. dP = dO V^T, dS = P (dP - D)                 P and dS go to shared memory
//   4. dV += P^T dO, dK += dS^T Q                   a warp has its own part of dK and dV
//   5. dQ = dS K                                    added to float32 sums in global memory
// The warps that compute some columns of P and dS are those that take them up in 4, so only 5 waits
// for all warps; with two stages of dS it runs beside the next step, which has that wait anyway.
// With split roles half of the warps do 2 and dV, the others 3 and dK, each with larger tiles:
// less is read from shared memory, which is what limits the kernel. Narrow heads leave P and dS in
// registers on top of that (docs/design/backward_sm80.md).
// A hidden pair has P = dS = 0, and 0 times NaN is NaN: where a block that is not full meets a
// score or a dP that is not finite, its tiles are marked, and backward_postprocess_sm80 looks at
// them. Launched with one block for each of num_kv_tiles(), after backward_preprocess_sm80.
#pragma once

#include "kernels/backward_sm80/dq.cuh"
#include "kernels/backward_sm80/gradients.cuh"
#include "kernels/backward_sm80/mask.cuh"
#include "kernels/backward_sm80/pairs.cuh"
#include "kernels/backward_sm80/pairs_swap_ab.cuh"
#include "kernels/backward_sm80/producer.cuh"

namespace fulmen {

// What backward_preprocess_sm80 writes is in memory.
template <BackwardSm80Config kConfig>
inline void wait_preprocess() {
  if constexpr (kConfig.hopper) ptx::grid_dependency_wait();
}

// What computes P and dS.
template <BackwardSm80Config kConfig, bool kKeysFirst>
struct PairsOf {
  using Type = BackwardPairsSm80<kConfig>;
};
template <BackwardSm80Config kConfig>
struct PairsOf<kConfig, true> {
  using Type = BackwardPairsSwapAbSm80<kConfig>;
};

template <BackwardSm80Config kConfig>
struct BackwardSm80 {
  using HeadType = Head<kConfig.dtype>;

  const BackwardSm80Params& params;
  const AttentionParams& p;
  i32 index;  // of the sequence
  BackwardStorageSm80<kConfig> tiles;
  KeyBlockSm80 place;
  BackwardSchedulerSm80<kConfig> ranges;
  BlockRange range{};
  BackwardProducerSm80<kConfig> producer;
  typename PairsOf<kConfig, kConfig.swap_ab>::Type pairs;
  BackwardGradientsSm80<kConfig> gradients;

  BackwardSm80(const BackwardSm80Params& params_, const HeadType& head, const TilePlace& keys)
      : params(params_),
        p(params_.attention),
        index(static_cast<i32>(keys.index)),
        place{head.sequence, static_cast<i32>(head.kv_head), static_cast<i32>(keys.first_row)},
        ranges(params_, place, index),
        producer{p, index, place, tiles},
        pairs{params_, tiles} {}

  // `place`, after a barrier.
  KeyBlockSm80 own_key_block() const {
    if constexpr (kConfig.saves_key_block()) return load_key_block(tiles.key_block_at());
    return place;
  }

  // Step 5 for a tile of queries, number `block` of its sequence.
  void add_dq(i32 tile, i32 block, i32 pair_stage) const {
    if constexpr (kConfig.deterministic) {
      if (ptx::thread_index() == 0)
        ptx::await(params.dq_semaphores + tile, ranges.semaphore_value(block));
      ptx::block_sync();  // it is this block's turn
    }
    gradients.add_dq(params.dq_accum + i64{tile} * kConfig.dq_elems(), pair_stage);
    if constexpr (kConfig.deterministic) {
      ptx::block_sync();  // all have added
      if (ptx::thread_index() == 0) ptx::announce(params.dq_semaphores + tile);
    }
  }

  using Step = BackwardStepSm80<kConfig>;

  void add_dv(i32 stage) {
    gradients.template add_columns<kConfig.dv_dims()>(gradients.dv_sums(), tiles.p_tile(),
                                                      tiles.dout_tile(stage));
  }
  void add_dk(i32 stage, i32 pair_stage) {
    gradients.template add_columns<kConfig.dk_dims()>(gradients.dK, tiles.ds_tile(pair_stage),
                                                      tiles.q_tile(stage));
  }
  void mark_rows(i32 tile) const {
    if (pairs.suspect) params.suspect_m_blocks[tile] = 1;
  }

  // Steps 2 to 4 for a tile of queries.
  void compute(const Step& step, i32 tile) {
    pairs.compute(step);
    mark_rows(tile);
    tiles.group_sync();  // P and dS of the team's keys are there
    if constexpr (kConfig.dv) add_dv(step.stage);
    if constexpr (kConfig.dk) add_dk(step.stage, step.pair_stage);
  }

  // The same by warps that have half of it each: P and dV, or dS and dK. Each adds to dQ when the
  // others are likely to be busy with numbers one by one.
  template <class AddDq, class Fetch>
  void compute_role(const Step& step, i32 tile, const AddDq& add_dq_before,
                    const Fetch& fetch_late) {
    if (tiles.computes_p()) {
      pairs.compute_weights(step);
      tiles.group_sync();  // P is there
      fetch_late();
      add_dv(step.stage);
      add_dq_before();
    } else {
      add_dq_before();
      fetch_late();
      pairs.compute_ds(step);
      tiles.group_sync();  // dS is there
      add_dk(step.stage, step.pair_stage);
    }
    mark_rows(tile);
  }

  // The same where the keys of a role are one warp's alone.
  template <class AddDq>
  void compute_keys(const Step& step, i32 tile, const AddDq& add_dq_before) {
    if (tiles.computes_p()) {
      pairs.add_dv(gradients.dv_sums(), step);
      add_dq_before();
    } else {
      add_dq_before();
      pairs.add_dk(gradients.dK, step);
    }
    mark_rows(tile);
  }

  // Steps 1 and 5, and all tiles of queries of all heads of the group that see a key of the block.
  void mainloop(const DqZeroingSm80<kConfig>& sums) {
    constexpr bool kLate = kConfig.dq && kConfig.pair_stages == 2;  // dQ a step after its dS
    const i32 begin = static_cast<i32>(range.visible.begin);
    const i32 end = static_cast<i32>(range.visible.end);
    const i32 full_begin = kConfig.full_blocks ? static_cast<i32>(range.full.begin) : end;
    const i32 full_end = static_cast<i32>(range.full.end);
    const i32 first_head = place.kv_head * static_cast<i32>(p.group_size());
    const i32 end_head = first_head + static_cast<i32>(p.group_size());
    const i32 next_head_tiles = ranges.num_slots - (end - begin);
    const auto stats_at = [&](i32 tile) {
      return params.row_stats + i64{tile} * kConfig.row_bytes();
    };
    i32 tile = ranges.tile_number(first_head, begin), tile_before = -1;
    auto queries = producer.queries_of(first_head);
    producer.fetch_ids(HeadType(p, index, first_head));
    producer.fetch(queries, begin * kConfig.q_rows, stats_at(tile), 0);
    sums.clear();
    i32 stage = 0;
    if constexpr (kConfig.swap_ab) {
      ptx::cp_async_wait<0>();
      ptx::block_sync();  // K and V are there
      pairs.load_registers();
    }
#pragma unroll 1
    for (i32 number = first_head; number < end_head; ++number) {
      const HeadType head(p, index, number);
#pragma unroll 1
      for (i32 block = begin; block < end; ++block) {
        const bool wraps = block + 1 == end;
        const i32 next_tile = tile + 1 + (wraps ? next_head_tiles : 0);
        const auto fetch_next = [&](i32 next_stage) {
          if (wraps) {
            if (number + 1 == end_head) return;
            queries = BackwardProducerSm80<kConfig>{p, index, own_key_block(), tiles}.queries_of(
                number + 1);
          }
          producer.fetch(queries, (wraps ? begin : block + 1) * kConfig.q_rows, stats_at(next_tile),
                         next_stage);
        };
        ptx::cp_async_wait<0>();
        ptx::block_sync();  // tiles are there; all are done with those of the step before
        constexpr bool kLateFetch = kConfig.late_prefetch && kConfig.stages == 2;
        if constexpr (kConfig.stages == 2 && !kLateFetch) fetch_next(1 - stage);
        const auto fetch_late = [&] {
          if constexpr (kLateFetch) fetch_next(1 - stage);
        };
        const auto add_dq_before = [&] {  // of the step before
          if (!kLate || tile_before < 0) return;
          add_dq(tile_before, block == begin ? end - 1 : block - 1, 1 - stage);
        };
        const Step step{head,
                        block * kConfig.q_rows,
                        place.first_key,
                        full_begin <= block && block < full_end,
                        stage,
                        kConfig.pair_stages == 2 ? stage : 0};
        if constexpr (kConfig.swap_ab) {
          compute_keys(step, tile, add_dq_before);
        } else if constexpr (kConfig.split_roles) {
          compute_role(step, tile, add_dq_before, fetch_late);
        } else {
          add_dq_before();
          compute(step, tile);
        }
        if (tile_before < 0) sums.wait_zeroed();
        if constexpr ((kConfig.dq && !kLate) || kConfig.tiled_dbias) {
          ptx::block_sync();  // dS of all is there
          if constexpr (kConfig.dq) add_dq(tile, block, 0);
          if constexpr (kConfig.tiled_dbias) BackwardDbiasSm80<kConfig>{params}.copy(tiles, step);
        }
        if constexpr (kConfig.stages == 2) {
          stage = 1 - stage;
        } else {
          ptx::block_sync();  // all are done with Q and dO
          fetch_next(0);
        }
        tile_before = tile;
        tile = next_tile;
      }
    }
    if constexpr (kLate) {
      ptx::block_sync();  // dS of all is there
      add_dq(tile_before, end - 1, 1 - stage);
    }
  }

  void run(const DqZeroingSm80<kConfig>& sums) {
    if (place.first_key < place.sequence.shape.kv_len) {
      producer.fetch_keys();
      if constexpr (kConfig.saves_key_block()) save_key_block(tiles.key_block_at(), place);
      range = ranges.m_block_range(place.first_key);
      wait_preprocess<kConfig>();
      if constexpr (kConfig.score.documents) ranges.narrow(range);
      if (range.visible.size() > 0) {
        mainloop(sums);
      } else {
        sums.zero_only();
      }
      ptx::cp_async_wait<0>();  // also where no row sees a key
    } else {
      if constexpr (kConfig.saves_key_block()) save_key_block(tiles.key_block_at(), place);
      sums.zero_only();
      wait_preprocess<kConfig>();  // the end of this grid is the end of the one before
    }
    ptx::block_sync();  // all are done with shared memory
    store();
  }

  void store() {
    const KeyBlockSm80 place = own_key_block();
    const float kept_scale =
        kConfig.score.dropout ? static_cast<float>(p.dropout.kept_scale()) : 1.f;
    if (kConfig.dk && !(kConfig.split_roles && tiles.computes_p())) {
      gradients.template store<kConfig.dk_dims()>(gradients.dK, place, p.dk, p.dim_qk,
                                                  static_cast<float>(p.score_map.scale));
    }
    if (kConfig.dv && tiles.computes_p()) {
      gradients.template store<kConfig.dv_dims()>(gradients.dv_sums(), place, p.dv, p.dim_v,
                                                  kept_scale);
    }
  }
};

template <BackwardSm80Config kConfig>
void backward_sm80(const BackwardSm80Params& params) {
  const AttentionParams& p = params.attention;
  if constexpr (kConfig.hopper) ptx::grid_dependents_launch();
  u32 block = ptx::block_index();
  if constexpr (kConfig.deterministic) {  // in the order in which blocks start, so that none waits
                                          // for one that has not
    const u32 word = ptx::dynamic_shared();
    if (ptx::thread_index() == 0) ptx::store_shared(word, ptx::atomic_add(params.next_n_block, 1));
    ptx::block_sync();  // the number is there
    block = ptx::load_shared(word);
    ptx::block_sync();  // and read
  }
  const u32 num_slots = static_cast<u32>(num_tile_slots(p, p.kv_rows, kConfig.kv_rows));
  const TileTask task = key_task(block, static_cast<u32>(p.batch_extent() * p.heads_kv),
                                 static_cast<u32>(p.heads_kv), num_slots, params.groups.kv_heads);
  const TilePlace place = find_tile(p, p.cu_kv, task, kConfig.kv_rows);
  const Head<kConfig.dtype> head(p, place.index, task.head * p.group_size());
  const DqZeroingSm80<kConfig> sums{params, block};
  if (place.first_row < 0 || place.first_row >= head.sequence.kv_slot) {
    sums.zero_only();
    wait_preprocess<kConfig>();  // the end of this grid is the end of the one before
    return;
  }
  const u32 number =
      static_cast<u32>((task.batch * p.heads_kv + task.head) * num_slots + task.slot);
  BackwardSm80<kConfig> keys(params, head, place);
  keys.run(sums);
  if (keys.pairs.suspect) params.suspect_n_blocks[number] = 1;
}

}  // namespace fulmen
