// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// dQ, dK and dV on the tensor cores of every GPU since Ampere, every option of the library. A block
// owns keys (an n_block), keeps K and V in shared memory and its dK and dV in registers, and
// iterates over the m_blocks of Q and dO of every head of the group, which are copied one iteration
// ahead. Source: Dao, FlashAttention-2 (2023), section 3.1.2. An iteration:
//   1. Q_i, dO_i have arrived; the copies of the next m_block are started
//   2. S = Q K^T, P = exp(S - lse)                  a warp has its own tiles of S
//   3. dP = dO V^T, dS = P (dP - D)                 P and dS go to shared memory
//   4. dV += P^T dO, dK += dS^T Q                   a warp has its own part of dK and dV
//   5. dQ = dS K                                    added to float32 sums in global memory
// The warps that compute some columns of P and dS are those that read them in 4, so only 5 waits
// for all warps; with two stages of dS it is computed in the next iteration, which has that wait
// anyway. Three schedules of 2 to 5: all warps compute both P and dS; or half of them (a role) 2
// and dV, the others 3 and dK, each with larger tiles, so that less is read from shared memory,
// which limits the kernel; or, for narrow heads, these roles on S^T and dP^T, which stay in
// registers. docs/design/backward_sm80.md compares them. A masked pair has P = dS = 0, and 0 times
// NaN is NaN: where a block that is not full meets a score or a dP that is not finite, its m_block
// and n_block are marked, and backward_postprocess_sm80 recomputes their rows. Launched with
// num_kv_tiles() blocks, after backward_preprocess_sm80.
#pragma once

#include "kernels/backward_sm80/dq.cuh"
#include "kernels/backward_sm80/gradients.cuh"
#include "kernels/backward_sm80/mask.cuh"
#include "kernels/backward_sm80/pairs.cuh"
#include "kernels/backward_sm80/pairs_swap_ab.cuh"
#include "kernels/backward_sm80/producer.cuh"

namespace fulmen {

// Returns when what backward_preprocess_sm80 wrote is in memory.
template <BackwardSm80Config kConfig>
inline void wait_preprocess() {
  if constexpr (kConfig.hopper) ptx::grid_dependency_wait();
}

// What computes P and dS.
template <BackwardSm80Config kConfig, bool kSwapAb>
struct PairsOf {
  using Type = BackwardPairsSm80<kConfig>;
};
template <BackwardSm80Config kConfig>
struct PairsOf<kConfig, true> {
  using Type = BackwardPairsSwapAbSm80<kConfig>;
};

template <BackwardSm80Config kConfig>
struct BackwardSm80 {
  using HeadType = BackwardHeadOf<kConfig>;
  using Producer = BackwardProducerSm80<kConfig>;
  using Step = BackwardStepSm80<kConfig>;
  using Zeroing = DqZeroingSm80<kConfig>;
  static constexpr bool kLateDq = kConfig.dq && kConfig.pair_stages == 2;
  static constexpr bool kLatePrefetch = kConfig.late_prefetch && kConfig.stages == 2;

  // Where the main loop is, among the m_blocks [begin, end) of the heads up to end_head.
  struct Cursor {
    i32 begin, end, end_head;
    i32 next_head_tiles;  // from the last m_block of a head to the first of the next
    i32 tile;             // number of the m_block among those of all heads
    i32 tile_before;      // of the iteration before; -1 in the first
    i32 stage;
    typename Producer::Queries queries;
    // Of one iteration:
    i32 head, block;
    bool is_last_of_head;
    i32 next_tile;
  };

  const BackwardSm80Params& params;
  const AttentionParams& p;
  i32 index;  // of the sequence
  BackwardStorageSm80<kConfig> storage;
  KeyBlockSm80 keys;
  BackwardMBlocksSm80<kConfig> m_blocks;
  BlockRange range{};
  Producer producer;
  typename PairsOf<kConfig, kConfig.swap_ab>::Type pairs;
  BackwardGradientsSm80<kConfig> gradients;

