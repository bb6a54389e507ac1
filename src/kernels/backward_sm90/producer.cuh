// SPDX-FileCopyrightText: fulmen contributors
// SPDX-License-Identifier: Apache-2.0
//
// The producers of backward_sm90, two threads that start TMA loads: one claims work tiles,
// publishes them, and loads K, and Q with lse for every step; the other loads V, and dO with delta.
// One thread with 24 registers could not do both in the time that the consumers take for a step.
// Of a pair of blocks each loads half of the columns of Q and dO, for both, and the first claims
// for both. Where registers hold K and V, 64 keys of each come before Q, the others before dO, and
// a third thread loads K for dQ.
#pragma once

#include "kernels/backward_sm90/dq_accum.cuh"
#include "kernels/backward_sm90/storage.cuh"
#include "kernels/common/pair_tiles_sm90.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/tma.cuh"

namespace fulmen {

// The loads of a work tile, for both producers.
template <BackwardSm90Config kConfig>
struct BackwardLoads {
  const BackwardParams& params;
  const BackwardTile& work_tile;
  i32 kv_head = work_tile.batch_kv_head % params.heads_kv;
  i32 batch = batch_of<kConfig>(params, work_tile.batch_kv_head);
  u32 first_kept =
      u32(first_padded_row<kConfig>(params, work_tile.batch_kv_head, work_tile.q_begin));

  static void load(const TensorMap& map, u32 tile, u32 full, i32 rows, i32 row, i32 head,
                   i32 batch) {
#pragma unroll
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      ptx::tma_load(tile + d * rows * 2, map, full, d, row, head, batch);
    }
  }
  // Q or dO of a step.
  template <class Step>
  void load_queries(const TensorMap& map, u32 tile, u32 full, const Step& step) const {
    const i32 row = work_tile.q_begin + step.q_block * kConfig.q_rows;
    const i32 head = kv_head * params.group_size + step.head;
    if constexpr (!kConfig.in_clusters()) {
      load(map, tile, full, kConfig.q_rows, row, head, batch);
    } else {
      const i32 first = half_of_columns();
#pragma unroll
      for (i32 d = first; d < first + kConfig.dims / 2; d += 64) {
        ptx::tma_load_multicast(tile + d * kConfig.q_rows * 2, map, full, d, row, head, batch, 3);
      }
    }
  }
  // Bias and mask of a step and the keys of the work tile.
  void load_bias_and_mask(u32 tile, u32 full, const BackwardStep& step) const {
    ptx::fence_proxy_async();  // ldmatrix -> these
    const i32 row = step.q_block * kConfig.q_rows, head = kv_head * params.group_size + step.head;
    const i32 sequence = work_tile.batch_kv_head / params.heads_kv;
    if constexpr (kConfig.tiled_bias) {
      load_pairs<kConfig.q_rows, kConfig.kv_rows(), i32(size_bytes(kConfig.score.bias))>(
          params.maps.bias, params.attention.bias, tile, full, sequence, head, row, first_key());
    }
    if constexpr (kConfig.tiled_mask) {
      load_pairs<kConfig.q_rows, kConfig.kv_rows(), 1>(params.maps.mask, params.attention.mask,
                                                       tile + kConfig.bias_bytes(), full, sequence,
                                                       head, row, first_key());
    }
  }
  // Where registers hold K and V: 64 keys of one, to a buffer of Q or dO.
  void load_half(const TensorMap& map, u32 tile, u32 full, i32 half) const {
    ptx::tma_load(tile, map, full, 0, first_key() + 64 * half, kv_head, batch);
  }
  template <i32 kBuffers>
  void load_for_registers(const TensorMap& map, Pipeline<kBuffers> pipeline,
                          PipelineState<kBuffers>& at, i32 half) const {
    wait_empty<kConfig>(pipeline, at);
    ptx::mbarrier_arrive_expect(pipeline.full(at), kConfig.q_bytes());
    load_half(map, pipeline.address(at), pipeline.full(at), half);
    at.advance();
  }
  // K or V.
  i32 first_key() const { return work_tile.kv_block * kConfig.kv_rows(); }
  void load_keys(const TensorMap& map, u32 tile, u32 full) const {
    load(map, tile, full, kConfig.kv_rows(), work_tile.kv_begin + first_key(), kv_head, batch);
  }
  // Of a pair: `rows` rows from key `first` of the work tile on, of the half of the columns that
  // begins at `column`.
  void load_half_of_keys(const TensorMap& map, u32 tile, u32 full, i32 rows, i32 first,
                         i32 column) const {
#pragma unroll
    for (i32 d = 0; d < kConfig.dims / 2; d += 64) {
      ptx::tma_load(tile + d * rows * 2, map, full, column + d,
                    work_tile.kv_begin + first_key() + first, kv_head, batch);
    }
  }
  static i32 half_of_columns() { return i32(ptx::cluster_rank()) * (kConfig.dims / 2); }
  static i32 other_half() { return i32(ptx::cluster_rank() ^ 1) * (kConfig.dims / 2); }
  void prefetch_keys(const TensorMap& map) const {
#pragma unroll
    for (i32 d = 0; d < kConfig.dims; d += 64) {
      ptx::tma_prefetch(map, d, work_tile.kv_begin + first_key(), kv_head, batch);
    }
  }

  // A step's first row in lse_log2 and delta.
  template <class Step>
  u32 kept(const Step& step) const {
    return first_kept + step.head * u32(params.padded_rows_per_head) +
           step.q_block * kConfig.q_rows;
  }

  // The barrier of a tile: that of the tail zero-fill if the tile ends past the sequence.
  static u32 landing(u32 full, u32 landed, i32 rows, i32 rows_left) {
    return kConfig.score.varlen && rows_left < rows ? landed : full;
  }
  template <class Step>
  u32 landing_of_queries(u32 full, u32 landed, const Step& step) const {
    return landing(full, landed, kConfig.q_rows,
                   work_tile.shape.q_len - step.q_block * kConfig.q_rows);
  }
  u32 landing_of_keys(u32 full, u32 landed) const {
    return landing(full, landed, kConfig.kv_rows(), work_tile.shape.kv_len - first_key());
  }
};

template <BackwardSm90Config kConfig>
struct BackwardProducer {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::QState at;
  typename Shared::KvState kv_at;

  // Blocks of queries, `count` from `begin` on, that see all of a warpgroup's 64 keys.
  struct Full {
    i32 begin, count;
  };
  Full full_blocks(const BackwardTile& work_tile, u32 warpgroup) const {
    const i32 key = work_tile.kv_block * kConfig.kv_rows() + first_key<kConfig>(warpgroup);
    if (key + 64 > work_tile.shape.kv_len) return {0, 0};
    Interval full = query_blocks_of_keys<kConfig>(params.mask, work_tile.shape, key, 64).full;
    if constexpr (kConfig.score.documents) {
      const DocumentBlocks& documents = document_blocks_of<kConfig>(params, work_tile);
      full.begin = max<i64>(full.begin, documents.full_begin[warpgroup]);
      full.end = max(full.begin, min<i64>(full.end, documents.full_end[warpgroup]));
    }
    return {i32(full.begin), i32(full.size())};
  }

  void load_k(const BackwardLoads<kConfig>& loads) const {
    const auto k = shared.k();
    const u32 full = loads.landing_of_keys(k.full(kv_at), shared.k_landed());
    k.producer_wait_loaded(kv_at);
    ptx::mbarrier_arrive_expect(full, kConfig.k_bytes());
    if constexpr (kConfig.paired) {
      loads.load_half_of_keys(params.maps.k, k.address(kv_at), full, kConfig.kv_rows(), 0,
                              loads.half_of_columns());
    } else {
      loads.load_keys(params.maps.k, k.address(kv_at), full);
    }
  }

  // Of a pair: the columns of K that registers hold come first, in a buffer of Q.
  void load_k_for_registers(const BackwardLoads<kConfig>& loads) {
    const auto q = shared.q();
    wait_empty<kConfig>(q, at);
    ptx::mbarrier_arrive_expect(q.full(at), kConfig.k_bytes());
    loads.load_half_of_keys(params.maps.k, q.address(at), q.full(at), kConfig.kv_rows(), 0,
                            loads.other_half());
    at.advance();
  }