  BackwardSm80(const BackwardSm80Params& params_, const HeadType& head, const TilePlace& tile)
      : params(params_),
        p(params_.attention),
        index(static_cast<i32>(tile.index)),
        keys{head.sequence, static_cast<i32>(head.kv_head), static_cast<i32>(tile.first_row)},
        m_blocks(params_, keys, index),
        producer{p, index, keys, storage},
        pairs{params_, storage} {}

  // `keys`, after a barrier.
  KeyBlockSm80 own_keys() const {
    if constexpr (kConfig.saves_key_block()) return load_key_block(storage.key_block_at());
    return keys;
  }
  const u8* stats_at(i32 tile) const { return params.row_stats + i64{tile} * kConfig.row_bytes(); }

  // 1. Starts the copies of the m_block after this one, if there is one.
  void prefetch(Cursor& at, i32 stage) {
    const bool wraps = at.is_last_of_head;
    if (wraps) {
      if (at.head + 1 == at.end_head) return;
      at.queries = Producer{p, index, own_keys(), storage}.queries_of(at.head + 1);
    }
    producer.fetch(at.queries, (wraps ? at.begin : at.block + 1) * kConfig.q_rows,
                   stats_at(at.next_tile), stage);
  }

  // 4. dV += P^T dO and dK += dS^T Q, from shared memory.
  void add_dv(i32 stage) {
    gradients.template add_columns<kConfig.dv_dims()>(gradients.dv_sums(), storage.p_tile(),
                                                      storage.dout_tile(stage));
  }
  void add_dk(i32 stage, i32 pair_stage) {
    gradients.template add_columns<kConfig.dk_dims()>(gradients.dK, storage.ds_tile(pair_stage),
                                                      storage.q_tile(stage));
  }

  // 5. dQ += dS K for a tile, m_block `block` of its sequence; with config.deterministic in the
  // order of the n_blocks.
  void add_dq(i32 tile, i32 block, i32 pair_stage) const {
    if constexpr (kConfig.deterministic) {
      if (ptx::thread_index() == 0) {
        ptx::await(params.dq_semaphores + tile, m_blocks.semaphore_value(block));
      }
      ptx::block_sync();  // n_blocks before this one have added
    }
    gradients.add_dq(params.dq_accum + i64{tile} * kConfig.dq_elems(), pair_stage);
    if constexpr (kConfig.deterministic) {
      ptx::block_sync();  // all warps have added
      if (ptx::thread_index() == 0) ptx::announce(params.dq_semaphores + tile);
    }
  }
  // The same of the iteration before, where dS has two stages.
  void add_late_dq(const Cursor& at) const {
    if (!kLateDq || at.tile_before < 0) return;
    add_dq(at.tile_before, at.block == at.begin ? at.end - 1 : at.block - 1, 1 - at.stage);
  }

  void mark_m_block(i32 tile) const {
    if (pairs.met_nonfinite) params.nonfinite_m_blocks[tile] = 1;
  }

  // Schedule 1: every warp computes P and dS.
  void compute_all(const Step& step, Cursor& at) {
    add_late_dq(at);
    pairs.compute(step);
    mark_m_block(at.tile);
    storage.group_sync();  // all warps of the group -> P and dS of its keys
    if constexpr (kConfig.dv) add_dv(step.stage);
    if constexpr (kConfig.dk) add_dk(step.stage, step.pair_stage);
  }

  // Schedule 2: half of the warps P and dV, the others dS and dK. Each role adds to dQ while the
  // other is likely to be busy with exponents and elementwise arithmetic.
  void compute_role(const Step& step, Cursor& at) {
    if (storage.computes_p()) {
      pairs.compute_p(step);
      storage.group_sync();  // all warps of the group -> P
      if constexpr (kLatePrefetch) prefetch(at, 1 - at.stage);
      add_dv(step.stage);
      add_late_dq(at);
    } else {
      add_late_dq(at);
      if constexpr (kLatePrefetch) prefetch(at, 1 - at.stage);
      pairs.compute_ds(step);
      storage.group_sync();  // all warps of the group -> dS
      add_dk(step.stage, step.pair_stage);
    }
    mark_m_block(at.tile);
  }