  void load_tile(const BackwardTile& work_tile, const QueryBlockRange& range) {
    const BackwardLoads<kConfig> loads{params, work_tile};
    if constexpr (kConfig.holds_keys()) {
      loads.load_for_registers(params.maps.k, shared.q(), at, 0);
      loads.load_for_registers(params.maps.v, shared.q(), at, 0);
    } else {  // to the L2, while the work tile before still uses the buffer
      loads.prefetch_keys(params.maps.k);
    }
    if (kConfig.adds_dq() && !kConfig.score.varlen &&
        work_tile.batch_kv_head >= params.num_accum_slots) {
      // wait until the sums in its slot are cleared
      ptx::await(params.freed + work_tile.batch_kv_head - params.num_accum_slots,
                 params.num_kv_blocks * kConfig.blocks_of_tile());
    }
    if constexpr (kConfig.paired) load_k_for_registers(loads);
    const Full full[2] = {full_blocks(work_tile, 0), full_blocks(work_tile, 1)};
    const u32 first_tile =
        first_dq_tile<kConfig>(params, work_tile.batch_kv_head, work_tile.q_begin);
    const auto q = shared.q();
    auto step = first_step<kConfig>(params, work_tile, range);
#pragma unroll 1
    for (i32 left = range.num_steps; left > 0; --left, step.advance(range)) {
      const u32 q_full = loads.landing_of_queries(q.full(at), shared.q_landed(at), step);
      u32 flags = step.q_block;
      if (left == 1) flags |= BackwardStepInfo::kLast;
      for (u32 w = 0; w < 2; ++w) {
        if (u32(step.q_block - full[w].begin) >= u32(full[w].count)) {
          flags |= BackwardStepInfo::kPartial << w;
        }
        if constexpr (kConfig.score.has_tile_lists()) {
          const u32 part = kConfig.kv_rows() > kPartRows ? w : 0;
          if (!step.line.is_met(step.q_block, part)) flags |= BackwardStepInfo::kHidden << w;
          if (!step.line.is_whole(step.q_block, part)) flags |= BackwardStepInfo::kPartial << w;
        }
      }
      const u32 tile =
          kConfig.dq
              ? first_tile + u32(step.head) * dq_tiles_of_head<kConfig>(params) + u32(step.q_block)
              : u32(loads.kv_head * params.group_size + step.head);
      const u32 kept = loads.kept(step);
      wait_empty<kConfig>(q, at);
      shared.write_step(at, {tile, flags});
      ptx::mbarrier_arrive_expect(q_full,
                                  kConfig.q_bytes() + kConfig.lse_bytes() + kConfig.pair_bytes());
      loads.load_queries(params.maps.q, q.address(at), q_full, step);
      if constexpr (kConfig.pair_bytes() > 0)
        loads.load_bias_and_mask(shared.pairs(at), q_full, step);
      ptx::bulk_load(shared.lse(at),
                     params.lse_log2 + (kConfig.score.stats ? lse_index(kept) : kept),
                     kConfig.lse_bytes(), q_full);
      if (!kConfig.holds_keys() && left == range.num_steps) load_k(loads);
      at.advance();
    }
    kv_at.advance();
  }

  // Work of index `index`, behind the conversion of dQ of work tile `converted` (negative: of
  // none); waits until that is complete.
  BackwardWork next_work(const BackwardTileCount& count, i32 index, i32 converted) const {
    BackwardWork work{BackwardWork::kEnd, {}, {-1, 0, 0, 1, 0, 0}};
    if (index >= count.all() && converted < 0) return work;
    work.num_steps = BackwardWork::kNoTile;
    if (index < count.of_tiles()) work.work_tile = tile_at<kConfig>(params, count, index);
    if (kConfig.dq && converted >= 0) {
      const BackwardTile before = whole_tile_at<kConfig>(params, converted);
      if constexpr (kConfig.adds_dq()) {
        ptx::await(params.done + before.batch_kv_head, tiles_of_head<kConfig>(params, before));
      }
      work.conversion = conversion_of(params, before);
    }
    return work;
  }

  // The next index of the grid's counter.
  i32 claim(PipelineState<1>& claim_at) const {
    if constexpr (!kConfig.in_clusters()) return ptx::atomic_add(params.next_tile, 1);
    const auto claim = shared.claim();
    i32 index;
    if (ptx::cluster_rank() == 0) {
      index = ptx::atomic_add(params.next_tile, 1);
      ptx::mbarrier_wait_cluster(claim.empty(claim_at), claim_at.phase ^ 1);
      ptx::store_cluster(ptx::map_shared(claim.address(claim_at), 1), u32(index));
      ptx::mbarrier_arrive_cluster(ptx::map_shared(claim.full(claim_at), 1));
    } else {
      ptx::mbarrier_wait_cluster(claim.full(claim_at), claim_at.phase);
      index = i32(ptx::load_shared(claim.address(claim_at)));
      ptx::mbarrier_arrive_cluster(ptx::map_shared(claim.empty(claim_at), 0));
    }
    claim_at.advance();
    return index;
  }

  void run() {
    typename Shared::WorkState work_at;
    PipelineState<1> claim_at;
    const BackwardTileCount count = backward_tile_count<kConfig>(params);
    i32 index = -1, left = 0;  // the last work tile; where blocks have whole heads, of its head
#pragma unroll 1
    for (;;) {
      // Claimed late, so that longest-first balances.
      i32 converted = -1;
      if constexpr (!kConfig.whole_heads) {
        index = claim(claim_at);
        if (index < count.all()) converted = count.converted(index);
      } else if (left > 0) {
        ++index;
        --left;
      } else {
        if (index < count.of_tiles()) converted = index;
        index = claim(claim_at) * params.num_kv_blocks;
        left = params.num_kv_blocks - 1;
      }
      BackwardWork work = next_work(count, index, converted);
      QueryBlockRange range{};
      if (index < count.of_tiles()) {
        range = query_block_range<kConfig>(params, work.work_tile);
        work.num_steps = range.num_steps;
      }
      ptx::mbarrier_wait(shared.work().empty(work_at), work_at.phase ^ 1);
      shared.write_work(work_at, work);
      ptx::mbarrier_arrive(shared.work().full(work_at));
      work_at.advance();
      if (work.num_steps == BackwardWork::kEnd) return;
      if (work.num_steps > 0) load_tile(work.work_tile, range);
    }
  }
};

template <BackwardSm90Config kConfig>
struct BackwardDOutProducer {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::DOutState at;
  typename Shared::KvState kv_at;

  void load_v(const BackwardLoads<kConfig>& loads) const {
    const auto v = shared.v();
    const u32 full = loads.landing_of_keys(v.full(kv_at), shared.v_landed());
    v.producer_wait_loaded(kv_at);
    ptx::mbarrier_arrive_expect(full, kConfig.v_bytes());
    if constexpr (kConfig.paired) {
      loads.load_half_of_keys(params.maps.v, v.address(kv_at), full, kConfig.kv_rows_of_block(),
                              first_key<kConfig>(0), loads.half_of_columns());
    } else {
      loads.load_keys(params.maps.v, v.address(kv_at), full);
    }
  }

  // Of a pair: the columns of V that registers hold come first, in a buffer of dO.
  void load_v_for_registers(const BackwardLoads<kConfig>& loads) {
    const auto dout = shared.dout();
    wait_empty<kConfig>(dout, at);
    ptx::mbarrier_arrive_expect(dout.full(at), kConfig.v_bytes());
    loads.load_half_of_keys(params.maps.v, dout.address(at), dout.full(at),
                            kConfig.kv_rows_of_block(), first_key<kConfig>(0), loads.other_half());
    at.advance();
  }

  void load_tile(const BackwardTile& work_tile) {
    const BackwardLoads<kConfig> loads{params, work_tile};
    const QueryBlockRange range = query_block_range<kConfig>(params, work_tile);
    if constexpr (kConfig.holds_keys()) {
      loads.load_for_registers(params.maps.k, shared.dout(), at, 1);
      loads.load_for_registers(params.maps.v, shared.dout(), at, 1);
    } else if constexpr (kConfig.needs_dp()) {
      loads.prefetch_keys(params.maps.v);
    }
    if constexpr (kConfig.paired) {
      if (range.num_steps > 0) load_v_for_registers(loads);
    }
    const auto dout = shared.dout();
    auto step = first_step<kConfig>(params, work_tile, range);
#pragma unroll 1
    for (i32 left = range.num_steps; left > 0; --left, step.advance(range)) {
      const u32 full = loads.landing_of_queries(dout.full(at), shared.dout_landed(at), step);
      const u32 kept = loads.kept(step);
      wait_empty<kConfig>(dout, at);
      ptx::mbarrier_arrive_expect(full, kConfig.q_bytes() + kConfig.delta_bytes());
      loads.load_queries(params.maps.dout, dout.address(at), full, step);
      ptx::bulk_load(shared.delta(at), params.delta + kept, kConfig.delta_bytes(), full);
      if (kConfig.v_bytes() > 0 && left == range.num_steps) load_v(loads);
      at.advance();
    }
    kv_at.advance();
  }

  void run() {
    shared.for_each_tile(true, [&](typename Shared::WorkState work_at, i32 num_steps) {
      if (num_steps > 0) load_tile(shared.read_tile(work_at));
    });
  }
};

// Where registers hold K and V: the thread that loads K for dQ.
template <BackwardSm90Config kConfig>
struct BackwardKeyProducer {
  using Shared = BackwardStorage<kConfig>;

  const BackwardParams& params;
  Shared shared;
  typename Shared::KvState at;

  void load_tile(const BackwardTile& work_tile) {
    const BackwardLoads<kConfig> loads{params, work_tile};
    const auto k = shared.k();
    ptx::mbarrier_wait(k.empty(at), at.phase ^ 1);
    ptx::mbarrier_arrive_expect(k.full(at), kConfig.k_bytes());
    for (i32 half = 0; half < 2; ++half) {
      loads.load_half(params.maps.k, k.address(at) + half * (kConfig.k_bytes() / 2), k.full(at),
                      half);
    }
    at.advance();
  }

  void run() {
    shared.for_each_tile(true, [&](typename Shared::WorkState work_at, i32 num_steps) {
      if (num_steps > 0) load_tile(shared.read_tile(work_at));
    });
  }
};

}  // namespace fulmen