  // Schedule 3: the same roles on S^T and dP^T, whose fragments go on to dV and dK in registers.
  void compute_role_swap_ab(const Step& step, Cursor& at) {
    if (storage.computes_p()) {
      pairs.add_dv(gradients.dv_sums(), step);
      add_late_dq(at);
    } else {
      add_late_dq(at);
      pairs.add_dk(gradients.dK, step);
    }
    mark_m_block(at.tile);
  }

  // What needs dS of all warps in the same iteration; and the next m_block, where there is one
  // stage.
  void finish_iteration(const Step& step, Cursor& at) {
    if constexpr ((kConfig.dq && !kLateDq) || kConfig.tiled_dbias) {
      ptx::block_sync();  // all warps -> dS
      if constexpr (kConfig.dq) add_dq(at.tile, at.block, 0);
      if constexpr (kConfig.tiled_dbias) BackwardDbiasSm80<kConfig>{params}.copy(storage, step);
    }
    if constexpr (kConfig.stages == 2) {
      at.stage = 1 - at.stage;
    } else {
      ptx::block_sync();  // all warps have read Q and dO
      prefetch(at, 0);
    }
  }

  // The first copies, at the first m_block.
  Cursor start(const Zeroing& zeroing) {
    const i32 begin = static_cast<i32>(range.visible.begin),
              end = static_cast<i32>(range.visible.end);
    const i32 first_head = keys.kv_head * static_cast<i32>(p.group_size());
    Cursor at{begin,
              end,
              first_head + static_cast<i32>(p.group_size()),
              m_blocks.num_slots - (end - begin),
              m_blocks.tile_number(first_head, begin),
              -1,
              0,
              producer.queries_of(first_head),
              first_head,
              begin,
              false,
              0};
    producer.fetch_ids(HeadType(p, index, first_head));
    producer.fetch(at.queries, begin * kConfig.q_rows, stats_at(at.tile), 0);
    zeroing.store_zeros();
    if constexpr (kConfig.swap_ab) {
      ptx::cp_async_wait<0>();
      ptx::block_sync();  // cp.async of all warps -> K and V
      pairs.load_registers();
    }
    return at;
  }

  void mainloop(const Zeroing& zeroing) {
    Cursor at = start(zeroing);
    const i32 full_begin = kConfig.full_blocks ? static_cast<i32>(range.full.begin) : at.end;
    const i32 full_end = static_cast<i32>(range.full.end);
#pragma unroll 1
    for (; at.head < at.end_head; ++at.head) {
      const HeadType head(p, index, at.head);
      const ListedQueriesSm80<kConfig> listed(params.tile_lists, index, at.head, p.heads_q,
                                              keys.first_key);
#pragma unroll 1
      for (at.block = at.begin; at.block < at.end; ++at.block) {
        at.is_last_of_head = at.block + 1 == at.end;
        at.next_tile = at.tile + 1 + (at.is_last_of_head ? at.next_head_tiles : 0);
        ptx::cp_async_wait<0>();
        ptx::block_sync();  // cp.async -> Q_i, dO_i; all warps have read those of the iteration
                            // before
        if constexpr (kConfig.stages == 2 && !kLatePrefetch) prefetch(at, 1 - at.stage);
        const Step step{head,
                        listed,
                        at.block * kConfig.q_rows,
                        keys.first_key,
                        full_begin <= at.block && at.block < full_end,
                        at.stage,
                        kConfig.pair_stages == 2 ? at.stage : 0};
        if constexpr (kConfig.swap_ab) {
          compute_role_swap_ab(step, at);
        } else if constexpr (kConfig.split_roles) {
          compute_role(step, at);
        } else {
          compute_all(step, at);
        }
        if (at.tile_before < 0) zeroing.wait_zeroed();
        finish_iteration(step, at);
        at.tile_before = at.tile;
        at.tile = at.next_tile;
      }
    }
    if constexpr (kLateDq) {
      ptx::block_sync();  // all warps -> dS
      add_dq(at.tile_before, at.end - 1, 1 - at.stage);
    }
  }

  void run(const Zeroing& zeroing) {
    if (keys.first_key < keys.sequence.shape.kv_len) {
      producer.fetch_keys();
      if constexpr (kConfig.saves_key_block()) save_key_block(storage.key_block_at(), keys);
      range = m_blocks.m_block_range(keys.first_key);
      wait_preprocess<kConfig>();
      if constexpr (kConfig.score.documents || kConfig.score.mask_tiles) m_blocks.narrow(range);
      if (range.visible.size() > 0) {
        mainloop(zeroing);
        if constexpr (kConfig.score.user.captures) pairs.captures.flush();
      } else {
        zeroing.zero_only();
      }
      ptx::cp_async_wait<0>();  // also where no row sees a key
    } else {
      if constexpr (kConfig.saves_key_block()) save_key_block(storage.key_block_at(), keys);
      zeroing.zero_only();
      wait_preprocess<kConfig>();  // the end of this grid is the end of the one before
    }
    ptx::block_sync();  // all warps have read shared memory
    store();
  }

  // dK and dV, scaled.
  void store() {
    const KeyBlockSm80 own = own_keys();
    const float kept_scale =
        kConfig.score.dropout ? static_cast<float>(p.dropout.kept_scale()) : 1.f;
    if (kConfig.dk && !(kConfig.split_roles && storage.computes_p())) {
      gradients.template store<kConfig.dk_dims()>(
          gradients.dK, own, p.dk, p.dim_qk,
          static_cast<float>(p.score_map.scale) * kConfig.ds_scale());
    }
    if (kConfig.dv && storage.computes_p()) {
      gradients.template store<kConfig.dv_dims()>(gradients.dv_sums(), own, p.dv, p.dim_v,
                                                  kept_scale * kConfig.p_scale());
    }
  }
};

template <BackwardSm80Config kConfig>
void backward_sm80(const BackwardSm80Params& params) {
  const AttentionParams& p = params.attention;
  if constexpr (kConfig.hopper) ptx::grid_dependents_launch();
  u32 block = ptx::block_index();
  if constexpr (kConfig.deterministic) {
    // Numbered in the order in which blocks start, so that none waits for one that has not started.
    const u32 word = ptx::dynamic_shared();
    if (ptx::thread_index() == 0) ptx::store_shared(word, ptx::atomic_add(params.next_n_block, 1));
    ptx::block_sync();  // thread 0 -> the number
    block = ptx::load_shared(word);
    ptx::block_sync();  // all threads have read it
  }
  const u32 num_slots = static_cast<u32>(num_kv_slots(p, kConfig.kv_rows));
  const TileTask task = key_task(block, static_cast<u32>(p.batch_extent() * p.heads_kv),
                                 static_cast<u32>(p.heads_kv), num_slots, params.groups.kv_heads);
  const TilePlace place = find_tile(p, p.cu_kv, task, kConfig.kv_rows);
  const BackwardHeadOf<kConfig> head(p, place.index, task.head * p.group_size());
  const DqZeroingSm80<kConfig> zeroing{params, block};
  if (place.first_row < 0 || place.first_row >= head.sequence.kv_slot) {
    zeroing.zero_only();
    wait_preprocess<kConfig>();  // the end of this grid is the end of the one before
    return;
  }
  const u32 number =
      static_cast<u32>((task.batch * p.heads_kv + task.head) * num_slots + task.slot);
  BackwardSm80<kConfig> kernel(params, head, place);
  kernel.run(zeroing);
  if (kernel.pairs.met_nonfinite) params.nonfinite_n_blocks[number] = 1;
}

}  // namespace fulmen
